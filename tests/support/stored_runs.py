"""Shards of stored runs as tables and rows."""

from typing import Any

import pyarrow as pa

from rheostat.infra.store.runs import Run, open_run
from rheostat.infra.store.shards import read_shard
from tests.support.in_process import InProcessJob


def open_tiny(job: InProcessJob) -> Run:
    """Open the run of a job."""
    return open_run(str(job.store), "tiny")


def tables_of(run: Run, iteration: str, stage: str) -> list[pa.Table]:
    """Return the tables of all shards of a stage, such as `rollout` of `it-0001`."""
    manifests = [each for each in run.manifests(iteration) if f"/{stage}" in each.key]
    return [read_shard(run.store, shard) for each in manifests for shard in each.shards]


def rows_of(job: InProcessJob, *keys: str) -> list[dict[str, Any]]:
    """Return the rows of the first shard of each manifest."""
    run = open_tiny(job)
    return [row for key in keys for row in read_shard(run.store, run.require(key).shards[0]).to_pylist()]
