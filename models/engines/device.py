"""Choice of the device on which a worker or an update rank computes."""

from typing import Literal

import torch

from rheostat.infra.environments.gpus import describe_old_driver, read_driver_version, visible_devices
from rheostat.infra.errors import BadInput


def choose_device() -> Literal["cpu", "cuda"]:
    """Return "cuda" if this process may use a GPU, otherwise "cpu".

    Raises BadInput if CUDA_VISIBLE_DEVICES gives GPUs to this process that PyTorch cannot use, because the process
    would compute on the CPU instead without notice. Ray or the user sets this variable. For workers without GPUs it is
    empty.

    On a GPU, convolutions of float32 tensors are computed in float32 from then on. By default cuDNN rounds their inputs
    to TF32, which has 10 bits of mantissa. PyTorch computes matrix products in float32 by default.
    """
    given = visible_devices() or ()
    if not torch.cuda.is_available():
        if given:
            raise BadInput(
                f"CUDA_VISIBLE_DEVICES gives {_name_gpus(given)} to this process, but {_find_reason()} To compute on "
                "CPUs, set pools.gpus_per_worker and pools.gpus_per_update_rank to 0."
            )
        return "cpu"
    count = torch.cuda.device_count()
    if count < len(given):
        raise BadInput(
            f"CUDA_VISIBLE_DEVICES gives {_name_gpus(given)} to this process, but PyTorch finds only {count} of these "
            f"{len(given)}. {_advise(given)}"
        )
    torch.backends.cudnn.allow_tf32 = False
    return "cuda"


def _name_gpus(given: tuple[str, ...]) -> str:
    return f"the {'GPU' if len(given) == 1 else 'GPUs'} {','.join(given)}"


def _advise(given: tuple[str, ...]) -> str:
    if len(set(given)) < len(given):
        return "List each GPU once."
    if any(each.startswith("MIG-") for each in given):
        return "CUDA gives a process only one instance of GPUs that are divided by MIG, so list one UUID."
    return "List only GPUs that `nvidia-smi -L` prints."


def _find_reason() -> str:
    """Return why PyTorch cannot use a GPU, and what to do about it, as the end of one sentence and another sentence."""
    build = f"PyTorch {torch.__version__}"
    cuda = torch.version.cuda
    if cuda is None:
        return (
            f"{build} is a build for CPUs. Install the build for CUDA (RHEOSTAT_TORCH=cuda "
            "infra/environments/install.sh VENV)."
        )
    if fault := describe_old_driver(cuda):
        return f"{fault}. Update the driver. {build} cannot use GPUs until then."
    version = read_driver_version()
    if version is None:
        return (
            "this machine has no NVIDIA driver. Install the driver, or give the GPUs to the container, for example "
            "with `docker run --gpus all`."
        )
    return (
        f"{build} finds no GPU with the driver {version}: {_read_cuda_error()}. List only GPUs that `nvidia-smi -L` "
        "prints, each once, and check that this process may open /dev/nvidia0."
    )


def _read_cuda_error() -> str:
    """Return the first line of the error with which CUDA cannot start."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return "no error is reported"
