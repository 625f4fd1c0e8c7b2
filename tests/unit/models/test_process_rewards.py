"""Rewards of steps and of tokens: users' functions and judges, and the score shards with their values."""

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.bundles import BundleRef, publish_bundle
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import Capo
from rheostat.models.config.judges import DirectoryJudge, JudgeReward
from rheostat.models.config.reward_terms import PatternSteps, RegexReward, TargetReward
from rheostat.models.config.rewards import RewardConfig, ScoringConfig
from rheostat.models.config.verdicts import StepsVerdict
from rheostat.models.data.problems import load_problems
from rheostat.models.records.schemas import VERDICT_SCHEMA, score_schema
from rheostat.models.records.versions import Outcome
from rheostat.models.records.work import CreditWork, ScoredShard, ScoringWork, VerdictShard
from rheostat.models.rewards.evaluate import Case, Evaluator
from rheostat.models.text.steps import StepValues, split_steps
from rheostat.models.workers.scoring import ScoringWorker
from tests.support.demos import ArithmeticData, demo_part
from tests.support.policies import small_tokenizer
from tests.support.rollout_shards import rollout, write_rollouts

wrong_steps = demo_part("capo/arithmetic_steps:wrong_steps")
LINES = PatternSteps(pattern=r"\n")
STEPWISE = TargetReward(
    name="stepwise", target="tests.support.rewards:stepwise", per="step", steps=LINES, options={"scale": 2.0}
)
TOKENS = TargetReward(name="sizes", target="tests.support.rewards:lengths_of_tokens", per="token")
OUTCOME = RegexReward(pattern="1", weight=2.0)
Score = Callable[..., Outcome]


def test_a_function_gets_the_steps_and_returns_a_value_of_each():
    errors = {
        "few": "2 floats.* 1",
        "many": "2 floats.* more",
        "text": "2 floats.* str",
        "words": "a float.* str",
        "endless": "2 floats.* more",
        "raise": "RuntimeError: cannot judge",
        "leave": "SystemExit: 3",
        "none": "2 floats.* NoneType",
        "nan": "finite float.* nan",
        "crash": "SIGSEGV",
        "hang": "no score.* 2 s",
    }
    completions = ["1\n2\n3", *(f"{harm}\n1" for harm in errors), "4"]
    with closing(Evaluator(ScoringConfig(rewards=(STEPWISE,), timeout_seconds=2))) as evaluator:
        first, *verdicts, last = evaluator.evaluate([Case("", text, "") for text in completions])
    assert first.values == (StepValues((2, 2, 1), (2.0, 4.0, 6.0)),)
    assert last.values == (StepValues((1,), (8.0,)),)
    for verdict, error in zip(verdicts, errors.values(), strict=True):
        assert verdict.values == (None,)
        assert re.search(f"^stepwise: .*{error}", verdict.error)


# ---- score shards


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"{tmp_path}/run")


@pytest.fixture
def tokenizer(store: Store, tmp_path: Path) -> BundleRef:
    small_tokenizer().save_pretrained(str(tmp_path / "policy"))
    return publish_bundle(store, tmp_path / "policy", prefix="policies")


@pytest.fixture
def score(tmp_path: Path, store: Store, tokenizer: BundleRef) -> Iterator[Score]:
    workers: list[ScoringWorker] = []

    def scored(rollouts: ShardRef, *rewards: RewardConfig, verdicts: ShardRef | None = None) -> Outcome:
        scoring = ScoringConfig(rewards=rewards, max_missing=0.5)
        workers.append(ScoringWorker(str(tmp_path), "run", scoring, Capo()))
        answers = () if verdicts is None else (VerdictShard(term=scoring.terms[-1], verdicts=verdicts),)
        work = ScoringWork(iteration=1, rollouts=rollouts, verdicts=answers, tokenizer=tokenizer)
        return workers[-1].score(work)

    yield scored
    for worker in workers:
        worker.close()


