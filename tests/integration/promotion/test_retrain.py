"""Retrains of the tiny job in two weeks: what the first one made is signed, what the second one made is rejected."""

import contextlib
import io
import tomllib
from datetime import date
from pathlib import Path
from unittest.mock import patch

import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.cli.app import main
from flows.cli.train import run_flow
from infra.errors import BadInput, StoreFailed
from infra.store.registry import Registry, open_registry
from infra.store.runs import list_runs, open_run
from infra.store.shards import read_shard
from tasks.config.run import override_config
from tests.support.in_process import InProcessJob
from tests.support.jobs import TINY

pytestmark = pytest.mark.timeout(600)

GATED = """
evaluations = [{name = "sums", data = {kind = "arithmetic", heldout_problems = 40}, problems = 40}]
[promotion]
registry = "assistant"
primary = {suite = "sums", min_gain = -1}
"""
"""Rules that a policy passes which learns nothing."""

FIRST, SECOND = date(2026, 11, 2), date(2026, 11, 9)


def retrained(job, day, *overrides):
    """Retrain the tiny job in this process in the name of a day."""
    document = tomllib.loads(TINY) | tomllib.loads(GATED)
    here = (f"store={job.store}", "pools.cluster=threads", "iterations=1", "warmup.steps=2")
    config = override_config(document, [*here, *overrides], source="tiny")
    with job.prefect():
        from flows.retrain import retrain

        return run_flow(retrain(config, day=day))


@pytest.fixture(scope="module")
def weeks(tmp_path_factory, prefect_api):
    """A job that was retrained in two weeks, and what came of it; in the first, the disk fails, and somebody signs."""
    job = InProcessJob(tmp_path_factory.mktemp("weeks"), prefect_api)
    first = (FIRST, "data.train_problems=16", "promotion.approve=manual")
    with patch.object(Registry, "append", fail), pytest.raises(StoreFailed, match="the disk is gone"):
        retrained(job, *first)
    proposed = retrained(job, *first)
    said = [sign(job, "assistant", "tiny-20261102") for _ in range(2)]
    return job, (proposed, retrained(job, SECOND, "data.train_problems=48", "promotion.limits={length=0.5}")), said


def fail(*_):
    raise StoreFailed("the disk is gone")


def sign(job, *words):
    """Sign a proposal by the command; return its exit code and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(["promote", *words, "--reason", "read fifty answers", "--store", str(job.store)])
    return code, said.getvalue()


def names_of(job, run):
    made = open_run(str(job.store), run)
    return set(read_shard(made.store, made.require("prompts/train").shards[0])["prompt_id"].to_pylist())


def weights_of(job, run, key):
    made = open_run(str(job.store), run)
    return load_file(job.store / run / made.require(key).bundles["weights"].key / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def test_a_challenger_that_passes_is_champion_once_signed_and_one_that_breaks_a_limit_is_not(weeks):
    job, (proposed, rejected), said = weeks
    registry = open_registry(str(job.store), "assistant")
    records = registry.records()
    assert [(record.kind, record.previous) for record in records] == [("proposal", 0), ("promote", 0), ("reject", 2)]
    assert (records[0], records[2]) == (proposed.record, rejected.record)
    assert registry.champion() == records[1]
    assert [code for code, _ in said] == [0, 0]
    assert "record 2" in said[0][1] and "is so already, by record 2" in said[1][1]
    assert (records[1].gate, records[1].bundle) == (records[0].gate, records[0].bundle)
    assert records[1].reason == "read fifty answers"
    assert "length: " in rejected.verdict.reasons[0] and "above 0.5" in rejected.verdict.reasons[0]


def test_only_a_proposal_can_be_signed(weeks):
    code, told = sign(weeks[0], "assistant", "tiny-20261109")
    assert code == 2 and "expected a run with a proposal, found 'tiny-20261109'; proposed: tiny-20261102" in told


def test_a_retrain_that_failed_before_its_record_leaves_no_second_copy_of_its_policy(weeks):
    job, (proposed, _), _ = weeks
    kept = {path.name for path in (job.store / "registry/assistant/policies").iterdir()}
    assert kept == {proposed.record.bundle.key.rpartition("/")[2]}


def test_a_retrain_begins_as_the_champion_and_without_its_warm_up(weeks):
    job, _, _ = weeks
    assert same(weights_of(job, "tiny-20261109", "policy/initial"), weights_of(job, "tiny-20261102", "it-0001/update"))
    assert not (job.store / "tiny-20261109/manifests/policy/sft.json").exists()


def test_a_retrain_learns_from_problems_that_no_champion_has_learnt_from(weeks):
    job, _, _ = weeks
    first, second = (names_of(job, f"tiny-202611{day}") for day in ("02", "09"))
    assert (len(first), len(second)) == (16, 32)
    assert not first & second


def test_the_champion_is_a_directory_of_its_own_that_transformers_loads_with_a_card(weeks):
    job, _, _ = weeks
    registry = open_registry(str(job.store), "assistant")
    directory = Path(registry.locate(registry.champion()))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert model.generate(**tokenizer("Ann has 3", return_tensors="pt"), max_new_tokens=2).shape[0] == 1
    assert same(load_file(directory / "model.safetensors"), weights_of(job, "tiny-20261102", "it-0001/update"))
    card = (directory / "README.md").read_text()
    assert "run: `tiny-20261102`" in card and "champion before: `none`" in card and "sums: " in card


def test_a_retrain_that_is_triggered_again_is_the_same_one(weeks):
    job, (_, rejected), _ = weeks
    before = open_registry(str(job.store), "assistant").records()
    assert retrained(job, SECOND, "data.train_problems=48", "promotion.limits={length=0.5}").record == rejected.record
    assert open_registry(str(job.store), "assistant").records() == before


def test_policies_are_evaluated_in_runs_named_after_the_retrain_the_suite_and_the_side(weeks):
    job, _, _ = weeks
    sides = ("", ".sums.challenger", ".sums.champion")
    assert list_runs(str(job.store)) == sorted(f"tiny-202611{day}{side}" for day in ("02", "09") for side in sides)


def test_rules_about_a_suite_that_is_not_there_are_refused_with_the_nearest_name(tmp_path, prefect_api):
    with pytest.raises(BadInput, match=r"expected 'heldout' or a suite of .*, found 'sumz'; did you mean 'sums'"):
        retrained(InProcessJob(tmp_path, prefect_api), FIRST, "promotion.primary={suite='sumz'}")
    assert not [*tmp_path.rglob("*.json")]
