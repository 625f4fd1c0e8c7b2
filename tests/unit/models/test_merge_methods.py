"""Merge methods compared with values that mergekit computed, and with values worked by hand."""

import math
import tomllib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rheostat.models.config.merging import DareLinearMerge, DareTiesMerge, LinearMerge, SlerpMerge, TiesMerge
from rheostat.models.config.policy import MergePolicy
from rheostat.models.modeling import merge_methods
from rheostat.models.modeling.merge_methods import TensorVersions, merge_tensor
from tests.support.mergekit_values import CASES, POSITIVE, WEIGHTS, draw_policies, draw_uniform

MERGEKIT = tomllib.loads((Path(__file__).parent / "mergekit.toml").read_text())
BASE = Path("base")


def merge(method, base: Tensor | None, *parents: Tensor, weights, name: str = "w") -> Tensor:
    return merge_tensor(method, TensorVersions(name, parents, weights, base), dtype=torch.float32)


# ---- mergekit


@pytest.mark.parametrize("case", CASES)
def test_merges_equal_those_of_mergekit(monkeypatch, case):
    """The expected values were printed by mergekit 0.1.5, with the commands in tests/support/mergekit_values.py."""
    settings = CASES[case]
    base, *policies = (torch.tensor(values) for values in draw_policies(settings.get("noise", 0.5)))
    kind = settings["method"]
    if kind == "slerp":
        found = merge(SlerpMerge(), None, *policies[:2], weights=(1 - settings["t"], settings["t"]))
    else:
        numbers = iter(draw_uniform())
        monkeypatch.setattr(merge_methods.torch, "rand", lambda *_, **__: torch.tensor(next(numbers)))
        options = {name: value for name, value in settings.items() if name != "method"}
        method = {"ties": TiesMerge, "dare_linear": DareLinearMerge, "dare_ties": DareTiesMerge}[kind]
        weights = POSITIVE if kind == "ties" else WEIGHTS
        found = merge(method(base=BASE, **options), base, *policies, weights=weights)
    torch.testing.assert_close(found, torch.tensor(MERGEKIT[case]), rtol=0, atol=1e-6)


# ---- TIES


def test_ties_keeps_the_largest_differences_and_averages_those_with_the_elected_sign():
    base = torch.full((5,), 10.0)
    one, other = base + torch.tensor([4.0, -3, 2, 1, 0]), base + torch.tensor([-1.0, 5, 6, 0.5, 2])
    found = merge(TiesMerge(base=BASE, density=0.6), base, one, other, weights=(0.5, 0.25))
    # Trimmed to three: [4, −3, 2, 0, 0] and [0, 5, 6, 0, 2]. Weighted sums 2, −0.25, 2.5, 0, 0.5 elect +, −, +, –, +.
    # Weighted means of those with that sign: 4, −3, (0.5·2 + 0.25·6) / 0.75 = 10/3, 0, 2.
    torch.testing.assert_close(found, torch.tensor([14.0, 7, 10 + 10 / 3, 10, 12]))
    half = merge(TiesMerge(base=BASE, density=0.6, scale=0.5), base, one, other, weights=(0.5, 0.25))
    torch.testing.assert_close(half - base, (found - base) / 2)
    scaled = merge(TiesMerge(base=BASE, density=0.6), base, one, other, weights=(2.0, 1.0))
    torch.testing.assert_close(scaled, found)


@pytest.mark.parametrize(
    ("density", "kept"),
    [(0.5, [1.0, -1, 0, 0, 0, 2]), (0.34, [1.0, 0, 0, 0, 0, 2]), (0.01, [0.0, 0, 0, 0, 0, 2]), (1.0, None)],
)
def test_ties_keeps_an_exact_number_of_equal_differences_the_first_ones(density, kept):
    difference = torch.tensor([1.0, -1, 1, 0, 1, 2])
    found = merge(TiesMerge(base=BASE, density=density), torch.zeros(6), difference, weights=(1.0,))
    assert found.tolist() == (difference.tolist() if kept is None else kept)


# ---- DARE


