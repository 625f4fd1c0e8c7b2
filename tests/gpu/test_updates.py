"""Updates on a GPU compared with those on the CPU, for the ZeRO stages, optimizers and kinds of models."""

import pytest
import torch

from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.optimizers import Adam8bit, Muon
from tests.support.cpu_updates import Updates, relative_error, take_updates, take_updates_on_cpu
from tests.support.update_workers import LORA, UNCLIPPED, change, start_worker, update_work

pytestmark = pytest.mark.gpu

STAGES = {
    f"stage {stage}, {dtype}": change(UNCLIPPED, zero_stage=stage, dtype=dtype)
    for dtype in ("float32", "bfloat16")
    for stage in (0, 2, 3)
}
OTHERS = {
    "LoRA": change(UNCLIPPED, lora=LORA),
    "recomputed layers": change(UNCLIPPED, activation_checkpointing=True),
    "eager attention": change(UNCLIPPED, attention="eager"),
    "optimizer offloaded": change(UNCLIPPED, zero_stage=2, dtype="bfloat16", offload="optimizer"),
    "parameters offloaded": change(UNCLIPPED, zero_stage=3, dtype="bfloat16", offload="parameters"),
}
CONFIGS: dict[str, UpdateConfig] = STAGES | OTHERS
ERRORS = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest relative error of gradients on a GPU. In bfloat16, each product is rounded to 8 bits on both devices."""


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory) -> dict[str, Updates]:
    return take_updates_on_cpu(tmp_path_factory.mktemp("cpu"), CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_updates_have_the_gradients_and_metrics_of_the_cpu_and_continue_from_their_stored_state(
    name, uri, on_cpu, record_property
):
    record_property("part", f"update: {name}")
    config, expected = CONFIGS[name], on_cpu[name]
    found, largest = take_updates(uri, config), ERRORS[config.dtype]
    error = relative_error(found.gradients, expected.gradients)
    repeated = relative_metric(found.resumed, found.second)
    record_property("figure", f"gradients {error:.1e} from the CPU's, a resumed update {repeated:.1e} from the first")
    assert error < largest
    for update in ("first", "second"):
        assert relative_metric(getattr(found, update), getattr(expected, update)) < 10 * largest
    assert repeated < 10 * largest


def relative_metric(found, expected) -> float:
    """Return the largest relative difference of the loss and the gradient norm of two updates."""
    names = ("loss", "grad_norm_max")
    return max(abs(found.metrics[name] / expected.metrics[name] - 1) for name in names)


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [(Muon(), "float32"), (Adam8bit(), "float32"), (Adam8bit(), "bfloat16")],
    ids=["muon", "adam8bit", "adam8bit in bfloat16"],
)
def test_other_optimizers_update_and_continue_from_their_stored_state(optimizer, dtype, uri, record_property):
    record_property("part", f"update: {optimizer.kind}, {dtype}")
    found = take_updates(uri, change(UNCLIPPED, optimizer=optimizer, dtype=dtype))
    repeated = relative_metric(found.resumed, found.second)
    record_property("figure", f"a resumed update {repeated:.1e} from the first")
    assert found.second.model.weights != found.first.model.weights
    assert repeated < 10 * ERRORS[dtype]


def test_reloading_a_policy_after_discarded_updates_takes_no_more_memory(uri, policy, record_property):
    record_property("part", "memory after discarded updates")
    worker, used = start_worker(uri, UNCLIPPED), []
    for _ in range(3):
        discarded = worker.update(update_work(uri, policy, advantages=[float("nan")]))
        assert discarded.metrics["quarantined"] == 1
        worker.update(update_work(uri, policy))
        used.append(torch.cuda.memory_allocated() / 2**20)
    worker.close()
    record_property("figure", f"{used[0]:.1f} MiB after the first, {used[-1]:.1f} MiB after the third")
    assert used[-1] < used[0] + 1
