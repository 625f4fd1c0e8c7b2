"""The judge worker with small models, and the scores computed from its verdicts."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import Grpo
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.judges import Canaries, JudgeReward, TrainedJudge
from rheostat.models.config.reward_terms import NumericReward
from rheostat.models.config.verdicts import ChoiceVerdict, LogprobVerdict, RubricVerdict, ScoreVerdict
from rheostat.models.records.schemas import PROMPT_SCHEMA, VERDICT_SCHEMA
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import JudgeWork, ScoringWork, VerdictShard
from rheostat.models.workers.judge import JudgeWorker
from tests.support.judged import rollouts
from tests.support.policies import write_policy

REWARD = JudgeReward(
    name="honest",
    model=TrainedJudge(),
    template="{fence}{completion}{fence}",
    verdict=ChoiceVerdict(choices={"A": 1.0, "B": 0.0}),  # one token each, about equally likely
    votes=3,
    vote="majority",
)

FREE = REWARD.model_copy(
    update={"verdict": ScoreVerdict(), "sampling": SamplingConfig(max_new_tokens=12), "retries": 2}
)


class Judging:
    """A run's store with a small model that judges."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.store = open_store(f"{home}/run")
        write_policy(home / "model", eos_share=0.2)
        self.model = ModelVersion(version=0, weights=publish_bundle(self.store, home / "model", prefix="judges"))

    def worker(self, reward: JudgeReward = REWARD) -> JudgeWorker:
        return JudgeWorker(str(self.home), "run", "honest", reward, 1)

    def work(self, *completions: str, seed: int = 5, iteration: int = 3) -> JudgeWork:
        rows = rollouts(self.home, *completions)
        return JudgeWork(iteration=iteration, rollouts=rows, model=self.model, seed=seed)

    def judge(self, *completions: str, reward: JudgeReward = REWARD, seed: int = 5) -> Outcome:
        return self.worker(reward).judge(self.work(*completions, seed=seed))

    def rows(self, outcome: Outcome) -> list[dict[str, object]]:
        return read_shard(self.store, outcome.shards[0]).to_pylist()


@pytest.fixture(scope="module")
def judging(tmp_path_factory: pytest.TempPathFactory) -> Judging:
    return Judging(tmp_path_factory.mktemp("judge"))


def test_every_vote_on_every_completion_has_a_row_in_order(judging):
    outcome = judging.judge("a", "b", "c")
    table = read_shard(judging.store, outcome.shards[0])
    assert table.schema.remove_metadata() == VERDICT_SCHEMA
    places = [(row["prompt_row"], row["sample"], row["vote"], row["attempt"]) for row in table.to_pylist()]
    assert places == [(row, sample, vote, 0) for row, sample in ((4, 0), (4, 1), (5, 0)) for vote in range(3)]
    values = {"A": 1.0, "B": 0.0}
    assert all(row["value"] == values[row["text"]] and row["error"] is None for row in table.to_pylist())
    assert outcome.metrics == {
        "sequences": 9,
        "tokens": sum(table["tokens"].to_pylist()),
        "answers": 9,
        "invalid": 0,
        "empty": 0,
        "canaries": 0,
        "canaries_passed": 0,
    }
    assert outcome.detail == {"lengths": sorted(table["tokens"].to_pylist())}
    assert {"load", "generate", "write", "steps", "step_seconds", "step_sequences"} <= set(outcome.timings)


@pytest.mark.parametrize("reward", [REWARD, FREE, REWARD.model_copy(update={"verdict": LogprobVerdict()})])
def test_the_same_work_gives_the_same_shard_after_any_other_work(judging, reward):
    work = judging.work("a", "b", "", "c")
    busy = judging.worker(reward)
    first = busy.judge(work)
    busy.judge(judging.work("else", "b", seed=6, iteration=4))
    busy.sleep()
    again = busy.judge(work)
    assert again.shards == first.shards == judging.worker(reward).judge(work).shards
    assert again.metrics == first.metrics


def test_another_seed_samples_other_votes(judging):
    assert judging.judge(*"abcdefgh").shards != judging.judge(*"abcdefgh", seed=6).shards


