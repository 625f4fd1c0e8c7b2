"""A whole run of PPO on episodes with branches, and the commands that read the run.

The turns of the episodes are sampled by the run's own engine, in the branches that `TURNS` describes.
"""

import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from rheostat.models.agents.branches import EpisodeRecord
from rheostat.models.agents.stored_branches import Ending, fill, read_records
from rheostat.models.engines.protocol import Request
from rheostat.models.records.model_input import TURN_PROMPT, ModelInput
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.turn_prompts import split_at_prompts
from rheostat.models.rollouts.groups import ChatMessage
from rheostat.models.workers.rollout import RolloutWorker
from rheostat.tasks.verification.invariants import verify_run
from rheostat.tasks.views.export import export_tables
from rheostat.tasks.views.query import query_runs
from rheostat.tasks.views.report.samples import browsed_groups
from tests.support import checker
from tests.support.in_process import InProcessJob, copy_job
from tests.support.prompts import choose_prompts
from tests.support.prompts import rollouts as all_rollouts
from tests.support.stored_runs import open_tiny, tables_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

TURNS = [(None, None), (None, "sub-agent"), (0, "tool"), (0, "again"), (1, "more"), (2, "")]
"""Parent of each turn of an episode, and the text before the turn. The text is None for the prompt of the problem."""
BRANCHES = [[0, 2, 5], [1, 4], [3]]
FAILS = 3
"""Sample number of the episode of each group that fails before its first request."""
OVERRIDES = (
    "iterations=2", "rollout.prompts=4", "evaluation.problems=2", "scoring.max_missing=1.0",
    "rollout.environment.kind=target", "rollout.environment.target=tests.support.games:Echo",
    "rollout.environment.prompts=text", "rollout.environment.parser=none", "rollout.environment.turn_tokens=8",
    'scoring.rewards=[{kind="environment", name="whole"}, {kind="environment", per="turn", gamma=0.9}]',
    "algorithm.kind=ppo", "algorithm.gamma=0.95", "algorithm.critic.learning_rate=1e-3",
    "algorithm.kl={coefficient=0.1}",
)  # fmt: skip


def sample_branches(worker, groups, work):
    """Replace the completions of groups by episodes with branches. The engine samples the turns of all episodes at the
    same time, one turn after the other."""
    tokenizer = AutoTokenizer.from_pretrained(worker._fetch(work.policy.weights))
    open_drafts = [
        (group, draft, EpisodeRecord())
        for group in groups
        for sample, draft in enumerate(group.drafts)
        if sample != FAILS
    ]
    for parent, text in TURNS:
        requests = []
        for group, draft, record in open_drafts:
            context = draft.input.prompt if text is None else tokenizer.encode(text, add_special_tokens=False)
            number = record.open_turn(record.place_after(parent, context), seed=draft.seed)
            inputs, seeds = (ModelInput.from_prompt(record.context_of(number)),), (record.turn(number).seed,)
            requests.append(Request(row=group.prompt_row, inputs=inputs, seeds=seeds, max_tokens=8))
        answers = worker._engine.generate(requests, work.sampling)
        for (_, _, record), [completion] in zip(open_drafts, answers, strict=True):
            number = record.num_requests - 1
            record.extend_turn(number, completion, work.policy.version)
            record.describe_turn(number, text=completion.text)
    records = {id(draft): record for _, draft, record in open_drafts}
    return [
        replace(group, drafts=tuple(end_episode(draft, records.get(id(draft)), tokenizer) for draft in group.drafts))
        for group in groups
    ]


