"""Rescorings and recredits of stored rollouts: the chain that protects their records, and the commits of their models
on the Hugging Face Hub."""

import asyncio
from types import SimpleNamespace

import pytest

import rheostat.infra.store.hub
from rheostat.flows.cli.requests import find_recredit_conflicts, stored_configuration
from rheostat.infra.store.chain import check_chain
from rheostat.infra.store.dependencies import record_dependencies, recorded_config
from rheostat.infra.store.inputs import paths_in, place_texts
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import create_run, open_run
from rheostat.tasks.config.run import parse_config
from rheostat.tasks.rescoring import begin_rescoring, find_remaining_iterations, reuse_reward_models
from rheostat.tasks.run.dependencies import dependencies_of
from rheostat.tasks.run.hub_inputs import with_hub_commits
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.rescorings import (
    DerivedResult,
    RecreditTerms,
    RescoringTerms,
    describe_derived_results,
    link_completed_iterations,
    list_derived_results,
    sealed_numbers,
    with_rescoring_commits,
)
from tests.support.demos import ARITHMETIC


def commit_iteration(run, derived, number):
    run.commit(Manifest(key=derived.key(number, "scoring/0001")))
    run.commit(Manifest(key=derived.key(number, "seal"), metrics={"reward_mean": 0.5}))


@pytest.mark.parametrize("kind", ["rescore", "recredit"])
def test_a_rescoring_without_a_chain_is_read_and_gets_one_when_it_is_continued(run, tmp_path, kind):
    derived = DerivedResult(kind, "strict")
    run.commit(Manifest(key=derived.terms_key))
    for number in (1, 2):
        commit_iteration(run, derived, number)
    assert sealed_numbers(run, derived) == (1, 2) and [*check_chain(run)] == []
    opened = SimpleNamespace(run=run)
    assert [each.number for each in asyncio.run(find_remaining_iterations(opened, derived, (1, 2, 3)))] == [3]
    commit_iteration(run, derived, 3)
    link_completed_iterations(run, derived)
    assert [*check_chain(run)] == []
    records = sorted(tmp_path.glob(f"r/manifests/{kind}/strict/**/*.json"))
    assert len(records) == 7
    for path in records:
        whole = path.read_bytes()
        path.unlink()
        key = str(path.relative_to(tmp_path / "r/manifests").with_suffix(""))
        assert any(key in problem for problem in check_chain(open_run(str(tmp_path), "r"))), key
        path.write_bytes(whole)


JUDGED = {"rewards": [{"kind": "judge", "model": {"kind": "directory", "path": "team/judge"}}]}
TAUGHT = {"kind": "grpo", "distillation": {"coefficient": 1, "teacher": {"kind": "directory", "path": "team/teacher"}}}


def begin_run(tmp_path, **tables):
    """Create a run with its dependencies and one result, as the start of a run does."""
    config = with_hub_commits(parse_config(place_texts({"name": "r", "data": ARITHMETIC, **tables}, ""), source="job"))
    stored_run = create_run(str(tmp_path), "r", config.identity())
    with stored_run.lock():
        record_dependencies(stored_run, dependencies_of(config), iteration=1)
        stored_run.commit(Manifest(key="policy/0"))
        stored_run.commit(Manifest(key=StageKey.reward_model("judge")))
    return stored_run


def request(stored_run, tmp_path):
    """Return the configuration of a rescoring with the judge, as the command line builds it."""
    scoring = RescoringTerms.model_validate(place_texts({"scoring": JUDGED}, "")).scoring
    return stored_configuration(stored_run, str(tmp_path), [], scoring=scoring)


async def rescore(stored_run, config, derived):
    """Begin a rescoring. Return the commit of its judge, and the rewards whose model is built."""
    used = with_rescoring_commits(config, derived)
    opened = OpenRun(stored_run, used, SimpleNamespace(address=None), store=config.store)
    with stored_run.lock():
        await begin_rescoring.fn(opened, derived, config.scoring)
        missing = await reuse_reward_models.fn(opened, derived)
    [path] = paths_in(used.scoring)
    return path.address.revision, missing


