"""Taking a champion back, and which policies keep their files, on a registry with policies of a few bytes."""

import json
import socket

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.cli.app import main
from infra.errors import BadInput
from infra.store.bundles import has_bundle
from infra.store.registry import open_registry
from tasks import events
from tasks.promotion.registry import promote, prune, refuse, rollback
from tests.support.champions import appended


@pytest.fixture
def registry(tmp_path):
    return open_registry(str(tmp_path / "store"), "assistant")


@pytest.fixture
def given(capsys):
    """Gives a command about a registry, and returns its exit code and what it printed."""

    def give(registry, *words):
        code = main([*words, "--store", registry.store.uri.rpartition("/registry/")[0]])
        return code, capsys.readouterr()

    return give


def test_a_rollback_names_the_champion_before_the_last_promotion_and_is_recorded_once(registry, tmp_path, given):
    for policy in "abc":
        appended(registry, tmp_path, policy)
    for expected in ("champion is b of run run-b, record 4", "champion is b of run run-b, is so already, by record 4"):
        code, said = given(registry, "rollback", "assistant", "--reason", "refuses too often")
        assert code == 0 and expected in said.out
    code, said = given(registry, "rollback", "assistant", "--to", "1", "--reason", "so did that")
    assert registry.champion().policy == "a"
    code, said = given(registry, "registry", "assistant", "--json")
    found = [(each["number"], each["kind"], each["previous"]) for each in json.loads(said.out)["assistant"]]
    assert found == [(1, "promote", 0), (2, "promote", 1), (3, "promote", 2), (4, "rollback", 3), (5, "rollback", 4)]
    code, said = given(registry, "registry")
    assert [line.split()[0:2] for line in said.out.splitlines() if "run-a" in line] == [["1", "promote"], ["5", "*"]]


@pytest.mark.parametrize(
    ("to", "message"),
    [
        (2, "expected the number of a promotion to roll back to, one of 1, 3, found 2"),
        (None, "the files of record 1 were deleted"),
    ],
)
def test_what_cannot_be_rolled_back_to_is_named_and_nothing_is_written(registry, tmp_path, to, message):
    first = appended(registry, tmp_path, "a")
    appended(registry, tmp_path, "b", kind="reject")
    appended(registry, tmp_path, "c")
    prune(registry, 1)
    assert not has_bundle(registry.store, first.bundle)
    store = registry.store.uri.rpartition("/registry/")[0]
    with pytest.raises(BadInput, match=message):
        rollback(store, "assistant", to=to, reason="why not")
    assert len(registry.records()) == 3


def test_a_first_champion_has_none_to_roll_back_to(registry, tmp_path):
    appended(registry, tmp_path, "a")
    with pytest.raises(BadInput, match="found none before the champion"):
        rollback(registry.store.uri.rpartition("/registry/")[0], "assistant", to=None, reason="why not")


def test_a_proposal_that_was_compared_with_another_champion_cannot_be_signed(registry, tmp_path):
    appended(registry, tmp_path, "a")
    appended(registry, tmp_path, "b", kind="proposal")
    appended(registry, tmp_path, "c")
    with pytest.raises(BadInput, match="'run-b' was compared with record 1, and record 3 is champion now"):
        promote(registry.store.uri.rpartition("/registry/")[0], "assistant", "run-b", reason="why not")


def test_the_newest_promoted_policies_the_champion_and_what_waits_keep_their_files(registry, tmp_path):
    records = {policy: appended(registry, tmp_path, policy) for policy in "abcde"}
    rollback(registry.store.uri.rpartition("/registry/")[0], "assistant", to=1, reason="back to the first")
    records["f"] = appended(registry, tmp_path, "f", kind="proposal")
    records["g"] = appended(registry, tmp_path, "g", kind="reject")
    prune(registry, 2)
    assert "".join(policy for policy, made in records.items() if has_bundle(registry.store, made.bundle)) == "adef"


def test_a_refused_proposal_cannot_be_signed_nor_a_signed_one_refused_and_what_was_refused_loses_its_files(
    registry, tmp_path
):
    store = registry.store.uri.rpartition("/registry/")[0]
    refused, signed = (appended(registry, tmp_path, policy, kind="proposal") for policy in "ab")
    for is_new in (True, False):
        made, found = refuse(store, "assistant", "run-a", reason="rude", who="Ann")
        assert (made.number, made.kind, made.who, found) == (3, "refuse", "Ann", is_new)
    with pytest.raises(BadInput, match=r"the proposal of 'run-a' was refused, by record 3: retrain again"):
        promote(store, "assistant", "run-a", reason="why not")
    promote(store, "assistant", "run-b", reason="good")
    with pytest.raises(BadInput, match="the proposal of 'run-b' was signed, by record 4: `rheostat rollback`"):
        refuse(store, "assistant", "run-b", reason="too late")
    assert [record.kind for record in registry.records()] == ["proposal", "proposal", "refuse", "promote"]
    prune(registry, 1)
    assert [has_bundle(registry.store, record.bundle) for record in (refused, signed)] == [False, True]


@pytest.mark.parametrize("answers", [False, True], ids=["closed", "silent"])
def test_a_rollback_stands_where_prefect_is_down_and_the_command_says_that_nobody_was_told(
    registry, tmp_path, given, monkeypatch, answers
):
    monkeypatch.setattr(events, "TELL_SECONDS", 0.5)
    for policy in "ab":
        appended(registry, tmp_path, policy)
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes the connection, and says nothing
        url = f"http://127.0.0.1:{server.getsockname()[1]}/api"
        if not answers:
            server.close()
        with temporary_settings({PREFECT_API_URL: url}):
            code, said = given(registry, "rollback", "assistant", "--reason", "refuses too often")
    assert code == 0 and "champion is a of run run-a, record 3" in said.out
    assert said.err.startswith(f"warning: the Prefect API at {url} was not told of record 3: ")
    assert said.err.count("\n") == 1 and registry.champion().number == 3
