"""The engine that takes time instead of computing."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.paced import PacedEngine as PacedConfig
from infra.store.bundles import BundleRef
from models.config.engines import SamplingConfig
from models.config.judges import ScoreVerdict
from models.engines.protocol import Completion, Engine, Request, build_engine
from models.judges.local import LocalJudge
from models.judges.verdicts import Question, read_verdict
from models.records.model_input import ModelInput
from models.records.schemas import FinishReason
from models.records.versions import ModelVersion
from placement.measurements import LineSums, fit_line
from tests.support.inputs import asking, going_on
from tests.support.policies import small_tokenizer, write_policy

FAST = PacedConfig(base_seconds=0, per_sequence_seconds=0, median_tokens=30, sigma=0.5)
SAMPLING = SamplingConfig(max_new_tokens=200)
REQUESTS = [asking(row, (5, 6, 7), range(50 * row, 50 * row + 50)) for row in range(4)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    write_policy(path)
    return path


def engine_of(directory: Path, config: PacedConfig = FAST, *, version: int = 0) -> Engine:
    engine = build_engine(config)
    weights = BundleRef(key="policies/d1ge57", digest="d1ge57", bytes=0)
    engine.load(directory, ModelVersion(version=version, weights=weights))
    return engine


def completions_of(engine: Engine, requests: list[Request] = REQUESTS) -> list[Completion]:
    return [completion for group in engine.generate(requests, SAMPLING) for completion in group]


def mean_length(completions: list[Completion]) -> float:
    return sum(len(completion.tokens) for completion in completions) / len(completions)


def test_same_seeds_give_same_completions_whoever_their_neighbours_are(directory: Path) -> None:
    together = completions_of(engine_of(directory))
    apart = [completion for request in REQUESTS for completion in completions_of(engine_of(directory), [request])]
    assert together == apart
    assert len({len(completion.tokens) for completion in together}) > 20


def test_lengths_follow_the_distribution_and_drift_from_version_to_version(directory: Path) -> None:
    drifting = FAST.model_copy(update={"drift": 1.5})
    first, third = (completions_of(engine_of(directory, drifting, version=version)) for version in (0, 2))
    median = sorted(len(completion.tokens) for completion in first)[100]
    assert 26 <= median <= 34
    assert mean_length(third) == pytest.approx(2.25 * mean_length(first), rel=0.05)


def test_a_completion_ends_with_eos_unless_it_was_as_long_as_it_may_be(directory: Path) -> None:
    eos = small_tokenizer().eos_token_id
    long = completions_of(engine_of(directory, FAST.model_copy(update={"median_tokens": 150})))
    for completion in long:
        stopped = completion.finish_reason is FinishReason.STOP
        assert (completion.tokens[-1] == eos) == stopped
        assert stopped or (completion.finish_reason, len(completion.tokens)) == (FinishReason.LENGTH, 200)
        assert len(completion.logprobs) == len(completion.tokens)
        assert "\N{REPLACEMENT CHARACTER}" not in completion.text
    assert len({completion.finish_reason for completion in long}) == 2


def test_a_completion_that_is_cut_goes_on_to_the_same_end(directory: Path) -> None:
    engine = engine_of(directory)
    asked = asking(0, [5], [3])
    whole = engine.generate([asked], SAMPLING)[0][0]
    cut = engine.generate([replace(asked, budget=10)], SAMPLING)[0][0]
    rest = engine.generate([going_on(asked, [cut.tokens], budget=500)], SAMPLING)[0][0]
    assert (cut.finish_reason, rest.finish_reason) == (FinishReason.CUT, FinishReason.STOP)
    assert cut.tokens + rest.tokens == whole.tokens
    assert rest.text == whole.text


def test_a_judge_that_is_paced_writes_one_of_its_endings_as_verdict(directory: Path) -> None:
    endings = FAST.model_copy(update={"endings": ("score: 2", "score: 7")})
    judge = LocalJudge(endings, SAMPLING, verdict=ScoreVerdict(), chat=False, threads=1)
    judge.load(directory, ModelVersion(version=0, weights=BundleRef(key="judges/d1", digest="d1", bytes=0)))
    answers = judge.ask([Question(text="Is it right?", seed=seed) for seed in range(100)])
    values = [read_verdict(answer, ScoreVerdict()).value for answer in answers]
    assert set(values) == {0.2, 0.7}


def test_nothing_before_an_ending_repeats_a_part_of_it(directory: Path) -> None:
    word = small_tokenizer()(" many", add_special_tokens=False)["input_ids"]
    assert len(word) == 1  # random tokens would say it by chance
    for completion in completions_of(engine_of(directory, FAST.model_copy(update={"endings": (" many",)}))):
        assert completion.text.count(" many") == 1


def test_a_batch_takes_at_least_the_time_of_its_steps_and_progress_moves_meanwhile(directory: Path) -> None:
    config = FAST.model_copy(update={"base_seconds": 0.01, "per_sequence_seconds": 0.001, "setup_seconds": 0.02})
    engine = engine_of(directory, config)
    requests = [asking(0, [5], range(12))]
    began, before = time.perf_counter(), engine.progress
    lengths = [len(completion.tokens) for completion in completions_of(engine, requests)]
    took, sums = time.perf_counter() - began, engine.steps()
    expected = 12 * 0.02 + 0.01 * max(lengths) + 0.001 * sum(lengths)
    assert 0.99 < took / expected < 3  # a busy machine wakes sleepers late, never early
    assert (sums.steps, sums.sequences) == (max(lengths), sum(lengths))
    assert engine.progress - before >= took / 0.5


def test_loading_takes_its_time(directory: Path) -> None:
    began = time.perf_counter()
    engine = engine_of(directory, FAST.model_copy(update={"load_seconds": 0.6}))
    assert time.perf_counter() - began >= 0.6
    assert engine.progress >= 2


def test_step_times_regress_to_the_pace_that_was_configured(directory: Path) -> None:
    config = FAST.model_copy(update={"base_seconds": 0.005, "per_sequence_seconds": 0.0005, "median_tokens": 20})
    engine = engine_of(directory, config)
    for _ in range(3):
        completions_of(engine, [asking(0, [5], range(24))])
    sums = engine.steps()
    line = LineSums(
        count=sums.steps, x=sums.sequences, xx=sums.sequences_squared, y=sums.seconds, xy=sums.sequence_seconds
    )
    base, slope = fit_line(line, prior=(0, 0))
    assert base == pytest.approx(0.005, rel=0.2)
    assert slope == pytest.approx(0.0005, rel=0.2)


def test_continuations_are_equally_likely_after_one_step(directory: Path) -> None:
    engine = engine_of(directory)
    logprobs = engine.likelihoods([ModelInput.given([1, 2]), ModelInput.given([3])], [(4,), (5, 6)])
    assert len(logprobs) == 2
    assert {value for row in logprobs for value in row} == {logprobs[0][0]}
    assert engine.steps().steps == 1