def move_branch(hub, name):
    commit = hub.add(name, {"config.json": b"{}", f"{len(hub.requests)}.txt": b""})
    rheostat.infra.store.hub._query_commit.cache_clear()
    return commit


async def test_a_rescoring_keeps_the_commit_of_its_judge_after_the_branch_moved(hub, tmp_path):
    first, stored_run = hub.add("team/judge", {"config.json": b"{}"}), begin_run(tmp_path)
    config, strict = request(stored_run, tmp_path), DerivedResult("rescore", "strict")
    assert await rescore(stored_run, config, strict) == (first, ["judge"])
    moved = move_branch(hub, "team/judge")
    assert await rescore(stored_run, config, strict) == (first, ["judge"])
    sent = type(config).model_validate_json(config.model_dump_json())  # to a deployment
    assert await rescore(stored_run, sent, strict) == (first, ["judge"])
    assert await rescore(stored_run, config, DerivedResult("rescore", "later")) == (moved, ["judge"])
    later, shown = list_derived_results(stored_run)
    assert (shown.commits, later.commits) == ({"model team/judge": first}, {"model team/judge": moved})
    assert describe_derived_results([shown]).endswith(f"no iteration yet (model team/judge at commit {first[:12]})")


async def test_a_rescoring_with_the_judge_of_its_run_reuses_the_model_at_the_commit_of_the_run(hub, tmp_path):
    first = hub.add("team/judge", {"config.json": b"{}"})
    stored_run = begin_run(tmp_path, scoring=JUDGED)
    move_branch(hub, "team/judge")
    derived = DerivedResult("rescore", "own")
    assert await rescore(stored_run, request(stored_run, tmp_path), derived) == (first, [])


def test_a_recredit_with_the_teacher_of_its_run_has_no_conflict_after_the_branch_moved(hub, tmp_path):
    for name in ("team/teacher", "team/other"):
        hub.add(name, {"config.json": b"{}"})
    stored_run = begin_run(tmp_path, algorithm=TAUGHT)
    move_branch(hub, "team/teacher")
    conflicts = {}
    for name in ("team/teacher", "team/other"):
        table = {**TAUGHT, "distillation": {**TAUGHT["distillation"], "teacher": {"kind": "directory", "path": name}}}
        terms = RecreditTerms.model_validate(place_texts({"algorithm": table}, ""))
        recorded = parse_config(recorded_config(stored_run), source="run", recorded=True)
        config = recorded.model_copy(update={"algorithm": terms.algorithm})
        conflicts[name] = [*find_recredit_conflicts(stored_run, terms, config, [])]
    assert conflicts["team/teacher"] == []
    assert "log-probs of this teacher" in conflicts["team/other"][0]


def test_a_recredit_with_other_specialists_than_its_run_has_a_conflict(hub, tmp_path):
    hub.add("team/teacher", {"config.json": b"{}"})
    stored_run = begin_run(tmp_path, algorithm=TAUGHT)
    teacher = TAUGHT["distillation"]["teacher"]
    more = {"specialists": [{"column": "kind", "values": ["code"], "teacher": teacher}]}
    for changes, is_conflict in (({"coefficient": 2}, False), (more, True)):
        table = {**TAUGHT, "distillation": {**TAUGHT["distillation"], **changes}}
        terms = RecreditTerms.model_validate(place_texts({"algorithm": table}, ""))
        recorded = parse_config(recorded_config(stored_run), source="run", recorded=True)
        config = recorded.model_copy(update={"algorithm": terms.algorithm})
        found = [*find_recredit_conflicts(stored_run, terms, config, [])]
        assert any("log-probs of this teacher" in each for each in found) == is_conflict
