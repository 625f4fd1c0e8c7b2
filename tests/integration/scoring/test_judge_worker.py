"""The worker that asks a judge, with small real models; and how its verdicts become scores."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from infra.errors import BadInput, Damaged
from infra.store.bundles import publish_bundle
from infra.store.shards import ShardRef, read_shard, write_shard
from infra.store.storage import open_store
from models.config.algorithms import Grpo
from models.config.engines import SamplingConfig
from models.config.judges import Canaries, ChoiceVerdict, JudgeReward, LogprobVerdict, ScoreVerdict, TrainedJudge
from models.config.reward_terms import NumericReward
from models.config.rewards import ScoringConfig
from models.records.schemas import VERDICT_SCHEMA
from models.records.versions import ModelVersion, Outcome
from models.records.work import JudgeWork, ScoringWork, VerdictShard
from models.workers.judge import JudgeWorker
from models.workers.scoring import ScoringWorker
from tests.support.judged import rollouts
from tests.support.policies import write_policy

REWARD = JudgeReward(
    name="honest",
    model=TrainedJudge(),
    template="{fence}{completion}{fence}",
    verdict=ChoiceVerdict(choices={"A": 1.0, "B": 0.0}),  # one token each, about as likely
    votes=3,
    vote="majority",
)

FREE = REWARD.model_copy(
    update={"verdict": ScoreVerdict(), "sampling": SamplingConfig(max_new_tokens=12), "retries": 2}
)

Make = Callable[..., JudgeWorker]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judge")


@pytest.fixture(scope="module")
def model(home: Path) -> ModelVersion:
    write_policy(home / "model", eos_share=0.2)
    return ModelVersion(version=0, weights=publish_bundle(open_store(f"{home}/run"), home / "model", prefix="judges"))


def worker(home: Path, reward: JudgeReward = REWARD) -> JudgeWorker:
    return JudgeWorker(str(home), "run", "honest", reward, 1)


def judge(home: Path, model: ModelVersion, shard: ShardRef, reward: JudgeReward = REWARD, *, seed: int = 5) -> Outcome:
    return worker(home, reward).judge(JudgeWork(iteration=3, rollouts=shard, model=model, seed=seed))


def rows_of(home: Path, outcome: Outcome) -> list[dict[str, object]]:
    return read_shard(open_store(f"{home}/run"), outcome.shards[0]).to_pylist()


def test_every_vote_on_every_completion_has_a_row_in_order(home, model):
    outcome = judge(home, model, rollouts(home, "a", "b", "c"))
    table = read_shard(open_store(f"{home}/run"), outcome.shards[0])
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
def test_the_same_work_gives_the_same_shard_whatever_came_before(home, model, reward):
    shard = rollouts(home, "a", "b", "", "c")
    work = JudgeWork(iteration=3, rollouts=shard, model=model, seed=5)
    hot = worker(home, reward)
    first = hot.judge(work)
    hot.judge(JudgeWork(iteration=4, rollouts=rollouts(home, "else", "b"), model=model, seed=6))
    hot.sleep()
    again = hot.judge(work)
    assert again.shards == first.shards == judge(home, model, shard, reward).shards
    assert again.metrics == first.metrics


def test_another_seed_draws_other_votes(home, model):
    shard = rollouts(home, *"abcdefgh")
    assert judge(home, model, shard).shards != judge(home, model, shard, seed=6).shards


def test_greedy_votes_are_all_alike(home, model):
    reward = REWARD.model_copy(update={"template": "{completion}", "sampling": SamplingConfig(temperature=0)})
    rows = rows_of(home, judge(home, model, rollouts(home, "a", "b"), reward))
    assert len({row["text"] for row in rows if row["sample"] == 0}) == 1


def test_an_answer_without_a_verdict_is_asked_for_again_so_often_and_then_has_no_value(home, model):
    outcome = judge(home, model, rollouts(home, "a", "b"), FREE)
    rows = rows_of(home, outcome)
    assert [row["attempt"] for row in rows] == [0, 1, 2] * 6
    assert all(row["value"] is None and row["error"] for row in rows)
    assert len({row["text"] for row in rows}) > 12  # each attempt has a seed of its own
    assert outcome.metrics["invalid"] == outcome.metrics["answers"] == 6
    assert outcome.metrics["sequences"] == 18


def test_a_completion_without_a_word_has_the_worst_reward_and_is_not_judged(home, model):
    reward = REWARD.model_copy(update={"verdict": ChoiceVerdict(choices={"A": 1.0, "B": -2.0})})
    outcome = judge(home, model, rollouts(home, "", " \n", "a"), reward)
    silent = [row for row in rows_of(home, outcome) if row["prompt_row"] == 4]
    assert [(row["value"], row["error"], row["text"], row["tokens"]) for row in silent] == [(-2.0, None, None, 0)] * 2
    assert outcome.metrics["empty"] == 2
    assert outcome.metrics["answers"] == 3


def test_canaries_come_first_and_are_counted_apart(home, model):
    canaries = Canaries(answers=("I pass.", "No idea."), per_shard=3, passing=0.5)
    outcome = judge(home, model, rollouts(home, "a", "b", "c"), REWARD.model_copy(update={"canaries": canaries}))
    rows = rows_of(home, outcome)
    assert [(row["prompt_row"], row["sample"]) for row in rows[:9:3]] == [(-1, 0), (-1, 1), (-1, 2)]
    assert outcome.metrics["canaries"] == 3
    assert outcome.metrics["answers"] == 9
    passed = [sum(row["value"] for row in rows[start : start + 3]) >= 2 for start in (0, 3, 6)]
    assert outcome.metrics["canaries_passed"] == sum(passed)


def test_a_completion_that_does_not_fit_the_context_is_invalid_and_its_neighbour_is_not(home, model):
    outcome = judge(home, model, rollouts(home, "long " * 400, "b"), REWARD.model_copy(update={"retries": 0}))
    rows = rows_of(home, outcome)
    assert all("the context holds 256" in row["error"] for row in rows[:3])
    assert all(row["value"] is not None for row in rows[3:])


def test_a_shard_without_rows_has_verdicts_without_rows(home, model):
    outcome = judge(home, model, rollouts(home), REWARD.model_copy(update={"canaries": Canaries()}))
    assert rows_of(home, outcome) == []
    assert outcome.metrics["sequences"] == 0


def test_a_worker_says_what_it_serves(home, model):
    asked = worker(home)
    assert asked.take(model) == model.weights.digest
    before = asked.progress()
    assert asked.take(model) == model.weights.digest
    assert asked.progress() == before
    asked.sleep()
    asked.take(model)
    assert asked.progress() > before


def test_a_local_judge_without_a_model_is_bad_input(home):
    with pytest.raises(BadInput, match="judge honest: expected the model to judge with, found none"):
        worker(home).judge(JudgeWork(iteration=3, rollouts=rollouts(home, "a"), model=None, seed=5))


# ---- scores
def score(home: Path, shard: ShardRef, *verdicts: ShardRef, reward: JudgeReward = REWARD) -> Outcome:
    scoring = ScoringConfig(rewards=(NumericReward(weight=0), reward))
    scorer = ScoringWorker(str(home), "run", scoring, Grpo())
    served = tuple(VerdictShard(term="honest", verdicts=ref) for ref in verdicts)
    try:
        return scorer.score(ScoringWork(iteration=3, rollouts=shard, verdicts=served, metric="honest"))
    finally:
        scorer.close()


def verdicts(home: Path, *rows: tuple[int, int, int, int, float | None]) -> ShardRef:
    names = ("prompt_row", "sample", "vote", "attempt", "value")
    filled = [
        dict(zip(names, row, strict=True)) | {"text": "", "error": None if row[-1] is not None else "no", "tokens": 1}
        for row in rows
    ]
    table = pa.Table.from_pylist(filled, schema=VERDICT_SCHEMA)
    return write_shard(open_store(f"{home}/run"), table, kind="verdicts", metadata={})


def test_scores_join_rules_and_the_majority_of_each_last_attempt(home):
    shard = rollouts(home, "#### 1", "#### 2", "x", "y")
    cast = [
        (-1, 0, 0, 0, 1.0),
        *((4, 0, vote, 0, 1.0) for vote in range(3)),
        *((4, 1, vote, 0, None) for vote in range(3)),
        (4, 1, 0, 1, 0.25),
        (5, 0, 0, 0, None),
        (5, 0, 0, 1, None),
        (5, 1, 0, 0, 0.5),
    ]
    cast.sort(key=lambda row: row[:4])
    outcome = score(home, shard, verdicts(home, *cast))
    table = read_shard(open_store(f"{home}/run"), outcome.shards[0])
    assert table["reward_numeric"].to_pylist() == [1.0, 0.0, 0.0, 0.0]
    assert table["reward_honest"].to_pylist() == [1.0, 0.25, None, 0.5]
    assert table["reward"].to_pylist() == [1.0, 0.25, None, 0.5]
    assert table["error"].to_pylist() == [None, None, "honest: no", None]
    assert outcome.metrics["missing"] == 1
    assert outcome.metrics["informative_groups"] == 1  # the other group has but one value


@pytest.mark.parametrize("cast", [[(4, 0, 0, 0, 1.0)], [(4, 0, 0, 0, 1.0), (4, 1, 0, 0, 1.0), (4, 2, 0, 0, 1.0)]])
def test_verdicts_about_other_completions_are_damage(home, cast):
    with pytest.raises(Damaged, match="verdicts of honest: expected those of 2 completions, found"):
        score(home, rollouts(home, "a", "b"), verdicts(home, *cast))


def test_scoring_without_the_verdicts_of_a_served_reward_is_bad_input(home):
    with pytest.raises(BadInput, match="expected verdicts of honest, found none"):
        score(home, rollouts(home, "a", "b"))
