"""Tracker for TensorBoard. Each time it is opened, it writes a new event file with the data that earlier files lack."""

import struct
import time
from collections.abc import Iterator
from pathlib import Path

from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event

from rheostat.infra.trackers.config import TensorBoardTracker
from rheostat.infra.trackers.records import Point, Product, Subject, TextTable, flatten_config

SAMPLES = "samples"
_FRAME = struct.Struct("<QI")  # length of the event and its checksum; another checksum of 4 bytes follows the event


class EventFiles:
    """TensorBoard event files to which the metrics of one run are copied. Implements
    `rheostat.infra.trackers.records.Mirror`."""

    def __init__(self, subject: Subject, settings: TensorBoardTracker) -> None:
        """Read the existing event files of the run and begin a new file."""
        folder = Path(settings.directory) / subject.identity
        self._known = {(tag, step) for event, tags in _events(folder) for tag in tags for step in [event.step]}
        # The default name only contains the second, so a file that begins in the same second would replace this one.
        self._writer = SummaryWriter(str(folder), flush_secs=3600, filename_suffix=f".{time.time_ns()}")
        if ("config/text_summary", 0) not in self._known:
            table = TextTable(("key", "value"), tuple(flatten_config(subject.config)))
            self._writer.add_text("config", table.markdown(), 0)

    def lacks(self, point: Point) -> bool:
        """Return whether the event files lack a metric or the table of samples of this iteration or evaluation."""
        return bool(self._missing(point)) or self._lacks_table(point)

    def write(self, point: Point, table: TextTable | None) -> None:
        """Write the metrics of an iteration or evaluation that the files lack, and flush them to the disk."""
        for tag in self._missing(point):
            self._writer.add_scalar(tag, point.scalars[tag], point.step)
            self._known.add((tag, point.step))
        if table is not None and self._lacks_table(point):
            self._writer.add_text(SAMPLES, table.markdown(), point.step)
        if point.samples is not None:  # a table that no longer exists need not be read again
            self._known.add((f"{SAMPLES}/text_summary", point.step))
        self._writer.flush()

    def close(self, product: Product | None) -> None:
        """Close the event file that this process writes. `product` is not used."""
        self._writer.close()

    def _missing(self, point: Point) -> list[str]:
        return [tag for tag in point.scalars if (tag, point.step) not in self._known]

    def _lacks_table(self, point: Point) -> bool:
        return point.samples is not None and (f"{SAMPLES}/text_summary", point.step) not in self._known


def open_mirror(subject: Subject, settings: TensorBoardTracker) -> EventFiles:
    """Open the TensorBoard event files to which the metrics of a run of Rheostat are copied."""
    return EventFiles(subject, settings)


def _events(folder: Path) -> Iterator[tuple[Event, list[str]]]:
    """Yield the complete events in the event files of a folder. Incomplete events, which a killed process may leave,
    are skipped."""
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at + _FRAME.size <= len(content):
            length, _ = _FRAME.unpack_from(content, at)
            begin = at + _FRAME.size
            at = begin + length + 4
            if at <= len(content):
                event = Event.FromString(content[begin : begin + length])
                yield event, [value.tag for value in event.summary.value]
