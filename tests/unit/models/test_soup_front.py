"""The arithmetic of a soup, and the metrics of a front, compared with values computed by hand."""

import numpy as np
import pytest

from rheostat.models.soup.front import hypervolume, measure_front, non_dominated, spacing, sparsity
from rheostat.models.soup.mixing import (
    compute_backbone_weights,
    extrapolate_weights,
    merge_weights,
    mixing_matrix,
    preference_grid,
)

# ---- mixing


def test_the_rows_of_b_are_the_reward_weights_of_the_backbones():
    assert mixing_matrix(2, 0.7).tolist() == [[0.7, pytest.approx(0.3)], [pytest.approx(0.3), 0.7]]
    by_three = mixing_matrix(3, 0.6)
    assert np.diag(by_three) == pytest.approx([0.6] * 3) and by_three.sum(axis=1) == pytest.approx([1] * 3)
    assert by_three[0, 1] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("preference", "beta", "expected"),
    [
        ((1, 0), 0.7, (1.75, -0.75)),  # γ = 0.3: (1 − 0.3) / 0.4, (0 − 0.3) / 0.4
        ((0.5, 0.5), 0.7, (0.5, 0.5)),
        ((0.3, 0.7), 0.7, (0.0, 1.0)),  # the second backbone itself
        ((0.2, 0.8), 1.0, (0.2, 0.8)),  # Rewarded Soup
        ((1, 0, 0), 0.6, (2.0, -0.5, -0.5)),  # γ = 0.2: 0.8 / 0.4, −0.2 / 0.4
        ((0.6, 0.2, 0.2), 0.6, (1.0, 0.0, 0.0)),
    ],
)
def test_the_weights_of_a_preference_solve_b_lambda_is_mu(preference, beta, expected):
    found = merge_weights(preference, beta)
    assert found == pytest.approx(expected, abs=1e-12)
    assert sum(found) == pytest.approx(1) and mixing_matrix(len(preference), beta) @ found == pytest.approx(preference)


def test_a_direct_merge_weighs_the_backbones_by_the_preference():
    assert compute_backbone_weights("direct", (0.3, 0.7), 0.7) == (0.3, 0.7)
    assert compute_backbone_weights("bone", (0.3, 0.7), 0.7) == pytest.approx((0, 1), abs=1e-12)


def test_extrapolation_moves_away_from_the_start():
    weights, start = extrapolate_weights((0.25, 0.75), 0.2)
    assert weights == pytest.approx((0.3, 0.9)) and start == -0.2
    assert sum(weights) + start == pytest.approx(1)


def test_a_grid_is_the_simplex_lattice_with_its_corners():
    assert preference_grid(2, 3) == [(0.0, 1.0), (0.5, 0.5), (1.0, 0.0)]
    by_three = preference_grid(3, 5)
    assert len(by_three) == 15 and all(sum(each) == pytest.approx(1) for each in by_three)
    assert {(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.25, 0.25, 0.5)} <= set(by_three)


# ---- the front


def test_hypervolume_of_two_rewards_is_the_area_of_the_staircase():
    # Above (0, 0): 3 × 1 below y = 1, 2 × 1 from 1 to 2, 1 × 1 from 2 to 3. (1, 1) lies inside, (−1, 5) is no gain.
    assert hypervolume(np.array([(1, 3), (2, 2), (3, 1), (1, 1), (-1, 5)]), np.zeros(2)) == 6
    assert hypervolume(np.array([(1, 3)]), np.array([-1, -1])) == 8
    assert hypervolume(np.array([(-1, -1)]), np.zeros(2)) == 0


def test_hypervolume_of_three_rewards_is_a_volume_without_overlaps():
    # Boxes 2·1·1, 1·2·1, 1·1·2: each pair shares the unit cube, so do all three: 6 − 3 + 1.
    assert hypervolume(np.array([(2, 1, 1), (1, 2, 1), (1, 1, 2)]), np.zeros(3)) == 4
    random = np.random.default_rng(0)
    some, samples = random.random((6, 3)), random.random((200_000, 3))
    share = (samples[:, None] <= some[None]).all(axis=2).any(axis=1).mean()
    assert hypervolume(some, np.zeros(3)) == pytest.approx(share, abs=0.005)


def test_only_points_that_no_other_dominates_are_kept_each_once():
    kept = non_dominated(np.array([(1, 3), (2, 2), (2, 2), (1, 2), (3, 1), (3, 0)]))
    assert kept.tolist() == [[1, 3], [2, 2], [3, 1]]


def test_gaps_between_neighbours_are_sparsity_and_spacing():
    front = np.array([(0, 4), (1, 2), (3, 0)])
    # Squared gaps: first reward 1, 4, second 4, 4; over two pairs.
    assert sparsity(front) == (1 + 4 + 4 + 4) / 2
    # Nearest: 1 + 2 = 3, 3, 2 + 2 = 4; mean 10/3, squares 1/9 + 1/9 + 4/9 over 2.
    assert spacing(front) == pytest.approx((6 / 9 / 2) ** 0.5)
    assert sparsity(front[:1]) == spacing(front[:2]) == 0


def test_a_front_is_measured_separately_inside_and_at_its_corners():
    preferences = [(0, 1), (0.25, 0.75), (0.5, 0.5), (0.75, 0.25), (1, 0)]
    rewards = [(-1, 1), (0, 0.8), (0.4, 0.4), (0.8, 0), (0.7, -1)]
    found = measure_front(preferences, rewards, (-1.5, -1.5))
    # Σ μ R: 1; 0.6; 0.4; 0.6; 0.7
    assert found.mean == pytest.approx(3.3 / 5) and found.inside == pytest.approx(1.6 / 3)
    assert found.corners == (0.7, 1)
    # Of ten pairs R_1 has one the wrong way round (the corner), R_2 none: τ 0.8 and 1.
    assert found.kendall_tau == pytest.approx(0.9)
    assert found.non_dominated == 4  # (0.7, −1) is beaten by (0.8, 0)
    # From below: 2.3 × 1.5 to y = 0, 1.9 × 0.4 to 0.4, 1.5 × 0.4 to 0.8, 0.5 × 0.2 to 1.
    assert found.hypervolume == pytest.approx(3.45 + 0.76 + 0.6 + 0.1)


def test_rewards_that_are_all_equal_have_no_order():
    assert measure_front([(0, 1), (1, 0)], [(1, 1), (1, 2)], (0, 0)).kendall_tau is None
