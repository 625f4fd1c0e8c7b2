"""An optimizer's state comes to other ranks and other ZeRO stages, value by value."""

from math import ceil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.records.versions import ModelVersion, Outcome
from models.training.layouts import StateLayout, respread
from tests.support.update_workers import CONFIG, files, staged, start, together, work


def moved(rank: int, ranks: int, port: int, uri: str, version: ModelVersion, stages: list, dtype: str) -> None:
    """Take the next update from a version on so many ranks at each stage; rank 0 notes what was made."""
    made = []
    for stage in stages:
        worker = start(uri, staged(stage, dtype), rank=rank, ranks=ranks, port=port)
        made.append(worker.update(work(uri, version)))
        worker.close()
    if rank == 0:
        torch.save(made, Path(uri, f"moved-{ranks}.pt"))


def state_of(uri: str, outcome: Outcome, layout: StateLayout, sizes: list[int]) -> dict[str, torch.Tensor]:
    """A state as one rank that shares nothing would have it, in one vector for each kind of moment."""
    directory = files(uri, outcome, "state")
    parts = [directory / f"rank-{rank:05d}.safetensors" for rank in range(layout.world_size)]
    one = layout.model_copy(update={"world_size": 1, "zero_stage": 0})
    return dict(respread(parts, layout, one, rank=0, sizes=sizes, shapes=[(sum(sizes),)]))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm((found - expected).float()))


@pytest.mark.system
@pytest.mark.parametrize(("dtype", "share"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_an_update_goes_on_on_other_ranks_and_stages_as_it_would_have_alone(uri, policy, dtype, share):
    stages = [0, 1, 2, 3] if dtype == "float32" else [2, 3]
    worker = start(uri, staged(stages[0], dtype))
    first = worker.update(work(uri, policy))
    alone = worker.update(work(uri, first.model))
    sizes, layout = worker._models.policy.trainer.sizes, StateLayout(world_size=1, zero_stage=stages[0], dtype=dtype)
    before, expected = (state_of(uri, outcome, layout, sizes) for outcome in (first, alone))
    old, new = (load_file(files(uri, outcome, "weights") / "model.safetensors") for outcome in (first, alone))
    for ranks, tried in {2: stages, **({3: stages[-1:]} if dtype == "float32" else {})}.items():
        together(moved, uri, first.model, tried, dtype, ranks=ranks)
        for stage, outcome in zip(tried, torch.load(Path(uri, f"moved-{ranks}.pt"), weights_only=False), strict=True):
            there = layout.model_copy(update={"world_size": ranks, "zero_stage": stage})
            found = state_of(uri, outcome, there, sizes)
            assert found["step.0"] == expected["step.0"] == before["step.0"] + CONFIG.minibatches
            for name in expected:
                assert distance(found[name], expected[name]) <= share * distance(before[name], expected[name])
            weights = load_file(files(uri, outcome, "weights") / "model.safetensors")
            step = sum(distance(old[name], new[name]) ** 2 for name in new) ** 0.5
            assert sum(distance(weights[name], new[name]) ** 2 for name in new) ** 0.5 <= share * step


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_state_that_comes_back_from_other_ranks_is_the_same_to_the_bit(ranks, stage, tmp_path):
    sizes, vectors = [7, 15, 1, 12], ("exp_avg", "exp_avg_sq", "master")
    one, there = (
        StateLayout(world_size=1, zero_stage=0, dtype="float32"),
        StateLayout(world_size=ranks, zero_stage=stage, dtype="float32"),
    )
    state = {f"{name}.{index}": torch.rand(size) for name in vectors for index, size in enumerate(sizes)}
    state |= {f"step.{index}": torch.tensor(4.0) for index in range(4)}
    save_file(state, tmp_path / "one")
    length = {0: 35, 1: ceil(35 / (2 * ranks)) * 2, 2: ceil(35 / (2 * ranks)) * 2}
    each = length.get(stage, sum(ceil(size / ranks) for size in sizes))
    shapes = [(each - 3,), (3,)]  # as ZeRO-3 cuts what is large
    for rank in range(ranks):
        part = respread([tmp_path / "one"], one, there, rank=rank, sizes=sizes, shapes=shapes)
        save_file({name: tensor.contiguous() for name, tensor in part.items()}, tmp_path / str(rank))
    files_there = [tmp_path / str(rank) for rank in range(ranks)]
    back = respread(files_there, there, one, rank=0, sizes=sizes, shapes=[(size,) for size in sizes])
    assert set(back) == set(state) and all(torch.equal(back[name], state[name]) for name in state)
