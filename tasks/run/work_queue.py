"""Work requests to controllers, either in the same process or through messages in the store to other processes.

A controller in another process has a folder below `orders/`. Only the process that has locked the run writes messages
there, and the controller deletes each message after reading it. So each process can tell that the other one is alive:
the sender sees that its messages are read, and the controller sees that messages arrive.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

from rheostat.infra.errors import HolderLost
from rheostat.infra.store.checksums import SealedRecord
from rheostat.infra.store.runs import ORDERS, Run

Shards = tuple[int, ...] | None

RunBatch = Callable[[str, Shards], Awaitable[object]]
"""Function with which a controller does its work for one batch. Arguments are the batch's key and the shards to work on
(None for all)."""

PAUSE_SECONDS = (0.02, 1.0)
"""Minimum and maximum pause in seconds between two checks for files of another process. The pause is a tenth of the
time waited so far, within these bounds."""
HEARTBEAT_SECONDS = 15.0
"""Number of seconds without a request after which the sender writes a message that it is alive."""
MAX_SILENT_SECONDS = 90.0
"""Number of seconds without a message, or with an unread message, after which the other process is considered dead."""
LEASE_CHECK_SECONDS = 1.0
"""Interval in seconds at which a controller checks whether another process has taken over the run."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Work request to a controller in this process. If the caller stops waiting, the work is canceled."""

    batch: str
    shards: Shards
    done: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def run(self, run_batch: RunBatch) -> None:
        """Do the requested work and pass the result or the error to the waiting caller."""
        work = asyncio.ensure_future(run_batch(self.batch, self.shards))
        self.done.add_done_callback(lambda done: work.cancel() if done.cancelled() else None)
        try:
            await work
        except BaseException as error:
            if self.done.cancelled() and work.cancelled():
                return
            if not self.done.done():
                self.done.set_exception(error)
            raise
        self.complete()

    def complete(self) -> None:
        """Report to the waiting caller that the request is done."""
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class ControllerSpan:
    """Range of iterations that one controller serves, and the queue of its work requests. None in the queue ends the
    controller."""

    first: int
    """Number of the first iteration of the range."""
    last: int
    """Number of the last iteration of the range. Another controller serves the iterations after it."""
    requests: "asyncio.Queue[BatchRequest | None]" = field(default_factory=asyncio.Queue)


class ControllerMessage(SealedRecord):
    """Message to a controller in another process."""

    label = "message to a controller"

    kind: Literal["order", "word", "end"]
    """Kind of message: `order` requests work, `word` only shows that the sender is alive, and `end` is the last
    message."""
    batch: str = ""
    shards: Shards = None


def pause_seconds(waited_seconds: float) -> float:
    """Return the pause in seconds before the next check, given the time waited so far."""
    shortest, longest = PAUSE_SECONDS
    return min(max(waited_seconds / 10, shortest), longest)


class Outbox:
    """Folder in the store for messages to one controller, used by the process that sends them."""

    def __init__(self, run: Run, folder: str) -> None:
        self._run, self._folder = run, folder
        self._written = self._read = 0
        self._last: ControllerMessage | None = None
        self._since = time.monotonic()
        """Time at which the last message was written or was seen to be read, in seconds of the monotonic clock."""

    def put(self, message: ControllerMessage) -> None:
        """Write the next message. Raises Fenced if another process has taken over the run."""
        if not self.num_unread:
            self._since = time.monotonic()
        self._run.put_record(_message_key(self._folder, self._written), message)
        self._written, self._last = self._written + 1, message

    def check(self) -> None:
        """Find out which messages were read. If all were read and nothing was written for `HEARTBEAT_SECONDS`, write a
        message that shows that the sender is alive."""
        while self.num_unread and not self._run.store.exists(_message_key(self._folder, self._read)):
            self._read, self._since = self._read + 1, time.monotonic()
        is_over = self._last is not None and self._last.kind == "end"
        if not (self.num_unread or is_over) and self.silent_seconds > HEARTBEAT_SECONDS:
            self.put(ControllerMessage(kind="word"))

    @property
    def num_unread(self) -> int:
        """Number of messages that were unread at the last check."""
        return self._written - self._read

    @property
    def has_begun(self) -> bool:
        """Whether the controller has read any message, which shows that it has started."""
        return self._read > 0

    @property
    def silent_seconds(self) -> float:
        """Seconds since a message was last written or read."""
        return time.monotonic() - self._since

    def close(self) -> None:
        """Delete the messages that the controller has not read."""
        for number in range(self._read, self._written):
            self._run.store.delete(_message_key(self._folder, number))


async def read_messages(run: Run, folder: str) -> AsyncIterator[ControllerMessage]:
    """Yield the work requests to the controller in this process, in order, until the last message.

    Raises Fenced if another process has taken over the run. Raises HolderLost if the sender is silent for more than
    `MAX_SILENT_SECONDS`.
    """
    number, last_message = 0, time.monotonic()
    last_order = checked = last_message
    while True:
        key, now = _message_key(folder, number), time.monotonic()
        if now - checked > LEASE_CHECK_SECONDS:
            run.check_lease()
            checked = now
        if not run.store.exists(key):
            if now - last_message > MAX_SILENT_SECONDS:
                raise HolderLost(
                    f"run {run.name!r}: the process that trains it (epoch {run.epoch}) sent no message for "
                    f"{now - last_message:.0f} s. If it has ended, start the run again to continue."
                )
            await asyncio.sleep(pause_seconds(now - last_order))
            continue
        message = ControllerMessage.unseal(run.store.read(key), where=f"{key!r} in {run.store.uri}")
        run.store.delete(key)
        number, last_message = number + 1, now
        if message.kind == "end":
            return
        if message.kind == "order":
            last_order = now
            yield message


def messages_folder(run: Run, flow_run: UUID | str) -> str:
    """Return the folder of messages to a controller that runs as a separate flow run."""
    return f"{ORDERS}{run.epoch:06d}/{flow_run}"


def delete_old_messages(run: Run) -> None:
    """Delete the messages that earlier processes of the run wrote. No process reads these messages any more."""
    for entry in run.store.entries(ORDERS):
        run.store.delete(entry.key)


def _message_key(folder: str, number: int) -> str:
    return f"{folder}/{number:06d}.json"
