"""Attention implementations in training, and the requirements of flash kernels. Torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, Literal

from infra.config import PoolsConfig
from infra.errors import BadInput
from models.config.policy import ModelOutline, ModelShape

if TYPE_CHECKING:
    from models.config.objectives import UpdateConfig

Attention = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"]

HEAD_SIZE: Final = 256
"""Maximum size of an attention head that both flash kernels support."""


@dataclass(frozen=True, slots=True)
class FlashPackage:
    """Python package that contains a flash attention kernel."""

    distribution: str
    least: tuple[int, int]
    """Minimum version. Earlier versions lack soft caps or a deterministic backward pass."""
    module: str
    """Module that contains `flash_attn_varlen_func`."""


FLASH: Final = {
    "flash_attention_2": FlashPackage("flash-attn", (2, 6), "flash_attn"),
    "flash_attention_3": FlashPackage("flash-attn-3", (3, 0), "flash_attn_interface"),
}


def reasons_against_attention(update: "UpdateConfig", pools: PoolsConfig) -> Iterator[str]:
    """Yield one line per reason why a flash kernel cannot run. Packages on a remote Ray cluster are not checked."""
    package = FLASH.get(update.attention or "")
    if package is None:
        return
    name = f"update.attention {update.attention!r}"
    if update.dtype == "float32":
        yield f"{name} with update.dtype 'float32': flash kernels know 16 bits alone; set dtype = 'bfloat16', or 'sdpa'"
    if not pools.gpus_per_update_rank:
        yield f"{name}: flash kernels need a GPU, update ranks have none; set pools.gpus_per_update_rank, or 'sdpa'"
    if pools.ray_address is None and (reason := lacks(package)) is not None:
        yield f"{name}: {reason}"


def lacks(package: FlashPackage) -> str | None:
    """Return a message if a kernel's package is missing or too old in this environment, or None if it is installed."""
    wanted = f"expected the package {package.distribution}, {'.'.join(map(str, package.least))} or later"
    install = f"pip install --no-build-isolation '{package.distribution}>={'.'.join(map(str, package.least))}'"
    try:
        found = version(package.distribution)
    except PackageNotFoundError:
        return f"{wanted}, found none; {install}"
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    return f"{wanted}, found {found}; {install}" if numbers < package.least else None


def check_attention(attention: Attention | None, outline: ModelOutline, shape: ModelShape) -> None:
    """Raise BadInput if the policy's model class or head size does not support the configured attention."""
    if attention is None:
        return
    name = f"update.attention {attention!r}"
    if attention not in outline.attentions:
        known = ", ".join(outline.attentions)
        raise BadInput(f"{name}: {outline.kind} does not compute it so; expected {known}, or remove the key")
    if attention in FLASH and shape.sees:
        raise BadInput(f"{name}: expected a policy that reads text alone, found {outline.kind}; use 'sdpa'")
    if attention in FLASH and shape.head_size > HEAD_SIZE:
        raise BadInput(f"{name}: expected heads of at most {HEAD_SIZE} numbers, found {shape.head_size}; use 'sdpa'")
