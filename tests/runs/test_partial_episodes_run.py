"""A whole run whose episodes are cut at a budget: killed it ends the same, and all commands read it."""

import json
import shutil
from itertools import chain

import pyarrow as pa
import pytest

import tasks.verification.samples as verification
from infra.errors import BadInput
from infra.store.runs import open_run
from infra.store.shards import read_shard
from tasks.run.iteration import Iteration
from tasks.verification.invariants import verify_run
from tests.support import checker
from tests.support.chaos import Strike, problems_after, run_once
from tests.support.in_process import InProcessJob
from tests.support.policies import write_chat_policy

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

THREADS = ("pools.cluster=threads",)
PARTIAL = (
    *(f"policy.{name}=" for name in ("heads", "kv_heads", "layers", "hidden_size", "intermediate_size")),
    "policy.kind=directory",
    "warmup=",
    *("data.train_problems=", "data.heldout_problems=", "data.kind=file"),
    "rollout.environment.kind=target",
    "rollout.environment.target=tests.support.games:Knows",
    "rollout.environment.parser=none",
    "rollout.environment.max_turns=3",
    "rollout.environment.turn_tokens=12",
    "rollout.environment.processes=1",
    "rollout.partial={tokens=9, max_staleness=1}",
    "rollout.sampling.max_new_tokens=160",
    "rollout.prompts=4",
    "rollout.shard_prompts=2",
    "algorithm.kind=grpo",
    "algorithm.kl={coefficient=0.1}",
    "iterations=2",
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    home = tmp_path_factory.mktemp("inputs")
    write_chat_policy(home / "policy", "qwen-2.5", likely={"<|im_end|>": 0.15})
    rows = [
        {"prompt": [{"role": "user", "content": f"How many are {number} and 2?"}], "answer": str(number + 2)}
        for number in range(24)
    ]
    (home / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return (
        *PARTIAL,
        f"policy.path={home / 'policy'}",
        f"data.path={home / 'chats.jsonl'}",
        "data.heldout_fraction=0.3",
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, prefect_api, settings):
    """The run, never disturbed."""
    job = InProcessJob(tmp_path_factory.mktemp("partial"), prefect_api)
    assert run_once(job.home, prefect_api, None, settings) == 0, (job.home / "output").read_text()[-2000:]
    return job


@pytest.fixture
def job(whole, tmp_path):
    copy = InProcessJob(tmp_path, whole.api)
    shutil.copytree(whole.run, copy.run)
    return copy


def rows_of(job, number):
    """Rollouts of an iteration: those that have ended, and those that go on."""
    run = open_run(str(job.store), "tiny")
    manifests = [each for each in run.manifests(f"it-{number:04d}") if "/rollout" in each.key]
    shards = ([each.shards[0] for each in manifests], [shard for each in manifests for shard in each.shards[1:]])
    return tuple([row for ref in part for row in read_shard(run.store, ref).to_pylist()] for part in shards)


def versions_of(row):
    return [each["policy_version"] for each in row["segments"] if each["policy_version"] >= 0]


def test_a_run_that_is_killed_while_episodes_go_on_ends_with_the_same_bits(whole, tmp_path, prefect_api, settings):
    strikes = [Strike("manifests/it-0002/rollout/0001.json", "before")]
    home = tmp_path / "killed"
    assert problems_after(strikes, home, prefect_api, whole.run, settings, start=run_once) == []


def test_it_keeps_every_promise_and_learns_from_what_several_versions_wrote(whole):
    assert verify_run(str(whole.store), "tiny") == []
    assert checker.problems_of(whole.run) == []
    _, cut = rows_of(whole, 1)
    ended, _ = rows_of(whole, 2)
    turned = [row for row in ended if len({*versions_of(row)}) == 2]
    assert any(len(versions_of(row)) > len(row["turns"]) for row in turned), "a turn of two versions"
    assert any(len(versions_of(row)) == len(row["turns"]) for row in turned), "two versions, a turn each"
    assert any(row["turns"] and row["finish_reason"] == "cut" for row in cut)
    for row in ended:
        roles = [message["role"] for message in row["messages"]]
        assert roles == [("user", "assistant")[place % 2] for place in range(len(roles))]
        assert roles.count("assistant") == len(row["turns"])
    run = open_run(str(whole.store), "tiny")
    samples = read_shard(run.store, run.require("it-0002/credit").shards[0]).to_pylist()
    assert {1, 0, -1} <= {*chain.from_iterable(row["staleness"] for row in samples)}


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: [*parts[:-1], parts[-1] | {"tokens": parts[-1]["tokens"] + 1}],
        lambda parts: [{"policy_version": 1, "tokens": 1}, parts[0] | {"tokens": parts[0]["tokens"] - 1}, *parts[1:]],
        lambda parts: [part | {"policy_version": 0} for part in parts],
        lambda parts: [parts[0], *parts],
    ],
)
def test_segments_that_are_not_those_of_the_turns_are_found(whole, monkeypatch, change):
    iteration, read = Iteration(open_run(str(whole.store), "tiny"), 2), verification.read_shard
    assert [*verification.check_rollouts(iteration)] == []

    def changed(store, ref, columns):
        table = read(store, ref, columns=columns)
        if "turns" not in columns or "messages" in columns or not table.num_rows:
            return table
        found = [change(parts) if len(parts) > 2 else parts for parts in table["segments"].to_pylist()]
        place = table.column_names.index("segments")
        return table.set_column(place, table.field(place), pa.array(found, table.schema.field(place).type))

    monkeypatch.setattr(verification, "read_shard", changed)
    found = [*verification.check_rollouts(iteration)]
    assert found
    assert all("do not make up its tokens" in line for line in found)


