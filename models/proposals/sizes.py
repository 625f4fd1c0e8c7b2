"""Sizes of a job that fit the lengths of its texts, the size of its policy and the memory of the machine.

Every value has a short reason, which becomes a comment in the job.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Final, NamedTuple

from rheostat.infra.counts import format_count
from rheostat.models.config.engines import TransformersEngine
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.outline import ModelOutline
from rheostat.models.config.policy import ModelShape
from rheostat.models.inspection.memory import MicrobatchSizes, microbatch_bytes, resident_bytes

GROUP_SIZE: Final = 8
"""Number of completions per prompt. 8 is a usual choice for GRPO."""
REASONING_TOKENS: Final = 512
"""Tokens allowed for reasoning before a short answer, if the policy has a chat template."""
SHORT_REASONING_TOKENS: Final = 128
"""Tokens allowed for reasoning before a short answer, if the policy has no chat template."""
ROUNDING: Final = 16
"""Unit of maximum completion lengths in tokens: they are rounded up to a multiple of it."""
MEMORY_SHARE: Final = 0.6
"""Share of the memory that weights, gradients and optimizer state may use. The rest is for activations and workers."""
FULL_SHARE: Final = 0.8
"""Share of the memory that training may use, including its activations."""
LORA_FACTOR: Final = 10
"""Ratio of the learning rate for adapters to that for all weights (Schulman et al. 2025, LoRA Without Regret)."""
MIN_MICROBATCH: Final = 1024
"""Minimum number of tokens in a proposed micro-batch."""

_RATES: Final = ((10_000_000, 5e-4), (100_000_000, 5e-5), (1_000_000_000, 2e-6))
"""Learning rates for training all weights, as pairs: number of parameters below which the rate is used, and the
rate."""
_RATE: Final = 1e-6
"""Learning rate for training all weights of policies that are larger than all limits in `_RATES`."""


class Value(NamedTuple):
    """Proposed value of a configuration key, with a short reason that becomes a comment in the job."""

    value: int | float
    reason: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory and processors of the machine on which a job is to run."""

    gpus: int
    memory: int
    """Memory in bytes: that of one GPU, or that of the machine if it has no GPU."""
    cores: int

    @property
    def device(self) -> str:
        """Name of the device to which `memory` belongs, for comments in the job."""
        return "each GPU" if self.gpus else "the machine"

    @property
    def ranks(self) -> int:
        """Number of ranks that train the policy together: one for each GPU."""
        return max(1, self.gpus)


@dataclass(frozen=True, slots=True)
class TextLengths:
    """Lengths of the prompts and reference answers, in tokens of the policy's tokenizer."""

    train: Sequence[int]
    """Length of each training prompt."""
    heldout: Sequence[int]
    """Length of each held-out prompt."""
    answers: Sequence[int]
    """Length of each reference answer. Empty if there are none."""

    @property
    def prompts(self) -> list[int]:
        """Length of each prompt of both splits."""
        return [*self.train, *self.heldout]


