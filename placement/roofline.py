"""Lower bounds on the time of one strictly on-policy iteration, and the number of FLOPs of its update.

The bounds follow the roofline model (Williams et al., 2009). Every decoding step reads all weights and the KV cache of
all unfinished sequences, and does its matrix multiplications. The slower of the two determines the time of the step.
The optimizer is limited by memory bandwidth, and all other stages by FLOP/s. The prompt of a group is computed once.
Kernel launches, padding, scheduling and weight transfers are not counted, so measured times can only be longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

ADAM_BYTES = 28
"""Bytes that Adam reads and writes for each parameter in one step, in float32. It reads the gradient, the master weight
and both moments, and writes the master weight and both moments."""


class DecoderWork(Protocol):
    """Sizes of a decoder model that determine its FLOPs and memory traffic."""

    @property
    def parameters(self) -> int:
        """Total number of parameters."""
        ...

    @property
    def matmul_parameters(self) -> int:
        """Number of parameters in the matrix multiplications of one token: projections, MLP and output head. In a
        mixture of experts, only the experts to which one token is routed are counted."""
        ...

    @property
    def layers(self) -> int:
        """Number of transformer blocks."""
        ...

    @property
    def query_width(self) -> int:
        """Number of attention heads multiplied by the size of a head."""
        ...

    @property
    def kv_values_per_token(self) -> int:
        """Number of key and value elements that one token adds to the KV cache."""
        ...


@dataclass(frozen=True, slots=True)
class Accelerator:
    """GPU model with the specifications from its data sheet."""

    name: str
    """Text that is part of the device name reported by the driver."""
    bfloat16: float
    """Dense bfloat16 FLOP/s with float32 accumulation."""
    float32: float
    """Float32 FLOP/s without tensor cores."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    memory: float
    """Memory size in bytes."""

    @property
    def key(self) -> str:
        """Name of the GPU model in command-line options."""
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
"""Known GPU models, with TFLOP/s, GB/s and GB from NVIDIA's data sheets. A device matches the first entry whose `name`
is part of the device name."""


@dataclass(frozen=True, slots=True)
class Device:
    """Performance of one accelerator, and the number of accelerators among which the work is divided evenly."""

    flops: float
    """Dense FLOP/s of one accelerator at the precision of the run. A multiply-add counts as two FLOPs."""
    bandwidth: float
    """Memory bandwidth of one accelerator in bytes per second, for reads and writes together."""
    workers: int = 1
    """Number of accelerators."""


@dataclass(frozen=True, slots=True)
class Generated:
    """Lengths of the prompts and completions of one iteration, in tokens."""

    prompts: tuple[int, ...]
    """Length of each prompt in tokens."""
    lengths: tuple[tuple[int, ...], ...]
    """Length of each completion in tokens, with one tuple for each prompt."""

    @property
    def contexts(self) -> list[tuple[int, int]]:
        """Prompt length and completion length of each completion, in tokens."""
        return [(prompt, length) for prompt, group in zip(self.prompts, self.lengths, strict=True) for length in group]

    @property
    def trained_tokens(self) -> int:
        """Number of tokens in a forward pass over all sequences, if each prompt is computed once for its whole
        group."""
        return sum(self.prompts) + self.tokens

    @property
    def tokens(self) -> int:
        """Total number of completion tokens."""
        return sum(length for _, length in self.contexts)


@dataclass(frozen=True, slots=True)
class Limit:
    """Minimum seconds of each stage of an iteration on a device. No implementation can be faster."""

    prefill: float
    """Seconds of the forward passes over the prompts."""
    decode: float
    """Seconds to generate the completions."""
    logprobs: float
    """Seconds of the forward passes that compute log-probs before the update."""
    train: float
    """Seconds of the forward and backward passes of the update."""
    optimizer: float
    """Seconds of all optimizer steps of the update."""

    @property
    def seconds(self) -> float:
        """Minimum seconds of the whole iteration if its stages run one after another (T_sync)."""
        return self.prefill + self.decode + self.logprobs + self.train + self.optimizer


