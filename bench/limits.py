"""What the hardware allows at best: seconds of one strictly on-policy iteration, and the arithmetic of its update.

The model is a roofline. Every decoding step reads all weights and the keys and values of every live sequence, and
multiplies; whichever takes longer decides. All other stages are bound by multiplication, the optimizer by memory.
Nothing is lost to launches, padding, scheduling or moving weights, so what is measured can only be slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.decoders import Decoder

ADAM_BYTES = 28
"""Per parameter and step: gradient, master weight and two moments are read, three of them written, in float32."""


@dataclass(frozen=True, slots=True)
class Device:
    """What one accelerator was measured to do; `workers` of them share the work evenly."""

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


def limit_of(made: Generated, decoder: Decoder, device: Device, *, bytes_per_weight: int, steps: int) -> Limit:
    """Reckon an iteration of `steps` optimizer steps.

    Log-probs of the policy that generated are needed for every step but the first, whose own pass has them.
    """
    sequences = [prompt + length for prompt, length in made.contexts]
    rate = device.flops * device.workers
    return Limit(
        prefill=2 * decoder.matmul_parameters * sum(made.prompts) / rate,
        decode=decode_seconds(made, decoder, device, bytes_per_weight=bytes_per_weight),
        logprobs=(steps - 1) / steps * forward_flops(decoder, sequences) / rate,
        train=train_flops(decoder, sequences) / rate,
        optimizer=steps * ADAM_BYTES * decoder.parameters / device.bandwidth,
    )


def decode_seconds(made: Generated, decoder: Decoder, device: Device, *, bytes_per_weight: int) -> float:
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


def forward_flops(decoder: Decoder, sequences: Sequence[int]) -> float:
    """One pass over whole sequences: two per weight and token, and causal attention over half of each square."""
    attention = 2 * decoder.layers * decoder.query_width * sum(length**2 for length in sequences)
    return float(2 * decoder.matmul_parameters * sum(sequences) + attention)


def train_flops(decoder: Decoder, sequences: Sequence[int]) -> float:
    """Forward and backward: three times the forward pass; what is computed again counts as nothing."""
    return 3 * forward_flops(decoder, sequences)


def utilisation(flops: float, seconds: float, *, peak: float) -> float:
    """Share of the peak that `flops` in so many seconds are (MFU)."""
    return flops / seconds / peak
