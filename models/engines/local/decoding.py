"""Decoding with a KV cache, and the log-probs of fixed continuations.

Shapes: B live rows (rows in the current batch), R all rows of a call, E end tokens, P prompts, T (padded) prompt
tokens, V vocabulary, C continuations, L tokens of the longest continuation.

A row is one completion. Each prompt is prefilled once, and its cache rows are repeated for its completions, or for the
continuations that have more than one token. A continued completion is prefilled together with its existing tokens.
Finished rows leave the batch, and waiting rows take their places.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerFast

from rheostat.infra.errors import Quarantined
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.local.kv_cache import ROOM, is_in_place, join_in_place, trim_in_place, use_in_place_layers
from rheostat.models.engines.local.recorded_experts import ExpertRecorder
from rheostat.models.engines.protocol import Completion
from rheostat.models.engines.requests import CompletionRow, decode_texts, length_finish_reason, stop_window
from rheostat.models.engines.sampling import sample_tokens, sample_uniforms
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import FinishReason
from rheostat.models.vision.tower import VisionInputs, encode_images, mask_tokens, prepare_rows

_KEEP_SHARE: Final = 0.75  # with fewer live rows, copying the cache is cheaper than decoding finished rows


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """Policy that is loaded for generation: its model, its tokenizer and its special tokens."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    digest: str
    eos_E: Tensor
    """Token IDs that end a completion, as a tensor."""
    context: int | None
    """Longest sequence in tokens, or None if the architecture sets no limit."""
    vision: VisionInputs | None = None
    """Vision tower and image settings, or None for a text-only policy."""
    suppressed: tuple[int, ...] = ()
    """Token IDs that the policy never generates, such as those of embedding rows that belong to no token."""

    @property
    def banned(self) -> tuple[int, ...]:
        """IDs of all tokens that have probability 0, because they are suppressed or are placeholders of images."""
        return self.suppressed if self.vision is None else (*self.vision.banned, *self.suppressed)


@dataclass(slots=True)
class _Batch:
    """State of the batch that is being decoded, with one row per completion. Finished rows are marked as not `alive`,
    and are removed once enough rows have finished."""

    rows_B: Tensor
    alive_B: Tensor
    width: int
    """Number of tokens of each row in the KV cache, including padding."""
    padding_B: Tensor
    """Number of padding tokens of each row in the KV cache. Padding is on the left."""
    lengths_B: Tensor
    """Number of tokens of each row in the KV cache, without padding. Without images this is also the position of the
    next token. The number does not change any more once the row has finished."""
    offsets_B: Tensor
    """Offset that is added to each row's next position, because an image may take fewer positions than tokens."""
    cache: Cache

    def keep_alive(self) -> None:
        keep_B = self.alive_B.nonzero().squeeze(1)
        self.rows_B, self.padding_B, self.lengths_B, self.offsets_B = (
            row_data[keep_B] for row_data in (self.rows_B, self.padding_B, self.lengths_B, self.offsets_B)
        )
        self.alive_B = self.alive_B[keep_B]
        self.cache.reorder_cache(keep_B)

    def trim(self) -> None:
        """Remove the leftmost entries of the KV cache that contain only padding."""
        width = int(self.lengths_B.max())
        trim_in_place(self.cache, width)
        self.padding_B = self.padding_B + (width - self.width)
        self.width = width

    def admit(self, new: "_Batch") -> None:
        """Append the rows of `new` to the batch, all of which must be unfinished. Cache entries that contain only
        padding are removed."""
        width = max(int(self.lengths_B.max()), new.width)
        join_in_place(self.cache, new.cache, width)
        self.padding_B = torch.cat([self.padding_B + (width - self.width), new.padding_B + (width - new.width)])
        self.rows_B, self.alive_B = torch.cat([self.rows_B, new.rows_B]), torch.cat([self.alive_B, new.alive_B])
        self.lengths_B = torch.cat([self.lengths_B, new.lengths_B])
        self.offsets_B = torch.cat([self.offsets_B, new.offsets_B])
        self.width = width


@dataclass(frozen=True, slots=True)
class _Output:
    """Generated tokens of all completions of a call. Entries beyond the length of a row are undefined."""

    tokens_RT: Tensor
    """Completion tokens of each row, beginning with the tokens that the completion already had."""
    logprobs_RT: Tensor
    prompts_R: Tensor
    """Number of prompt tokens of each completion."""
    turns_R: Tensor
    """Index in each row's completion at which the current turn (the newest reply of an episode) begins."""
    limits_R: Tensor
    lengths_R: Tensor
    stopped_R: Tensor

    def ends(self, live: _Batch) -> Tensor:
        """Return, for each row of the batch, the index of the newest token in its completion. This token is not in the
        KV cache yet."""
        return live.lengths_B - self.prompts_R[live.rows_B]


