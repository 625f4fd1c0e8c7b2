"""Log-probs of completion tokens are those of the whole model for every way to compute them."""

import math
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, Gemma3TextConfig, GraniteConfig

from rheostat.infra.errors import BadInput
from rheostat.models.config.corrections import MaskedImportance, SecondMoment, TruncatedImportance
from rheostat.models.config.divergence import KlPenalty
from rheostat.models.config.objectives import EntropyBonus, UpdateConfig, chunk_elements_of
from rheostat.models.config.policy_losses import ClipCov, KlCov
from rheostat.models.data.problems import load_problems
from rheostat.models.modeling.head import HeadSettings as Head
from rheostat.models.modeling.head import TopTokens
from rheostat.models.modeling.logit_shapes import LogitShape
from rheostat.models.modeling.logprobs import ForwardInput, TokenLogprobs
from rheostat.models.modeling.policy import build_scratch
from rheostat.models.objectives.loss_inputs import LossInputs, MetricSums
from rheostat.models.objectives.losses import update_loss
from rheostat.models.text.tokenizer import scratch_tokenizer
from rheostat.models.training.update_steps import build_loss_gradient
from tests.support.losses import LOSSES, NAMES
from tests.support.training import DATA, TINY

CHUNK = 2 * 354
"""Elements of a chunk of two tokens."""
CORRECTIONS = {
    "token": TruncatedImportance(cap=1.05),
    "sequence": TruncatedImportance(cap=1.05, level="sequence"),
    "veto": MaskedImportance(veto=0.1),
    "second_moment": SecondMoment(),
}


def build(architecture: str = "llama"):
    policy = TINY.model_copy(update={"architecture": architecture})
    return build_scratch(policy, scratch_tokenizer(policy, load_problems(DATA, "train", 0)), seed=0).eval()


def build_input() -> ForwardInput:
    """Build an input of three rows and six completion tokens, the same at each call."""
    tokens_BT, targets_N = (
        torch.randint(2, 300, size, generator=torch.Generator().manual_seed(0)) for size in ((3, 9), (6,))
    )
    return ForwardInput(tokens_BT, torch.tensor([2, 3, 4, 12, 13, 25]), targets_N)


def compute(model, **options):
    """Return the log-probs, the gradients of their weighted sum by parameter, and the log-probs of the whole model."""
    read, policy = build_input(), TokenLogprobs(model, temperature=0.7, **options)
    policy.zero_grad(set_to_none=True)
    logprobs_N = policy(read)
    (logprobs_N * torch.arange(6)).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    logits_NV = model(input_ids=read.tokens_BT).logits.flatten(0, 1)[read.positions_N]
    return logprobs_N, gradients, (logits_NV / 0.7).log_softmax(-1)[torch.arange(6), read.targets_N]


