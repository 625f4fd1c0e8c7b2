"""Continuous batching with the transformers engine: the claims about every engine with one thread per request, and rows
that join the batch while others are decoded."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import torch

from rheostat.infra.errors import BadInput, Quarantined, WorkerAsleep
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.engines.local import decoding_batch
from rheostat.models.engines.local.continuous import ContinuousDecoder, EngineLoad
from rheostat.models.engines.local.decoding import RowDecoder
from rheostat.models.engines.local.engine import HuggingFaceEngine
from rheostat.models.engines.local.kv_cache import replace_in_place, trim_in_place
from rheostat.models.engines.local.loaded_policy import LoadedPolicy
from rheostat.models.engines.protocol import Completion, Request
from rheostat.models.engines.requests import build_rows
from rheostat.models.modeling.policy import load_policy
from tests.support.engines import *  # noqa: F403  # pytest collects the claims about every engine here
from tests.support.engines import EOS, MIXED, Loaded, engine_of, find_readable_completion, load_if_needed, request
from tests.support.inputs import request_continuations
from tests.support.policies import CONTEXT, small_tokenizer, write_policy

LONG = SamplingConfig(max_new_tokens=100)
HYBRID = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
LIMIT = 60
"""Maximum number of seconds for which a test waits for another thread."""


class ThreadPerRequest(HuggingFaceEngine):
    """Engine that generates the completions of each request in a call of its own, all at the same time."""

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        with self.batch_continuously() as decoder, ThreadPoolExecutor(len(requests)) as threads:
            groups = threads.map(lambda each: decoder.generate([each], sampling), requests)
            return [group for [group] in groups]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return partial(load_if_needed, ThreadPerRequest(TransformersEngine()))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    write_policy(path, eos_share=0.001)
    return path


def read_policy(directory: Path) -> LoadedPolicy:
    """Load the policy in a directory."""
    tokenizer = small_tokenizer()
    end = torch.tensor([tokenizer.eos_token_id])
    return LoadedPolicy(load_policy(directory).eval(), tokenizer, "digest", end, CONTEXT)


class Steps:
    """Record of a decoder's forward passes. It can stop decoding before a pass until more rows are waiting."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        """Number of rows of each decoding step. 0 is a prefill."""
        self.prompts: list[int] = []
        """Number of prompts of each prefill."""
        self.rows: list[int] = []
        """Number of rows, also finished ones, of each decoding step."""
        self.actions: dict[int, Callable[[], object]] = {}
        """Functions that are called after a pass, by the number of the pass."""
        self.reached = Event()
        self._pause: tuple[int, int] | None = None
        self._num_waiting: Callable[[], int]

    def pause_after(self, num_steps: int, *, num_waiting: int) -> None:
        """Stop decoding after `num_steps` passes until `num_waiting` rows are waiting."""
        self._pause = num_steps, num_waiting

    def on_step(self, count: int) -> None:
        self.counts.append(count)
        self.actions.get(len(self.counts), lambda: None)()
        if self._pause is not None and len(self.counts) == self._pause[0]:
            self.reached.set()
            self.wait_for_rows(self._pause[1])

    def wait_for_rows(self, num_waiting: int) -> None:
        """Return when `num_waiting` rows are waiting."""
        end = time.monotonic() + LIMIT
        while self._num_waiting() < num_waiting and time.monotonic() < end:
            time.sleep(0.001)

    @contextmanager
    def decoder(self, directory: Path, *, places: int = 512) -> Iterator[ContinuousDecoder]:
        """Run the block with a decoder of the policy in a directory."""
        policy = read_policy(directory)
        policy.model.register_forward_pre_hook(self._note_pass, with_kwargs=True)
        with ContinuousDecoder(policy, places=places, on_step=self.on_step) as decoder:
            self._num_waiting = lambda: decoder.load.waiting
            yield decoder

    def _note_pass(self, model: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        num_rows, num_tokens = kwargs["input_ids"].shape
        (self.prompts if num_tokens > 1 else self.rows).append(num_rows)


def generate_in_two_calls(
    directory: Path,
    first: list[Request],
    second: list[Request],
    *,
    samplings: tuple[SamplingConfig, SamplingConfig] = (LONG, LONG),
    places: int = 512,
) -> tuple[Steps, list[list[Completion]], list[list[Completion]]]:
    """Return the completions of two calls, of which the second arrives after five passes of the first."""
    steps = Steps()
    steps.pause_after(5, num_waiting=sum(len(each.seeds) for each in second))
    with steps.decoder(directory, places=places) as decoder, ThreadPoolExecutor(2) as threads:
        started = threads.submit(decoder.generate, first, samplings[0])
        assert steps.reached.wait(LIMIT)
        joined = threads.submit(decoder.generate, second, samplings[1])
        return steps, started.result(LIMIT), joined.result(LIMIT)


def require_equal(groups: list[list[Completion]], others: list[list[Completion]]) -> None:
    """Check that completions are equal, except that sums may be rounded differently in other batches."""
    for group, other in zip(groups, others, strict=True):
        for one, same in zip(group, other, strict=True):
            assert (one.tokens, one.text, one.finish_reason) == (same.tokens, same.text, same.finish_reason)
            assert one.logprobs == pytest.approx(same.logprobs, abs=2e-5)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("architecture", "changes", "joins"), [("llama", {}, True), ("mistral", {}, False), ("qwen3", HYBRID, False)]
)
def test_a_call_that_arrives_during_decoding_gives_the_completions_that_it_gives_alone(
    architecture, changes, joins, tmp_path
):
    write_policy(tmp_path, architecture, changes=changes, eos_share=0.01)
    engine = engine_of(tmp_path)
    steps, first, second = generate_in_two_calls(tmp_path, MIXED[:3], MIXED[3:])
    require_equal(first, engine.generate(MIXED[:3], LONG))
    require_equal(second, engine.generate(MIXED[3:], LONG))
    assert steps.counts[:2] == [0, 12]
    assert (max(steps.counts) > 12) is joins
    assert (steps.counts.index(0, 1) == 5) is joins


