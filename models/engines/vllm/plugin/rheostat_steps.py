"""Timing of decoding steps, measured where vLLM's engine returns its outputs."""

import asyncio
import time
from typing import TYPE_CHECKING

from rheostat_internals import count_sequences, observe_steps
from vllm import AsyncLLMEngine

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs

BREATH_SECONDS = 0.05
"""Seconds between two pauses in which other asyncio tasks run. Output lines that were collected since the last pause
are then sent together."""
BREATH_TURNS = 8
"""Number of event-loop iterations in one pause for other asyncio tasks. This many are needed to send a chunk to the
caller."""


class Steps:
    """Sums over the decoding steps of this server, from which the duration of a step is estimated as a function of the
    batch size.

    A step that begins a completion is a prefill and is not counted, unless the completion has only one token.
    """

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._steps = 0
        self._sequences = 0
        self._sequences_squared = 0
        self._seconds = 0.0
        self._sequence_seconds = 0.0
        self._under_way = 0
        self._last = 0.0
        self._breathed = 0.0
        observe_steps(engine, self._observe)

    def begin(self, completions: int) -> None:
        """Register `completions` new completions, whose decoding steps are then measured. If no completion was
        registered before, the idle time until now is not counted as a step."""
        if not self._under_way:
            self._last = time.monotonic()
        self._under_way += completions

    def end(self, completions: int) -> None:
        """Unregister `completions` completions that have ended or are no longer wanted."""
        self._under_way -= completions

    def sums(self) -> dict[str, float]:
        """Return the sums over all decoding steps since the server started, by name."""
        return {
            "steps": self._steps,
            "sequences": float(self._sequences),
            "sequences_squared": float(self._sequences_squared),
            "seconds": self._seconds,
            "sequence_seconds": self._sequence_seconds,
        }

    async def _observe(self, outputs: "EngineCoreOutputs") -> None:
        """Count a step, and let other asyncio tasks run from time to time. While outputs queue up, vLLM's loop over
        them would never let them run."""
        if outputs.outputs:
            self._count(outputs)
        now = time.monotonic()
        if now - self._breathed < BREATH_SECONDS:
            return
        for _ in range(BREATH_TURNS):
            await asyncio.sleep(0)
        self._breathed = time.monotonic()

    def _count(self, outputs: "EngineCoreOutputs") -> None:
        seconds, self._last = outputs.timestamp - self._last, outputs.timestamp
        if not self._under_way:
            return  # the request came through one of vLLM's own routes
        sequences = count_sequences(outputs)
        if sequences and seconds > 0:
            self._steps += 1
            self._sequences += sequences
            self._sequences_squared += sequences**2
            self._seconds += seconds
            self._sequence_seconds += sequences * seconds
