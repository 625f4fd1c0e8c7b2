"""What accelerators allow at best: seconds of one strictly on-policy iteration, and the arithmetic of its update.

The model is a roofline (Williams et al., 2009). Every decoding step reads all weights and the keys and values of every
live sequence, and multiplies; whichever takes longer decides. All other stages are bound by multiplication, the
optimizer by memory. A group's prompt is computed once. Nothing is lost to launches, padding, scheduling or moving
weights, so what is measured can only be slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

ADAM_BYTES = 28
"""Per parameter and step: gradient, master weight and two moments are read, three of them written, in float32."""


class DecoderWork(Protocol):
    """What of a decoder decides how much it computes and reads."""

    @property
    def parameters(self) -> int:
        """All weights."""
        ...

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply every token: projections, MLP and head; of experts, those that a token is sent to."""
        ...

    @property
    def layers(self) -> int:
        """Blocks."""
        ...

    @property
    def query_width(self) -> int:
        """Heads times the size of each."""
        ...

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values that a token leaves in the cache, as a count of numbers."""
        ...


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU by its maker's data sheet."""

    name: str
    """Part of the name that its driver tells."""
    bfloat16: float
    """Dense FLOP/s with float32 sums."""
    float32: float
    """FLOP/s without tensor cores."""
    bandwidth: float
    """Bytes per second."""
    memory: float
    """Bytes."""

    @property
    def key(self) -> str:
        """What it is called on the command line."""
        return self.name.lower().replace(" ", "-")


ACCELERATORS: Final = tuple(
    Accelerator(name, bfloat16 * 1e12, float32 * 1e12, bandwidth * 1e9, memory * 1e9)
    for name, bfloat16, float32, bandwidth, memory in (
        ("B200", 2250, 75, 7700, 180),
        ("GH200", 989.4, 67, 4000, 96),
        ("H200", 989.4, 67, 4800, 141),
        ("H100 PCIe", 756, 51, 2000, 80),
        ("H100 NVL", 835, 60, 3900, 94),
        ("H100", 989.4, 67, 3350, 80),
        ("A100", 312, 19.5, 2039, 80),
        ("L40S", 362, 91.6, 864, 48),
        ("L40", 181, 90.5, 864, 48),
        ("L4", 121, 30.3, 300, 24),
        ("A10G", 70, 31.5, 600, 24),
        ("A10", 125, 31.2, 600, 24),
        ("A40", 149.7, 37.4, 696, 48),
        ("RTX A6000", 154.8, 38.7, 768, 48),
        ("RTX 6000 Ada", 364.2, 91.1, 960, 48),
        ("RTX 5090", 209.5, 104.8, 1792, 32),
        ("RTX 4090", 165.2, 82.6, 1008, 24),
        ("RTX 3090", 71, 35.6, 936, 24),
    )
)
"""TFLOP/s, GB/s and GB by NVIDIA's data sheets; the first whose name a device's holds is that device."""


@dataclass(frozen=True, slots=True)
class Device:
    """What one accelerator does; `workers` of them share the work evenly."""

    flops: float
    """Dense multiply-adds per second count twice, at the precision of the run."""
    bandwidth: float
    """Bytes per second, read or written."""
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Generated:
    """What one iteration really wrote: prompts of so many tokens, and the length of each of their completions."""

    prompts: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    """One tuple per prompt."""

    @property
    def contexts(self) -> list[tuple[int, int]]:
        """Prompt and completion tokens of each sequence."""
        return [(prompt, length) for prompt, group in zip(self.prompts, self.lengths, strict=True) for length in group]

    @property
    def learnt(self) -> int:
        """Tokens of a pass over all sequences that computes each prompt once."""
        return sum(self.prompts) + self.tokens

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return sum(length for _, length in self.contexts)


@dataclass(frozen=True, slots=True)
class Limit:
    """Seconds that no implementation of the iteration on this device can go below, by stage."""

    prefill: float
    decode: float
    logprobs: float
    train: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """All stages, one after the other: T_sync."""
        return self.prefill + self.decode + self.logprobs + self.train + self.optimizer


def limit_of(made: Generated, decoder: DecoderWork, device: Device, *, bytes_per_weight: int, steps: int) -> Limit:
    """Reckon an iteration of `steps` optimizer steps.

    Log-probs of the policy that generated are needed for every step but the first, whose own pass has them.
    """
    rate = device.flops * device.workers
    return Limit(
        prefill=2 * decoder.matmul_parameters * sum(made.prompts) / rate,
        decode=decode_seconds(made, decoder, device, bytes_per_weight=bytes_per_weight),
        logprobs=(steps - 1) / steps * shared_flops(decoder, made) / rate,
        train=3 * shared_flops(decoder, made) / rate,
        optimizer=steps * ADAM_BYTES * decoder.parameters / device.bandwidth,
    )


def decode_seconds(made: Generated, decoder: DecoderWork, device: Device, *, bytes_per_weight: int) -> float:
    """Sum the steps of all sequences side by side: a smaller batch reads the weights more often and never less."""
    prompt_S, length_S = np.array(made.contexts, dtype=np.float64).T
    order = np.argsort(length_S)
    prompt_S, length_S = prompt_S[order], length_S[order]
    step_T = np.arange(1, int(length_S[-1]) + 1)
    ended_T = np.searchsorted(length_S, step_T)  # sequences shorter than this step
    live_T = len(length_S) - ended_T
    prompts_left = np.append(np.cumsum(prompt_S[::-1])[::-1], 0.0)
    context_T = prompts_left[ended_T] + live_T * step_T  # keys and values that this step reads, over all sequences
    weights = bytes_per_weight * decoder.matmul_parameters
    cache = bytes_per_weight * decoder.kv_values_per_token
    width = 4 * decoder.layers * decoder.query_width
    # Sequences are dealt evenly, but a worker with one sequence cannot have less than it.
    share_T = np.maximum(live_T / device.workers, 1) / live_T
    memory_T = (weights + cache * context_T * share_T) / device.bandwidth
    compute_T = share_T * (2 * decoder.matmul_parameters * live_T + width * context_T) / device.flops
    return float(np.maximum(memory_T, compute_T).sum())


def forward_flops(decoder: DecoderWork, sequences: Sequence[int]) -> float:
    """One pass over whole sequences: two per weight and token, and causal attention over half of each square."""
    attention = 2 * decoder.layers * decoder.query_width * sum(length**2 for length in sequences)
    return float(2 * decoder.matmul_parameters * sum(sequences) + attention)


def shared_flops(decoder: DecoderWork, made: Generated) -> float:
    """One forward pass that computes each prompt once, for all completions of its group."""
    prompts = sum(prompt**2 for prompt in made.prompts) / 2
    completions = sum(length * prompt + length**2 / 2 for prompt, length in made.contexts)
    attention = 4 * decoder.layers * decoder.query_width * (prompts + completions)
    return float(2 * decoder.matmul_parameters * made.learnt + attention)


def train_flops(decoder: DecoderWork, sequences: Sequence[int]) -> float:
    """Forward and backward: three times the forward pass; what is computed again counts as nothing."""
    return 3 * forward_flops(decoder, sequences)


def utilisation(flops: float, seconds: float, *, peak: float) -> float:
    """Share of the peak that `flops` in so many seconds are (MFU)."""
    return flops / seconds / peak
