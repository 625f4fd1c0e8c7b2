"""Trackers of a user, valid and invalid, and functions that read back what trackers wrote."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from rheostat.infra.trackers.config import Tracker
from rheostat.infra.trackers.records import Point, Product, Subject, TextTable


class FileTracker(Tracker):
    """Tracker that writes a line for each point."""

    implementation: ClassVar[str] = "tests.support.trackers:FileMirror"
    path: str
    """Path of the file."""


class FileMirror:
    def __init__(self, subject: Subject, settings: FileTracker):
        self.path = Path(settings.path)
        self.path.touch()
        self.known = {tuple(json.loads(line)[:2]) for line in self.path.read_text().splitlines()}

    def lacks(self, point: Point) -> bool:
        return (point.series, point.step) not in self.known

    def write(self, point: Point, table: TextTable | None) -> None:
        with self.path.open("a") as file:
            rows = None if table is None else len(table.rows)
            file.write(json.dumps([point.series, point.step, dict(point.scalars), rows]) + "\n")

    def close(self, product: Product | None) -> None:
        if product is not None:
            self.path.with_suffix(".ended").write_text(product.digest)


class DownTracker(FileTracker):
    """Tracker that cannot be reached while a file exists."""

    implementation: ClassVar[str] = "tests.support.trackers:down"
    blocker: str
    """Path of that file."""


def down(subject: Subject, settings: DownTracker) -> FileMirror:
    if Path(settings.blocker).exists():
        raise ConnectionError("nobody listens at tracker.example.com")
    return FileMirror(subject, settings)


class HangingTracker(Tracker):
    """Tracker that never answers."""

    implementation: ClassVar[str] = "tests.support.trackers:hang"


def hang(subject: Subject, settings: HangingTracker) -> FileMirror:
    while True:
        time.sleep(60)


def tensorboard_series(folder: Path) -> Counter[tuple[str, int]]:
    """Return how often each tag has a value at each step, in all event files of a folder. Every checksum is checked."""
    return Counter((tag, step) for tag, step, _ in tensorboard_values(folder))


def tensorboard_values(folder: Path) -> list[tuple[str, int, float | str]]:
    """Return every value of every event file of a folder."""
    found: list[tuple[str, int, float | str]] = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            length = int.from_bytes(content[at : at + 8], "little")
            body = content[at + 12 : at + 12 + length]
            assert int.from_bytes(content[at + 8 : at + 12], "little") == masked_crc32c(content[at : at + 8])
            assert int.from_bytes(content[at + 12 + length : at + 16 + length], "little") == masked_crc32c(body)
            event = Event.FromString(body)
            found += [(v.tag, event.step, _value(v)) for v in event.summary.value]
            at += 16 + length
    return found


def _value(value) -> float | str:
    return value.tensor.string_val[0].decode() if value.HasField("tensor") else value.simple_value
