"""Context of longrope models, in which log-probs do not depend on the other sequences of a forward pass."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from models.config.context import longrope_context, usable_context
from models.engines.requests import context_of
from models.engines.vllm.server import context_of as served_context_of
from models.modeling.policy import policy_shape
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