def test_greedy_votes_are_equal(judging):
    reward = REWARD.model_copy(update={"template": "{completion}", "sampling": SamplingConfig(temperature=0)})
    rows = judging.rows(judging.judge("a", "b", reward=reward))
    assert len({row["text"] for row in rows if row["sample"] == 0}) == 1


def test_an_answer_without_a_verdict_is_requested_again_up_to_the_retries_and_then_has_no_value(judging):
    outcome = judging.judge("a", "b", reward=FREE)
    rows = judging.rows(outcome)
    assert [row["attempt"] for row in rows] == [0, 1, 2] * 6
    assert all(row["value"] is None and row["error"] for row in rows)
    assert len({row["text"] for row in rows}) > 12  # each attempt has its own seed
    assert outcome.metrics["invalid"] == outcome.metrics["answers"] == 6
    assert outcome.metrics["sequences"] == 18


def test_an_empty_completion_has_the_lowest_reward_and_is_not_judged(judging):
    reward = REWARD.model_copy(update={"verdict": ChoiceVerdict(choices={"A": 1.0, "B": -2.0})})
    outcome = judging.judge("", " \n", "a", reward=reward)
    empty = [row for row in judging.rows(outcome) if row["prompt_row"] == 4]
    assert [(row["value"], row["error"], row["text"], row["tokens"]) for row in empty] == [(-2.0, None, None, 0)] * 2
    assert outcome.metrics["empty"] == 2
    assert outcome.metrics["answers"] == 3


def test_canaries_come_first_and_are_counted_separately(judging):
    canaries = Canaries(answers=("I pass.", "No idea."), per_shard=3, pass_reward=0.5)
    outcome = judging.judge("a", "b", "c", reward=REWARD.model_copy(update={"canaries": canaries}))
    rows = judging.rows(outcome)
    assert [(row["prompt_row"], row["sample"]) for row in rows[:9:3]] == [(-1, 0), (-1, 1), (-1, 2)]
    assert outcome.metrics["canaries"] == 3
    assert outcome.metrics["answers"] == 9
    passed = [sum(row["value"] for row in rows[start : start + 3]) >= 2 for start in (0, 3, 6)]
    assert outcome.metrics["canaries_passed"] == sum(passed)


def test_a_completion_beyond_the_context_is_invalid_and_the_next_one_is_judged(judging):
    rows = judging.rows(judging.judge("long " * 400, "b", reward=REWARD.model_copy(update={"retries": 0})))
    assert all("256" in row["error"] for row in rows[:3])
    assert all(row["value"] is not None for row in rows[3:])


def test_a_shard_without_rows_has_verdicts_without_rows(judging):
    outcome = judging.judge(reward=REWARD.model_copy(update={"canaries": Canaries()}))
    assert judging.rows(outcome) == []
    assert outcome.metrics["sequences"] == 0


def test_a_worker_reports_the_digest_that_it_serves_and_loads_it_once(judging):
    worker = judging.worker()
    assert worker.take(judging.model) == judging.model.weights.digest
    before = worker.progress()
    assert worker.take(judging.model) == judging.model.weights.digest
    assert worker.progress() == before
    worker.sleep()
    worker.take(judging.model)
    assert worker.progress() > before


def test_a_local_judge_without_a_model_is_refused(judging):
    work = JudgeWork(iteration=3, rollouts=rollouts(judging.home, "a"), model=None, seed=5)
    with pytest.raises(BadInput, match=r"judge honest: .* does not name the model"):
        judging.worker().judge(work)


# ---- scores

Votes = tuple[tuple[int, int, int, int, float | None], ...]
"""Votes as prompt row, sample, vote, attempt and value."""


