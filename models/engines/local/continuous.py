"""Continuous batching of concurrent calls with the local engine: rows join and leave the batch between decoding steps.

A row is one completion. One thread decodes, and the calls of other threads wait for their rows.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Event, Thread
from types import TracebackType
from typing import Final, Self, TypeVar

import torch

from rheostat.infra.errors import WorkerAsleep
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.local.decoding import RowDecoder
from rheostat.models.engines.local.loaded_policy import LoadedPolicy, sequence_scores
from rheostat.models.engines.protocol import Completion, Generate, Request, SequenceScores
from rheostat.models.engines.requests import CompletionRow, build_rows, require_context, require_engine_room
from rheostat.models.records.model_input import ModelInput

_JOIN_SHARE: Final = 0.125
"""Number of waiting rows, as a share of the batch, at which they join at once. Joining may copy the KV cache."""
_MAX_DELAY: Final = 8
"""Maximum number of decoding steps for which a row waits until more rows join with it."""

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Call:
    """Call of `generate` that waits for its rows."""

    sampling: SamplingConfig
    num_rows: int
    abandoned: tuple[Event, ...]
    """Events of the requests. The call is abandoned when one of them is set."""
    finished: dict[tuple[int, int], Completion] = field(default_factory=dict)
    """Completions of the finished rows, by index of the request and index of the sample."""
    done: Future[dict[tuple[int, int], Completion]] = field(default_factory=Future)
    """Completions of all rows, or the error that ended the decoder. Cancelled if the call is abandoned."""

    def shares_distribution(self, sampling: SamplingConfig) -> bool:
        """Return whether tokens for this call are sampled in the same way as with the given settings."""
        mine = self.sampling
        return (mine.temperature, mine.top_p, mine.top_k) == (sampling.temperature, sampling.top_p, sampling.top_k)


@dataclass(eq=False, slots=True)
class _Scoring:
    """Call of `score_tokens` that waits for its result."""

    tokens: Sequence[int]
    top: int
    done: Future[SequenceScores] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Number of completions that an engine is decoding, and of those that wait until they are decoded."""

    decoding: int
    waiting: int