@pytest.mark.parametrize(("length", "num_replacements"), [(7, 1), (60, 0)])
def test_rows_take_the_places_of_finished_rows_if_the_batch_is_wide_enough(
    length, num_replacements, directory, monkeypatch
):
    replacements = []
    monkeypatch.setattr(
        decoding_batch,
        "replace_in_place",
        lambda *arguments: replacements.append(replace_in_place(*arguments)),
    )
    work = [request(3, 20, group=13), replace(request(4, 11, group=3), budget=2)]
    steps, first, second = generate_in_two_calls(directory, work, [request(5, length, group=3)])
    assert len(replacements) == num_replacements
    assert max(steps.rows) == 16
    engine = engine_of(directory)
    require_equal(first, engine.generate(work, LONG))
    require_equal(second, engine.generate([request(5, length, group=3)], LONG))


def test_a_finished_row_that_is_longer_than_all_others_does_not_slow_down_every_step(directory, monkeypatch):
    trims = []
    monkeypatch.setattr(decoding_batch, "trim_in_place", lambda *arguments: trims.append(trim_in_place(*arguments)))
    long = replace(request(4, CONTEXT - 100, group=3), budget=2)
    steps, _, _ = generate_in_two_calls(directory, [request(3, 7, group=13), long], [request(5, 7, group=2)])
    assert max(steps.rows) == 16, "a finished row is still in the batch"
    assert len(trims) == 1, "trimming copies the whole KV cache"


@torch.inference_mode()
def test_a_slot_is_not_reused_while_its_finished_row_is_in_the_batch(directory):
    work = [replace(request(1, 9, group=1), budget=2), request(2, 9, group=7), request(3, 9, group=2)]
    rows = build_rows(work, longest=LONG.max_new_tokens)
    decoder = RowDecoder(read_policy(directory), LONG, on_step=lambda count: None)
    decoder.admit(decoder.add(rows[:8], [LONG] * 8))
    assert [decoder.step(), decoder.step()] == [[], [0]]
    assert [len(each.tokens) for each in decoder.pop([0])] == [2]
    assert decoder.add(rows[8:9], [LONG]) == [8]
    decoder.admit([8])
    assert decoder.add(rows[9:], [LONG]) == [0]


def test_rows_wait_for_places_and_join_when_others_have_finished(directory):
    steps, first, second = generate_in_two_calls(directory, MIXED[:2], MIXED[2:], places=5)
    assert max(steps.counts) == 5
    engine = engine_of(directory)
    require_equal(first + second, engine.generate(MIXED[:2], LONG) + engine.generate(MIXED[2:], LONG))


def test_equal_prompts_of_calls_that_join_together_are_processed_once(directory):
    alone = [replace(MIXED[0], inputs=MIXED[0].inputs[:1], seeds=(seed,)) for seed in MIXED[0].seeds]
    steps = Steps()
    steps.pause_after(5, num_waiting=8)
    with steps.decoder(directory) as decoder, ThreadPoolExecutor(6) as threads:
        threads.submit(decoder.generate, [request(99, 12, group=8)], LONG)
        assert steps.reached.wait(LIMIT)
        calls = [threads.submit(decoder.generate, [each], LONG) for each in [*alone[:2], *MIXED[1:2], *alone[2:]]]
        groups = [call.result(LIMIT)[0] for call in calls]
    assert steps.prompts == [1, 2]
    engine = engine_of(directory)
    require_equal([[*groups[0], *groups[1], *groups[3], *groups[4]], groups[2]], engine.generate(MIXED[:2], LONG))