@torch.inference_mode()
def decode(
    policy: LoadedPolicy,
    rows: Sequence[CompletionRow],
    sampling: SamplingConfig,
    *,
    places: int,
    on_step: Callable[[int], None],
    recorder: ExpertRecorder | None = None,
) -> list[Completion]:
    """Generate one completion per row, decoding at most `places` rows together, and return the completions in order.
    Rows of one prompt must be neighbors. `on_step` is called after every forward pass with the number of sequences that
    it advanced, or 0 after a prefill. If `recorder` is given, the completions include the experts that the routers
    chose. Raises Quarantined if a logit is not finite.

    Waiting rows are admitted in order whenever finished rows leave, so the admission depends only on the generated
    tokens and not on timing. If a cache layer does not grow with every token, waiting rows are admitted only when the
    whole batch is finished.
    """
    output = _allocate_output(rows, device=policy.model.device)
    uniforms_RT = np.stack([sample_uniforms(row.seed, output.tokens_RT.shape[1]) for row in rows])
    random_RT = torch.from_numpy(uniforms_RT).to(policy.model.device)
    # Upper bound of the width of a forward pass.
    widest = max(len(row.input) for row in rows) + max(row.limit - row.num_existing_tokens for row in rows)
    waiting = range(min(places, len(rows)), len(rows))
    logits_BV, live = _prefill(policy, rows, range(waiting.start), recorder)
    on_step(0)
    while True:
        _require_finite(logits_BV, live, policy, rows)
        at_B = output.ends(live)
        tokens_B, logprobs_B = sample_tokens(logits_BV, random_RT[live.rows_B, at_B], sampling, banned=policy.banned)
        _store_tokens(live, output, at_B, tokens_B, logprobs_B)
        _end_rows(live, output, at_B, policy, sampling.stop)
        num_alive = int(live.alive_B.sum())
        if num_alive == 0 and not waiting:
            return _build_completions(output, rows, policy, sampling.max_new_tokens, recorder)
        leave = num_alive < _KEEP_SHARE * len(live.rows_B)
        if num_alive:
            if leave:
                live.keep_alive()
            if live.width >= widest + ROOM:
                live.trim()
            at_B = output.ends(live)
            logits_BV = _decode_token(policy, live, output.tokens_RT[live.rows_B, at_B])
            if recorder is not None:
                recorder.record_tokens(live.rows_B, at_B)
            on_step(num_alive)
        if waiting and leave and (num_alive == 0 or is_in_place(live.cache)):
            next_rows, waiting = waiting[: places - num_alive], waiting[places - num_alive :]
            new_logits_BV, new = _prefill(policy, rows, next_rows, recorder)
            if num_alive:
                live.admit(new)
                logits_BV = torch.cat([logits_BV, new_logits_BV])
            else:
                logits_BV, live = new_logits_BV, new
            on_step(0)


def _allocate_output(rows: Sequence[CompletionRow], *, device: torch.device) -> _Output:
    limits_R = torch.tensor([row.limit for row in rows], device=device)
    tokens_RT = np.zeros((len(rows), max(row.limit for row in rows)), np.int64)
    for tokens_T, row in zip(tokens_RT, rows, strict=True):
        tokens_T[: row.num_existing_tokens] = row.input.completion
    return _Output(
        tokens_RT=torch.from_numpy(tokens_RT).to(device),
        logprobs_RT=torch.zeros(tokens_RT.shape, device=device),
        prompts_R=torch.tensor([row.input.num_prompt_tokens for row in rows], device=device),
        turns_R=torch.tensor([row.turn_start for row in rows], device=device),
        limits_R=limits_R,
        lengths_R=limits_R.clone(),
        stopped_R=torch.zeros(len(rows), dtype=torch.bool, device=device),
    )