@pytest.mark.parametrize("method", [DareLinearMerge, DareTiesMerge])
def test_dare_drops_differences_by_seed_tensor_and_position_of_the_policy(method):
    base, difference = torch.zeros(40, 50), torch.full((40, 50), 1.0)

    def keep(seed: int = 0, name: str = "w", weights=(1.0, 0.0)) -> Tensor:
        settings = method(base=BASE, density=0.25, seed=seed)
        return merge(settings, base, difference, difference, weights=weights, name=name)

    once = keep()
    assert once.unique().tolist() == [0, 4] and 0.2 < (once > 0).float().mean() < 0.3
    assert torch.equal(once, keep())
    for other in (keep(seed=1), keep(name="v"), keep(weights=(0.0, 1.0))):
        assert 0.3 < (other != once).float().mean() < 0.45  # two independent masks: 2 · 0.25 · 0.75 = 0.375


def test_the_expected_value_of_dare_linear_is_the_weighted_sum_of_differences():
    base, one, other = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    draws = [
        merge(DareLinearMerge(base=BASE, density=0.3, seed=seed), base, one, other, weights=(0.8, 0.5))
        for seed in range(2000)
    ]
    expected = base + 0.8 * (one - base) + 0.5 * (other - base)
    errors = (torch.stack(draws).mean(dim=0) - expected).abs()
    variance = (1 / 0.3 - 1) * ((0.8 * (one - base)) ** 2 + (0.5 * (other - base)) ** 2)
    assert (errors < 4.5 * (variance / 2000).sqrt()).all()
    exact = merge(DareLinearMerge(base=BASE, density=1), base, one, other, weights=(0.8, 0.5))
    torch.testing.assert_close(exact, expected)
    linear = merge(LinearMerge(), None, one, other, base, weights=(0.8, 0.5, -0.3))
    torch.testing.assert_close(exact, linear)


# ---- SLERP


def test_slerp_turns_along_the_arc_between_two_tensors():
    east, north = torch.tensor([[2.0, 0], [0, 0]]), torch.tensor([[0.0, 0], [0, 2]])
    third = merge(SlerpMerge(), None, east, north, weights=(2 / 3, 1 / 3))
    torch.testing.assert_close(third, torch.tensor([[2 * math.cos(math.pi / 6), 0], [0, 2 * math.sin(math.pi / 6)]]))
    for weights, expected in (((1.0, 0.0), east), ((0.0, 1.0), north)):
        torch.testing.assert_close(merge(SlerpMerge(), None, east, north, weights=weights), expected)
    beyond = merge(SlerpMerge(), None, east, north, weights=(-1.0, 2.0))
    torch.testing.assert_close(beyond, -east, atol=1e-6, rtol=0)


# ---- all methods


METHODS = (
    LinearMerge(), SlerpMerge(), TiesMerge(base=BASE), DareLinearMerge(base=BASE), DareTiesMerge(base=BASE),
)  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.kind)
def test_tensors_that_are_the_same_everywhere_keep_their_bits_and_other_integers_are_refused(method):
    value = torch.tensor([1, 2, 3])
    base = None if method.base_path is None else value
    assert torch.equal(
        merge_tensor(method, TensorVersions("w", [value] * 2, (0.5, 0.5), base), dtype=torch.int64), value
    )
    with pytest.raises(ValueError, match=r"torch\.int64 .* they differ"):
        merge_tensor(method, TensorVersions("w", [value, value + 1], (0.5, 0.5), base), dtype=torch.int64)


def test_task_vectors_are_computed_in_float32():
    base = torch.tensor([256.0]).bfloat16()
    found = merge(DareLinearMerge(base=BASE, density=1), base, torch.tensor([258.0]).bfloat16(), weights=(0.5,))
    assert found.item() == 257  # in bfloat16, 257 would be rounded to 256


@pytest.mark.parametrize(
    ("method", "weights", "message"),
    [
        ({"kind": "slerp"}, (0.5, 0.3, 0.2), "method 'slerp' merges exactly 2 policies, but 3 are given"),
        ({"kind": "slerp"}, (0.5, 0.6), "0.5 + 0.6 = 1.1"),
        ({"kind": "ties", "base": "b"}, (0.5, -0.5), "each weight must be above 0, but one is -0.5"),
        ({"kind": "ties", "base": "b", "density": 0}, (1,), "greater than 0"),
        ({"kind": "dare_ties"}, (1,), "base"),
        ({"kind": "linear", "base": "b"}, (1,), "base"),
    ],
)
def test_methods_refuse_weights_and_settings_that_do_not_fit(method, weights, message):
    parents = [{"path": f"p{place}", "weight": weight} for place, weight in enumerate(weights)]
    with pytest.raises(ValueError) as found:
        MergePolicy.model_validate({"parents": parents, "method": method})
    assert message in str(found.value)
