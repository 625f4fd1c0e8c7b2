"""A whole run of episodes whose turns have prompts of their own: killed it ends the same, and all commands read it."""

import json
import shutil
from itertools import chain

import numpy as np
import pytest

from infra.errors import BadInput
from infra.store.runs import open_run
from infra.store.shards import read_shard
from models.records.model_input import RENDERED
from models.records.turn_prompts import cut_at_prompts, turn_prompts
from tasks.run.iteration import Iteration
from tasks.verification.invariants import verify_run
from tasks.verification.samples import check_samples
from tasks.views.export import exported
from tests.support import checker
from tests.support.chaos import Strike, problems_after, run_once
from tests.support.in_process import InProcessJob
from tests.support.policies import write_chat_policy

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

LIKELY = {"<|im_end|>": 0.15, "</think>": 0.1, "<think>": 0.03}
PER_TURN = (
    *(f"policy.{name}=" for name in ("heads", "kv_heads", "layers", "hidden_size", "intermediate_size")),
    "policy.kind=directory",
    "warmup=",
    *("data.train_problems=", "data.heldout_problems=", "data.kind=file"),
    "rollout.environment.kind=target",
    "rollout.environment.target=tests.support.games:Echo",
    "rollout.environment.options.reward=0.1",
    "rollout.environment.history=per_turn",
    "rollout.environment.parser=none",
    "rollout.environment.turn_tokens=12",
    "rollout.environment.processes=1",
    "rollout.sampling.max_new_tokens=96",
    "rollout.prompts=4",
    "rollout.shard_prompts=2",
    "iterations=2",
    "evaluation.problems=2",
    "algorithm.kind=grpo",
    "algorithm.kl={coefficient=0.1}",
    'scoring.rewards=[{kind="environment"}]',
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    home = tmp_path_factory.mktemp("inputs")
    write_chat_policy(home / "policy", "qwen-3", likely=LIKELY)
    rows = [
        {"prompt": [{"role": "user", "content": f"How many are {number} and 2?"}], "answer": str(number + 2)}
        for number in range(12)
    ]
    (home / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return (
        *PER_TURN,
        f"policy.path={home / 'policy'}",
        f"data.path={home / 'chats.jsonl'}",
        "data.heldout_fraction=0.3",
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, prefect_api, settings):
    """The run, never disturbed."""
    job = InProcessJob(tmp_path_factory.mktemp("per-turn"), prefect_api)
    job.train(*settings)
    return job


def tables(run, number, stage):
    manifests = [each for each in run.manifests(f"it-{number:04d}") if f"/{stage}" in each.key]
    return [read_shard(run.store, shard) for each in manifests for shard in each.shards]


def test_exported_advantages_are_of_the_tokens_that_are_no_prompt_of_a_turn(whole):
    run = open_run(str(whole.store), "tiny")
    several = 0
    for number in (1, 2):
        for table in exported(run, number):
            for row in table.to_pylist():
                prompts = [segment["tokens"] for segment in row["segments"] if segment["policy_version"] == RENDERED]
                if row["advantages"] is not None:
                    assert len(row["advantages"]) == len(row["completion_tokens"]) - sum(prompts)
                    several += bool(prompts)
    assert several > 0


def test_a_run_that_is_killed_ends_with_the_same_bits(whole, tmp_path, prefect_api, settings):
    strikes = [Strike("manifests/it-0002/rollout/0001.json", "before")]
    home = tmp_path / "killed"
    assert problems_after(strikes, home, prefect_api, whole.run, settings, start=run_once) == []


def test_what_is_learnt_are_the_turns_of_the_rollouts_and_every_digest_holds(whole):
    assert verify_run(str(whole.store), "tiny") == []
    assert checker.problems_of(whole.run) == []
    run, several = open_run(str(whole.store), "tiny"), 0
    for number in (1, 2):
        turns = {}
        for table in tables(run, number, "rollout"):
            several += int((turn_prompts(table) > 0).sum())
            for row in cut_at_prompts(table)[0].to_pylist():
                turns.setdefault((row["prompt_row"], row["sample"]), []).append(row)
        [samples] = tables(run, number, "credit")
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


def test_what_other_models_say_is_of_each_turn_after_its_own_prompt(whole):
    """In the first iteration the reference is the policy that wrote."""
    run = open_run(str(whole.store), "tiny")
    rollouts, said = tables(run, 1, "rollout"), tables(run, 1, "estimates")
    for table, estimates in zip(rollouts, said, strict=True):
        for row, found in zip(table["logprobs"].to_pylist(), estimates["reference"].to_pylist(), strict=True):
            np.testing.assert_allclose(found, row, atol=1e-4)
    update = run.require("it-0001/update").metrics
    assert update["mismatch_difference_max"] < 1e-4, "the trainer reads what the engine read"


def test_an_episode_of_which_a_turn_is_missing_or_learnt_twice_is_found(whole, monkeypatch):
    import tasks.verification.samples as verification

    iteration, names = Iteration(open_run(str(whole.store), "tiny"), 1), verification._names
    assert [*check_samples(iteration)] == []
    for change in (lambda found: found[1:], lambda found: [found[0], *found]):
        monkeypatch.setattr(verification, "_names", lambda run, ref, change=change: change(names(run, ref)))
        [problem] = check_samples(iteration)
        assert "repeated, not whole or was never finished" in problem


@pytest.fixture
def job(whole, tmp_path):
    copy = InProcessJob(tmp_path, whole.api)
    shutil.copytree(whole.run, copy.run)
    return copy


def test_commands_that_read_a_run_read_its_episodes(job):
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
    assert (replayed.code, "6 episodes were played again: new environments answer as" in replayed.output) == (0, True)
    seal = open_run(str(job.store), "tiny").require("recredit/turns/it-0001/seal").metrics
    assert seal["coinciding"] > 0
    assert verify_run(str(job.store), "tiny") == []


def test_what_was_said_in_a_forgotten_episode_is_gone_with_its_prompts(job, tmp_path):
    run = open_run(str(job.store), "tiny")
    row = tables(run, 1, "rollout")[0].to_pylist()[0]
    (tmp_path / "ids").write_text(row["prompt_id"])
    ended = job.command("forget", "--prompt-ids", str(tmp_path / "ids"), "--delete")
    assert ended.code == 0, ended.output
    found = [
        each
        for table in tables(open_run(str(job.store), "tiny"), 1, "rollout")
        for each in table.to_pylist()
        if each["prompt_id"] == row["prompt_id"]
    ]
    assert found and not any(chain.from_iterable(each["completion_tokens"] for each in found))
    assert not any(each["completion"] for each in found)
    assert not any(message["content"] for each in found for message in each["messages"])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rollout.environment.prompts=text"], "with prompts 'text': no template writes what comes before a turn"),
        (["algorithm.overlong={buffer=4}"], "with algorithm.overlong: max_new_tokens does not bound"),
        (
            ['scoring.rewards=[{kind="target", target="tests.support.rewards:even", per="token"}]'],
            "with reward 'target': it values tokens of one sequence; value turns or episodes",
        ),
        (["rollout.partial={tokens=4}"], "rollout.environment.history 'per_turn' with rollout.partial: "),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_one_line(overrides, told, settings, tmp_path):
    job = InProcessJob(tmp_path, "nowhere")
    with pytest.raises(BadInput, match=told.replace("(", r"\(")) as refused:
        job.train(*settings, *overrides)
    assert "\n" not in str(refused.value)
