"""Controllers of a run with pictures load none: no byte of a picture is in their memory, which does not grow."""

import json
import secrets

import pytest

from bench.controllers import BenchPlace, list_processes
from bench.processes import ProcessUsage, files_with, measure_processes
from tests.support.jobs import Job
from tests.support.pictures import picture

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

PICTURES = 12
SMALL, LARGE = 1 << 19, 1 << 23
"""Bytes of each picture: 6 MiB together, and sixteen times that number."""
SEEING = (
    "data.kind=file",
    "data.images_column=images",
    "policy={kind='target',target='scratch_vision:VisionScratchPolicy'}",
    "iterations=1",
    "warmup.steps=2",
    "rollout.prompts=4",
    "rollout.shard_prompts=2",
    "rollout.sampling.max_new_tokens=6",
    "evaluation.problems=1",
)


def watch_memory(home, api, size: int, *, searched: bool) -> tuple[list[ProcessUsage], list[ProcessUsage]]:
    """Run a job with pictures of a size, each filled with a marker. Return its driver and controllers, and its workers.

    Without a search for the marker only the peak memory is measured, because a search takes as long as the run.
    """
    marker = secrets.token_hex(16).encode()
    home.mkdir()
    rows = []
    for number in range(PICTURES):
        encoded = picture((number, 0, 0))
        (home / f"{number}.png").write_bytes(encoded + marker * ((size - len(encoded)) // len(marker)))
        rows.append(json.dumps({"prompt": "How red?", "answer": str(number), "images": f"{number}.png"}))
    (home / "rows.jsonl").write_text("\n".join(rows))
    job = Job(home, api)
    data = (f"data.path={home / 'rows.jsonl'}", "data.heldout_fraction=0.3")
    with (
        job.started(*SEEING, *data) as process,
        measure_processes(
            lambda: list_processes(process.pid, BenchPlace(home)), marker=marker if searched else b""
        ) as seen,
    ):
        ended = job.ended(process)
    assert ended.code == 0, ended.output
    assert files_with(job.run / "shards", marker), "the pictures are in the run"
    workers = [each for each in seen.values() if each.kind == "worker"]
    return [each for each in seen.values() if each.kind != "worker"], workers


def test_the_driver_loads_no_image_and_its_memory_does_not_grow_with_the_images(tmp_path, prefect_api):
    few, _ = watch_memory(tmp_path / "few", prefect_api, SMALL, searched=False)
    many, workers = watch_memory(tmp_path / "many", prefect_api, LARGE, searched=True)
    for process in many:
        assert process.searches > 0 and process.hits == 0, process
    assert sum(worker.hits for worker in workers) > 0, "the search finds them where they are"
    peaks = [max(each.peak_bytes for each in seen if each.kind == "driver") for seen in (few, many)]
    print(f"driver's peak {peaks[0] >> 20} MiB, and {peaks[1] >> 20} MiB")  # noqa: T201
    assert peaks[1] - peaks[0] < (LARGE - SMALL) * PICTURES / 4