def test_a_frozen_head_gets_no_gradient_and_changes_no_other_gradient():
    model = build()
    whole, gradients, _ = compute(model, chunk_elements=CHUNK)
    head = model.get_input_embeddings().weight  # tied with the head
    assert head is model.get_output_embeddings().weight
    head.requires_grad_(False)
    found, frozen_gradients, _ = compute(model, chunk_elements=CHUNK)
    torch.testing.assert_close(found, whole)
    [head_name] = gradients.keys() - frozen_gradients.keys()
    assert model.get_parameter(head_name) is head
    expected = {name: gradient for name, gradient in gradients.items() if name != head_name}
    torch.testing.assert_close(frozen_gradients, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", [*LOSSES, ClipCov(), KlCov()], ids=[*NAMES, "clip_cov", "kl_cov"])
def test_a_loss_with_known_gradients_per_token_needs_the_logits_once_and_has_the_same_gradients(
    loss, correction, monkeypatch
):
    config = UpdateConfig(loss=loss, kl=KlPenalty(), correction=CORRECTIONS[correction])
    model, generator = build(), torch.Generator().manual_seed(0)
    module, read = TokenLogprobs(model, temperature=0.7, chunk_elements=CHUNK), build_input()
    before_N = module(read).detach()
    noise_N, mismatch_N, advantages_N = 0.3 * torch.randn(3, 6, generator=generator)
    tokens = LossInputs(
        behavior_N=before_N + mismatch_N, advantages_N=advantages_N, staleness_N=torch.zeros(6, dtype=torch.int16),
        weights_N=torch.arange(6) / 15, rows_N=torch.tensor([0, 0, 0, 1, 1, 2]), lengths_B=torch.tensor([3, 2, 1]),
        old_N=before_N + noise_N, reference_N=before_N - noise_N,
        selected_N=torch.tensor([0, 1, 0, 0, 1, 0]) > 0, outlier_N=torch.tensor([0, 0, 1, 0, 0, 0]) > 0,
        low_entropy_N=torch.tensor([0, 1, 0, 1, 0, 0]) > 0,
    )  # fmt: skip
    gradients, calls, plain = [], [], Head.logits
    monkeypatch.setattr(Head, "logits", lambda *given: calls.append(len(given[1])) or plain(*given))
    loss_gradient = build_loss_gradient(tokens, config=config, kl_coefficient=0.1)
    for known in (None, loss_gradient):
        calls.clear()
        model.zero_grad()
        logprobs_N = module(read._replace(loss_gradient=known))
        update_loss(logprobs_N, tokens, config=config, kl_coefficient=0.1, tally=MetricSums()).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        assert len(calls) == (6 if known is None else 3)  # chunks of 2 of 6 tokens, once or twice
    assert (loss_gradient is None) == (loss.compares_sequences or correction in ("sequence", "veto"))
    with_bonus = config.model_copy(update={"entropy": EntropyBonus(coefficient=0.1)})
    assert build_loss_gradient(tokens, config=with_bonus, kl_coefficient=0.1) is None
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-9)


