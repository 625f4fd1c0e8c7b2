"""Context of longrope models, in which log-probs do not depend on the other sequences of a forward pass."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config, PhimoeConfig
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from rheostat.infra.errors import BadInput
from rheostat.models.config.context import longrope_context, longrope_scales, usable_context
from rheostat.models.config.engines import TransformersEngine, VllmEngine
from rheostat.models.engines.requests import context_of
from rheostat.models.engines.vllm.server import context_of as served_context_of
from rheostat.models.modeling.policy import policy_shape
from tests.support.policies import DECODER, LONGROPE


@pytest.fixture(scope="module")
def model():
    """A longrope model with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Phi3Config(**{**DECODER, **LONGROPE}, vocab_size=300, pad_token_id=0, initializer_range=0.3)
        return AutoModelForCausalLM.from_config(config).eval()


def logits_beside(model, *, length):
    """Return the logits of twelve tokens that share a forward pass with a sequence of this length."""
    tokens = torch.arange(2 * length).remainder(299).reshape(2, length) + 1
    mask = torch.ones_like(tokens)
    mask[0, 12:] = 0
    with torch.no_grad():
        return model(
            input_ids=tokens.clone().index_put_((torch.tensor(0), torch.arange(12)), torch.arange(1, 13)),
            attention_mask=mask,
        ).logits[0, :12]


def test_log_probs_of_a_longrope_model_depend_on_other_sequences_only_beyond_its_context(model, tmp_path):
    context = policy_shape(model.config, parameters=0, source="phi3").context
    alone = logits_beside(model, length=12)
    assert (logits_beside(model, length=context) - alone).abs().max() < 1e-4
    assert (logits_beside(model, length=context + 1) - alone).abs().max() > 0.1


def test_trainer_engines_and_servers_agree_on_the_context_of_a_longrope_model(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    shape = policy_shape(model.config, parameters=0, source="phi3")
    assert (shape.context, context_of(tmp_path), served_context_of(tmp_path)) == (40, 40, 40)
    assert "longrope" in shape.context_text


@pytest.mark.parametrize(
    ("rope", "original"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, 64),
        ({"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 64}}, 64),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, None),
        (None, None),
    ],
)
def test_only_longrope_settings_limit_the_context(rope, original):
    config = {"rope_parameters": rope}
    assert longrope_context(config) == original
    assert usable_context(128, config) == (original or 128)


ROPE = LONGROPE["rope_parameters"]
DEFAULT = (1 + math.log(256 / 40) / math.log(40)) ** 0.5
LARGER = (1 + math.log(8) / math.log(40)) ** 0.5
SCALES = [
    # (settings of rotary positions, max_position_embeddings, scale of transformers, scale of vLLM)
    ({}, 256, DEFAULT, DEFAULT),
    ({}, 40, 1, 1),
    ({}, 32, 1, 1),
    ({"factor": 6.4}, 256, DEFAULT, DEFAULT),
    ({"factor": 8.0}, 256, LARGER, DEFAULT),
    ({"factor": 1.0}, 256, 1, DEFAULT),
    ({"factor": 0.8}, 32, 1, 1),
    ({"attention_factor": DEFAULT}, 256, DEFAULT, DEFAULT),
    ({"attention_factor": 1.3}, 256, 1.3, DEFAULT),
    ({"attention_factor": 1.3, "factor": 8.0}, 256, 1.3, DEFAULT),
    ({"attention_factor": 1.3}, 40, 1.3, 1),
    ({"long_mscale": 1.2}, 256, DEFAULT, DEFAULT),
    ({"short_mscale": 1.1, "long_mscale": 1.2}, 256, DEFAULT, 1.1),
    ({"short_mscale": 1.1, "attention_factor": 1.1}, 256, 1.1, 1.1),
]
"""Measured with `get_rope` of vLLM 0.32, and with transformers below."""


@pytest.mark.parametrize(("settings", "longest", "trained", "served"), SCALES)
def test_the_scale_of_longrope_positions_is_that_of_transformers_and_of_vllm(settings, longest, trained, served):
    config = Phi3Config(
        **{**DECODER, "max_position_embeddings": longest, "rope_parameters": {**ROPE, **settings}},
        original_max_position_embeddings=40,
    )
    cosines, _ = Phi3RotaryEmbedding(config)(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.long))
    assert cosines.flatten().tolist() == pytest.approx([trained] * 16)
    [scale] = longrope_scales(config.to_dict())
    assert (scale.trained, scale.served) == pytest.approx((trained, served))
    shape = policy_shape(config, parameters=0, source="phi3")
    if trained == pytest.approx(served):
        VllmEngine().check_policy(shape, "rollout.engine")
    else:
        with pytest.raises(BadInput, match=r"rollout\.engine\.kind = 'vllm' .* longrope .* 'transformers'$"):
            VllmEngine().check_policy(shape, "rollout.engine")
        TransformersEngine().check_policy(shape, "rollout.engine")


def test_mixtures_of_phi_read_the_short_scale_in_both_libraries():
    settings = {**ROPE, "short_mscale": 1.1, "long_mscale": 1.2, "original_max_position_embeddings": 40}
    config = PhimoeConfig(**{**DECODER, "rope_parameters": settings})
    cosines, _ = PhimoeRotaryEmbedding(config)(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.long))
    assert cosines.flatten()[0].item() == pytest.approx(1.1)
    [scale] = longrope_scales(config.to_dict())
    assert (scale.trained, scale.served) == (1.1, 1.1)


def test_other_rotary_positions_have_no_longrope_scale():
    assert longrope_scales({"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}) == []