@pytest.fixture
def score(judging, make_worker):
    """Function that writes votes on completions and returns the outcome of scoring with them."""

    def score_votes(completions: tuple[str, ...], votes: Votes | None) -> Outcome:
        served = ()
        if votes is not None:
            names = ("prompt_row", "sample", "vote", "attempt", "value")
            rows = [
                dict(zip(names, vote, strict=True))
                | {"text": "", "error": None if vote[-1] is not None else "no", "tokens": 1}
                for vote in votes
            ]
            table = pa.Table.from_pylist(rows, schema=VERDICT_SCHEMA)
            verdicts = write_shard(judging.store, table, kind="verdicts", metadata={})
            served = (VerdictShard(term="honest", verdicts=verdicts),)
        worker = make_worker(NumericReward(weight=0), REWARD, algorithm=Grpo(), home=judging.home)
        shard = rollouts(judging.home, *completions)
        return worker.score(ScoringWork(iteration=3, rollouts=shard, verdicts=served, metric="honest"))

    return score_votes


def test_scores_join_rules_and_the_majority_of_each_last_attempt(judging, score):
    votes = [
        (-1, 0, 0, 0, 1.0),
        *((4, 0, vote, 0, 1.0) for vote in range(3)),
        *((4, 1, vote, 0, None) for vote in range(3)),
        (4, 1, 0, 1, 0.25),
        (5, 0, 0, 0, None),
        (5, 0, 0, 1, None),
        (5, 1, 0, 0, 0.5),
    ]
    outcome = score(("#### 1", "#### 2", "x", "y"), sorted(votes, key=lambda row: row[:4]))
    table = read_shard(judging.store, outcome.shards[0])
    assert table["reward_numeric"].to_pylist() == [1.0, 0.0, 0.0, 0.0]
    assert table["reward_honest"].to_pylist() == [1.0, 0.25, None, 0.5]
    assert table["reward"].to_pylist() == [1.0, 0.25, None, 0.5]
    assert table["error"].to_pylist() == [None, None, "honest: no", None]
    assert outcome.metrics["missing"] == 1
    assert outcome.metrics["informative_groups"] == 1  # the other group has only one value


@pytest.mark.parametrize(
    ("votes", "error", "message"),
    [
        ([(4, 0, 0, 0, 1.0)], Damaged, "reward honest .*2 completions"),
        ([(4, sample, 0, 0, 1.0) for sample in range(3)], Damaged, "reward honest .*2 completions"),
        (None, BadInput, "each of honest, but it contains none"),
    ],
)
def test_verdicts_must_be_those_of_the_completions(score, votes, error, message):
    with pytest.raises(error, match=message):
        score(("a", "b"), votes)


def test_a_judge_of_rubrics_rates_every_criterion_and_stores_what_it_answered(judging):
    rubric = [{"criterion": "Is short", "weight": 3}, {"criterion": "Is wrong", "weight": -1}]
    reward = REWARD.model_copy(
        update={
            "verdict": RubricVerdict(criterion=ChoiceVerdict(choices={"A": 1.0, "B": 0.0})),
            "template": "{fence}{completion}{criterion}",
            "votes": 2,
        }
    )
    row = {"prompt_id": "0" * 16, "text": "p", "tokens": [1], "answer": "", "columns": json.dumps({"rubric": rubric})}
    prompts = write_shard(
        judging.store, pa.Table.from_pylist([row] * 6, schema=PROMPT_SCHEMA), kind="prompts", metadata={}
    )
    work = replace(judging.work("a", "", "c"), prompts=prompts)
    outcome = judging.worker(reward).judge(work)
    rows = judging.rows(outcome)
    assert rows[2]["value"] == 0 and rows[2]["text"] is None, "an empty completion is not judged"
    judged = [row for row in rows if row["text"] is not None]
    assert len(judged) == 4
    for row in judged:
        criteria = json.loads(row["text"])
        assert [(each["criterion"], each["weight"]) for each in criteria] == [("Is short", 3), ("Is wrong", -1)]
        assert all(each["value"] == {"A": 1.0, "B": 0.0}[each["answer"]] for each in criteria)
        assert row["value"] == max(0, 3 * criteria[0]["value"] - criteria[1]["value"]) / 3
    assert outcome.metrics["answers"] == 4
    assert judging.worker(reward).judge(work).shards == outcome.shards
    with pytest.raises(BadInput, match="names no prompts"):
        judging.worker(reward).judge(replace(work, prompts=None))
