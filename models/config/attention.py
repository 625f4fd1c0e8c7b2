"""Attention implementations in training, and the requirements of flash attention kernels. Torch-free."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Literal

from rheostat.infra.errors import BadInput
from rheostat.models.config.outline import ModelOutline
from rheostat.models.config.policy import ModelShape

Attention = Literal["auto", "sdpa", "eager", "varlen", "flash_attention_2", "flash_attention_3"]

VARLEN: Final = "varlen"
"""Variable-length attention of PyTorch itself, which is also a flash attention kernel. torchtitan uses the same name
for it."""
HEAD_SIZE: Final = 256
"""Maximum size of an attention head. All flash attention kernels support heads up to this size."""


@dataclass(frozen=True, slots=True)
class FlashPackage:
    """Python package that contains a flash attention kernel, and the oldest version of it that can be used."""

    distribution: str
    min_version: tuple[int, int]
    """Minimum version, as (major, minor). Earlier versions lack soft-capped logits or a deterministic backward pass."""
    module: str
    """Python module that contains the function `flash_attn_varlen_func`."""


FLASH: Final = {
    "flash_attention_2": FlashPackage("flash-attn", (2, 6), "flash_attn"),
    "flash_attention_3": FlashPackage("flash-attn-3", (3, 0), "flash_attn_interface"),
}
KERNELS: Final = (VARLEN, *FLASH)
"""Attention implementations that are kernels for rows of different lengths. They need 16-bit numbers and a GPU."""


def describe_missing_package(package: FlashPackage) -> str | None:
    """Return a message, with the command that installs the package, if the package of a flash attention kernel is
    missing or too old on this machine. Return None if it can be used."""
    min_version = ".".join(map(str, package.min_version))
    required = f"the package {package.distribution} {min_version} or later is required"
    command = f"Run: pip install --no-build-isolation '{package.distribution}>={min_version}'"
    try:
        installed = version(package.distribution)
    except PackageNotFoundError:
        return f"{required}, but it is not installed. {command}"
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    return f"{required}, but {installed} is installed. {command}" if numbers < package.min_version else None


def check_attention(attention: Attention | None, outline: ModelOutline, shape: ModelShape) -> None:
    """Raise BadInput if the policy's model class (`outline`) or its head size (`shape`) does not support the configured
    attention implementation."""
    if attention in (None, "auto"):
        return
    name = f"update.attention = {attention!r}"
    if attention in KERNELS and shape.head_size > HEAD_SIZE:
        raise BadInput(
            f"{name} supports attention heads of size {HEAD_SIZE} or less, but the policy's heads have size "
            f"{shape.head_size}. Use 'sdpa'"
        )
    if attention not in outline.attentions:
        supported = ", ".join(outline.attentions)
        raise BadInput(f"{name} is not supported by {outline.kind}. Use {supported}, or remove the key")
    if attention in KERNELS and shape.vision_model_type:
        raise BadInput(f"{name} needs a policy that reads only text, but {outline.kind} reads images. Use 'sdpa'")
