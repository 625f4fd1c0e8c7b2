"""Tracker for Weights & Biases. A run of Rheostat becomes one W&B run. The rows that exist on the server or in offline
files show which steps were already copied."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from rheostat.infra.trackers.config import WandbTracker
from rheostat.infra.trackers.records import Point, Product, Series, Subject, TextTable

SAMPLES = "samples"
FIRST: dict[Series, int] = {"iteration": 0, "evaluation": -1}
"""Number of the last logged step of each series (iterations, evaluations) if nothing was logged yet. Iterations are
numbered from 1, and evaluations from 0."""
_BLOCK, _HEADER = 1 << 15, struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_FILE_HEADER = 7


class LoggedRun:
    """W&B run to which the metrics of a run are copied. Implements `rheostat.infra.trackers.records.Mirror`."""

    def __init__(self, subject: Subject, settings: WandbTracker) -> None:
        """Create the W&B run, or resume it if it exists."""
        directory = Path(settings.directory)
        last = (
            {**FIRST, **_read_offline_steps(directory, subject.identity)} if settings.mode == "offline" else {**FIRST}
        )
        directory.mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            id=subject.identity,
            name=subject.name,
            mode=settings.mode,
            dir=settings.directory,
            resume="allow",
            reinit="finish_previous",
            config=dict(subject.config),
            settings=quiet,
        )
        self._run.define_metric("*", step_metric="iteration", step_sync=False)
        self._run.define_metric("eval/*", step_metric="evaluation", step_sync=False)
        summary = dict(self._run.summary)
        self._last = {series: int(summary.get(series, step)) for series, step in last.items()}

    def lacks(self, point: Point) -> bool:
        """Return whether this iteration or evaluation is later than the last one that was sent, so that it must be
        sent."""
        return point.step > self._last[point.series]

    def write(self, point: Point, table: TextTable | None) -> None:
        """Log the metrics of an iteration or evaluation as one row. The row of an evaluation stays open until the next
        iteration, whose metrics are added to it."""
        if not self.lacks(point):
            return
        row: dict[str, object] = {point.series: point.step, **point.scalars}
        if table is not None:
            row[SAMPLES] = wandb.Table(columns=[*table.columns], data=[[*cells] for cells in table.rows])
        is_whole, done = point.series == "iteration", self._last["iteration"]
        step = point.step if is_whole else done + (done > 0)
        self._run.log(row, step=max(step, self._run.step), commit=is_whole)  # a new process starts counting at 0
        self._last[point.series] = point.step

    def close(self, product: Product | None) -> None:
        """Finish the W&B run: write all rows, and send them to the server if the mode is online. If `product` is given,
        its digest is added to the summary."""
        if product is not None:
            self._run.summary["policy"] = product.digest
        self._run.finish()
        wandb.teardown()  # waits for its process, which writes the last rows as it ends


def open_mirror(subject: Subject, settings: WandbTracker) -> LoggedRun:
    """Open the W&B run to which the metrics of a run of Rheostat are copied, or create it."""
    return LoggedRun(subject, settings)


def _read_offline_steps(directory: Path, identity: str) -> dict[Series, int]:
    """Return the number of the last step of each series in local W&B files that have not been sent to the server.
    `identity` identifies the run."""
    last: dict[Series, int] = {}
    for path in sorted(directory.glob(f"wandb/offline-run-*-{identity}/run-{identity}.wandb")):
        for row in rows_of(path):
            for series in FIRST:
                if series in row:
                    last[series] = max(last.get(series, FIRST[series]), int(str(row[series])))
    return last


def rows_of(path: Path) -> Iterator[dict[str, object]]:
    """Yield the rows of metrics in a local W&B file. An incomplete row at the end is skipped."""
    for content in _records(path.read_bytes()):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the records in the content of a file in the log format of LevelDB
    (https://github.com/google/leveldb/blob/main/doc/log_format.md)."""
    at, parts = _FILE_HEADER, b""
    while at + _HEADER.size <= len(content):
        if (block_rest := _BLOCK - at % _BLOCK) < _HEADER.size:
            at += block_rest
            continue
        _, length, kind = _HEADER.unpack_from(content, at)
        begin = at + _HEADER.size
        at = begin + length
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or at > len(content):
            return
        parts = content[begin:at] if kind in (_FULL, _FIRST) else parts + content[begin:at]
        if kind in (_FULL, _LAST):
            yield parts
