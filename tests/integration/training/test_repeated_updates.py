"""Updates that are repeated after their optimizer state was lost: exactly on CPUs, approximately on GPUs."""

from dataclasses import replace

import pytest

from rheostat.infra.errors import Damaged
from rheostat.infra.store.bundles import delete_bundle, has_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.training.ranks import Ranks
from tests.support.update_workers import CONFIG, chain, change, distance, load_trained, start_worker, update_work

OTHER_ORDER = change(CONFIG, microbatch_tokens=60)
"""Other micro-batches, so that sums are added in another order. GPUs do this even with equal settings."""


@pytest.fixture
def rounds_differently(monkeypatch):
    """Whether updates are repeated on devices that do not add numbers in a fixed order."""
    monkeypatch.setattr(Ranks, "repeats_exactly", False)


def test_a_lost_optimizer_state_is_computed_again_and_stored(uri, policy):
    works, outcomes = chain(uri, policy, 3, kept=(1, 2, 3))
    store, lost = open_store(f"{uri}/run"), outcomes[1].model.state
    delete_bundle(store, lost)
    again = start_worker(uri).update(replace(works[2], past=(works[1],)))
    assert (again.model, again.metrics) == (outcomes[2].model, outcomes[2].metrics)
    assert has_bundle(store, lost)


def test_updates_without_a_state_are_repeated_with_the_same_bits(uri, policy):
    works, outcomes = chain(uri, policy, 4, kept=(1, 4))
    assert [outcome.model.state is not None for outcome in outcomes] == [True, False, False, True]
    for first in (1, 0):  # from the newest state, and from the first policy
        again = start_worker(uri).update(replace(works[3], past=tuple(works[first:3])))
        assert (again.model, again.metrics) == (outcomes[3].model, outcomes[3].metrics)


def test_repeating_an_update_from_other_samples_is_damage_that_names_the_iteration(uri, policy):
    works, _ = chain(uri, policy, 3, kept=(1,))
    other = replace(works[1], samples=update_work(uri, policy, seed=9).samples)
    with pytest.raises(Damaged, match=r"iteration 1: .* is weights .* instead of the stored weights"):
        start_worker(uri).update(replace(works[2], past=(other,)))


def test_a_repetition_that_rounds_differently_is_damage_on_cpus(uri, policy):
    works, _ = chain(uri, policy, 2)
    with pytest.raises(Damaged, match=r"iteration 0: .* instead of the stored weights"):
        start_worker(uri, OTHER_ORDER).update(replace(works[1], past=(works[0],)))


@pytest.mark.thorough
def test_a_repetition_on_gpus_keeps_the_stored_weights_and_restores_the_moments(uri, policy, rounds_differently):
    works, outcomes = chain(uri, policy, 3, kept=(1, 3))
    again = start_worker(uri, OTHER_ORDER).update(replace(works[2], past=(works[0], works[1])))
    assert 0 < again.metrics["repeated_difference"] < 1e-3
    start, exact, near = (load_trained(uri, model) for model in (outcomes[1].model, outcomes[2].model, again.model))
    assert 0 < distance(near, exact) < 1e-2 * distance(exact, start)  # lost moments would change the whole step


@pytest.mark.thorough
def test_a_repetition_on_gpus_from_other_samples_is_damage(uri, policy, rounds_differently):
    works, _ = chain(uri, policy, 2)
    other = replace(works[0], samples=update_work(uri, policy, seed=9).samples)
    with pytest.raises(Damaged, match=r"policy 1: its update was repeated .* only 25% is allowed"):
        start_worker(uri).update(replace(works[1], past=(other,)))


@pytest.mark.thorough
def test_an_update_that_is_discarded_after_a_repetition_on_gpus_reports_the_repetition(uri, policy, rounds_differently):
    works, _ = chain(uri, policy, 3, kept=(1, 3))
    spoilt = update_work(uri, works[2].policy, advantages=[float("nan")]).samples
    discarded = start_worker(uri, OTHER_ORDER).update(replace(works[2], samples=spoilt, past=(works[0], works[1])))
    assert discarded.metrics["quarantined"] == 1
    assert 0 < discarded.metrics["repeated_difference"] < 1e-3  # `verify` then allows that the state is missing
