"""Command lines of servers become the configuration of an H100 in vLLM's build for CUDA, without a GPU."""

import csv
import json
from collections import defaultdict
from pathlib import Path

import pytest

from rheostat.models.config.engines import VllmEngine
from rheostat.models.engines.vllm.completions import SEED_LIMIT
from rheostat.models.engines.vllm.server import Address, command, environment, lora_rank, platform_of
from tests.support.cuda_build import compile_driver, require_cuda_build, run_json
from tests.support.policies import write_policy
from tests.vllm.servers import PLAIN, build_request

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = Path(__file__).parent / "cuda" / "h100.py"
SERVERS = {
    "default": {},
    "bfloat16": {"dtype": "bfloat16", "gpu_memory_share": 0.4, "max_batch_rows": 48},
    "raw log-probs": {"logprobs": "raw"},
    "eager": {"eager": True, "prefix_caching": False, "cache_gib": 2},
    "adapters": {"adapters": 9},
    "two GPUs": {"tensor_parallel": 2},
    "three GPUs": {"tensor_parallel": 3},
    "experts": {"architecture": "qwen3_moe", "experts": True},
    "experts of two GPUs": {"architecture": "qwen3_moe", "experts": True, "tensor_parallel": 2},
    "experts of a dense model": {"experts": True},
}
"""Settings of servers. Their policies have 4 attention heads, 2 key-value heads and 6 experts."""
EVERY_SERVER = {
    "device_type": "cuda",
    "use_v2_model_runner": True,
    "enable_sleep_mode": True,
    "enable_cumem_allocator": True,
    "enable_chunked_prefill": True,
    "async_scheduling": True,
    "load_format": "dummy",
    "max_logprobs": 20,
    "max_model_len": 256,
    "worker_extension_cls": "rheostat_vllm.Weights",
}
DEFAULTS = {
    "dtype": "float32",
    "logprobs_mode": "processed_logprobs",
    "enable_prefix_caching": True,
    "gpu_memory_utilization": 0.85,
    "kv_cache_memory_bytes": None,
    "max_lora_rank": None,
    "enable_return_routed_experts": False,
    "distributed_executor_backend": "uni",
    "cudagraph_mode": "FULL_AND_PIECEWISE",
}
SEEDS = (0, 2**32, SEED_LIMIT - 1, SEED_LIMIT, 2**64 - 1)


@pytest.fixture(scope="module")
def python() -> Path:
    """Python of vLLM's environment for CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        return require_cuda_build(patch)


@pytest.fixture(scope="module")
def found(python, tmp_path_factory):
    """Configurations of all servers, and the seeds that vLLM's model runner stores."""
    home = tmp_path_factory.mktemp("cuda")
    for architecture in ("llama", "qwen3_moe"):
        write_policy(home / architecture, architecture)
    commands = {name: build_command(home, python, **settings) for name, settings in SERVERS.items()}
    requests = [build_request(row, [1, 2], seed=seed) for row, seed in enumerate(SEEDS)]
    query = {"commands": commands, "work": json.dumps({"digest": "", "sampling": PLAIN, "requests": requests})}
    variables = environment("the-key", platform="cuda") | {"LD_LIBRARY_PATH": str(compile_driver(home / "driver"))}
    return run_json([python, PROGRAM], query, variables, seconds=1500)


def build_command(home, python, *, architecture="llama", adapters=0, experts=False, **settings):
    """Return the options of a server and the environment variables that depend on them."""
    words = command(
        VllmEngine(**settings),
        home / architecture,
        python=python,
        platform="cuda",
        at=Address(port=8123),
        lora_rank=lora_rank(adapters),
        report_experts=experts,
    )
    variables = environment("the-key", platform="cuda", report_experts=experts)
    return {"words": words[3:], "variables": {name: variables[name] for name in variables if name.startswith("VLLM_")}}


def test_the_environment_is_found_to_be_for_gpus(python):
    assert platform_of(python) == "cuda"


@pytest.mark.parametrize(
    ("server", "changes"),
    [
        ("default", {}),
        ("bfloat16", {"dtype": "bfloat16", "gpu_memory_utilization": 0.4, "max_num_seqs": 48}),
        ("raw log-probs", {"logprobs_mode": "raw_logprobs"}),
        ("eager", {"enable_prefix_caching": False, "cudagraph_mode": "NONE", "kv_cache_memory_bytes": 2 << 30}),
        ("adapters", {"max_lora_rank": 16}),
        ("two GPUs", {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
        ("experts", {"enable_return_routed_experts": True}),
        ("experts of two GPUs", {"enable_return_routed_experts": True, "distributed_executor_backend": "mp"}),
    ],
)
def test_the_options_of_a_server_become_the_configuration_of_an_h100(found, server, changes):
    expected, config = EVERY_SERVER | DEFAULTS | changes, found["configs"][server]
    assert {name: str(config.get(name)).removeprefix("torch.") for name in expected} == {
        name: str(value) for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("three GPUs", "attention heads (4) must be divisible by tensor parallel size (3)"),
        ("experts of a dense model", "only supports MoE models"),
    ],
)
def test_vllm_refuses_a_configuration_that_does_not_fit_the_policy(found, server, reason):
    assert reason in found["configs"][server]["refusal"]


def test_the_model_runner_of_gpus_stores_every_seed_below_the_limit_and_no_larger_seed(found):
    *below, limit, largest = found["seeds"]
    assert below == [seed for seed in SEEDS if seed < SEED_LIMIT]
    assert "too large" in limit and "too large" in largest


def test_no_two_packages_of_the_environment_write_different_modules_to_the_same_path(python):
    [site] = (python.parent.parent / "lib").glob("python*/site-packages")
    digests = defaultdict(set)
    for record in site.glob("*.dist-info/RECORD"):
        for path, digest, _ in csv.reader(record.open()):
            if "/" in path and not path.endswith(".pyc"):
                digests[path].add(digest)
    assert [path for path, each in digests.items() if len(each) > 1] == []
