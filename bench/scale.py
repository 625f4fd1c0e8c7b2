"""Cost of an iteration in a run of growing length: the driver's own work, with invented results of workers.

Plans, commits, seals, the chain, retention and reports are real. All shards refer to one small file, and a policy is a
folder with one file. The store is in memory if the machine has such a file system, so that no disk is measured.
"""

import gc
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from bench.tables import Table
from rheostat.infra.pools.threads import ThreadCluster
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.manifests import Manifest, provenance_here
from rheostat.infra.store.runs import Run, create_run
from rheostat.infra.store.shards import write_shard
from rheostat.models.records.versions import ModelVersion, Outcome, bundles_of
from rheostat.tasks.commit import retire_policies, seal_iteration
from rheostat.tasks.config.run import RunConfig, parse_config
from rheostat.tasks.plan import plan_iteration
from rheostat.tasks.reporting import TABLE_ROWS
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import PROMPTS, StageKey
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.views.metrics import newest_reports

ITERATIONS, SHARDS, SHARD_PROMPTS = 2000, 64, 4
MEMORY = Path("/dev/shm")
SHOWN = 100
"""Number of consecutive iterations whose mean is one measurement.

The table shows the first measurement, every fifth after it, and the last one.
"""


@dataclass(frozen=True, slots=True)
class HundredIterations:
    """Mean CPU time and final memory of the driver over 100 consecutive iterations."""

    last: int
    """Number of the last of the 100 iterations."""
    cpu_ms: float
    """Mean user plus system CPU time of one iteration, in milliseconds."""
    resident_mib: float
    """Resident memory of the process after the last of the 100 iterations, in MiB."""


class SyntheticRun:
    """Training run whose driver does its usual work, while all results of workers are constants."""

    def __init__(self, run: Run, settings: RunConfig, home: Path) -> None:
        self.run, self.home = run, home
        self.open_run = OpenRun(run, settings, ThreadCluster(), store=str(home))
        self.shard = write_shard(run.store, pa.table({"text": ["x"]}), kind="prompts", metadata={})
        prompts = self.shard.model_copy(update={"rows": 10 * SHARDS * SHARD_PROMPTS})
        self._commit(PROMPTS["train"], Outcome(shards=(prompts,)))
        self._commit(StageKey.policy(0), Outcome(model=self._policy(0)))

    def iterate(self, number: int) -> None:
        """Run one iteration: commit constant results of all stages, end the iteration, and build its report."""
        this = Iteration(self.run, number)
        batch = plan_iteration(self.open_run, this)
        groups = {"groups": SHARD_PROMPTS, "informative_groups": SHARD_PROMPTS}
        for shard in batch.shards:
            for stage in ("rollout", "scoring"):
                self._commit(batch.plan.shard_key(stage, shard), Outcome(shards=(self.shard,), metrics=groups))
        self._commit(this.stage_key("credit"), Outcome(metrics={"missing": 0, "reward_mean": 0.5}))
        self._commit(StageKey.policy(number), Outcome(model=self._policy(number), metrics={"quarantined": 0}))
        seal_iteration(self.open_run, this)
        retire_policies(self.open_run, this)
        newest_reports(self.run, number, limit=TABLE_ROWS, term="exact")

    def _policy(self, version: int) -> ModelVersion:
        made = self.home / "made"
        made.mkdir(exist_ok=True)
        (made / "config.json").write_text(str(version))
        return ModelVersion(version, publish_bundle(self.run.store, made, prefix="policies"))

    def _commit(self, key: str, made: Outcome) -> None:
        seconds = dict.fromkeys(("stage", "worker", "weights_seconds", "weights_bytes"), 1.0)
        self.run.commit(
            Manifest(
                key=key,
                shards=made.shards,
                bundles={} if made.model is None else bundles_of(made.model),
                metrics=made.metrics or {},
                detail={} if made.model is None else {"version": made.model.version},
                provenance=provenance_here(worker="none", seconds=seconds),
            )
        )


def measure() -> list[Table]:
    """Measure the driver's CPU time and memory over 2,000 iterations without workers.

    Returns a table of both for increasing iteration numbers. The CPU time is that of this process.
    """
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-", dir=MEMORY if MEMORY.is_dir() else None) as directory:
        hundreds = run_iterations(Path(directory), iterations=ITERATIONS)
    chosen = [row for index, row in enumerate(hundreds) if index % 5 == 0 or row is hundreds[-1]]
    rows = tuple((f"{row.last - SHOWN + 1} to {row.last}", row.cpu_ms, row.resident_mib) for row in chosen)
    return [
        Table(
            title=f"Cost of one iteration of {SHARDS} shards in a run of {ITERATIONS:,}, without workers",
            columns=("iterations", "driver's CPU, ms", "driver's memory, MiB"),
            rows=rows,
        )
    ]


def run_iterations(home: Path, *, iterations: int) -> list[HundredIterations]:
    """Run iterations without workers, and return one measurement per 100 iterations. The run is stored in `home`."""
    prompts = SHARDS * SHARD_PROMPTS
    rollout = {"prompts": prompts, "shard_prompts": SHARD_PROMPTS}
    document = {"name": "long", "data": {"kind": "file", "path": "problems.jsonl"}, "rollout": rollout}
    settings = parse_config(document, source="bench")
    run = create_run(str(home), settings.name, settings.identity())
    hundreds = []
    with run.lock():
        story = SyntheticRun(run, settings, home)
        for last in range(SHOWN, iterations + 1, SHOWN):
            began = time.process_time()
            for number in range(last - SHOWN + 1, last + 1):
                story.iterate(number)
            cpu_ms = 1000 * (time.process_time() - began) / SHOWN
            gc.collect()
            hundreds.append(HundredIterations(last, cpu_ms, _resident_mib()))
            sys.stderr.write(f"iterations to {last}: {cpu_ms:.0f} ms, {hundreds[-1].resident_mib:.0f} MiB\n")
    return hundreds


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
