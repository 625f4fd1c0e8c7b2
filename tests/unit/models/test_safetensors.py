"""Tensor files that are hashed while they are written have the bytes that the libraries write."""

from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save
from transformers import modeling_utils

from rheostat.infra.store.file_writer import describe_pieces
from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.data.problems import load_problems
from rheostat.models.modeling import safetensors
from rheostat.models.modeling.policy import build_scratch
from rheostat.models.modeling.safetensors import (
    CHUNK_BYTES,
    FileShare,
    TensorFile,
    copy_to_host,
    save_pretrained,
    save_tensors,
    tensor_pieces,
    view_on_host,
    write_share,
)
from rheostat.models.text.tokenizer import scratch_tokenizer
from tests.support.training import DATA

PRECISIONS = (
    *(torch.uint8, torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_streamed_file_has_the_bytes_of_the_library(tmp_path, metadata):
    tensors = {f"layer.{index}": torch.arange(5).to(dtype) for index, dtype in enumerate(PRECISIONS)}
    tensors |= {'Größe "a"': torch.ones(2, 3), "scalar": torch.tensor(1.5), "none": torch.ones(0, 4)}
    file = save_tensors(tensors, tmp_path / "file", metadata=metadata)
    data = (tmp_path / "file").read_bytes()
    assert data == save(tensors, metadata)
    assert (file.digest, file.bytes) == (blake3(data).hexdigest(), len(data))


def test_a_tensor_that_is_not_contiguous_is_written_as_if_it_were(tmp_path):
    tensors = {"turned": torch.arange(6.0).reshape(2, 3).T, "every_other": torch.arange(8.0)[::2]}
    save_tensors(tensors, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == save({name: tensor.contiguous() for name, tensor in tensors.items()})


@pytest.mark.gpu
def test_tensors_on_a_gpu_give_the_bytes_of_their_copies_in_host_memory(tmp_path):
    pieces = CHUNK_BYTES // 4
    tensors = {
        "large": torch.arange(2 * pieces + 5),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "one": torch.ones(()),
    }
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    expected = describe_pieces(tensor_pieces(tensors))
    for to_host in (view_on_host, copy_to_host):
        assert describe_pieces(tensor_pieces(on_gpu, to_host=to_host)) == expected
    assert copy_to_host(on_gpu["large"]).is_pinned()


def test_large_tensors_are_written_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "CHUNK_BYTES", 64)
    tensors = {"a": torch.arange(100), "b": torch.arange(3), "c": torch.arange(8.0)}
    _, *chunks = map(len, tensor_pieces(tensors))
    assert chunks == [*[64] * 12, 32, 24, 32]
    save_tensors(tensors, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == save(tensors)


def test_copies_stay_the_same_when_tensors_change():
    tensor = torch.zeros(3)
    views, copies = ([*tensor_pieces({"a": tensor}, to_host=to_host)] for to_host in (view_on_host, copy_to_host))
    tensor.fill_(1)
    assert [bytes(pieces[1]) for pieces in (views, copies)] == [
        torch.full((3,), x).numpy().tobytes() for x in (1.0, 0.0)
    ]


@pytest.mark.parametrize("max_bytes", ["50GB", "4KB"])
def test_a_saved_model_has_the_files_of_transformers_and_the_digests_of_its_weights(tmp_path, max_bytes, monkeypatch):
    split = modeling_utils.split_torch_state_dict_into_shards
    monkeypatch.setattr(
        modeling_utils,
        "split_torch_state_dict_into_shards",
        lambda state, **options: split(state, **options | {"max_shard_size": max_bytes}),
    )
    policy = ScratchPolicy(hidden_size=16, intermediate_size=16, layers=1, heads=1, kv_heads=1)
    model = build_scratch(policy, scratch_tokenizer(policy, load_problems(DATA, "train", 0)), seed=0)
    model.save_pretrained(tmp_path / "theirs")
    progress = []
    files = save_pretrained(model, tmp_path / "ours", on_progress=lambda: progress.append(1))
    assert len(progress) == len([*model.parameters()]) + len(files)  # and the header of each file
    theirs, ours = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("theirs", "ours")
    )
    assert ours == theirs
    assert {name: file.digest for name, file in files.items()} == {
        name: blake3(data).hexdigest() for name, data in theirs.items() if name.endswith(".safetensors")
    }


@pytest.mark.parametrize(
    ("files", "writers", "expected"),
    [(1, 8, [0]), (3, 16, [0, 5, 10]), (5, 2, [0, 0, 0, 1, 1]), (4, 4, [0, 1, 2, 3]), (2, 1, [0, 0])],
)
def test_weight_files_are_spread_over_all_ranks_and_the_first_file_of_each_rank_comes_first(files, writers, expected):
    paths = [Path(f"model-{index}") for index in range(files)]
    assigned = FileShare(0, writers).assign(paths[::-1])
    assert [assigned[path] for path in paths] == expected
    first = [*assigned.values()][: len({*expected})]
    assert len({*first}) == len(first)


def test_ranks_write_different_files_whose_bytes_are_those_of_one_writer(tmp_path):
    files = {
        f"model-{index}": TensorFile({"a": torch.full((3, 4), float(index)).T}, {"format": "pt"}) for index in range(5)
    }
    written = {}
    for rank in range(3):
        (tmp_path / f"{rank}").mkdir()
        share = FileShare(rank, 3, gathers=bool(rank))
        own = {tmp_path / f"{rank}" / name: file for name, file in files.items()}
        for path, file in write_share(own, share=share, on_progress=lambda: None).items():
            assert path.name not in written
            written[path.name] = file
    (tmp_path / "whole").mkdir()
    whole = {tmp_path / "whole" / name: file for name, file in files.items()}
    alone = write_share(whole, share=FileShare(), on_progress=lambda: None)
    assert written == {path.name: file for path, file in alone.items()}
