"""Retrains of the tiny job in two weeks: a good challenger is promoted, one with a faulty reward rejected."""

import shutil
import tomllib
from datetime import date
from pathlib import Path
from unittest.mock import patch

import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rheostat.flows.cli.train import run_flow
from rheostat.infra.store.bundles import CONTENTS
from rheostat.infra.store.registry import Registry, open_registry
from rheostat.infra.store.runs import list_runs, open_run
from rheostat.infra.store.shards import read_shard
from rheostat.tasks.config.run import override_config
from rheostat.tasks.promotion.gate import ids_trained_before
from rheostat.tasks.promotion.suites import Opponent
from tests.support.in_process import InProcessJob, run_command
from tests.support.jobs import SMALLEST, TINY, CommandResult

pytestmark = [pytest.mark.system, pytest.mark.smoke, pytest.mark.timeout(600)]

GATED = """
[[evaluations]]
name = "sums"
data = {kind = "target", target = "arithmetic:ArithmeticData", options = {heldout_problems = 40}}
rewards = [
    {kind = "numeric"},
    {kind = "regex", name = "marked", pattern = "####", weight = 0},
    {kind = "regex", name = "digits", pattern = "[0-9]", weight = 0},
]
problems = 40
samples = 2
temperature = 1
[promotion]
registry = "assistant"
primary = {suite = "sums", min_gain = -1}
guards = [{suite = "sums", term = "marked", margin = 1}]
"""
"""Rules that a policy passes without any improvement."""

SPOILT = (
    "data.options.train_problems=48",
    "scoring.rewards=[{kind='regex', pattern='^[^0-9]*$'}]",
    "update.learning_rate=2e-1",
    "promotion.primary={suite='sums', term='digits'}",
    "promotion.limits={length=0.5}",
    "promotion.alpha=0.05",
)
"""Changes of the second retrain: more problems, a reward for answers without a digit, and a limit that it exceeds."""

FIRST, SECOND = date(2026, 11, 2), date(2026, 11, 9)


def run_retrain(job, day, *overrides):
    """Run the retrain of the tiny job for a day in this process."""
    document = tomllib.loads(TINY) | tomllib.loads(GATED)
    smallest = (*SMALLEST, "iterations=1", "rollout.prompts=6", "rollout.shard_prompts=3")
    here = (f"store={job.store}", "pools.cluster=threads", *smallest)
    config = override_config(document, [*here, *overrides], source="tiny")
    with job.prefect():
        from rheostat.flows.retrain import retrain

        return run_flow(retrain(config, day=day))


@pytest.fixture(scope="module")
def weeks(tmp_path_factory, prefect_api):
    """Job with the retrains of two weeks and their results. The first challenger is signed."""
    job = InProcessJob(tmp_path_factory.mktemp("weeks"), prefect_api)
    first = (FIRST, "data.options.train_problems=16", "promotion.approve=manual")
    proposed = run_retrain(job, *first)
    said = [sign(job, "tiny-20261102") for _ in range(2)]
    with patch.object(Registry, "append", second_to_another):
        rejected = run_retrain(job, SECOND, *SPOILT)
    return job, (proposed, rejected), said


def second_to_another(registry, make, append=Registry.append):
    """Append a record after another process has appended one: the same files, of another retrain."""
    champion = registry.champion()
    if champion.number == 2:
        another = {"number": 3, "run": "another", "policy": "f" * 64, "previous": 2}
        append(registry, lambda *_: champion.model_copy(update=another))
    return append(registry, make)


def sign(job, run):
    """Sign a proposal with the command."""
    return run_command("promote", "assistant", run, "--reason", "read fifty answers", "--store", str(job.store))


def names_of(job, run):
    made = open_run(str(job.store), run)
    return set(read_shard(made.store, made.require("prompts/train").shards[0])["prompt_id"].to_pylist())


def weights_of(job, run, key):
    made = open_run(str(job.store), run)
    return load_file(job.store / run / made.require(key).bundles["weights"].key / "model.safetensors")


def equal_weights(one, other):
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def test_a_signed_challenger_becomes_champion_and_a_worse_challenger_is_rejected(weeks):
    job, (proposed, rejected), said = weeks
    registry = open_registry(str(job.store), "assistant")
    records = registry.records()
    kinds = [(record.kind, record.previous) for record in records]
    assert kinds == [("proposal", 0), ("promote", 0), ("promote", 2), ("reject", 3)]
    assert (records[0], records[3]) == (proposed.record, rejected.record)
    assert registry.champion() == records[2]
    assert [ended.code for ended in said] == [0, 0]
    assert "record 2" in said[0].output and "unchanged since record 2" in said[1].output
    assert (records[1].gate, records[1].bundle) == (records[0].gate, records[0].bundle)
    assert records[1].reason == "read fifty answers"
    worse, limit = rejected.record.reason.split("; ")[:2]
    assert worse.startswith("sums/digits: -") and worse.endswith("worse than the champion")
    assert limit.startswith("length: ") and limit.endswith("above 0.5")


def test_a_challenger_is_compared_again_if_the_champion_changes_during_the_comparison(weeks):
    _, (_, rejected), _ = weeks
    assert (rejected.record.previous, rejected.record.gate["opponent"]) == (3, 3)


def test_a_record_counts_the_gates_that_used_the_same_problems(weeks):
    _, (proposed, rejected), _ = weeks
    first, second = (week.record.gate["suites"]["sums"] for week in (proposed, rejected))
    assert (first["past"], second["past"]) == (0, 2)
    assert first["digest"] == second["digest"]
    assert first["challenger"]["problems"] == 40 and first["challenger"]["samples"] == 2
    assert {*first["challenger"]["pass_at"]} == {"1", "2"}
    chance = "sums: 2 earlier gates used these problems; with 3 gates, a challenger that is no better passes with"
    chance += " probability 14.3%"
    assert rejected.record.reason.endswith(chance)


