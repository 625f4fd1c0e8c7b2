"""Log-probs of completion tokens are those of the whole model, however they are computed."""

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, Gemma3TextConfig, GraniteConfig

from infra.errors import BadInput
from models.config.objectives import KlPenalty, TruncatedImportance, UpdateConfig, chunk_elements_of
from models.data.problems import load_problems
from models.modeling.head import HeadSettings as Head
from models.modeling.logit_shapes import LogitShape
from models.modeling.logprobs import ForwardInput, TokenLogprobs
from models.modeling.policy import build_scratch
from models.objectives.loss_inputs import LossInputs, MetricSums
from models.objectives.losses import update_loss
from models.text.tokenizer import scratch_tokenizer
from models.training.update_steps import slopes_of
from tests.support.losses import LOSSES, NAMES
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


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_a_loss_that_is_known_token_by_token_teaches_the_same_while_the_logits_are_there(loss, monkeypatch):
    config = UpdateConfig(loss=loss, kl=KlPenalty(), correction=TruncatedImportance(cap=1.05))
    model, generator = build(), torch.Generator().manual_seed(0)
    module = TokenLogprobs(model, temperature=0.7, chunk_elements=2 * 354)
    tokens_BT, targets_N = (torch.randint(2, 300, size, generator=generator) for size in ((3, 9), (6,)))
    read = ForwardInput(tokens_BT, torch.tensor([2, 3, 4, 12, 13, 25]), targets_N)
    before_N = module(read).detach()
    noise_N, drawn_N, advantages_N = 0.3 * torch.randn(3, 6, generator=generator)
    rows_N, lengths_B = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([3, 2, 1])
    tokens = LossInputs(
        behaviour_N=before_N + drawn_N, advantages_N=advantages_N, staleness_N=torch.zeros(6, dtype=torch.int16),
        weights_N=torch.arange(6) / 15, rows_N=rows_N, lengths_B=lengths_B, old_N=before_N + noise_N,
        reference_N=before_N - noise_N,
    )  # fmt: skip
    answers, asked = [], []
    plain = Head.logits
    monkeypatch.setattr(Head, "logits", lambda *given: asked.append(len(given[1])) or plain(*given))
    slopes = slopes_of(tokens, config=config, kl_coefficient=0.1)
    for known in (None, slopes):
        asked.clear()
        model.zero_grad()
        loss_found = update_loss(
            module(read._replace(slopes=known)), tokens, config=config, kl_coefficient=0.1, tally=MetricSums()
        )
        loss_found.backward()
        answers.append([parameter.grad.clone() for parameter in model.parameters()])
        assert len(asked) == (6 if known is None else 3)  # chunks of 2 of 6 tokens, once or twice
    assert (slopes is None) == (loss.kind == "gspo")
    for found, expected in zip(answers[1], answers[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_so_it_is_under_scales_and_soft_caps(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPED[family][0]).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    head, states_NH = TokenLogprobs(model, temperature=0.7, chunk_elements=2 * 354).head, torch.randn(7, 32)
    targets_N, answers = torch.randint(2, 300, (7,)), []
    for frozen in (False, True):
        head.weight.requires_grad_(not frozen)
        states = states_NH.clone().requires_grad_()
        found_N = head(states, targets_N)
        assert (type(found_N.grad_fn).__name__ == "_FrozenLogprobsBackward") == frozen
        (found_N.square() * torch.arange(7)).sum().backward()
        answers.append((found_N.detach(), states.grad))
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-5, atol=1e-6)


def test_a_chunk_grows_with_all_of_a_gpus_memory_and_not_with_what_is_free():
    sizes = {None: 26, 24e9: 25, 80e9: 27, 79.1 * 2**30: 27, 141e9: 28}
    for memory, power in sizes.items():
        assert chunk_elements_of(memory) == 1 << power
        assert memory is None or 12 * (1 << power) <= memory / 32 < 24 * (1 << power)


def test_a_model_that_changes_its_logits_after_the_head_is_refused():
    model = build()
    plain = model.forward

    def moved(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits + 3
        return output

    model.forward = moved
    with pytest.raises(BadInput, match="with at most a scale or a soft cap behind it, found something else"):
        TokenLogprobs(model, temperature=1.0)


SHAPE = {
    "vocab_size": 354, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
SHAPED = {
    "gemma2": (Gemma2Config(**SHAPE, final_logit_softcapping=0.5), LogitShape(cap=0.5)),
    "granite": (GraniteConfig(**SHAPE, logits_scaling=13.0), LogitShape(scale=1 / 13)),
    "cohere": (CohereConfig(**SHAPE, logit_scale=0.0625), LogitShape(scale=0.0625)),
    "gemma3 without a cap": (Gemma3TextConfig(**SHAPE), LogitShape()),
}


@pytest.mark.parametrize("family", SHAPED)
@pytest.mark.parametrize("chunk_elements", [1 << 26, 2 * 354])
def test_scales_and_soft_caps_behind_the_head_are_part_of_log_probs_and_gradients(family, chunk_elements):
    config, shape = SHAPED[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # logits that the cap bends
    model.zero_grad()
    found_N, gradients, expected_N = ask(model, chunk_elements=chunk_elements)
    torch.testing.assert_close(found_N, expected_N, rtol=1e-5, atol=2e-6)
    assert TokenLogprobs(model, temperature=1.0).head.settings.shape == pytest.approx(shape, rel=1e-6)

    model.zero_grad()
    (expected_N * torch.arange(6)).sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