def compute_limit(
    generated: Generated, decoder: DecoderWork, device: Device, *, bytes_per_weight: int, steps: int
) -> Limit:
    """Return the minimum seconds of each stage of an iteration with `steps` optimizer steps.

    Training needs the log-probs of the completions under the weights that generated them. The forward pass of the
    first optimizer step computes the log-probs of its own completions, because the weights are still unchanged. Only
    the completions of later steps need a separate forward pass.
    """
    rate = device.flops * device.workers
    return Limit(
        prefill=2 * decoder.matmul_parameters * sum(generated.prompts) / rate,
        decode=decode_seconds(generated, decoder, device, bytes_per_weight=bytes_per_weight),
        logprobs=(steps - 1) / steps * shared_flops(decoder, generated) / rate,
        train=3 * shared_flops(decoder, generated) / rate,
        optimizer=steps * ADAM_BYTES * decoder.parameters / device.bandwidth,
    )


def decode_seconds(generated: Generated, decoder: DecoderWork, device: Device, *, bytes_per_weight: int) -> float:
    """Return the minimum seconds of decoding all sequences in one batch.

    This is also a lower bound for smaller batches, because they have to read the weights more often.
    """
    prompt_S, length_S = np.array(generated.contexts, dtype=np.float64).T
    order = np.argsort(length_S)
    prompt_S, length_S = prompt_S[order], length_S[order]
    step_T = np.arange(1, int(length_S[-1]) + 1)
    ended_T = np.searchsorted(length_S, step_T)  # number of sequences shorter than this step
    live_T = len(length_S) - ended_T
    prompts_left = np.append(np.cumsum(prompt_S[::-1])[::-1], 0.0)
    context_T = prompts_left[ended_T] + live_T * step_T  # keys and values read in this step, over all sequences
    weights = bytes_per_weight * decoder.matmul_parameters
    cache = bytes_per_weight * decoder.kv_values_per_token
    width = 4 * decoder.layers * decoder.query_width
    # Sequences are divided evenly, but a worker cannot have less than one sequence.
    share_T = np.maximum(live_T / device.workers, 1) / live_T
    memory_T = (weights + cache * context_T * share_T) / device.bandwidth
    compute_T = share_T * (2 * decoder.matmul_parameters * live_T + width * context_T) / device.flops
    return float(np.maximum(memory_T, compute_T).sum())


def forward_flops(decoder: DecoderWork, sequences: Sequence[int]) -> float:
    """Return the FLOPs of a forward pass over sequences of the given lengths in tokens.

    Each weight of a matrix multiplication costs two FLOPs per token. Causal attention computes half of the attention
    matrix.
    """
    attention = 2 * decoder.layers * decoder.query_width * sum(length**2 for length in sequences)
    return float(2 * decoder.matmul_parameters * sum(sequences) + attention)


def shared_flops(decoder: DecoderWork, generated: Generated) -> float:
    """Return the FLOPs of a forward pass that computes each prompt only once for all completions of its group."""
    prompts = sum(prompt**2 for prompt in generated.prompts) / 2
    completions = sum(length * prompt + length**2 / 2 for prompt, length in generated.contexts)
    attention = 4 * decoder.layers * decoder.query_width * (prompts + completions)
    return float(2 * decoder.matmul_parameters * generated.trained_tokens + attention)


def train_flops(decoder: DecoderWork, sequences: Sequence[int]) -> float:
    """Return the FLOPs of a forward and a backward pass without activation recomputation, which are three times those
    of the forward pass."""
    return 3 * forward_flops(decoder, sequences)


def compute_utilization(flops: float, seconds: float, *, peak: float) -> float:
    """Return the model FLOPs utilization (MFU): `flops / seconds` as a fraction of the peak FLOP/s."""
    return flops / seconds / peak
