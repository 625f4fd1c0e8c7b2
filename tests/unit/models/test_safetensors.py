"""Tensor files that are hashed while they are written have the bytes that the libraries write."""

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save

from models.config.policy import ScratchPolicy
from models.data.problems import load_problems
from models.modeling.policy import build_scratch
from models.modeling.safetensors import save_pretrained, save_tensors
from models.text.tokenizer import scratch_tokenizer
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


def test_a_saved_model_has_the_files_of_transformers_and_the_digests_of_its_weights(tmp_path):
    policy = ScratchPolicy(hidden_size=16, intermediate_size=16, layers=1, heads=1, kv_heads=1)
    model = build_scratch(policy, scratch_tokenizer(policy, load_problems(DATA, "train", 0)), seed=0)
    model.save_pretrained(tmp_path / "theirs")
    files = save_pretrained(model, tmp_path / "ours")
    theirs, ours = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("theirs", "ours")
    )
    assert ours == theirs
    assert {name: file.digest for name, file in files.items()} == {
        name: blake3(data).hexdigest() for name, data in theirs.items() if name.endswith(".safetensors")
    }