def build_shaped(config):
    """Build a model with logits that are large enough for a soft cap to change them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_a_frozen_head_with_a_scale_or_a_soft_cap_gives_the_same_gradients(family):
    model = build_shaped(SHAPED[family][0])
    torch.manual_seed(0)
    head, states_NH = TokenLogprobs(model, temperature=0.7, chunk_elements=CHUNK).head, torch.randn(7, 32)
    targets_N, answers = torch.randint(2, 300, (7,)), []
    for frozen in (False, True):
        head.weight.requires_grad_(not frozen)
        states = states_NH.clone().requires_grad_()
        found_N = head(states, targets_N)
        assert (type(found_N.grad_fn).__name__ == "_FrozenLogprobsBackward") == frozen
        (found_N.square() * torch.arange(7)).sum().backward()
        answers.append((found_N.detach(), states.grad))
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-5, atol=1e-6)


def test_a_chunk_is_sized_by_the_total_memory_of_a_gpu():
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
    with pytest.raises(BadInput, match="scale or a soft cap"):
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


MODELS = {
    **{name: (partial(build_shaped, config), shape) for name, (config, shape) in SHAPED.items()},
    **{name: (partial(build, name), LogitShape()) for name in ("llama", "qwen3")},
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("chunk_elements", [1 << 26, CHUNK])
def test_log_probs_and_gradients_are_those_of_the_model_with_its_scale_or_soft_cap(family, chunk_elements):
    build_model, shape = MODELS[family]
    model = build_model()
    found_N, gradients, expected_N = compute(model, chunk_elements=chunk_elements)
    torch.testing.assert_close(found_N, expected_N, rtol=1e-5, atol=2e-6)
    assert TokenLogprobs(model, temperature=1.0).head.settings.shape == pytest.approx(shape, rel=1e-6)

    found = torch.cat([gradient.flatten() for gradient in gradients.values()])
    model.zero_grad(set_to_none=True)
    (expected_N * torch.arange(6)).sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_entropies_and_their_gradients_are_those_of_all_logits_of_the_model(family, is_frozen):
    model = MODELS[family][0]()
    model.get_output_embeddings().weight.requires_grad_(not is_frozen)
    read, factors_N2 = build_input(), torch.linspace(-1, 1, 12).reshape(6, 2)
    logits_NV = model(input_ids=read.tokens_BT).logits.flatten(0, 1)[read.positions_N]
    policies = torch.distributions.Categorical(logits=logits_NV / 0.7)
    expected_N2 = torch.stack([policies.log_prob(read.targets_N), policies.entropy()], -1)
    results = [expected_N2]
    for elements in (1 << 26, CHUNK):
        policy = TokenLogprobs(model, temperature=0.7, chunk_elements=elements)
        results.append(policy(read._replace(with_entropy=True)))
    gradients = []
    for outputs_N2 in results:
        model.zero_grad(set_to_none=True)
        (outputs_N2 * factors_N2).sum().backward()
        torch.testing.assert_close(outputs_N2, expected_N2, rtol=1e-5, atol=5e-6)
        gradients.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=1e-4, atol=1e-5 * float(gradients[0].abs().max()))


def test_the_entropy_ignores_tokens_that_are_never_generated():
    logits = torch.tensor([[0.0, 5.0, 0.0, math.log(2)]], requires_grad=True)
    settings = Head(LogitShape(), temperature=1.0, banned=(1,))
    raw = settings.logits(logits)
    assert settings.entropies(raw).item() == pytest.approx(1.5 * math.log(2))  # probabilities 1/4, 0, 1/4, 1/2
    gradients = settings.compute_entropy_gradients(raw, torch.ones(1, 1))
    half = math.log(2) / 2
    assert gradients.flatten().tolist() == pytest.approx([half / 4, 0, half / 4, -half / 2])  # -p (log p + H)


@pytest.mark.parametrize("chunk_elements", [CHUNK, None])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_log_probs_and_gradients_of_candidate_tokens_are_those_of_the_whole_model(chunk_elements, is_frozen):
    model, read = build(), build_input()
    model.get_output_embeddings().weight.requires_grad_(not is_frozen)
    module = TokenLogprobs(model, temperature=0.7, chunk_elements=chunk_elements)
    ids_NK = torch.randint(2, 300, (6, 4), generator=torch.Generator().manual_seed(5))
    factors_NS = torch.randn(6, 5, generator=torch.Generator().manual_seed(6))
    found_NS = module(read.with_candidates(ids_NK))
    logits_NV = model(input_ids=read.tokens_BT).logits.flatten(0, 1)[read.positions_N]
    expected_NS = (logits_NV / 0.7).log_softmax(-1).gather(-1, torch.cat([read.targets_N[:, None], ids_NK], 1))
    torch.testing.assert_close(found_NS, expected_NS)
    trained = [each for each in model.parameters() if each.requires_grad]
    found, expected = (
        torch.autograd.grad((values_NS * factors_NS).sum(), trained) for values_NS in (found_NS, expected_NS)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_teacher_returns_its_most_probable_tokens_among_those_of_the_policy():
    model, read = build(), build_input()
    module = TokenLogprobs(model, temperature=0.7, chunk_elements=CHUNK, top=TopTokens(3, 100))
    target_N1, logprobs_NK, ids_NK = module(read).split([1, 3, 3], dim=1)
    logprobs_NV = (model(input_ids=read.tokens_BT).logits.flatten(0, 1)[read.positions_N] / 0.7).log_softmax(-1)
    expected = logprobs_NV[:, :100].topk(3)
    torch.testing.assert_close(logprobs_NK, expected.values)
    assert torch.equal(ids_NK.long(), expected.indices)
    torch.testing.assert_close(target_N1, logprobs_NV.gather(1, read.targets_N[:, None]))