def test_calls_with_other_settings_keep_their_settings(directory):
    engine = engine_of(directory)
    asked, free = find_readable_completion(engine, request(8, 9, group=32))
    stop = small_tokenizer().decode(free.tokens[3:6])
    stops = SamplingConfig(max_new_tokens=70, stop=(stop,))
    for sampling in (stops, SamplingConfig(temperature=0, max_new_tokens=20), SamplingConfig(top_k=3)):
        steps, first, second = generate_in_two_calls(directory, [MIXED[1]], [asked], samplings=(LONG, sampling))
        require_equal(first, engine.generate([MIXED[1]], LONG))
        require_equal(second, engine.generate([asked], sampling))
        assert (5 in steps.counts) is (sampling is stops), "only rows of one distribution are decoded together"


def test_a_completion_that_was_cut_continues_with_its_random_numbers(directory):
    engine = engine_of(directory)
    [whole] = engine.generate([MIXED[0]], LONG)
    cut = replace(MIXED[0], budget=3)
    _, _, [begun] = generate_in_two_calls(directory, [MIXED[1]], [cut])
    assert all(len(each.tokens) == 3 and EOS not in each.tokens for each in begun)
    rest = request_continuations(MIXED[0], [each.tokens for each in begun])
    _, _, [ended] = generate_in_two_calls(directory, [MIXED[1]], [rest])
    assert [one.tokens + two.tokens for one, two in zip(begun, ended, strict=True)] == [one.tokens for one in whole]


def test_weights_that_are_not_numbers_end_all_calls_with_the_error(tmp_path):
    write_policy(tmp_path)
    steps = Steps()
    steps.pause_after(1, num_waiting=4)
    with steps.decoder(tmp_path) as decoder, ThreadPoolExecutor(2) as threads:
        decoder._policy.model.lm_head.weight.data[17] = torch.nan
        calls = [threads.submit(decoder.generate, [MIXED[0]], LONG)]
        assert steps.reached.wait(LIMIT)
        calls.append(threads.submit(decoder.generate, [MIXED[1]], LONG))
        for call in calls:
            with pytest.raises(Quarantined, match=r"policy.* digest .*prompt row 0, sample 0"):
                call.result(LIMIT)
        with pytest.raises(Quarantined):
            decoder.generate([MIXED[2]], LONG)


def test_the_end_of_the_block_ends_the_calls_that_are_decoded_or_wait(directory):
    steps = Steps()
    steps.pause_after(5, num_waiting=4)
    with ThreadPoolExecutor(2) as threads:
        with steps.decoder(directory, places=4) as decoder:
            calls = [threads.submit(decoder.generate, [MIXED[0]], LONG)]
            assert steps.reached.wait(LIMIT)
            calls.append(threads.submit(decoder.generate, [MIXED[1]], LONG))
        for call in calls:
            with pytest.raises(WorkerAsleep, match="digest"):
                call.result(LIMIT)
    with pytest.raises(WorkerAsleep):
        decoder.generate([MIXED[2]], LONG)


@pytest.mark.parametrize("num_dropped", [1, 4])
def test_the_rows_of_an_abandoned_call_leave_the_batch_and_the_queue(num_dropped, directory):
    steps, abandoned = Steps(), Event()
    steps.pause_after(5, num_waiting=14)
    steps.actions[9] = abandoned.set
    kept, later = request(3, 11, group=7), request(7, 9, group=2)
    with steps.decoder(directory, places=7 + num_dropped) as decoder, ThreadPoolExecutor(4) as threads:
        calls = [
            threads.submit(decoder.generate, [replace(request(4, 20, group=num_dropped), abandoned=abandoned)], LONG)
        ]
        assert steps.reached.wait(LIMIT)
        joined = threads.submit(decoder.generate, [replace(kept, abandoned=Event())], LONG)
        steps.wait_for_rows(7)
        calls.append(threads.submit(decoder.generate, [replace(request(6, 20, group=5), abandoned=abandoned)], LONG))
        steps.wait_for_rows(12)
        last = threads.submit(decoder.generate, [later], LONG)
        for call in calls:
            with pytest.raises(CancelledError):
                call.result(LIMIT)
        groups = joined.result(LIMIT) + last.result(LIMIT)
        assert decoder.load == EngineLoad(decoding=0, waiting=0)
    require_equal(groups, engine_of(directory).generate([kept, later], LONG))
    assert steps.counts[5:9] == [0, 7 + num_dropped, 7 + num_dropped, 7 + num_dropped]
    assert steps.counts[9:11] == [0, 7 + min(num_dropped, 2)]


def test_a_request_that_does_not_fit_is_refused_and_the_other_calls_continue(directory):
    steps = Steps()
    with steps.decoder(directory) as decoder, ThreadPoolExecutor(1) as threads:
        call = threads.submit(decoder.generate, [MIXED[0]], LONG)
        with pytest.raises(BadInput, match="prompt row 6"):
            decoder.generate([request(6, CONTEXT)], LONG)
        assert decoder.generate([], LONG) == []
        require_equal(call.result(LIMIT), engine_of(directory).generate([MIXED[0]], LONG))
