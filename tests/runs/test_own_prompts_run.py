"""A whole run of episodes whose turns have separate prompts, and the commands that read the run."""

import json
from itertools import chain

import numpy as np
import pytest

from rheostat.models.records.model_input import TURN_PROMPT
from rheostat.models.records.turn_prompts import count_turn_prompts, split_at_prompts
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.verification.invariants import verify_run
from rheostat.tasks.verification.samples import check_samples
from rheostat.tasks.views.export import export_tables
from tests.support import checker
from tests.support.stored_runs import open_tiny, tables_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]
FAMILY = "prompts per turn"


def test_exported_advantages_leave_out_the_prompts_of_turns(whole):
    run = open_tiny(whole)
    several = 0
    for number in (1, 2):
        for table in export_tables(run, number):
            for row in table.to_pylist():
                prompts = [segment["tokens"] for segment in row["segments"] if segment["policy_version"] == TURN_PROMPT]
                if row["advantages"] is not None:
                    assert len(row["advantages"]) == len(row["completion_tokens"]) - sum(prompts)
                    several += bool(prompts)
    assert several > 0


def test_training_samples_are_the_turns_of_the_rollouts(whole):
    assert verify_run(str(whole.store), "tiny") == []
    assert checker.problems_of(whole.run) == []
    run, several = open_tiny(whole), 0
    for number in (1, 2):
        turns = {}
        for table in tables_of(run, f"it-{number:04d}", "rollout"):
            several += int((count_turn_prompts(table) > 0).sum())
            for row in split_at_prompts(table)[0].to_pylist():
                turns.setdefault((row["prompt_row"], row["sample"]), []).append(row)
        [samples] = tables_of(run, f"it-{number:04d}", "credit")
        learnt = {}
        for row in samples.to_pylist():
            learnt.setdefault((row["prompt_row"], row["sample"]), []).append(row)
        assert learnt
        for name, rows in learnt.items():
            assert [row["tokens"] for row in rows] == [
                row["prompt_tokens"] + row["completion_tokens"] for row in turns[name]
            ]
            assert [row["logprobs"] for row in rows] == [row["logprobs"] for row in turns[name]]
            assert len({value for row in rows for value in row["advantages"]}) == 1
    assert several > 5


def test_reference_log_probs_are_computed_after_the_prompt_of_each_turn(whole):
    """In the first iteration the reference is the policy that generated the completions."""
    run = open_tiny(whole)
    rollouts, said = tables_of(run, "it-0001", "rollout"), tables_of(run, "it-0001", "estimates")
    for table, estimates in zip(rollouts, said, strict=True):
        for row, found in zip(table["logprobs"].to_pylist(), estimates["reference"].to_pylist(), strict=True):
            np.testing.assert_allclose(found, row, atol=1e-4)
    update = run.require("it-0001/update").metrics
    assert update["mismatch_difference_max"] < 1e-4, "the trainer reads what the engine read"


def test_verify_finds_an_episode_with_a_missing_or_repeated_turn(whole, monkeypatch):
    import rheostat.tasks.verification.samples as verification

    iteration, names = Iteration(open_tiny(whole), 1), verification._read_names
    assert [*check_samples(iteration)] == []
    for change in (lambda found: found[1:], lambda found: [found[0], *found]):
        monkeypatch.setattr(verification, "_read_names", lambda run, ref, change=change: change(names(run, ref)))
        [problem] = check_samples(iteration)
        assert "repeated, incomplete or was never finished" in problem


def test_commands_accept_a_run_with_prompts_per_turn(job):
    shown = json.loads(job.command("rollouts", "--json").output)
    assert any(len(each["turns"]) > 1 for each in shown)
    assert "turn 2: " in job.command("rollouts").output
    again = job.command(
        "rescore", "--rewards", "rewards=[{kind='environment', per='turn'}]", "--as", "turns", "pools.cluster=threads"
    )
    assert again.code == 0, again.output
    credit = job.command(
        "recredit", "--algorithm", "reinforce_pp", "--as", "turns", "--scores", "turns", "pools.cluster=threads"
    )
    assert credit.code == 0, credit.output
    replayed = job.command("verify", "--environment", "--episodes", "6")
    assert (replayed.code, "6 episodes were replayed: new environments responded as" in replayed.output) == (0, True)
    seal = open_tiny(job).require("recredit/turns/it-0001/seal").metrics
    assert seal["coinciding"] > 0
    assert verify_run(str(job.store), "tiny") == []


def test_forgetting_a_prompt_empties_its_episodes(job, tmp_path):
    run = open_tiny(job)
    row = tables_of(run, "it-0001", "rollout")[0].to_pylist()[0]
    (tmp_path / "ids").write_text(row["prompt_id"])
    ended = job.command("forget", "--prompt-ids", str(tmp_path / "ids"), "--delete")
    assert ended.code == 0, ended.output
    found = [
        each
        for table in tables_of(open_tiny(job), "it-0001", "rollout")
        for each in table.to_pylist()
        if each["prompt_id"] == row["prompt_id"]
    ]
    assert found and not any(chain.from_iterable(each["completion_tokens"] for each in found))
    assert not any(each["completion"] for each in found)
    assert not any(message["content"] for each in found for message in each["messages"])
