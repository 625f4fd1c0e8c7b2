"""The critic's clipped loss and its fit, against numbers worked by hand."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.objectives.loss_inputs import MetricSums
from models.objectives.losses import explained_variance, fit_sums, value_loss


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (1.1, 1.0, 2.0, 0.9**2 / 2, -0.9, False),  # inside the band: the plain squared error
        (1.5, 1.0, 2.0, 0.8**2 / 2, 0.0, True),  # moved 0.5 to the target, counts as 0.2: the worse error, no gradient
        (0.5, 1.0, 2.0, 1.5**2 / 2, -1.5, False),  # moved away: plain is worse, it may come back
        (2.5, 1.0, 2.0, 0.8**2 / 2, 0.0, True),  # past the target, but less wrong than the clipped one
        (4.0, 1.0, 2.0, 2.0**2 / 2, 2.0, False),  # far past the target: plain is worse again
    ],
)
def test_the_value_loss_is_clipped_outside_a_band_around_the_old_value(value, old, target, loss, gradient, clipped):
    values_N = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    found = value_loss(values_N, old_N=torch.tensor([old]), returns_N=torch.tensor([target]), clip=0.2)
    found.loss_N.sum().backward()
    assert found.loss_N.item() == pytest.approx(loss)
    assert values_N.grad.item() == pytest.approx(gradient)
    assert found.clipped_N.item() is clipped


def test_the_gradient_of_the_value_loss_is_that_of_finite_differences():
    torch.manual_seed(0)
    old, returns = torch.randn(2, 40, dtype=torch.float64)
    values = (old + 0.5 * torch.randn(40, dtype=torch.float64)).requires_grad_()
    clipped = partial(value_loss, old_N=old, returns_N=returns, clip=0.2)
    assert torch.autograd.gradcheck(lambda x: clipped(x).loss_N.sum(), (values,))


def compute_explained_variance(values: list[float], returns: list[float], *, parts: int = 1) -> float:
    tally = MetricSums()
    for part in range(parts):
        tally.add(fit_sums(torch.tensor(values[part::parts]), torch.tensor(returns[part::parts])))
    tally.raise_to({"nothing": torch.zeros(1)})
    return explained_variance(tally.unpacked(*tally.packed())[0])


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1.0),
        ([5.0, 6.0, 7.0], [1.0, 2.0, 3.0], 1.0),  # a constant error is no variance
        ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0], 0.0),
        ([3.0, 2.0, 1.0], [1.0, 2.0, 3.0], -3.0),  # errors -2, 0, 2 vary four times as much
        ([0.5, 0.1, 0.3], [0.1, 0.1, 0.1], 0.0),
        ([], [], 0.0),
    ],
)
def test_explained_variance_compares_errors_with_returns(values, returns, expected):
    assert compute_explained_variance(values, returns) == pytest.approx(expected)


@given(
    pairs=st.lists(st.tuples(st.floats(-9, 9, width=32), st.floats(-9, 9, width=32)), min_size=2),
    parts=st.integers(1, 5),
)
def test_explained_variance_adds_up_over_micro_batches_and_ranks(pairs, parts):
    values, returns = map(list, zip(*pairs, strict=True))
    assert compute_explained_variance(values, returns, parts=parts) == pytest.approx(
        compute_explained_variance(values, returns), rel=1e-6, abs=1e-6
    )
