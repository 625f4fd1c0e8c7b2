"""Alarms in the configuration of a run, and what a return leaves to later iterations and to retention."""

import json

import pytest

from infra.errors import BadInput
from infra.pools.threads import ThreadCluster
from infra.store.bundles import BundleRef
from infra.store.manifests import Manifest
from infra.store.runs import create_run, open_run
from models.config.alarms import MEASURED
from tasks.commit import retire_policies
from tasks.config.run import override_config
from tasks.run.iteration import Iteration
from tasks.run.keys import StageKey
from tasks.run.ordered_returns import version_to_return_to
from tasks.run.returns import made_in, policy_after, return_key
from tasks.run.session import Session
from tasks.run.states import newest_with_state, way_to


def config(*overrides):
    return override_config({}, overrides, source="run.toml")


def alarms(*fields):
    return f"alarms=[{', '.join(f'{{{each}}}' for each in fields)}]"


DIP = "kind = 'reward_dip'"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [alarms("kind = 'metric', metric = 'update/grad_norm_mx', bound = 1")],
            r"expected a number of metrics.jsonl of credit or the update; did you mean 'update/grad_norm_max'\?",
        ),
        (
            [alarms("kind = 'metric', metric = 'tokens_per_second', bound = 1")],
            "'tokens_per_second': expected a number",
        ),
        (
            [alarms("kind = 'kl'")],
            "alarms: 'kl': nothing measures KL to the reference: expected update.kl or algorithm.kl",
        ),
        ([alarms(DIP, DIP)], "'reward_dip' is there twice"),
        ([alarms(f"{DIP}, action = 'return'"), "rollout.staleness=1", "retention.keep_last=3"], "'return' would learn"),
        ([alarms("kind = 'reward_dipp'")], "did you mean 'reward_dip'"),
    ],
)
def test_an_alarm_that_would_never_be_raised_or_does_not_go_with_the_run_is_refused_in_one_line(overrides, said):
    with pytest.raises(BadInput, match=said) as refused:
        config(*overrides)
    assert "\n" not in str(refused.value)


def test_a_run_without_configured_alarms_has_two_that_warn():
    assert [(alarm.known_as, alarm.action) for alarm in config().alarms] == [
        ("length_collapse", "warn"),
        ("reward_dip", "warn"),
    ]


def test_results_depend_on_alarms_that_return_but_not_on_others_nor_on_how_often():
    plain, returning = config(), config(alarms(f"{DIP}, action = 'return'"))
    for alike in ("alarms=[]", alarms(f"{DIP}, action = 'stop'"), alarms(DIP, "kind = 'length_collapse', bound = 0.9")):
        assert config(alike).identity() == plain.identity()
    assert "alarms" not in plain.identity()
    assert returning.identity() != plain.identity()
    assert config(alarms(f"{DIP}, action = 'return', returns = 7")).identity() == returning.identity()
    assert config(alarms(f"{DIP}, action = 'return', bound = 2")).identity() != returning.identity()


def test_every_number_that_a_run_measures_has_a_name_that_an_alarm_takes(reference):
    sealed = json.loads((reference.run / "manifests/it-0002/seal.json").read_text())
    known = {f"{stage}/{name}" for stage, names in MEASURED.items() for name in names}
    measured = {name for name in sealed["metrics"] if name.startswith(("credit/", "update/"))}
    assert {name for name in measured if not name.startswith("credit/term_")} <= known
    assert len(measured) > 20


def test_a_healthy_run_raises_none_of_the_alarms_that_every_run_has(reference):
    run = open_run(str(reference.store), "tiny")
    assert [run.require(f"it-000{number}/seal").provenance.alarms for number in (1, 2, 3)] == [{}, {}, {}]


# ---- returns
@pytest.fixture
def run(tmp_path):
    """A run whose alarms may order a return."""
    made = create_run(str(tmp_path), "r", {"seed": 1, "alarms": [{"kind": "kl", "action": "return"}]})
    with made.hold():
        yield made


def bundle(content):
    digest = f"{content:016x}{0:048x}"
    return BundleRef(key=f"policies/{digest[:16]}", digest=digest, bytes=1)


def learn(run, version):
    """Commit a version, of which every second names a state."""
    bundles = {"weights": bundle(version)} | ({"state": bundle(100 + version)} if version and version % 2 == 0 else {})
    for ref in bundles.values():
        run.store.put(f"{ref.key}/bundle.json", b"{}")
    run.commit(Manifest(key=StageKey.policy(version), bundles=bundles, metrics={"steps": 1}))


def go_back(run, number):
    to = version_to_return_to(run, number)
    bundles = policy_after(run, to).bundles
    run.commit(Manifest(key=return_key(number), bundles=bundles, detail={"to": to, "version": number}))


def there(run, *contents):
    return [content for content in contents if run.store.exists(f"{bundle(content).key}/bundle.json")]


def test_the_last_good_version_generated_the_newest_iteration_without_a_return(run):
    for version in range(8):
        learn(run, version)
    assert [version_to_return_to(run, number) for number in (1, 2, 3, 4)] == [0, 0, 1, 2]
    go_back(run, 3)
    assert version_to_return_to(run, 4) == 3, "which is version 1: iteration 4 was generated by it and was not good"
    go_back(run, 4)
    assert [made_in(run, number) for number in (2, 3, 4, 5)] == [2, 1, 1, 5]
    assert version_to_return_to(run, 6) == 4, "iteration 5 was good, and version 4 generated it"
    assert policy_after(run, 4).bundles == policy_after(run, 1).bundles


def test_the_way_to_a_version_leads_through_what_was_returned_to_and_not_through_what_was_discarded(run):
    for version in range(6):
        learn(run, version)
    go_back(run, 5)  # to version 3, whose state is not in the store
    learn(run, 6)
    assert way_to(run, 4) == (4, [])
    assert way_to(run, 5) == (2, [3]), "version 5 is version 3, learnt by update 3 from the state of version 2"
    assert newest_with_state(run, 5) == 2
    run.store.delete(f"{bundle(106).key}/bundle.json")
    assert way_to(run, 6) == (2, [3, 6])


def kept_after(run, *, returns):
    """The versions whose weights are there after each iteration, with a return after one of them."""
    session = Session(run, config("name=r", "retention.keep_last=2"), ThreadCluster(), store="here")
    looks = {}
    learn(run, 0)
    for number in range(1, 9):
        learn(run, number)
        if number == returns:
            go_back(run, number)
        retire_policies(session, Iteration(run, number))
        looks[number] = there(run, *range(1, number + 1))
    return looks


def test_retention_keeps_what_was_returned_to_as_long_as_a_version_has_it_and_then_deletes_it(run):
    looks = kept_after(run, returns=4)
    assert looks[3] == [2, 3]
    assert looks[4] == [2, 3, 4], "version 2 lives on as version 4, in place of what was learnt"
    assert looks[6] == [2, 4, 5, 6], "where it is, too, version 5 is learnt from again, which has no state"
    assert looks[7] == [6, 7] and looks[8] == [6, 7, 8]


def test_retention_keeps_the_state_from_which_what_was_returned_to_is_learnt_again(run):
    looks = kept_after(run, returns=5)
    assert looks[5] == [2, 3, 4, 5], "version 3 lives on as version 5, and its state is learnt from that of version 2"
    assert looks[6] == [2, 3, 5, 6] and looks[8] == [6, 7, 8]