def _prefill(
    policy: LoadedPolicy, rows: Sequence[CompletionRow], indices: range, recorder: ExpertRecorder | None
) -> tuple[Tensor, _Batch]:
    """Process the prompts of the rows at `indices`, padded on the left, and return the logits of the next tokens and
    the new batch. Each distinct prompt is processed once, and its cache rows are repeated for each of its completions.
    """
    device = policy.model.device
    firsts = [index for index in indices if index == indices.start or not _shares_cache(rows[index], rows[index - 1])]
    counts = np.diff([*firsts, indices.stop])
    prompts = [rows[index].input for index in firsts]
    logits_PV, mask_PT, offsets_P, cache = read_prompts(policy, prompts)
    prompt_B = torch.arange(len(prompts), device=device).repeat_interleave(torch.from_numpy(counts).to(device))
    if recorder is not None:
        recorder.record_prompts(indices, prompt_B, num_prompts=len(prompts))
    cache.reorder_cache(prompt_B)
    use_in_place_layers(cache)
    lengths_P = mask_PT.sum(dim=1)
    live = _Batch(
        rows_B=torch.arange(indices.start, indices.stop, device=device),
        alive_B=torch.ones(len(indices), dtype=torch.bool, device=device),
        width=mask_PT.shape[1],
        padding_B=(mask_PT.shape[1] - lengths_P)[prompt_B],
        lengths_B=lengths_P[prompt_B],
        offsets_B=offsets_P[prompt_B],
        cache=cache,
    )
    return logits_PV[prompt_B], live


def read_prompts(policy: LoadedPolicy, prompts: Sequence[ModelInput]) -> tuple[Tensor, Tensor, Tensor, Cache]:
    """Run a forward pass over prompts, padded on the left. Returns the logits of the next token, the attention mask,
    the offsets between tokens and positions, and the filled KV cache."""
    device, width = policy.model.device, max(map(len, prompts))
    tokens_PT = np.zeros((len(prompts), width), np.int64)
    for tokens_T, prompt in zip(tokens_PT, prompts, strict=True):
        tokens_T[width - len(prompt) :] = prompt.tokens
    mask_PT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    offsets_P = torch.zeros_like(mask_PT[:, 0])
    options = {"position_ids": (mask_PT.cumsum(dim=1) - 1).clamp(min=0)}
    if policy.vision is not None:
        rows = prepare_rows(policy.vision, policy.model, prompts, device=device, width=width, pads_left=True)
        offsets_P, options = rows.offsets_B, encode_images(policy.model, rows).options
    output = policy.model(
        input_ids=torch.from_numpy(tokens_PT).to(device),
        attention_mask=mask_PT,
        use_cache=True,
        logits_to_keep=1,
        **options,
    )
    return output.logits[:, -1], mask_PT, offsets_P, output.past_key_values


def _shares_cache(row: CompletionRow, other: CompletionRow) -> bool:
    return row.request == other.request and row.input == other.input


