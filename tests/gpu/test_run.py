"""A whole tiny run on one GPU that slots and ranks share, killed twice and resumed."""

import pytest

from tests.support.in_process import run_command
from tests.support.jobs import Fault, Job, manifest_of

pytest.importorskip("ray", reason="the workers of a run are processes of Ray")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SHARED = (
    "pools.workers=1",
    "pools.update_ranks=1",
    "pools.gpus_per_worker=0.5",
    "pools.gpus_per_update_rank=0.5",
    "update.dtype=bfloat16",
)
ENGINES = [
    pytest.param("{kind='transformers',dtype='bfloat16'}", id="transformers"),
    pytest.param("{kind='vllm',dtype='bfloat16',gpu_memory_share=0.3}", id="vllm", marks=pytest.mark.vllm),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_whose_driver_and_rank_are_killed_continues_and_passes_verification(
    tmp_path, record_property, request, engine
):
    record_property("part", f"run with {request.node.callspec.id}: driver and rank killed, resumed")
    job = Job(tmp_path, counts_works=True)
    settings = (*SHARED, f"rollout.engine={engine}")
    killed = job.train(*settings, faults=[Fault("driver", "before", "/manifests/it-0002/seal")])
    assert job.struck() == 1, killed.output
    resumed = job.train(*settings, faults=[Fault("update-0", "progress", "update .*iteration=3")])
    assert resumed.code == 0, resumed.output
    assert job.struck() == 1
    verified = run_command("verify", "tiny", "--store", str(job.store))
    assert verified.code == 0, verified.output
    updates = [manifest_of(job.run, f"it-000{number}/update")["metrics"] for number in (1, 2, 3)]
    repeated = [metrics.get("repeated_difference", 0.0) for metrics in updates]
    record_property("figure", f"repeated updates differ by {max(repeated):.1e} of the update's length")
    assert all(metrics["steps"] > 0 for metrics in updates)
