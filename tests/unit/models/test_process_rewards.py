"""Rewards of steps and of tokens: users' functions, and the score shards that they and judges end in."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from infra.errors import BadInput, Damaged
from infra.store.bundles import BundleRef, publish_bundle
from infra.store.shards import ShardRef, read_shard, write_shard
from infra.store.storage import Store, open_store
from models.config.algorithms import Capo
from models.config.data import ArithmeticData
from models.config.judges import DirectoryJudge, JudgeReward, StepsVerdict
from models.config.reward_terms import PatternSteps, RegexReward, TargetReward
from models.config.rewards import RewardConfig, ScoringConfig
from models.data.problems import load_problems
from models.records.schemas import ROLLOUT_SCHEMA, VERDICT_SCHEMA, score_schema
from models.records.versions import Outcome
from models.records.work import CreditWork, ScoredShard, ScoringWork, VerdictShard
from models.rewards.arithmetic_steps import wrong_steps
from models.rewards.evaluate import Case, Evaluator, check_rewards
from models.text.steps import StepValues, segment
from models.workers.scoring import ScoringWorker
from tests.support.policies import small_tokenizer

LINES = PatternSteps(pattern=r"\n")
STEPWISE = TargetReward(
    name="stepwise", target="tests.support.rewards:stepwise", per="step", steps=LINES, options={"scale": 2.0}
)
TOKENS = TargetReward(name="sizes", target="tests.support.rewards:lengths_of_tokens", per="token")
OUTCOME = RegexReward(pattern="1", weight=2.0)
Score = Callable[..., Outcome]


# ---- what a function returns


def test_a_function_is_given_the_steps_and_values_each():
    scoring = ScoringConfig(rewards=(STEPWISE,), timeout_seconds=2)
    evaluator = Evaluator(scoring)
    try:
        harms = ["few\n1", "many\n1", "text\n1", "words\n1", "endless\n1", "raise\n1", "leave\n1", "none\n1", "nan\n1"]
        cases = [Case("", text, "") for text in ("1\n2\n3", *harms, "crash\n1", "hang\n1", "4")]
        verdicts = evaluator.evaluate(cases)
    finally:
        evaluator.close()
    assert verdicts[0].values == (StepValues((2, 2, 1), (2.0, 4.0, 6.0)),)
    assert verdicts[-1].values == (StepValues((1,), (8.0,)),)
    errors = [verdict.error for verdict in verdicts[1:-1]]
    assert all(verdict.values == (None,) for verdict in verdicts[1:-1])
    assert errors[:5] == [
        "stepwise: expected 2 floats, one for each of the steps, found 1",
        "stepwise: expected 2 floats, one for each of the steps, found more",
        "stepwise: expected 2 floats, one for each of the steps, found str",
        "stepwise: expected a float, found str",
        "stepwise: expected 2 floats, one for each of the steps, found more",
    ]
    assert "RuntimeError: cannot judge" in str(errors[5])
    assert "SystemExit: 3" in str(errors[6])
    assert errors[7] == "stepwise: expected 2 floats, one for each of the steps, found NoneType"
    assert errors[8] == "stepwise: expected a finite float, found nan"
    assert "was killed by SIGSEGV" in str(errors[9])
    assert "no value after 2 s" in str(errors[10])


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (TargetReward(target="tests.support.rewards:length", per="step"), "(prompt, completion, answer, steps=…)"),
        (
            TargetReward(target="tests.support.rewards:stepwise", per="token"),
            "(prompt, completion, answer, tokens=…)",
        ),
        (TargetReward(target="tests.support.rewards:stepwise"), "missing a required argument: 'steps'"),
    ],
)
def test_a_function_that_does_not_take_its_parts_is_refused_before_anything_starts(reward, told):
    with pytest.raises(BadInput) as refused:
        check_rewards(ScoringConfig(rewards=(reward,)))
    assert told in str(refused.value)


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(ValueError, match="is not a regular expression"):
        PatternSteps(pattern="(")
    for nothing in ("", r"\s*"):
        with pytest.raises(ValueError, match="every character would be a step"):
            PatternSteps(pattern=nothing)


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


def write_rollouts(store: Store, *completions: str, spelt: tuple[str, ...] = (), group: int = 2) -> ShardRef:
    tokenizer = small_tokenizer()
    rows = []
    for index, completion in enumerate(completions):
        text = spelt[index] if spelt else completion
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        row = {"prompt_row": index // group, "sample": index % group, "prompt": "p", "answer": "1", "prompt_id": "x"}
        rows.append(
            row
            | {"completion": completion, "completion_tokens": tokens, "logprobs": [-1.0] * len(tokens), "seed": 0}
            | {"prompt_tokens": [5], "finish_reason": "stop"}
            | {"segments": [{"policy_version": 0, "tokens": len(tokens)}]}
        )
    table = pa.Table.from_pylist(rows, schema=ROLLOUT_SCHEMA)
    return write_shard(store, table, kind="rollouts", metadata={})


def columns(store: Store, outcome: Outcome) -> dict[str, list[object]]:
    return read_shard(store, outcome.shards[0]).to_pydict()


def test_a_score_shard_has_spans_and_values_and_their_aggregate_is_in_the_total(store, score):
    outcome = score(write_rollouts(store, "1\n20\n", "3"), OUTCOME, STEPWISE)
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
    assert columns(store, score(write_rollouts(store, "1\n20\n"), reward))["reward_stepwise"] == [value]


def test_tokens_have_values_of_their_own(store, score):
    found = columns(store, score(write_rollouts(store, "a字b", ""), TOKENS))
    assert found["spans_sizes"] == [[0, 1, 2, 3, 4, 5], [0]]
    assert found["values_sizes"] == [[1.0, 0.0, 0.0, 1.0, 1.0, 0.0], [0.0]]  # 字 is with the last of its tokens


def test_a_term_that_fails_is_missing_with_its_spans_and_the_reason(store, score):
    found = columns(store, score(write_rollouts(store, "few\n1", "1\n1"), OUTCOME, STEPWISE))
    assert (found["spans_stepwise"][0], found["values_stepwise"][0], found["reward_stepwise"][0]) == (None, None, None)
    assert found["reward"] == [None, 4.0]
    assert found["error"] == ["stepwise: expected 2 floats, one for each of the steps, found 1", None]
    assert found["reward_regex"] == [1.0, 1.0]


@pytest.mark.parametrize("reward", [STEPWISE, TOKENS])
def test_tokens_that_do_not_spell_the_completion_make_the_term_missing(store, score, reward):
    found = columns(store, score(write_rollouts(store, "1\n1", "2", spelt=("1\n2", "2")), reward))
    assert found["reward"][0] is None
    assert found["reward"][1] is not None
    assert found["error"][0] == f"{reward.name}: the completion's tokens do not spell its text"


def test_the_same_rollouts_give_the_same_shard_in_another_worker(store, score):
    rollouts = write_rollouts(store, "1\n20\n", "3")
    assert score(rollouts, OUTCOME, STEPWISE).shards == score(rollouts, OUTCOME, STEPWISE).shards


def test_scoring_steps_without_a_tokenizer_is_bad_input(store, tmp_path):
    worker = ScoringWorker(str(tmp_path), "run", ScoringConfig(rewards=(STEPWISE,)), Capo())
    with pytest.raises(BadInput, match="stepwise needs the policy's tokenizer"):
        worker.score(ScoringWork(iteration=1, rollouts=write_rollouts(store, "1")))


def test_a_damaged_tokenizer_is_noticed_and_other_files_are_not_read(store, tokenizer, score):
    folder = store.local(f"{tokenizer.key}/tokenizer.json").parent
    (folder / "tokenizer_config.json").write_text("changed")
    assert columns(store, score(write_rollouts(store, "1"), STEPWISE))["reward"] == [2.0]
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(Damaged, match=r"'tokenizer.json': expected digest"):
        score(write_rollouts(store, "2"), STEPWISE)


# ---- critiques become scores

JUDGE = JudgeReward(name="critic", model=DirectoryJudge(path="judge"), verdict=StepsVerdict(steps=LINES))


def write_verdicts(store: Store, *rows: tuple[int, int, int, int, list[int] | None]) -> ShardRef:
    names = ("prompt_row", "sample", "vote", "attempt", "steps")
    filled = [
        dict(zip(names, row, strict=True))
        | {"text": "", "tokens": 1, "value": None if row[-1] is None else 0.0, "error": None if row[-1] else "no"}
        for row in rows
    ]
    table = pa.Table.from_pylist(filled, schema=VERDICT_SCHEMA)
    return write_shard(store, table, kind="verdicts", metadata={})


def test_critiques_vote_on_steps_by_the_last_attempt_of_each_vote_and_unusable_ones_do_not_count(store, score):
    rollouts = write_rollouts(store, "1\n2\n3", "1\n2", "7", "8")
    verdicts = write_verdicts(
        store,
        (-1, 0, 0, 0, [0]),  # a canary
        *((0, 0, 0, 0, [0, 1]), (0, 0, 1, 0, None), (0, 0, 1, 1, [1, 2])),
        *((0, 1, 0, 0, []), (0, 1, 1, 0, [1])),
        *((1, 0, 0, 0, [0]), (1, 0, 1, 0, None)),
        *((1, 1, 0, 0, None), (1, 1, 1, 0, None)),
    )
    found = columns(store, score(rollouts, OUTCOME, JUDGE, verdicts=verdicts))
    assert found["values_critic"] == [[0.0, -1.0, 0.0], [0.0, 0.0], [-1.0], [0.0]]
    assert found["reward_critic"] == [pytest.approx(-1 / 3), 0.0, -1.0, 0.0]
    assert found["error"] == [None] * 4


def test_an_all_right_group_with_a_flagged_step_still_teaches(store, score, tmp_path):
    rollouts = write_rollouts(store, "1\n1", "1\n1")
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
def test_a_step_is_wrong_that_is_miscalculated_or_does_not_follow(work, flags):
    assert wrong_steps(PROMPT, work, "#### 15", steps=segment(work, SPACES)) == flags


def test_every_worked_answer_of_the_data_has_no_wrong_step():
    for problem in load_problems(ArithmeticData(train_problems=200, heldout_problems=8), "train", 0):
        steps = segment(str(problem.worked), SPACES)
        assert wrong_steps(str(problem.prompt), str(problem.worked), problem.answer, steps=steps) == [0.0] * 5


def test_a_problem_of_another_kind_is_no_zero():
    with pytest.raises(ValueError, match="expected an arithmetic problem"):
        wrong_steps("What is love?", "16", "16", steps=["16"])