def test_only_a_proposal_can_be_signed(weeks):
    ended = sign(weeks[0], "tiny-20261109")
    assert (
        ended.code == 2
        and "'tiny-20261109' has not proposed a policy. Runs with a proposal: tiny-20261102" in ended.output
    )


def test_a_retrain_starts_from_the_champion_without_a_warm_up(weeks):
    job, _, _ = weeks
    assert equal_weights(
        weights_of(job, "tiny-20261109", "policy/initial"), weights_of(job, "tiny-20261102", "it-0001/update")
    )
    assert not (job.store / "tiny-20261109/manifests/policy/sft.json").exists()


def test_a_retrain_trains_on_problems_that_no_champion_was_trained_on(weeks):
    job, _, _ = weeks
    first, second = (names_of(job, f"tiny-202611{day}") for day in ("02", "09"))
    assert (len(first), len(second)) == (16, 32)
    assert not first & second


def test_later_gates_are_checked_against_the_problems_that_champions_were_trained_on(weeks):
    job, _, _ = weeks
    registry = open_registry(str(job.store), "assistant")
    before = ids_trained_before(registry, "tiny-20261109", Opponent(number=3, policy=""))
    assert before == names_of(job, "tiny-20261102")
    assert not ids_trained_before(registry, "tiny-20261102", Opponent(number=0, policy=""))


def test_the_champion_is_a_separate_directory_with_a_card_that_transformers_loads(weeks):
    job, _, _ = weeks
    registry = open_registry(str(job.store), "assistant")
    directory = Path(registry.locate(registry.champion()))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert model.generate(**tokenizer("Ann has 3", return_tensors="pt"), max_new_tokens=2).shape[0] == 1
    assert equal_weights(load_file(directory / "model.safetensors"), weights_of(job, "tiny-20261102", "it-0001/update"))
    card = (directory / "README.md").read_text()
    assert "run: `tiny-20261102`" in card and "previous champion: `none`" in card and "sums: " in card


def test_triggering_a_retrain_again_adds_no_record(weeks):
    job, (_, rejected), _ = weeks
    before = open_registry(str(job.store), "assistant").records()
    assert run_retrain(job, SECOND, *SPOILT).record == rejected.record
    assert open_registry(str(job.store), "assistant").records() == before


@pytest.fixture
def copied(weeks, tmp_path):
    """Copy of the store, and a function that runs commands on it."""
    store = tmp_path / "store"
    shutil.copytree(weeks[0].store, store)
    return store, lambda *words: run_command(*words, "--store", str(store))


def test_verify_names_the_damaged_files_of_a_registry(copied):
    store, give = copied
    assert give("verify", "assistant") == CommandResult(0, "registry assistant: every record and every digest holds\n")
    [weights] = store.glob("registry/assistant/policies/*/model.safetensors")
    weights.chmod(0o600)
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    draft = store / "registry/assistant/retrains/tiny-20261109.json"
    draft.write_text(draft.read_text().replace("tiny", "tinY"))
    ended = give("verify", "assistant")
    assert ended.code == 1
    assert "model.safetensors" in ended.output and "retrains/tiny-20261109.json" in ended.output


def test_a_rollback_restores_the_previous_champion_and_never_a_rejected_policy(copied, tmp_path):
    store, give = copied
    registry = open_registry(str(store), "assistant")
    first = registry.records()[1]
    assert give("rollback", "assistant", "--reason", "refuses too often").code == 0
    champion = registry.champion()
    assert (champion.number, champion.kind, champion.policy) == (5, "rollback", first.policy)
    assert give("checkout", "assistant", "--to", str(tmp_path / "current")).code == 0
    assert (tmp_path / "current" / CONTENTS).read_bytes() == Path(registry.locate(first), CONTENTS).read_bytes()
    ended = give("rollback", "assistant", "--to", "4", "--reason", "its own reward rose")
    assert (
        ended.code == 2
        and "record 4 was never a champion, so nothing can be restored. Set --to to one of 2, 3, 5" in ended.output
    )


def test_forgetting_a_prompt_names_the_policies_that_were_trained_on_it(copied, tmp_path):
    store, give = copied
    run = open_run(str(store), "tiny-20261102")
    name = read_shard(run.store, run.require("prompts/train").shards[0])["prompt_id"][0].as_py()
    (tmp_path / "ids.txt").write_text(name)
    ended = give("forget", "tiny-20261102", "--prompt-ids", str(tmp_path / "ids.txt"))
    assert ended.code == 0
    assert "assistant@2: policy " in ended.output and "trained on the prompts in run tiny-20261102" in ended.output


def test_garbage_collection_does_not_change_registries(copied):
    store, give = copied
    before = {path: path.stat().st_size for path in (store / "registry").rglob("*")}
    assert give("gc", "--older-than", "0m", "--delete").code == 0
    assert {path: path.stat().st_size for path in (store / "registry").rglob("*")} == before
    assert give("verify", "assistant").code == 0


def test_policies_are_evaluated_in_runs_named_after_the_retrain_the_suite_and_the_side(weeks):
    job, _, _ = weeks
    sides = {
        "02": ("", ".sums.challenger", ".sums.initial"),
        "09": ("", ".sums.challenger", ".sums.champion-2", ".sums.champion-3"),
    }
    assert list_runs(str(job.store)) == [f"tiny-202611{day}{side}" for day in sides for side in sides[day]]