def end_episode(draft, record, tokenizer):
    """Return the completion of an episode. Rewards depend on the sampled tokens."""

    def decode(tokens):
        return tokenizer.decode(tokens, skip_special_tokens=True)

    if record is None:
        failed = Ending(FinishReason.FAILED, error="exit code 3")
        return fill(EpisodeRecord(), draft, failed, decode=decode)
    texts = [decode(record.turn(number).tokens) for number in BRANCHES[0]]
    ending = Ending(
        FinishReason.STOP,
        reward=1.0,
        rewards={turn.number: float(sum(turn.tokens) % 5) for turn in record.turns()},
        replayed=frozenset({1}),
        messages=tuple(ChatMessage(role="assistant", content=text, name=None) for text in texts),
    )
    return fill(record, draft, ending, decode=decode)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, prefect_api):
    """A run of two iterations. Tests must not change it."""
    job = InProcessJob(tmp_path_factory.mktemp("branches"), prefect_api)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutWorker, "_complete", sample_branches)
        job.train(*OVERRIDES)
    return job


@pytest.fixture
def job(whole, tmp_path):
    """Copy of the run, which a test may change."""
    return copy_job(whole, tmp_path / "job")


def by_episode(rows):
    """Return rows by prompt row and sample number, in order."""
    found = defaultdict(list)
    for row in rows:
        found[row["prompt_row"], row["sample"]].append(row)
    return found


def test_each_branch_becomes_a_training_sample_with_the_log_probs_of_the_engine(whole):
    assert verify_run(str(whole.store), "tiny") == []
    assert checker.problems_of(whole.run) == []
    run = open_tiny(whole)
    for iteration in ("it-0001", "it-0002"):
        rollouts = tables_of(run, iteration, "rollout")
        records = [record for table in rollouts for record in read_records(table)]
        trees = [[[turn.number for turn in branch] for branch in record.branches()] for record in records]
        assert trees.count(BRANCHES) == len(trees) * 3 / 4 and trees.count([]) == len(trees) / 4
        branches = by_episode(row for table in rollouts for row in split_at_prompts(table)[0].to_pylist())
        [table] = tables_of(run, iteration, "credit")
        samples = by_episode(table.to_pylist())
        assert samples
        for name, rows in samples.items():
            assert len(rows) == 3
            own = branches[name]
            assert [row["tokens"] for row in rows] == [row["prompt_tokens"] + row["completion_tokens"] for row in own]
            assert [row["logprobs"] for row in rows] == [row["logprobs"] for row in own]
        assert run.require(f"{iteration}/update").metrics["mismatch_difference_max"] < 1e-4
        metrics = run.require(f"{iteration}/credit").metrics
        assert metrics["branches_mean"] == 3 * 3 / 4, "the episode that failed has no branch"


def test_reference_log_probs_are_computed_in_the_branch_of_each_turn(whole):
    """In the first iteration the reference is the policy that generated the completions."""
    run = open_tiny(whole)
    rollouts, estimates = tables_of(run, "it-0001", "rollout"), tables_of(run, "it-0001", "estimates")
    for table, auxiliary in zip(rollouts, estimates, strict=True):
        for row, found in zip(table["logprobs"].to_pylist(), auxiliary["reference"].to_pylist(), strict=True):
            np.testing.assert_allclose(found or [], row, atol=1e-4)


def test_exported_advantages_are_those_of_the_samples_without_the_prompts_of_branches(whole):
    run = open_tiny(whole)
    for number in (1, 2):
        [table] = tables_of(run, f"it-000{number}", "credit")
        samples = by_episode(table.to_pylist())
        exported = [row for table in export_tables(run, number) for row in table.to_pylist()]
        assert {(row["prompt_row"], row["sample"]) for row in exported if row["advantages"] is not None} == {*samples}
        for row in exported:
            if row["advantages"] is not None:
                own = samples[row["prompt_row"], row["sample"]]
                assert row["advantages"] == [value for sample in own for value in sample["advantages"]]
                prompts = [each["tokens"] for each in row["segments"] if each["policy_version"] == TURN_PROMPT]
                assert len(prompts) == 2
                assert len(row["advantages"]) == len(row["completion_tokens"]) - sum(prompts)