class ContinuousDecoder:
    """Engine that batches concurrent calls of `generate` and decodes at most `places` rows together. It is a context
    manager: calls are possible inside its block, in which a thread decodes. Use each decoder for one block.

    Rows join in the order in which their calls arrived. They wait for a few steps if they are few, because joining may
    copy the whole KV cache. If a cache layer does not grow with every token, rows join only when the batch is empty.
    Rows whose distribution settings (temperature, top_p, top_k) differ from those of the batch also wait until then. If
    decoding fails, all calls raise the error.

    `on_step` is called in the decoding thread after every forward pass, with the number of rows that it advanced, or 0
    after a prefill.
    """

    def __init__(self, policy: LoadedPolicy, *, places: int, on_step: Callable[[int], None]) -> None:
        self._policy, self.places, self._on_step = policy, places, on_step
        self._changed = Condition()
        self._calls: set[_Call] = set()
        """Calls that have not returned."""
        self._waiting: deque[tuple[_Call, CompletionRow]] = deque()
        self._scorings: deque[_Scoring] = deque()
        self._decoding: dict[int, tuple[_Call, CompletionRow]] = {}
        """Unfinished rows in the batch, by slot."""
        self._delay = 0
        """Number of steps for which the first waiting row has waited."""
        self._end: BaseException | None = None
        """Error of the calls that are unfinished when decoding ends, and of later calls."""
        self._thread = Thread(target=self._run, name="decoding", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End decoding after the current step. Unfinished calls raise WorkerAsleep."""
        with self._changed:
            self._end = self._end or WorkerAsleep(
                f"the policy with digest {self._policy.digest} no longer generates completions"
            )
            self._changed.notify()
        self._thread.join()

    def run_interleaved(self, work: Callable[[Generate], T]) -> T:
        """Call `work` with `generate` and return its result."""
        with self:
            return work(self.generate)

    @property
    def failure(self) -> BaseException | None:
        """Error that ended decoding, or None if decoding has not ended."""
        return self._end

    @property
    def load(self) -> EngineLoad:
        """Number of rows in the batch and number of waiting rows."""
        with self._changed:
            unfinished = sum(call.num_rows - len(call.finished) for call in self._calls)
            return EngineLoad(decoding=unfinished - len(self._waiting), waiting=len(self._waiting))

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        """Generate completions, in any thread, together with those of other calls. Returns one list per request, in
        order, with one completion per seed of the request.

        If an event `abandoned` of the requests is set, the rows leave the batch after the current decoding step. The
        call then raises `concurrent.futures.CancelledError` unless it has finished.

        Raises BadInput if a request does not fit into the policy's context, Quarantined if the policy computes a logit
        that is not finite, and WorkerAsleep if the decoder's block ends before the completions have finished.
        """
        assert self._thread.ident is not None, "generate before the decoder's block"
        require_engine_room(requests, sampling, context=self._policy.context)
        if not (rows := build_rows(requests, longest=sampling.max_new_tokens)):
            return [[] for _ in requests]
        call = _Call(sampling, len(rows), tuple(each.abandoned for each in requests if each.abandoned is not None))
        with self._changed:
            if self._end is not None:
                raise self._end
            self._calls.add(call)
            self._waiting.extend((call, row) for row in rows)
            self._changed.notify()
        finished = call.done.result()
        return [[finished[index, sample] for sample in range(len(each.seeds))] for index, each in enumerate(requests)]

    @property
    def can_score_tokens(self) -> bool:
        """True for every policy."""
        return True

    def score_tokens(self, tokens: Sequence[int], top: int, /) -> SequenceScores:
        """Return the log-probs of the tokens of a sequence, and the `top` most probable tokens at each place, in any
        thread. They are computed between two decoding steps.

        Raises the same errors as `generate`.
        """
        require_context([ModelInput.from_prompt(tokens)], 0, context=self._policy.context)
        scoring = _Scoring(tokens, top)
        with self._changed:
            if self._end is not None:
                raise self._end
            self._scorings.append(scoring)
            self._changed.notify()
        return scoring.done.result()

    @torch.inference_mode()
    def _run(self) -> None:
        """Decode until the block ends or decoding fails, then end the unfinished calls with an error."""
        decoder: RowDecoder | None = None
        try:
            while self._wait_for_work():
                self._score_one()
                if not (self._waiting or self._decoding):
                    continue
                if decoder is None or not decoder.num_alive:
                    decoder = RowDecoder(self._policy, self._waiting[0][0].sampling, on_step=self._on_step)
                if rows := self._take_rows(decoder):
                    self._admit(decoder, rows)
                self._finish(decoder, decoder.step())
                self._drop_abandoned(decoder)
        except BaseException as error:
            self._end = error
        with self._changed:
            for call in self._calls:
                call.done.set_exception(self._end)
            for scoring in self._scorings:
                scoring.done.set_exception(self._end)

    def _wait_for_work(self) -> bool:
        """Wait until a row or a scoring is unfinished, and return True. Return False when the block has ended."""
        with self._changed:
            while not (self._waiting or self._scorings or self._decoding or self._end):
                self._changed.wait()
            return self._end is None

    def _score_one(self) -> None:
        """Compute the log-probs of the first sequence that waits for them, if any."""
        if self._scorings:
            scoring = self._scorings[0]
            scores = sequence_scores(self._policy, scoring.tokens, scoring.top)
            self._on_step(0)
            self._scorings.popleft()
            scoring.done.set_result(scores)

    def _take_rows(self, decoder: RowDecoder) -> list[tuple[_Call, CompletionRow]]:
        """Remove the rows that join the batch now from the waiting rows, and return them."""
        with self._changed:
            count, free = len(self._waiting), self.places - decoder.num_alive
            is_due = count >= _JOIN_SHARE * decoder.num_alive or self._delay >= _MAX_DELAY
            if not (count and free and is_due and decoder.admits_rows):
                self._delay += bool(count)
                return []
            self._delay = 0
            rows: list[tuple[_Call, CompletionRow]] = []
            while self._waiting and len(rows) < free and self._waiting[0][0].shares_distribution(decoder.sampling):
                rows.append(self._waiting.popleft())
            return rows

    def _admit(self, decoder: RowDecoder, rows: list[tuple[_Call, CompletionRow]]) -> None:
        """Add rows to the batch. Rows with the same prompt become neighbors, so that its forward pass is shared."""
        rows.sort(key=lambda each: (len(each[1].input), each[1].input.tokens.tobytes()))
        slots = decoder.add([row for _, row in rows], [call.sampling for call, _ in rows])
        self._decoding.update(zip(slots, rows, strict=True))
        decoder.admit(slots)

    def _finish(self, decoder: RowDecoder, slots: Sequence[int]) -> None:
        """Pass the completions of finished rows to their calls. A call returns after its last row."""
        for slot, completion in zip(slots, decoder.pop(slots) if slots else (), strict=True):
            call, row = self._decoding.pop(slot)
            call.finished[row.request, row.sample] = completion
            if len(call.finished) == call.num_rows:
                with self._changed:
                    self._calls.remove(call)
                call.done.set_result(call.finished)

    def _drop_abandoned(self, decoder: RowDecoder) -> None:
        """Remove the rows of abandoned calls from the batch and from the waiting rows, and cancel the calls."""
        with self._changed:
            ended = {call for call in self._calls if any(event.is_set() for event in call.abandoned)}
            if not ended:
                return
            self._calls -= ended
            self._waiting = deque(each for each in self._waiting if each[0] not in ended)
        if slots := [slot for slot, (call, _) in self._decoding.items() if call in ended]:
            decoder.drop(slots)
        self._decoding = {slot: each for slot, each in self._decoding.items() if each[0] not in ended}
        for call in ended:
            call.done.cancel()
