"""A worker or rank that was given GPUs never computes on the CPU without notice."""

import pytest
import torch

from rheostat.infra.environments import gpus
from rheostat.infra.errors import BadInput
from rheostat.models.config.engines import DiffusersEngine, TransformersEngine
from rheostat.models.config.judges import ModelReward
from rheostat.models.engines.device import choose_device
from rheostat.models.engines.image_generation import DiffusersImageEngine
from rheostat.models.engines.local.engine import HuggingFaceEngine
from rheostat.models.training.ranks import join_ranks
from rheostat.models.workers.reward_model import RewardModelWorker

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Aug 19 01:15:15 UTC 2023\n"
MIG = ("MIG-2b6e8f6a", "MIG-8f0c2f0e")


@pytest.fixture
def given(monkeypatch):
    """Function that gives devices to this process."""
    return lambda *devices: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(devices))


@pytest.mark.parametrize(
    "start",
    [
        lambda folder: HuggingFaceEngine(TransformersEngine()),
        lambda folder: DiffusersImageEngine(DiffusersEngine()),
        lambda folder: RewardModelWorker(str(folder), "run", "term", ModelReward.model_construct(), threads=1),
        lambda folder: join_ranks(0, 1, address="127.0.0.1", port=1),
    ],
    ids=["text engine", "image engine", "reward model", "update rank"],
)
def test_a_worker_whose_gpus_pytorch_cannot_use_ends_with_an_error(given, tmp_path, start):
    given("97")
    with pytest.raises(BadInput, match=r"CUDA_VISIBLE_DEVICES gives the GPU 97 .* pools\.gpus_per_worker") as refused:
        start(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("devices", [("",), ("-1",), ("NoDevFiles",)])
def test_a_worker_without_gpus_computes_on_the_cpu(given, devices):
    given(*devices)
    if torch.cuda.is_available():
        pytest.skip("CUDA of this process already uses a GPU")
    assert choose_device() == "cpu"


@pytest.mark.parametrize(
    ("cuda", "driver", "words"),
    [
        (None, "580.65.06", ["build for CPUs", torch.__version__, "RHEOSTAT_TORCH=cuda"]),
        ("13.0", None, ["no NVIDIA driver", "docker run --gpus all"]),
        ("13.0", "535.104.05", ["driver 535.104.05", "too old for CUDA 13.0", "580 or newer", "Update the driver"]),
        ("12.8", "535.104.05", ["driver 535.104.05", "finds no GPU", "nvidia-smi -L"]),
        ("13.0", "580.65.06", ["driver 580.65.06", "finds no GPU", "nvidia-smi -L"]),
    ],
)
def test_the_error_names_the_reason_and_what_to_do(given, monkeypatch, tmp_path, cuda, driver, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    if driver is not None:
        (tmp_path / "version").write_text(DRIVER.format(driver))
    given("0", "1")
    with pytest.raises(BadInput, match="gives the GPUs 0,1 to this process") as refused:
        choose_device()
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("devices", "count", "words"),
    [
        (("0", "7"), 1, ["GPUs 0,7", "only 1 of these 2", "nvidia-smi -L"]),
        (("0", "0"), 0, ["GPUs 0,0", "only 0 of these 2", "each GPU once"]),
        (MIG, 1, [",".join(MIG), "MIG", "one UUID"]),
    ],
)
def test_a_variable_with_more_gpus_than_pytorch_finds_is_refused(given, monkeypatch, devices, count, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    given(*devices)
    with pytest.raises(BadInput) as refused:
        choose_device()
    assert [word for word in words if word not in str(refused.value)] == []
    given(MIG[0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device() == "cuda"
