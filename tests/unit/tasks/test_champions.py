"""Rollbacks, refusals and retention of promoted policies, in a registry with policies of a few bytes."""

import json
import socket

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import has_bundle
from rheostat.tasks import events
from rheostat.tasks.promotion.registry import promote, prune, refuse, rollback
from tests.support.champions import append_record


def test_a_rollback_makes_the_previous_champion_the_champion_and_is_recorded_once(registry, tmp_path, registry_command):
    for policy in "abc":
        append_record(registry, tmp_path, policy)
    for expected in ("champion is b of run run-b (record 4)", "champion is b of run run-b (unchanged since record 4)"):
        code, out, _ = registry_command("rollback", "assistant", "--reason", "refuses too often")
        assert code == 0 and expected in out
    registry_command("rollback", "assistant", "--to", "1", "--reason", "so did that")
    assert registry.champion().policy == "a"
    records = json.loads(registry_command("registry", "assistant", "--json")[1])["assistant"]
    assert [(record["number"], record["kind"], record["previous"]) for record in records] == [
        (1, "promote", 0), (2, "promote", 1), (3, "promote", 2), (4, "rollback", 3), (5, "rollback", 4),
    ]  # fmt: skip
    lines = registry_command("registry")[1].splitlines()
    assert [line.split()[0:2] for line in lines if "run-a" in line] == [["1", "promote"], ["5", "*"]]


@pytest.mark.parametrize(
    ("kinds", "to", "message"),
    [
        (("promote",), None, "there was no champion before"),
        (
            ("promote", "reject", "promote"),
            2,
            "record 2 was never a champion, so nothing can be restored. Set --to to one of 1, 3",
        ),
        (("promote", "reject", "promote"), None, "files of record 1 were deleted"),
    ],
)
def test_a_rollback_without_an_earlier_promotion_is_refused_and_writes_nothing(
    registry, home, tmp_path, kinds, to, message
):
    records = [append_record(registry, tmp_path, policy, kind=kind) for policy, kind in zip("abc", kinds, strict=False)]
    prune(registry, 1)
    assert has_bundle(registry.store, records[0].bundle) == (len(kinds) == 1)
    with pytest.raises(BadInput, match=message):
        rollback(home, "assistant", to=to, reason="why not")
    assert len(registry.records()) == len(kinds)


def test_a_proposal_that_was_compared_with_another_champion_cannot_be_promoted(registry, home, tmp_path):
    for policy, kind in (("a", "promote"), ("b", "proposal"), ("c", "promote")):
        append_record(registry, tmp_path, policy, kind=kind)
    with pytest.raises(BadInput, match=r"'run-b' .* record 1, .*record 3"):
        promote(home, "assistant", "run-b", reason="why not")


def test_the_newest_promotions_the_champion_and_open_proposals_keep_their_files(registry, home, tmp_path):
    records = {policy: append_record(registry, tmp_path, policy) for policy in "abcde"}
    rollback(home, "assistant", to=1, reason="back to the first")
    records["f"] = append_record(registry, tmp_path, "f", kind="proposal")
    records["g"] = append_record(registry, tmp_path, "g", kind="reject")
    prune(registry, 2)
    assert "".join(policy for policy, record in records.items() if has_bundle(registry.store, record.bundle)) == "adef"


def test_a_proposal_is_decided_once_and_a_refused_one_loses_its_files(registry, home, tmp_path):
    refused, promoted = (append_record(registry, tmp_path, policy, kind="proposal") for policy in "ab")
    for is_new in (True, False):
        record, was_new = refuse(home, "assistant", "run-a", reason="rude", who="Ann")
        assert (record.number, record.kind, record.who, was_new) == (3, "refuse", "Ann", is_new)
    with pytest.raises(BadInput, match=r"'run-a' was refused \(record 3\)"):
        promote(home, "assistant", "run-a", reason="why not")
    promote(home, "assistant", "run-b", reason="good")
    with pytest.raises(BadInput, match=r"'run-b' was already promoted \(record 4\) .* `rheostat rollback`"):
        refuse(home, "assistant", "run-b", reason="too late")
    assert [record.kind for record in registry.records()] == ["proposal", "proposal", "refuse", "promote"]
    prune(registry, 1)
    assert [has_bundle(registry.store, record.bundle) for record in (refused, promoted)] == [False, True]


@pytest.mark.parametrize("listens", [False, True], ids=["closed", "silent"])
def test_a_rollback_without_prefect_is_recorded_and_the_command_warns_that_no_event_was_sent(
    registry, tmp_path, registry_command, monkeypatch, listens
):
    monkeypatch.setattr(events, "TELL_SECONDS", 0.5)
    for policy in "ab":
        append_record(registry, tmp_path, policy)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts the connection and sends nothing
        url = f"http://127.0.0.1:{server.getsockname()[1]}/api"
        if not listens:
            server.close()
        with temporary_settings({PREFECT_API_URL: url}):
            code, out, err = registry_command("rollback", "assistant", "--reason", "refuses too often")
    assert code == 0 and "champion is a of run run-a (record 3)" in out
    assert err.startswith("warning: ") and url in err and "record 3" in err
    assert err.count("\n") == 1 and registry.champion().number == 3
