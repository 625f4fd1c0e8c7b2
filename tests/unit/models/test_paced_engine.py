"""The engine that sleeps instead of computing."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.paced import PacedEngine as PacedConfig
from rheostat.infra.store.bundles import BundleRef
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.verdicts import ScoreVerdict
from rheostat.models.engines.protocol import Completion, Engine, Request, build_engine
from rheostat.models.judges.local import LocalJudge
from rheostat.models.judges.verdicts import Question, read_verdict
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.versions import ModelVersion
from rheostat.placement.measurements import LineSums, fit_line
from tests.support.inputs import request_completions, request_continuations
from tests.support.policies import small_tokenizer, write_policy

FAST = PacedConfig(base_seconds=0, per_sequence_seconds=0, median_tokens=30, sigma=0.5)
SAMPLING = SamplingConfig(max_new_tokens=200)
REQUESTS = [request_completions(row, (5, 6, 7), range(50 * row, 50 * row + 50)) for row in range(4)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a small policy."""
    path = tmp_path_factory.mktemp("policy")
    write_policy(path)
    return path


def load_engine(directory: Path, *, version: int = 0, **settings: object) -> Engine:
    engine = build_engine(FAST.model_copy(update=settings))
    weights = BundleRef(key="policies/d1ge57", digest="d1ge57", bytes=0)
    engine.load(directory, ModelVersion(version=version, weights=weights))
    return engine


def generate(engine: Engine, requests: list[Request] = REQUESTS) -> list[Completion]:
    return [completion for group in engine.generate(requests, SAMPLING) for completion in group]


def mean_length(completions: list[Completion]) -> float:
    return sum(len(completion.tokens) for completion in completions) / len(completions)


def test_a_seed_gives_the_same_completion_in_every_batch(directory):
    together = generate(load_engine(directory))
    apart = [completion for request in REQUESTS for completion in generate(load_engine(directory), [request])]
    assert together == apart
    assert len({len(completion.tokens) for completion in together}) > 20


def test_lengths_follow_the_distribution_and_drift_from_version_to_version(directory):
    first, third = (generate(load_engine(directory, drift=1.5, version=version)) for version in (0, 2))
    median = sorted(len(completion.tokens) for completion in first)[100]
    assert 26 <= median <= 34
    assert mean_length(third) == pytest.approx(2.25 * mean_length(first), rel=0.05)


def test_a_completion_ends_with_eos_unless_it_reaches_the_length_limit(directory):
    eos = small_tokenizer().eos_token_id
    long = generate(load_engine(directory, median_tokens=150))
    for completion in long:
        stopped = completion.finish_reason is FinishReason.STOP
        assert (completion.tokens[-1] == eos) == stopped
        assert stopped or (completion.finish_reason, len(completion.tokens)) == (FinishReason.LENGTH, 200)
        assert len(completion.logprobs) == len(completion.tokens)
        assert "\N{REPLACEMENT CHARACTER}" not in completion.text
    assert len({completion.finish_reason for completion in long}) == 2


def test_a_completion_that_is_cut_continues_to_the_same_end(directory):
    engine = load_engine(directory)
    request = request_completions(0, [5], [3])
    whole = engine.generate([request], SAMPLING)[0][0]
    cut = engine.generate([replace(request, budget=10)], SAMPLING)[0][0]
    rest = engine.generate([request_continuations(request, [cut.tokens], budget=500)], SAMPLING)[0][0]
    assert (cut.finish_reason, rest.finish_reason) == (FinishReason.CUT, FinishReason.STOP)
    assert cut.tokens + rest.tokens == whole.tokens
    assert rest.text == whole.text


def test_a_paced_judge_returns_one_of_its_endings_as_verdict(directory):
    endings = FAST.model_copy(update={"endings": ("score: 2", "score: 7")})
    judge = LocalJudge(endings, SAMPLING, verdict=ScoreVerdict(), chat=False, threads=1)
    judge.load(directory, ModelVersion(version=0, weights=BundleRef(key="judges/d1", digest="d1", bytes=0)))
    answers = judge.answer([Question(text="Is it right?", seed=seed) for seed in range(100)])
    values = [read_verdict(answer, ScoreVerdict()).value for answer in answers]
    assert set(values) == {0.2, 0.7}


def test_the_text_before_an_ending_contains_no_part_of_it(directory):
    word = small_tokenizer()(" many", add_special_tokens=False)["input_ids"]
    assert len(word) == 1  # random tokens would say it by chance
    for completion in generate(load_engine(directory, endings=(" many",))):
        assert completion.text.count(" many") == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Clock of the engine, which only sleeps advance."""
    clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr("bench.paced_engine.time", clock)
    return clock


def test_a_batch_takes_the_time_of_its_steps_and_reports_progress(directory, clock):
    engine = load_engine(directory, base_seconds=0.01, per_sequence_seconds=0.001, setup_seconds=0.02)
    began, before = clock.now, engine.progress
    lengths = [len(completion.tokens) for completion in generate(engine, [request_completions(0, [5], range(12))])]
    seconds, sums = clock.now - began, engine.step_sums()
    assert seconds == pytest.approx(12 * 0.02 + 0.01 * max(lengths) + 0.001 * sum(lengths))
    assert (sums.steps, sums.sequences) == (max(lengths), sum(lengths))
    assert engine.progress - before >= seconds / 0.5


def test_loading_takes_the_configured_time(directory, clock):
    began = clock.now
    engine = load_engine(directory, load_seconds=0.6)
    assert clock.now - began == pytest.approx(0.6)
    assert engine.progress >= 2


def test_the_configured_pace_is_the_regression_of_the_step_times(directory, clock):
    engine = load_engine(directory, base_seconds=0.005, per_sequence_seconds=0.0005, median_tokens=20)
    generate(engine, [request_completions(0, [5], range(24))])
    sums = engine.step_sums()
    line = LineSums(
        count=sums.steps, x=sums.sequences, xx=sums.sequences_squared, y=sums.seconds, xy=sums.sequence_seconds
    )
    assert fit_line(line, prior=(0, 0)) == pytest.approx((0.005, 0.0005), rel=0.01)


def test_all_continuations_are_equally_likely_and_take_one_step(directory):
    engine = load_engine(directory)
    logprobs = engine.score_continuations([ModelInput.from_prompt([1, 2]), ModelInput.from_prompt([3])], [(4,), (5, 6)])
    assert len(logprobs) == 2
    assert {value for row in logprobs for value in row} == {logprobs[0][0]}
    assert engine.step_sums().steps == 1
