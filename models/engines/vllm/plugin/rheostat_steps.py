"""Times of decoding steps, seen where vLLM's engine hands its outputs over."""

import asyncio
import time

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM

BREATH_SECONDS = 0.05
"""Longest time that lines of chunks wait for each other; seldom enough that they leave in few pieces."""
BREATH_TURNS = 8
"""Turns of the event loop that a chunk takes from vLLM to the caller, and some more."""


class Steps:
    """Sums over the decoding steps of this server, from which their time is regressed on the batch.

    A step that begins a completion is a prefill and none of them, unless the completion is of one token. vLLM's own
    statistics would tell the same, but gathering them for every token costs more than all else around the engine.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self._steps = 0
        self._sequences = 0
        self._sequences_squared = 0
        self._seconds = 0.0
        self._sequence_seconds = 0.0
        self._under_way = 0
        self._last = 0.0
        self._breathed = 0.0
        core = engine.engine_core
        take = core.get_output_async

        async def take_and_count() -> EngineCoreOutputs:
            outputs: EngineCoreOutputs = await take()
            self._count(outputs)
            await self._breathe()
            return outputs

        core.get_output_async = take_and_count

    def begin(self, completions: int) -> None:
        """Note that completions were asked for; time before the first of them is no step's."""
        if not self._under_way:
            self._last = time.monotonic()
        self._under_way += completions

    def end(self, completions: int) -> None:
        """Note that completions are no longer wanted."""
        self._under_way -= completions

    def sums(self) -> dict[str, float]:
        """Return all sums since the server started."""
        return {
            "steps": self._steps,
            "sequences": float(self._sequences),
            "sequences_squared": float(self._sequences_squared),
            "seconds": self._seconds,
            "sequence_seconds": self._sequence_seconds,
        }

    async def _breathe(self) -> None:
        """Let everything else run now and then: where outputs queue up, vLLM's loop over them would not."""
        now = time.monotonic()
        if now - self._breathed < BREATH_SECONDS:
            return
        for _ in range(BREATH_TURNS):
            await asyncio.sleep(0)
        self._breathed = time.monotonic()

    def _count(self, outputs: EngineCoreOutputs) -> None:
        if not outputs.outputs:
            return
        seconds, self._last = outputs.timestamp - self._last, outputs.timestamp
        if not self._under_way:
            return  # asked for by another route of vLLM's
        if any(output.prefill_stats is not None and output.finish_reason is None for output in outputs.outputs):
            return
        sequences = sum(1 for output in outputs.outputs if output.new_token_ids)
        if sequences and seconds > 0:
            self._steps += 1
            self._sequences += sequences
            self._sequences_squared += sequences**2
            self._seconds += seconds
            self._sequence_seconds += sequences * seconds