def write_completions(store: Store, *completions: str, texts: tuple[str, ...] = ()) -> ShardRef:
    """Write rollouts in groups of two; the tokens encode other texts if any are passed."""
    tokenizer, rows = small_tokenizer(), []
    for index, (completion, text) in enumerate(zip(completions, texts or completions, strict=True)):
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        columns = {"completion_tokens": tokens, "logprobs": [-1.0] * len(tokens), "prompt_tokens": [5]}
        columns["segments"] = [{"policy_version": 0, "tokens": len(tokens)}]
        rows.append(rollout(index // 2, index % 2, completion, **columns))
    return write_rollouts(store, *rows)


def read_columns(store: Store, outcome: Outcome) -> dict[str, list[object]]:
    return read_shard(store, outcome.shards[0]).to_pydict()


def test_a_score_shard_has_spans_and_values_and_the_reward_includes_their_aggregate(store, score):
    outcome = score(write_completions(store, "1\n20\n", "3"), OUTCOME, STEPWISE)
    table = read_shard(store, outcome.shards[0])
    assert table.schema.remove_metadata() == score_schema(("regex", "stepwise"), ("stepwise",))
    found = table.to_pydict()
    # tokens: 1 \n 2 0 \n eos, and 3 eos
    assert found["spans_stepwise"] == [[0, 2], [0]]
    assert found["values_stepwise"] == [[2.0, 40.0], [6.0]]
    assert found["reward_stepwise"] == [21.0, 6.0]
    assert found["reward"] == [23.0, 6.0]
    assert outcome.metrics["term_stepwise_sum"] == 27.0


@pytest.mark.parametrize(("how", "value"), [("mean", 21.0), ("sum", 42.0), ("min", 2.0)])
def test_values_are_aggregated_as_configured(store, score, how, value):
    reward = STEPWISE.model_copy(update={"aggregate": how})
    assert read_columns(store, score(write_completions(store, "1\n20\n"), reward))["reward_stepwise"] == [value]


def test_tokens_have_one_value_each(store, score):
    found = read_columns(store, score(write_completions(store, "a字b", ""), TOKENS))
    assert found["spans_sizes"] == [[0, 1, 2, 3, 4, 5], [0]]
    assert found["values_sizes"] == [[1.0, 0.0, 0.0, 1.0, 1.0, 0.0], [0.0]]  # 字 is with the last of its tokens


def test_a_term_that_fails_is_missing_with_its_spans_and_the_reason_is_stored(store, score):
    found = read_columns(store, score(write_completions(store, "few\n1", "1\n1"), OUTCOME, STEPWISE))
    assert (found["spans_stepwise"][0], found["values_stepwise"][0], found["reward_stepwise"][0]) == (None, None, None)
    assert found["reward"] == [None, 4.0]
    assert found["error"][0].startswith("stepwise: ") and found["error"][1] is None
    assert found["reward_regex"] == [1.0, 1.0]


@pytest.mark.parametrize("reward", [STEPWISE, TOKENS])
def test_a_term_is_missing_if_the_tokens_do_not_decode_to_the_completion(store, score, reward):
    found = read_columns(store, score(write_completions(store, "1\n1", "2", texts=("1\n2", "2")), reward))
    assert found["reward"][0] is None
    assert found["reward"][1] is not None
    assert re.search(f"^{reward.name}: .*tokens", found["error"][0])


@pytest.mark.thorough
def test_the_same_rollouts_give_the_same_shard_in_another_worker(store, score):
    rollouts = write_completions(store, "1\n20\n", "3")
    assert score(rollouts, OUTCOME, STEPWISE).shards == score(rollouts, OUTCOME, STEPWISE).shards


def test_scoring_steps_without_a_tokenizer_is_refused(store, tmp_path):
    worker = ScoringWorker(str(tmp_path), "run", ScoringConfig(rewards=(STEPWISE,)), Capo())
    with pytest.raises(BadInput, match=r"stepwise.*tokenizer"):
        worker.score(ScoringWork(iteration=1, rollouts=write_completions(store, "1")))


def test_a_damaged_tokenizer_is_noticed_and_other_files_are_ignored(store, tokenizer, score):
    folder = store.local_path(f"{tokenizer.key}/tokenizer.json").parent
    (folder / "tokenizer_config.json").write_text("changed")
    assert read_columns(store, score(write_completions(store, "1"), STEPWISE))["reward"] == [2.0]
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(Damaged, match=r"tokenizer\.json.*digest"):
        score(write_completions(store, "2"), STEPWISE)


# ---- critiques become scores

JUDGE = JudgeReward(name="critic", model=DirectoryJudge(path="judge"), verdict=StepsVerdict(steps=LINES))


def write_verdicts(store: Store, *rows: tuple[int, int, int, int, list[int] | None]) -> ShardRef:
    """Write verdicts from rows of prompt, sample, vote, attempt and flagged steps, None if the answer is unusable."""
    names, records = ("prompt_row", "sample", "vote", "attempt", "steps"), []
    for row in rows:
        answer = {"text": "", "tokens": 1, "value": None if row[-1] is None else 0.0}
        records.append(dict(zip(names, row, strict=True)) | answer | {"error": None if row[-1] else "no"})
    table = pa.Table.from_pylist(records, schema=VERDICT_SCHEMA)
    return write_shard(store, table, kind="verdicts", metadata={})


def test_critiques_vote_on_steps_with_the_last_attempt_of_each_vote_if_it_is_usable(store, score):
    rollouts = write_completions(store, "1\n2\n3", "1\n2", "7", "8")
    verdicts = write_verdicts(
        store,
        (-1, 0, 0, 0, [0]),  # a canary
        *((0, 0, 0, 0, [0, 1]), (0, 0, 1, 0, None), (0, 0, 1, 1, [1, 2])),
        *((0, 1, 0, 0, []), (0, 1, 1, 0, [1])),
        *((1, 0, 0, 0, [0]), (1, 0, 1, 0, None)),
        *((1, 1, 0, 0, None), (1, 1, 1, 0, None)),
    )
    found = read_columns(store, score(rollouts, OUTCOME, JUDGE, verdicts=verdicts))
    assert found["values_critic"] == [[0.0, -1.0, 0.0], [0.0, 0.0], [-1.0], [0.0]]
    assert found["reward_critic"] == [pytest.approx(-1 / 3), 0.0, -1.0, 0.0]
    assert found["error"] == [None] * 4


def test_a_group_of_right_answers_with_a_flagged_step_has_advantages(store, score, tmp_path):
    rollouts = write_completions(store, "1\n1", "1\n1")
    verdicts = write_verdicts(store, (0, 0, 0, 0, [1]), (0, 1, 0, 0, []))
    scores = score(rollouts, OUTCOME, JUDGE, verdicts=verdicts).shards[0]
    worker = ScoringWorker(str(tmp_path), "run", ScoringConfig(rewards=(OUTCOME, JUDGE)), Capo())
    outcome = worker.credit(CreditWork(iteration=1, shards=(ScoredShard(rollouts, scores),)))
    samples = read_shard(store, outcome.shards[0]).to_pydict()
    # tokens 1 \n | 1 eos: rewards 2 2 1 1 and 2 2 2 2; mean 7/4, population std sqrt(3)/4
    low, high = (1 - 1.75) / (3**0.5 / 4), (2 - 1.75) / (3**0.5 / 4)
    assert samples["advantages"][0] == pytest.approx([high, high, low, low])
    assert samples["advantages"][1] == pytest.approx([high] * 4)


# ---- the checker of arithmetic steps

PROMPT = "Ana has 16 pens, buys 3, sells 4. How many?\n"
SPACES = PatternSteps(pattern=r"(?<!#) ")


@pytest.mark.parametrize(
    ("work", "flags"),
    [
        ("16+3=19 19-4=15 #### 15", [0, 0, 0]),
        ("16+3=18 18-4=14 #### 14", [-1, 0, 0]),  # one slip is flagged once
        ("16+3=19 19-4=14 #### 15", [0, -1, -1]),  # and the answer must follow from what is written
        ("16+4=20 20-4=16 #### 16", [-1, 0, 0]),  # another number than the problem's
        ("16-3=13 13-4=9 #### 9", [-1, 0, 0]),  # the other sign
        ("16+3=19 20-4=16 #### 16", [0, -1, 0]),  # from another result
        ("16+3=19 19-4=15 15+1=16 #### 16", [0, 0, -1, -1]),  # a step too many
        ("16+3=19 #### 19", [0, -1]),  # a step too few
        ("#### 15", [-1]),  # a guess, though it is right
        ("well 16+3=19 19-4=15 #### 15 done", [-1, 0, 0, 0, -1]),
        ("16+3=99999999999 #### 1", [-1, -1]),
        ("", [-1]),
    ],
)
def test_a_step_is_flagged_if_it_is_miscalculated_or_does_not_follow(work, flags):
    assert wrong_steps(PROMPT, work, "#### 15", steps=split_steps(work, SPACES)) == flags


def test_worked_answers_of_the_data_have_no_wrong_step():
    for problem in load_problems(ArithmeticData(train_problems=200, heldout_problems=8), "train", 0):
        steps = split_steps(str(problem.worked), SPACES)
        assert wrong_steps(str(problem.prompt), str(problem.worked), problem.answer, steps=steps) == [0.0] * 5


def test_a_problem_that_is_not_arithmetic_is_an_error_and_not_zero():
    with pytest.raises(ValueError, match="'arithmetic_steps'"):
        wrong_steps("What is love?", "16", "16", steps=["16"])