def propose_new_tokens(lengths: TextLengths, *, thinks: bool, is_chat: bool, context: int) -> Value:
    """Return the maximum length of a completion in tokens. Long answers are worked solutions, which show how long a
    completion must be. If the policy `thinks` before a short answer, room for reasoning is added."""
    answer = _percentile(lengths.answers, 0.95) if lengths.answers else 0
    reasoning = REASONING_TOKENS if is_chat else SHORT_REASONING_TOKENS
    if not answer:
        wanted, reason = reasoning, "no reference answers show how long an answer is"
    elif thinks and answer < reasoning // 4:
        length = format_count(answer, "token")
        wanted, reason = reasoning, f"95% of the answers have at most {length}; the rest is for reasoning"
    else:
        wanted, reason = max(2 * answer, ROUNDING), f"twice the {answer} tokens that 95% of the answers have at most"
    wanted = ROUNDING * ceil(wanted / ROUNDING)
    room = context - max(lengths.prompts)
    allowed = max(room, context // 2)
    if wanted <= allowed:
        return Value(wanted, reason)
    return Value(max(1, allowed), f"limited by the policy's context of {context:,} tokens")


def propose_prompts(num_train: int, machine: Machine) -> Value:
    """Return the number of prompts per iteration: a power of two, which is at most an eighth of the training
    problems."""
    most = 64 if machine.gpus else 16
    fitting = 2 ** max(0, (num_train // 8).bit_length() - 1) if num_train >= 8 else 1
    if fitting < most:
        return Value(fitting, f"at most an eighth of the {num_train:,} training problems")
    return Value(most, "x 8 completions per iteration on GPUs" if machine.gpus else "few, because there is no GPU")


def propose_iterations(num_train: int, prompts: int) -> Value:
    """Return the number of iterations, so that every problem is used about once. It is at least 8 and at most 200."""
    once = ceil(num_train / prompts)
    iterations = min(max(once, 8), 200)
    times = iterations * prompts / num_train
    how_often = "once" if 0.95 <= times < 1.05 else f"{max(0.01, times):.2g} times"
    return Value(iterations, f"uses each problem about {how_often}")


def propose_lora(update: UpdateConfig, outline: ModelOutline, machine: Machine) -> Value | None:
    """Return the rank of LoRA adapters if there is too little memory for training all weights, else None. `update` are
    the settings for training all weights."""
    needed = _sum_bytes(resident_bytes(update, outline, ranks=machine.ranks))
    if needed <= MEMORY_SHARE * machine.memory:
        return None
    reason = (
        f"all weights would need {_format_bytes(needed)} (weights, gradients, AdamW), but {machine.device} has "
        f"{_format_bytes(machine.memory)}"
    )
    return Value(LoraConfig().rank, reason)


def explain_full_training(update: UpdateConfig, outline: ModelOutline, machine: Machine) -> str:
    """Return the reason why all weights are trained instead of LoRA adapters, as a comment for the job."""
    needed = _sum_bytes(resident_bytes(update, outline, ranks=machine.ranks))
    where = f" of {machine.device}" if machine.gpus else ""
    return f"all weights are trained: they need {_format_bytes(needed)} of {_format_bytes(machine.memory)}{where}"


def propose_learning_rate(outline: ModelOutline, *, lora: bool) -> Value:
    """Return the learning rate for a policy of this size. `lora` says that adapters are trained instead of all
    weights."""
    rate = next((rate for limit, rate in _RATES if outline.parameters < limit), _RATE)
    size = f"for {_format_count(outline.parameters)} parameters"
    return Value(rate * LORA_FACTOR, f"{size}, adapters") if lora else Value(rate, f"{size}, all weights")


def propose_microbatch(update: UpdateConfig, outline: ModelOutline, *, longest: int, machine: Machine) -> Value:
    """Return the largest number of tokens in a micro-batch whose activations fit in the memory. `longest` is the length
    of the longest sequence."""
    held = _sum_bytes(resident_bytes(update, outline, ranks=machine.ranks))
    tokens = UpdateConfig().microbatch_tokens
    while tokens > max(MIN_MICROBATCH, longest):
        sizes = MicrobatchSizes(tokens)
        added = _sum_bytes(microbatch_bytes(update, outline, sizes, held=held), among="update_")
        if held + added <= FULL_SHARE * machine.memory:
            break
        tokens //= 2
    count = max(1, tokens // longest)
    return Value(tokens, f"about {count} of the longest sequences ({longest:,} tokens) at a time; limits the memory")


def propose_batch_rows(
    update: UpdateConfig, outline: ModelOutline, shape: ModelShape, *, longest: int, completions: int, machine: Machine
) -> Value:
    """Return the number of completions that are generated at the same time on a GPU, which also holds the state of
    training. `longest` is the length of the longest sequence."""
    held = _sum_bytes(resident_bytes(update, outline, ranks=machine.ranks))
    rows = 2 ** ceil(log2(max(1, completions)))
    while rows > 1:
        engine = TransformersEngine(dtype=update.dtype, max_batch_rows=rows)
        needed = engine.estimate_memory(shape, longest=longest, gpus=1, name="rollout.engine")
        if held + _sum_bytes(needed) <= FULL_SHARE * machine.memory:
            break
        rows //= 2
    return Value(rows, "completions at a time; limits the memory of the key-value cache")


def _sum_bytes(sizes: dict[str, float], *, among: str = "") -> float:
    return sum(value for name, value in sizes.items() if name.endswith("_bytes") and name.startswith(among))


def _percentile(lengths: Sequence[int], share: float) -> int:
    return sorted(lengths)[min(len(lengths) - 1, int(share * len(lengths)))]


def _format_bytes(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def _format_count(number: float) -> str:
    for unit, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"