def test_a_report_shows_the_mean_advantage_of_the_sampled_tokens_and_the_tree_of_turns(whole):
    run = open_tiny(whole)
    [table] = tables_of(run, "it-0001", "credit")
    advantages = {
        place: [
            value for row in rows for value, age in zip(row["advantages"], row["staleness"], strict=True) if age >= 0
        ]
        for place, rows in by_episode(table.to_pylist()).items()
    }
    rollouts = [row for table in tables_of(run, "it-0001", "rollout") for row in table.to_pylist()]
    places = {(row["prompt_id"], row["sample"]): (row["prompt_row"], row["sample"]) for row in rollouts}
    groups = [group for group in browsed_groups(run, iterations=[1], evaluations=[]) if group.batch == "it-0001"]
    shown = {(group.prompt_id, each.sample): each for group in groups for each in group.completions}
    assert {*shown} == {*places}
    for name, completion in shown.items():
        tree = [(turn["order"], turn["depth"]) for turn in completion.turns]
        if completion.sample == FAILS:
            assert (tree, completion.advantage) == ([(None, 0)], None)
        else:
            assert tree == [(0, 0), (3, 1), (2, 0), (5, 0), (1, 0), (4, 0)]
            assert completion.advantage == pytest.approx(np.mean(advantages[places[name]]))


def test_commands_read_a_run_with_branches(job, tmp_path):
    for command in (("verify",), ("show",), ("export",), ("report", "--to", str(tmp_path / "report.html"))):
        ended = job.command(*command)
        assert ended.code == 0, ended.output
    text = job.command("rollouts", "--limit", "100").output
    assert "\n  turn 4: " in text and "continues turn 1" in text and "fresh prompt, replayed" in text
    shown = json.loads(job.command("rollouts", "--json", "--limit", "100").output)
    assert {tuple(turn["order"] for turn in each["turns"]) for each in shown} == {(0, 2, 5, 1, 4, 3), (None,)}


def test_a_query_counts_the_turns_by_their_order(whole):
    sql = (
        "with turns as (select unnest(turns) as turn from rollouts where iteration = 1)"
        " select turn.order as place, count(turn.parent) as continued, count(*) as turns"
        " from turns group by 1 order by 1"
    )
    found = query_runs(str(whole.store), sql, names=("tiny",)).to_pylist()
    numbers = [(row["place"], row["continued"], row["turns"]) for row in found]
    expected = [(place, 12 * (parent is not None), 12) for place, (parent, _) in enumerate(TURNS)]
    assert numbers == [*expected, (None, 0, 4)], "four episodes failed before their first request"


def test_scores_and_credit_of_branches_are_computed_again(job):
    rewards = 'max_missing=1.0\nrewards=[{kind="environment", per="turn"}]'
    for command in (
        ("rescore", "--rewards", rewards, "--as", "turns"),
        ("recredit", "--algorithm", "reinforce_pp", "--as", "turns", "--scores", "turns"),
        ("verify",),
    ):
        ended = job.command(*command)
        assert ended.code == 0, ended.output


def test_forgetting_a_prompt_empties_the_texts_and_tokens_of_its_turns(job, tmp_path):
    ids = choose_prompts(job)
    (tmp_path / "ids").write_text("\n".join(ids))
    before = all_rollouts(job)
    ended = job.command("forget", "--prompt-ids", str(tmp_path / "ids"), "--delete")
    assert ended.code == 0, ended.output
    numbers = ("tokens", "observation", "calls", "errors", "reward", "order", "parent", "replayed", "finish_reason")
    for old, new in zip(before, all_rollouts(job), strict=True):
        if old["prompt_id"] not in ids:
            assert new == old
            continue
        assert new["completion"] == "" and not any(new["completion_tokens"]) and not any(new["logprobs"])
        assert not any(turn["text"] for turn in new["turns"])
        assert not any(message["content"] for message in new["messages"])
        assert [[turn[name] for name in numbers] for turn in new["turns"]] == [
            [turn[name] for name in numbers] for turn in old["turns"]
        ]
    assert job.command("verify").code == 0
    assert job.command("rollouts", "--limit", "100").code == 0
    assert job.command("export").code == 0