def _decode_token(policy: LoadedPolicy, live: _Batch, tokens_B: Tensor) -> Tensor:
    """Append the token in `tokens_B` to every row of the batch and return the logits of the next token."""
    live.width += 1
    mask_BT = torch.arange(live.width, device=live.padding_B.device) >= live.padding_B[:, None]
    output = policy.model(
        input_ids=tokens_B[:, None],
        attention_mask=mask_BT.long(),
        position_ids=(live.lengths_B + live.offsets_B)[:, None],
        past_key_values=live.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    live.lengths_B = (
        live.lengths_B + live.alive_B
    )  # the positions of finished rows stay within the policy's context length
    logits_BV: Tensor = output.logits[:, -1]
    return logits_BV


def _require_finite(logits_BV: Tensor, live: _Batch, policy: LoadedPolicy, rows: Sequence[CompletionRow]) -> None:
    finite_B = logits_BV.sum(
        dim=1, dtype=torch.float64
    ).isfinite()  # reads the logits once; isfinite alone would read memory three times
    if not finite_B.all():
        row = rows[int(live.rows_B[~finite_B][0])]
        raise Quarantined(
            f"the policy with digest {policy.digest} computed NaN or infinite logits for prompt row {row.prompt_row}, "
            f"sample {row.sample}, so no token can be sampled. Check its weights, and lower update.learning_rate if "
            "an update has caused this"
        )


def _store_tokens(live: _Batch, output: _Output, at_B: Tensor, tokens_B: Tensor, logprobs_B: Tensor) -> None:
    """Store sampled tokens and their log-probs at the indices `at_B` of the rows' completions. Finished rows stay
    unchanged."""
    rows_B = live.rows_B
    output.tokens_RT[rows_B, at_B] = torch.where(live.alive_B, tokens_B, output.tokens_RT[rows_B, at_B])
    output.logprobs_RT[rows_B, at_B] = torch.where(live.alive_B, logprobs_B, output.logprobs_RT[rows_B, at_B])


def _end_rows(live: _Batch, output: _Output, at_B: Tensor, policy: LoadedPolicy, stop: tuple[str, ...]) -> None:
    """Mark the rows as finished whose completion ended with the token at index `at_B`, by an end token, a stop text or
    its maximum length."""
    ended_B = torch.isin(output.tokens_RT[live.rows_B, at_B], policy.eos_E)
    if stop:
        ended_B |= _ends_with_stop_text(live, output, at_B, policy.tokenizer, stop)
    ended_B &= live.alive_B
    ended_rows = live.rows_B[ended_B]
    output.lengths_R[ended_rows] = at_B[ended_B] + 1
    output.stopped_R[ended_rows] = True
    live.alive_B &= ~ended_B & (at_B + 1 < output.limits_R[live.rows_B])


def _ends_with_stop_text(
    live: _Batch, output: _Output, at_B: Tensor, tokenizer: PreTrainedTokenizerFast, stop: tuple[str, ...]
) -> Tensor:
    """Return, for each row of the batch, whether the token at index `at_B` of its completion completes a stop text in
    the current turn."""
    window = stop_window(stop)
    back_W = torch.arange(window - 1, -1, -1, device=at_B.device)
    recent_BW = output.tokens_RT[live.rows_B[:, None], (at_B[:, None] - back_W).clamp(min=0)]
    counts = (at_B + 1 - output.turns_R[live.rows_B]).clamp(max=window).tolist()
    recent = [tokens[window - count :] for tokens, count in zip(recent_BW.tolist(), counts, strict=True)]
    texts = decode_texts(tokenizer, recent)
    return torch.tensor([any(end in text for end in stop) for text in texts], device=at_B.device)


def _build_completions(
    output: _Output,
    rows: Sequence[CompletionRow],
    policy: LoadedPolicy,
    longest: int,
    recorder: ExpertRecorder | None,
) -> list[Completion]:
    lengths, stopped = output.lengths_R.tolist(), output.stopped_R.tolist()
    tokens = [row[:length] for row, length in zip(output.tokens_RT.tolist(), lengths, strict=True)]
    logprobs = [row[:length] for row, length in zip(output.logprobs_RT.tolist(), lengths, strict=True)]
    texts = decode_texts(policy.tokenizer, tokens)
    return [
        Completion(
            tokens=tuple(tokens[index][row.num_existing_tokens :]),
            logprobs=tuple(logprobs[index][row.num_existing_tokens :]),
            text=texts[index],
            finish_reason=FinishReason.STOP if stopped[index] else length_finish_reason(lengths[index], longest),
            experts=None if recorder is None else recorder.read_row(index, lengths[index] - row.num_existing_tokens),
        )
        for index, row in enumerate(rows)
    ]


@torch.inference_mode()
def continuation_logprobs(
    policy: LoadedPolicy, prompts: Sequence[ModelInput], continuations: Sequence[Sequence[int]]
) -> Tensor:
    """Return the summed log-prob of each continuation after each prompt, at temperature 1, as float64 of shape
    (prompts, continuations). Raises Quarantined if a logit is not finite."""
    device, longest = policy.model.device, max(map(len, continuations))
    logits_PV, mask_PT, offsets_P, cache = read_prompts(policy, prompts)
    first_C = torch.tensor([tokens[0] for tokens in continuations], device=device)
    logprobs_PC = _log_softmax(logits_PV, policy)[:, first_C]
    if longest == 1:
        return logprobs_PC
    # Padding is on the right, where causal attention never looks; the log-probs of padding are masked.
    tokens_CL = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in continuations], device=device)
    real_CL = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in continuations]).to(device)
    row_R = torch.arange(len(prompts), device=device).repeat_interleave(len(continuations))
    cache.reorder_cache(row_R)
    tokens_RL, real_RL = tokens_CL.repeat(len(prompts), 1), real_CL.repeat(len(prompts), 1)
    steps_L = torch.arange(longest - 1, device=device)
    logits_RLV = policy.model(
        input_ids=tokens_RL[:, :-1],
        attention_mask=torch.cat([mask_PT[row_R], real_RL[:, :-1]], dim=1),
        position_ids=(mask_PT.sum(dim=1) + offsets_P)[row_R][:, None] + steps_L,
        past_key_values=cache,
        use_cache=True,
    ).logits
    later_RL = _log_softmax(logits_RLV, policy).gather(2, tokens_RL[:, 1:, None]).squeeze(2)
    later_R = later_RL.masked_fill(real_RL[:, 1:] == 0, 0).sum(dim=1)
    return logprobs_PC + later_R.view(len(prompts), len(continuations))


def _log_softmax(logits: Tensor, policy: LoadedPolicy) -> Tensor:
    if not logits.isfinite().all():
        raise Quarantined(
            f"the policy with digest {policy.digest} computed NaN or infinite logits for continuations whose "
            "log-probs are compared. Check its weights, and lower the learning rate if training has caused this"
        )
    return mask_tokens(logits.double(), policy.banned).log_softmax(dim=-1)
