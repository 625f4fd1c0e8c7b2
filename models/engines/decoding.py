"""Decoding one batch with a KV cache. B live rows, R all rows of the batch, E end tokens,
P prompts, T tokens, V vocabulary.

A row is one completion. Each prompt is prefilled once and its cache rows are repeated for its completions; finished
rows leave the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerFast

from infra.errors import Quarantined
from models.config import SamplingConfig
from models.engines import Completion
from models.engines.sampling import draw, uniforms
from models.records import FinishReason

_KEEP_SHARE: Final = 0.75  # with fewer live rows than this, copying the cache is cheaper than decoding dead rows on


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy ready to generate."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    digest: str
    eos_E: Tensor
    """Every token that ends a completion."""
    context: int | None
    """Longest sequence in tokens; none where the architecture sets no limit."""


@dataclass(frozen=True, slots=True)
class Row:
    """One completion to be made: the prompt (`request`-th of the work) and the seed of its draws."""

    request: int
    sample: int
    prompt_row: int
    prompt: tuple[int, ...]
    seed: int


@dataclass(slots=True)
class _Live:
    """The rows still in the batch. Rows that ended stay until enough have, and are not `alive`."""

    rows_B: Tensor
    alive_B: Tensor
    mask_BT: Tensor
    """1 where the cache holds, or will hold, a real token; as wide as the cache may grow."""
    width: int
    """Tokens in the cache, padding included."""
    lengths_B: Tensor
    """Real tokens in the cache, thus the position of the next one."""
    cache: Cache

    def keep_alive(self) -> None:
        kept_B = self.alive_B.nonzero().squeeze(1)
        self.rows_B, self.mask_BT, self.lengths_B = self.rows_B[kept_B], self.mask_BT[kept_B], self.lengths_B[kept_B]
        self.alive_B = self.alive_B[kept_B]
        self.cache.reorder_cache(kept_B)


@dataclass(frozen=True, slots=True)
class _Written:
    """What has been drawn, by row of the batch; entries past a row's length mean nothing."""

    tokens_RT: Tensor
    logprobs_RT: Tensor
    lengths_R: Tensor
    stopped_R: Tensor


@torch.inference_mode()
def decode(
    policy: LoadedPolicy, rows: Sequence[Row], sampling: SamplingConfig, *, on_step: Callable[[int], None]
) -> list[Completion]:
    """Return one completion per row; rows of one prompt must be neighbours.

    `on_step` is called after every forward with the number of sequences that it brought forward, 0 after the prefill.
    """
    device, longest = policy.model.device, sampling.max_new_tokens
    written = _Written(
        tokens_RT=torch.zeros(len(rows), longest, dtype=torch.long, device=device),
        logprobs_RT=torch.zeros(len(rows), longest, device=device),
        lengths_R=torch.full((len(rows),), longest, device=device),
        stopped_R=torch.zeros(len(rows), dtype=torch.bool, device=device),
    )
    uniforms_RT = torch.from_numpy(np.stack([uniforms(row.seed, longest) for row in rows])).to(device)
    logits_BV, live = _prefill(policy, rows, longest)
    on_step(0)
    for step in range(longest):
        _require_finite(logits_BV, live, policy, rows)
        tokens_B, logprobs_B = draw(logits_BV, uniforms_RT[live.rows_B, step], sampling)
        written.tokens_RT[live.rows_B, step] = tokens_B
        written.logprobs_RT[live.rows_B, step] = logprobs_B
        _end_rows(live, written, step, policy, sampling.stop)
        num_alive = int(live.alive_B.sum())
        if num_alive == 0 or step + 1 == longest:
            break
        if num_alive < _KEEP_SHARE * len(live.rows_B):
            live.keep_alive()
        logits_BV = _forward(policy, live, written.tokens_RT[live.rows_B, step])
        on_step(num_alive)
    return _completions(written, policy)


