"""Log-probs of completion tokens are those of the whole model, however they are computed."""

import pytest
import torch

from infra.errors import BadInput
from models.data.problems import load_problems
from models.modeling.logprobs import ForwardInput, TokenLogprobs
from models.modeling.policy import build_scratch
from models.text.tokenizer import scratch_tokenizer
from tests.support.training import DATA, TINY


def build(architecture: str = "llama"):
    policy = TINY.model_copy(update={"architecture": architecture})
    return build_scratch(policy, scratch_tokenizer(policy, load_problems(DATA, "train", 0)), seed=0).eval()


def ask(model, **options):
    torch.manual_seed(0)
    tokens_BT = torch.randint(2, 300, (3, 9))
    positions_N = torch.tensor([2, 3, 4, 12, 13, 25])
    targets_N = torch.randint(2, 300, (6,))
    policy = TokenLogprobs(model, temperature=0.7, **options)
    policy.zero_grad()
    logprobs_N = policy(ForwardInput(tokens_BT, positions_N, targets_N))
    (logprobs_N * torch.arange(6)).sum().backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    expected_N = (model(input_ids=tokens_BT).logits.flatten(0, 1)[positions_N] / 0.7).log_softmax(-1)
    return logprobs_N, gradients, expected_N[torch.arange(6), targets_N]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_completion_logprobs_are_the_models_own(architecture):
    found, _, expected = ask(build(architecture))
    torch.testing.assert_close(found, expected)


def test_chunks_of_tokens_change_neither_logprobs_nor_gradients():
    model = build()
    whole, whole_gradients, _ = ask(model)
    parts, part_gradients, _ = ask(model, chunk_elements=2 * 354)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(part_gradients, whole_gradients, rtol=1e-5, atol=1e-6)


def test_a_frozen_head_gets_no_gradient_and_changes_no_other():
    model = build()
    whole, _, _ = ask(model, chunk_elements=2 * 354)
    kept = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    head = model.get_input_embeddings().weight  # tied with the head
    assert head is model.get_output_embeddings().weight
    head.requires_grad_(False)
    frozen = TokenLogprobs(model, temperature=0.7, chunk_elements=2 * 354)
    torch.manual_seed(0)
    tokens_BT = torch.randint(2, 300, (3, 9))
    found = frozen(ForwardInput(tokens_BT, torch.tensor([2, 3, 4, 12, 13, 25]), torch.randint(2, 300, (6,))))
    (found * torch.arange(6)).sum().backward()
    torch.testing.assert_close(found, whole)
    assert head.grad is None
    for name, parameter in model.named_parameters():
        if parameter is not head:
            torch.testing.assert_close(parameter.grad, kept[name], rtol=1e-5, atol=1e-6)


def test_a_model_that_changes_its_logits_after_the_head_is_refused():
    model = build()
    plain = model.forward

    def capped(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.forward = capped
    with pytest.raises(BadInput, match="something after it"):
        TokenLogprobs(model, temperature=1.0)
