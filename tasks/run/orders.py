"""What controllers are asked to do: by their run's own process, or by letters in the store to processes of their own.

A controller in another process has a folder below `orders/`, into which only the holder of the run writes, and from
which it takes each letter away. So each of the two sees that the other lives: the holder that its letters are read, the
controller that others come.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

from infra.errors import HolderLost
from infra.store.checksums import SealedRecord
from infra.store.runs import ORDERS, Run

Shards = tuple[int, ...] | None

Perform = Callable[[str, Shards], Awaitable[object]]
"""What a controller does with a batch, or with some of its shards."""

PAUSE_SECONDS = (0.02, 1.0)
"""Between looks for what another process writes: a tenth of what was waited so far, within these."""
WORD_SECONDS = 15.0
"""After so long without an order the holder writes that it is there."""
SILENT_SECONDS = 90.0
"""After so long without a letter, or with one that is not read, the other one is given up."""
EPOCH_SECONDS = 1.0
"""How often a controller looks whether its epoch is over."""


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """What a controller is asked to do. Who stops waiting for it has it stopped."""

    batch: str
    shards: Shards
    done: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def carry_out(self, perform: Perform) -> None:
        """Do it, and tell who waits how it ended."""
        work = asyncio.ensure_future(perform(self.batch, self.shards))
        self.done.add_done_callback(lambda done: work.cancel() if done.cancelled() else None)
        try:
            await work
        except BaseException as error:
            if self.done.cancelled() and work.cancelled():
                return
            if not self.done.done():
                self.done.set_exception(error)
            raise
        self.tell()

    def tell(self) -> None:
        """Tell who waits that it is done."""
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class Tenure:
    """A controller's time, and what it is asked to do until its end, which is told by None."""

    first: int
    """Number of the iteration that it begins with."""
    last: int
    """Number of the one after which a successor takes over."""
    orders: "asyncio.Queue[BatchOrder | None]" = field(default_factory=asyncio.Queue)


class Letter(SealedRecord):
    """What the holder writes to a controller in another process."""

    label = "message to a controller"

    kind: Literal["order", "word", "end"]
    """What to do; that the holder is there; or that nothing more will come."""
    batch: str = ""
    shards: Shards = None


def pause_seconds(waited_seconds: float) -> float:
    """How long to wait before the next look after so long without a find."""
    shortest, longest = PAUSE_SECONDS
    return min(max(waited_seconds / 10, shortest), longest)


class Outbox:
    """The letters to one controller, seen by the holder."""

    def __init__(self, run: Run, folder: str) -> None:
        self._run, self._folder = run, folder
        self._written = self._read = 0
        self._last: Letter | None = None
        self._since = time.monotonic()
        """When the last letter was written, or found to be read."""

    def put(self, letter: Letter) -> None:
        """Write the next letter. Raises Fenced once the run is another's."""
        if not self.unread:
            self._since = time.monotonic()
        self._run.put_record(_name(self._folder, self._written), letter)
        self._written, self._last = self._written + 1, letter

    def look(self) -> None:
        """See which letters were read; where all were, write from time to time that the holder is there."""
        while self.unread and not self._run.store.exists(_name(self._folder, self._read)):
            self._read, self._since = self._read + 1, time.monotonic()
        is_over = self._last is not None and self._last.kind == "end"
        if not (self.unread or is_over) and self.silent_seconds > WORD_SECONDS:
            self.put(Letter(kind="word"))

    @property
    def unread(self) -> int:
        """Letters that were not read when it was last looked."""
        return self._written - self._read

    @property
    def has_begun(self) -> bool:
        """Whether the controller has ever read one."""
        return self._read > 0

    @property
    def silent_seconds(self) -> float:
        """Since when nothing was written or read."""
        return time.monotonic() - self._since

    def close(self) -> None:
        """Take back what was not read."""
        for number in range(self._read, self._written):
            self._run.store.delete(_name(self._folder, number))


async def letters(run: Run, folder: str) -> AsyncIterator[Letter]:
    """Read the orders of this process, one after another, until their end.

    Raises Fenced once the epoch is over, and HolderLost when its holder has been silent for too long.
    """
    number, heard = 0, time.monotonic()
    ordered = checked = heard
    while True:
        key, now = _name(folder, number), time.monotonic()
        if now - checked > EPOCH_SECONDS:
            run.check_lease()
            checked = now
        if not run.store.exists(key):
            if now - heard > SILENT_SECONDS:
                raise HolderLost(
                    f"run {run.name!r}: the holder of epoch {run.epoch} was silent for {now - heard:.0f} s"
                )
            await asyncio.sleep(pause_seconds(now - ordered))
            continue
        letter = Letter.unseal(run.store.read(key), where=f"{key!r} in {run.store.uri}")
        run.store.delete(key)
        number, heard = number + 1, now
        if letter.kind == "end":
            return
        if letter.kind == "order":
            ordered = now
            yield letter


def orders_folder(run: Run, flow_run: UUID | str) -> str:
    """Where the orders of a controller lie that is a flow run of its own."""
    return f"{ORDERS}{run.epoch:06d}/{flow_run}"


def sweep_orders(run: Run) -> None:
    """Delete what earlier epochs have left; nobody reads it."""
    for entry in run.store.entries(ORDERS):
        run.store.delete(entry.key)


def _name(folder: str, number: int) -> str:
    return f"{folder}/{number:06d}.json"