def _prefill(policy: LoadedPolicy, rows: Sequence[Row], longest: int) -> tuple[Tensor, _Live]:
    """Run each prompt once, padded on the left, and repeat what it left in the cache for each of its rows."""
    device = policy.model.device
    firsts = [index for index, row in enumerate(rows) if index == 0 or row.request != rows[index - 1].request]
    counts = np.diff([*firsts, len(rows)])
    prompts = [rows[index].prompt for index in firsts]
    width = max(map(len, prompts))
    tokens_PT = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask_PT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    output = policy.model(
        input_ids=tokens_PT,
        attention_mask=mask_PT,
        position_ids=(mask_PT.cumsum(dim=1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
    )
    prompt_B = torch.arange(len(prompts), device=device).repeat_interleave(torch.from_numpy(counts).to(device))
    output.past_key_values.reorder_cache(prompt_B)
    room_BT = mask_PT.new_ones(len(rows), longest)
    live = _Live(
        rows_B=torch.arange(len(rows), device=device),
        alive_B=torch.ones(len(rows), dtype=torch.bool, device=device),
        mask_BT=torch.cat([mask_PT[prompt_B], room_BT], dim=1),
        width=width,
        lengths_B=mask_PT.sum(dim=1)[prompt_B],
        cache=output.past_key_values,
    )
    return output.logits[:, -1][prompt_B], live


def _forward(policy: LoadedPolicy, live: _Live, tokens_B: Tensor) -> Tensor:
    """Append one token to every row and return the logits of the next."""
    live.width += 1
    output = policy.model(
        input_ids=tokens_B[:, None],
        attention_mask=live.mask_BT[:, : live.width],
        position_ids=live.lengths_B[:, None],
        past_key_values=live.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    live.lengths_B = live.lengths_B + 1
    logits_BV: Tensor = output.logits[:, -1]
    return logits_BV


def _require_finite(logits_BV: Tensor, live: _Live, policy: LoadedPolicy, rows: Sequence[Row]) -> None:
    finite_B = logits_BV.isfinite().all(dim=1)
    if not finite_B.all():
        row = rows[int(live.rows_B[~finite_B][0])]
        raise Quarantined(
            f"policy {policy.digest}: logits that are not finite at prompt row {row.prompt_row}, sample {row.sample}"
        )


def _end_rows(live: _Live, written: _Written, step: int, policy: LoadedPolicy, stop: tuple[str, ...]) -> None:
    """Note which rows ended with the token just written."""
    ended_B = torch.isin(written.tokens_RT[live.rows_B, step], policy.eos_E)
    if stop:
        ended_B |= _says_stop(live, written, step, policy.tokenizer, stop)
    ended_B &= live.alive_B
    ended_rows = live.rows_B[ended_B]
    written.lengths_R[ended_rows] = step + 1
    written.stopped_R[ended_rows] = True
    live.alive_B &= ~ended_B


def _says_stop(
    live: _Live, written: _Written, step: int, tokenizer: PreTrainedTokenizerFast, stop: tuple[str, ...]
) -> Tensor:
    """Look for a stop text in the last tokens: each spells at least a byte, so as many as its bytes hold all of it."""
    # 4 more: the first tokens may be the rest of a character, which decodes as another one.
    window = max(len(text.encode()) for text in stop) + 4
    recent_BT = written.tokens_RT[live.rows_B, max(0, step + 1 - window) : step + 1]
    texts = _texts(tokenizer, recent_BT.tolist())
    return torch.tensor([any(end in text for end in stop) for text in texts], device=recent_BT.device)


def _completions(written: _Written, policy: LoadedPolicy) -> list[Completion]:
    lengths = written.lengths_R.tolist()
    tokens = [row[:length] for row, length in zip(written.tokens_RT.tolist(), lengths, strict=True)]
    logprobs = [row[:length] for row, length in zip(written.logprobs_RT.tolist(), lengths, strict=True)]
    texts, stopped = _texts(policy.tokenizer, tokens), written.stopped_R.tolist()
    return [
        Completion(
            tokens=tuple(tokens[row]),
            logprobs=tuple(logprobs[row]),
            text=texts[row],
            finish_reason=FinishReason.STOP if stopped[row] else FinishReason.LENGTH,
        )
        for row in range(len(tokens))
    ]


def _texts(tokenizer: PreTrainedTokenizerFast, tokens: list[list[int]]) -> list[str]:
    texts: list[str] = tokenizer.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return texts