def test_commands_that_read_a_run_read_its_episodes(job):
    replayed = job.command("verify", "--environment", "--episodes", "12")
    assert (replayed.code, "12 episodes were played again: new environments answer as" in replayed.output) == (0, True)
    assert "turn 2: " in job.command("rollouts").output
    again = job.command("rescore", "--rewards", "rewards=[{kind='regex', pattern='1'}]", "--as", "ones", *THREADS)
    assert again.code == 0, again.output
    credit = job.command("recredit", "--algorithm", "reinforce_pp", "--as", "ones", "--scores", "ones", *THREADS)
    assert credit.code == 0, credit.output
    assert open_run(str(job.store), "tiny").require("recredit/ones/it-0002/seal").metrics["coinciding"] > 0
    assert verify_run(str(job.store), "tiny") == []


def test_what_was_said_before_and_after_a_cut_is_gone_with_its_prompt(job, tmp_path):
    _, cut = rows_of(job, 1)
    forgotten = next(row["prompt_id"] for row in cut if row["turns"])
    (tmp_path / "ids").write_text(forgotten)
    ended = job.command("forget", "--prompt-ids", str(tmp_path / "ids"), "--delete")
    assert ended.code == 0, ended.output
    found = [row for part in (*rows_of(job, 1), *rows_of(job, 2)) for row in part if row["prompt_id"] == forgotten]
    assert {row["finish_reason"] == "cut" for row in found} == {True, False}
    assert not any(chain.from_iterable(row["completion_tokens"] for row in found))
    assert not any(row["completion"] or row["prompt"] for row in found)
    assert not any(message["content"] for row in found for message in row["messages"] or ())
    assert verify_run(str(job.store), "tiny") == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rollout.environment.history=per_turn"], "rollout.environment.history 'per_turn' with rollout.partial: "),
        (
            [
                *(f"rollout.environment.{name}=" for name in ("target", "processes")),
                "rollout.environment.kind=dialogue",
                "rollout.environment.instructions=Ask.",
                "rollout.environment.model={kind='directory', path='user'}",
            ],
            "rollout.environment.kind 'dialogue' with rollout.partial: ",
        ),
    ],
)
def test_what_cannot_go_on_later_is_refused_in_one_line(overrides, told, settings, tmp_path):
    job = InProcessJob(tmp_path, "nowhere")
    with pytest.raises(BadInput, match=told) as refused:
        job.train(*settings, *overrides)
    assert "\n" not in str(refused.value)
