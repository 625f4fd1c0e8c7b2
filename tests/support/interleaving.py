"""An engine in this process that several threads can use, with one request at a time."""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import TypeVar

from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.engines.local.engine import HuggingFaceEngine
from rheostat.models.engines.protocol import Completion, Generate, Request

T = TypeVar("T")


class InterleavingTransformers(TransformersEngine):
    """Transformers engine that serves requests in the order in which they arrive."""

    implementation = "tests.support.interleaving:InterleavingLocalEngine"


class InterleavingLocalEngine(HuggingFaceEngine):
    """Engine that serves requests of any thread. It repeats its first work once."""

    def __init__(self, config: TransformersEngine, *, adapter_rank: int = 0) -> None:
        super().__init__(config, adapter_rank=adapter_rank)
        self._turn = Lock()
        self._doubted = True

    def run_interleaved(self, work: Callable[[Generate], T]) -> T:
        def generate(requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
            with self._turn:
                return self.generate(requests, sampling)

        if self._doubted:
            work(generate)
            self._doubted = False
        return work(generate)
