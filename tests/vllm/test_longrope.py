"""Scale of longrope positions in vLLM, measured in its own environment."""

import json
import subprocess

import pytest

from rheostat.infra.environments.find import find_environment
from rheostat.models.config.context import longrope_scales

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 40,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
SETTINGS = [
    {},
    {"factor": 8.0},
    {"attention_factor": 1.3},
    {"long_mscale": 1.2},
    {"short_mscale": 1.1, "long_mscale": 1.2},
    {"short_mscale": 1.1, "attention_factor": 1.1},
]
PROGRAM = """
import json, sys
from types import SimpleNamespace as Record
import torch
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as longrope
longrope.get_current_vllm_config = lambda: Record(model_config=Record(max_model_len=40))
caches = [rotary_embedding.get_rope(16, longest, rope_parameters=rope, dtype=torch.float32).long_short_cos_sin_cache
          for longest in (32, 256) for rope in json.load(open(sys.argv[1]))]
print(json.dumps([cache[0, 0].item() for cache in caches]))
"""


def test_vllm_scales_longrope_positions_as_the_check_before_a_run_expects(tmp_path):
    ropes = [{**ROPE, **settings} for settings in SETTINGS]
    (tmp_path / "ropes.json").write_text(json.dumps(ropes))
    command = [str(find_environment("vllm", None).python), "-c", PROGRAM, str(tmp_path / "ropes.json")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    configs = [{"max_position_embeddings": longest, "rope_parameters": rope} for longest in (32, 256) for rope in ropes]
    assert json.loads(printed) == pytest.approx([longrope_scales(config)[0].served for config in configs])
