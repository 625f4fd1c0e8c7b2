"""TensorBoard: an event file for each time that a mirror is opened, with what the files before lack."""

import struct
import time
from collections.abc import Iterator
from pathlib import Path

from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event

from infra.trackers.config import TensorBoardTracker
from infra.trackers.records import Point, Product, Subject, TextTable, flattened

SAMPLES = "samples"
_FRAME = struct.Struct("<QI")  # length of the event and its checksum; another checksum of 4 bytes follows the event


class EventFiles:
    """The event files of one run. Implements `infra.trackers.records.Mirror`."""

    def __init__(self, subject: Subject, settings: TensorBoardTracker) -> None:
        """Read what is there, and begin a file."""
        folder = Path(settings.directory) / subject.identity
        self._known = {(tag, step) for event, tags in _events(folder) for tag in tags for step in [event.step]}
        # Its name has the second alone: another that begins in the same one would take this file's place.
        self._writer = SummaryWriter(str(folder), flush_secs=3600, filename_suffix=f".{time.time_ns()}")
        if ("config/text_summary", 0) not in self._known:
            table = TextTable(("key", "value"), tuple(flattened(subject.config)))
            self._writer.add_text("config", table.markdown(), 0)

    def lacks(self, point: Point) -> bool:
        """Whether a tag has no value at this step."""
        return bool(self._missing(point)) or self._lacks_table(point)

    def write(self, point: Point, table: TextTable | None) -> None:
        """Add the values that are missing, and have them on the disk."""
        for tag in self._missing(point):
            self._writer.add_scalar(tag, point.scalars[tag], point.step)
            self._known.add((tag, point.step))
        if table is not None and self._lacks_table(point):
            self._writer.add_text(SAMPLES, table.markdown(), point.step)
        if point.samples is not None:  # where it has none any more, nobody need look again
            self._known.add((f"{SAMPLES}/text_summary", point.step))
        self._writer.flush()

    def close(self, product: Product | None) -> None:
        """End the file."""
        self._writer.close()

    def _missing(self, point: Point) -> list[str]:
        return [tag for tag in point.scalars if (tag, point.step) not in self._known]

    def _lacks_table(self, point: Point) -> bool:
        return point.samples is not None and (f"{SAMPLES}/text_summary", point.step) not in self._known


def open_mirror(subject: Subject, settings: TensorBoardTracker) -> EventFiles:
    """Open the folder of a run."""
    return EventFiles(subject, settings)


def _events(folder: Path) -> Iterator[tuple[Event, list[str]]]:
    """Go through the events of a folder, those aside that a killed writer left torn."""
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at + _FRAME.size <= len(content):
            length, _ = _FRAME.unpack_from(content, at)
            begin = at + _FRAME.size
            at = begin + length + 4
            if at <= len(content):
                event = Event.FromString(content[begin : begin + length])
                yield event, [value.tag for value in event.summary.value]
