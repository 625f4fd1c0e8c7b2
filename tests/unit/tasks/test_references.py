"""Reference model of each iteration, and the retention of its weights."""

import pytest

from rheostat.infra.pools.threads import ThreadCluster
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import create_run
from rheostat.models.config.divergence import ReferenceRule
from rheostat.tasks.commit import retire_policies
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import StageKey, iteration_key
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.references import recorded_rule, reference_iteration
from rheostat.tasks.run.reverts import policy_after, revert_key
from tests.support.configurations import accepted
from tests.support.versions import commit_version, stored_bundles

PENALTY = {"kind": "k3", "reset_every": 3}
AVERAGE = {"kind": "policy", "template": "{prompt}", "ema_decay": 0.9}
EVERY_THIRD = ReferenceRule(reset_every=3)


def make_run(path, **config):
    return create_run(str(path), "r", {"seed": 1, **config})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"update": {"kl": PENALTY}}, {"reset_every": 3}),
        ({"update": {"kl": {"kind": "k1", "reset_after_plateau": 4}}}, {"reset_after_plateau": 4}),
        ({"algorithm": {"kind": "grpo", "kl": PENALTY}}, {"reset_every": 3}),
        ({"update": {"kl": {"kind": "k3", "ema_decay": 0.9}}}, {"ema_decay": 0.9}),
        ({"algorithm": {"kind": "target", "target": "a:B", "options": {"penalty": PENALTY}}}, {"reset_every": 3}),
        ({"algorithm": {"kind": "grpo", "distillation": {"teacher": AVERAGE}}}, {"ema_decay": 0.9}),
        ({"algorithm": {"kind": "grpo", "distillation": {"specialists": [{"teacher": AVERAGE}]}}}, {"ema_decay": 0.9}),
        ({"algorithm": {"kind": "target", "options": {"old": {"kind": "policy", "ema_decay": 2}}}}, {}),
        ({"update": {"kl": {"kind": "k3"}}, "algorithm": {"kind": "grpo"}}, {}),
        ({}, {}),
    ],
)
def test_the_rule_of_resets_is_read_from_the_recorded_penalty(tmp_path, config, expected):
    assert recorded_rule(make_run(tmp_path, **config), 1) == ReferenceRule(**expected)


def test_the_reference_is_the_policy_after_the_last_multiple_of_the_interval(tmp_path):
    run = make_run(tmp_path)
    for every, expected in ((None, [0] * 7), (1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 0, 0, 3, 3, 3, 6]), (9, [0] * 7)):
        assert [
            reference_iteration(run, number, ReferenceRule(reset_every=every)) for number in range(1, 8)
        ] == expected


@pytest.fixture
def run(tmp_path):
    """Locked run whose alarms may revert it, and whose reference is reset after every third iteration."""
    new_run = make_run(tmp_path, update={"kl": PENALTY}, alarms=[{"kind": "kl", "action": "return"}])
    with new_run.lock():
        yield new_run


def commit_revert(run, number, to):
    detail = {"to": to, "version": number}
    run.commit(Manifest(key=revert_key(number), bundles=policy_after(run, to).bundles, detail=detail))


def test_a_revert_to_a_policy_before_the_reset_replaces_the_reference(run):
    for version in range(5):
        commit_version(run, version, weights=version)
    commit_revert(run, 4, to=2)
    for version in range(5, 9):
        commit_version(run, version, weights=version)
    assert [reference_iteration(run, number, EVERY_THIRD) for number in range(1, 10)] == [0, 0, 0, 3, 4, 4, 6, 6, 6]
    assert Iteration(run, 5).reference.bundles == policy_after(run, 2).bundles
    commit_revert(run, 8, to=6)
    assert reference_iteration(run, 9, EVERY_THIRD) == 6, "the restored policy is the reference itself"


def test_a_revert_to_a_policy_after_the_reset_keeps_the_reference(run):
    for version in range(7):
        commit_version(run, version, weights=version)
    commit_revert(run, 6, to=4)
    assert [reference_iteration(run, number, EVERY_THIRD) for number in (5, 6)] == [3, 3]
    assert Iteration(run, 7).reference.bundles == policy_after(run, 4).bundles, "it is the policy after iteration 6"


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((0.1, 0.2, 0.3, 0.4, 0.5), (0, 0, 0, 0, 0, 0)),
        ((0.5, 0.4, 0.5, 0.5, 0.3, 0.6), (0, 0, 0, 3, 3, 5, 5)),  # after 3: none of 2 and 3 is above 0.5
        ((0.5, 0.4, 0.6, 0.5, 0.6, 0.9), (0, 0, 0, 0, 0, 5, 5)),
        ((0.5, None, None, 0.5, 0.5), (0, 0, 0, 3, 3, 5)),
    ],
)
def test_the_reference_is_reset_after_iterations_without_a_higher_mean_reward(tmp_path, rewards, expected):
    run = make_run(tmp_path, update={"kl": {"kind": "k3", "reset_after_plateau": 2}})
    with run.lock():
        for number, reward in enumerate(rewards, start=1):
            metrics = {} if reward is None else {"reward_mean": reward}
            run.commit(Manifest(key=StageKey.of(iteration_key(number), "credit"), metrics=metrics))
    references = [reference_iteration(run, number, recorded_rule(run, number)) for number in range(1, len(rewards) + 2)]
    assert references == [*expected]


def test_iterations_that_an_alarm_reverted_do_not_count_towards_a_plateau(tmp_path):
    penalty, alarm = {"kind": "k3", "reset_after_plateau": 2}, {"kind": "kl", "action": "revert"}
    run = make_run(tmp_path, update={"kl": penalty}, alarms=[alarm])
    with run.lock():
        for version in range(6):
            commit_version(run, version, weights=version)
        for number, reward in enumerate((0.5, 0.4, 0.9, 0.4, 0.4), start=1):
            run.commit(Manifest(key=StageKey.of(iteration_key(number), "credit"), metrics={"reward_mean": reward}))
        commit_revert(run, 3, to=2)
    assert [reference_iteration(run, number, recorded_rule(run, number)) for number in range(1, 7)] == [
        0,
        0,
        0,
        0,
        4,
        4,
    ]


def weights_after(run, resumes):
    """Retire policies after each iteration, optionally in a new process each time. Return the versions whose weights
    and the versions whose states are stored after each iteration."""
    opened = None
    for number in range(9):
        commit_version(run, number, weights=number, state=100 + number)
        if not number:
            continue
        if opened is None or resumes:
            opened = OpenRun(run, accepted("name=r"), ThreadCluster(), store="here")
        retire_policies(opened, Iteration(run, number))
        kept, states = stored_bundles(run, range(9)), stored_bundles(run, range(100, 109))
        yield kept, [state - 100 for state in states]


@pytest.mark.parametrize("resumes", [False, True])
def test_retention_keeps_the_weights_of_the_reference_until_the_next_reset(tmp_path, resumes):
    run = make_run(tmp_path, update={"kl": PENALTY})
    with run.lock():
        found = [*weights_after(run, resumes)]
    assert [weights for weights, _ in found] == [
        [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 3, 4, 5], [0, 3, 5, 6], [0, 6, 7], [0, 6, 7, 8],
    ]  # fmt: skip
    assert [states for _, states in found[4:6]] == [[0, 4, 5], [0, 5, 6]], "a reference needs no optimizer state"
