"""Decoding of completions with a KV cache.

Shapes: B live rows (rows in the current batch), R slots (one per completion), P prompts, T tokens, V vocabulary,
W tokens in which stop texts are searched.

A row is one completion. Each prompt is prefilled once, and its cache rows are repeated for its completions. A continued
completion is prefilled together with its existing tokens. Finished rows leave the batch, and waiting rows take their
places.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import count, islice
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rheostat.infra.errors import Quarantined
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.local.decoding_batch import DecodingBatch
from rheostat.models.engines.local.kv_cache import ROOM, is_in_place, use_in_place_layers
from rheostat.models.engines.local.loaded_policy import LoadedPolicy, read_prompts
from rheostat.models.engines.local.recorded_experts import ExpertRecorder
from rheostat.models.engines.protocol import Completion
from rheostat.models.engines.requests import CompletionRow, decode_texts, length_finish_reason, stop_window
from rheostat.models.engines.sampling import sample_tokens, sample_uniforms
from rheostat.models.records.schemas import FinishReason

_KEEP_SHARE: Final = 0.75  # with fewer live rows, copying the cache is cheaper than decoding finished rows


@dataclass(slots=True)
class _Output:
    """Completions that are being generated, one per slot. Entries beyond the length of a completion are undefined."""

    tokens_RT: Tensor
    """Completion tokens of each row, beginning with the tokens that the completion already had."""
    logprobs_RT: Tensor
    uniforms_RT: Tensor
    """Uniform random number with which each token is sampled."""
    prompts_R: Tensor
    """Number of prompt tokens of each completion."""
    turns_R: Tensor
    """Index in each row's completion at which the current turn (the newest reply of an episode) begins."""
    limits_R: Tensor
    lengths_R: Tensor
    stopped_R: Tensor

    @classmethod
    def without_slots(cls, device: torch.device) -> "_Output":
        """Return an output to which slots are added by `write`."""
        none_R = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(
            tokens_RT=torch.zeros((0, 0), dtype=torch.int64, device=device),
            logprobs_RT=torch.zeros((0, 0), device=device),
            uniforms_RT=torch.zeros((0, 0), dtype=torch.float64, device=device),
            prompts_R=none_R,
            turns_R=none_R,
            limits_R=none_R,
            lengths_R=none_R,
            stopped_R=none_R.bool(),
        )

    def write(self, slots: Sequence[int], rows: Sequence[CompletionRow]) -> None:
        """Write new rows to slots. If there are too few slots, or too few tokens in a slot, more are added."""
        self._reserve(max(slots) + 1, max(row.limit for row in rows))
        tokens_RT = np.zeros((len(rows), self.tokens_RT.shape[1]), np.int64)
        uniforms_RT = np.zeros(tokens_RT.shape)
        for tokens_T, uniforms_T, row in zip(tokens_RT, uniforms_RT, rows, strict=True):
            tokens_T[: row.num_existing_tokens] = row.input.completion
            uniforms_T[: row.limit] = sample_uniforms(row.seed, row.limit)
        device = self.tokens_RT.device
        slots_R = torch.tensor(slots, device=device)
        self.tokens_RT[slots_R] = torch.from_numpy(tokens_RT).to(device)
        self.uniforms_RT[slots_R] = torch.from_numpy(uniforms_RT).to(device)
        self.prompts_R[slots_R] = torch.tensor([row.input.num_prompt_tokens for row in rows], device=device)
        self.turns_R[slots_R] = torch.tensor([row.turn_start for row in rows], device=device)
        self.limits_R[slots_R] = self.lengths_R[slots_R] = torch.tensor([row.limit for row in rows], device=device)
        self.stopped_R[slots_R] = False

    def _reserve(self, num_slots: int, num_tokens: int) -> None:
        """Add slots up to `num_slots`, and make room for `num_tokens` tokens in every slot."""
        more_slots, more_tokens = num_slots - self.tokens_RT.shape[0], num_tokens - self.tokens_RT.shape[1]
        if max(more_slots, more_tokens) <= 0:
            return
        added = (0, max(0, more_tokens), 0, max(0, more_slots))
        for each in fields(self):
            values: Tensor = getattr(self, each.name)
            setattr(self, each.name, pad(values, added[-2 * values.dim() :]))

    def ends(self, live: DecodingBatch) -> Tensor:
        """Return, for each row of the batch, the index of the newest token in its completion. This token is not in the
        KV cache yet."""
        return live.lengths_B - self.prompts_R[live.rows_B]


class RowDecoder:
    """Decoder of completions that are decoded together, one row per completion. Rows that were added to a slot join the
    batch by `admit`, and leave it when they have finished. Must be used in torch's inference mode.

    The rows may have different maximum lengths and stop texts, but share the settings `sampling` of the distribution.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        sampling: SamplingConfig,
        *,
        on_step: Callable[[int], None],
        recorder: ExpertRecorder | None = None,
    ) -> None:
        self.num_alive = 0
        """Number of unfinished rows in the batch."""
        self.has_shrunk = True
        """Whether the batch is empty, or the last step has removed its finished rows because there were many."""
        self.sampling = sampling
        self._policy, self._on_step, self._recorder = policy, on_step, recorder
        self._rows: dict[int, CompletionRow] = {}
        """Rows by slot. Finished rows stay until `pop`."""
        self._samplings: dict[int, SamplingConfig] = {}
        """Settings by slot. Only the maximum length and the stop texts are used. The settings stay after `pop`, because
        the finished row may still be in the batch."""
        self._output = _Output.without_slots(policy.model.device)
        self._live: DecodingBatch | None = None
        self._logits_BV: Tensor
        """Logits of the next token of each row of the batch."""
        self._stop_window = 0
        self._max_width = 0
        """Upper bound of the width of a forward pass, if padding is trimmed."""

    @property
    def admits_rows(self) -> bool:
        """Whether rows can join the batch, because it is empty or because every layer of its KV cache keeps all
        tokens."""
        return self._live is None or is_in_place(self._live.cache)

    def add(self, rows: Sequence[CompletionRow], samplings: Sequence[SamplingConfig]) -> list[int]:
        """Assign each row to a free slot and return the slots. The rows do not join the batch yet. `samplings` contains
        the maximum length and the stop texts of each row."""
        taken = {*self._rows, *(self._live.rows_B.tolist() if self._live is not None else ())}
        slots = [*islice((slot for slot in count() if slot not in taken), len(rows))]
        self._output.write(slots, rows)
        self._rows.update(zip(slots, rows, strict=True))
        self._samplings.update(zip(slots, samplings, strict=True))
        present = self._rows.values()
        self._max_width = max(
            max(len(row.input) for row in present) + max(row.limit - row.num_existing_tokens for row in present),
            0 if self._live is None else int(self._live.lengths_B.max()),  # of finished rows, which trimming keeps
        )
        stops = {stop for slot in self._rows for stop in self._samplings[slot].stop}
        self._stop_window = stop_window(stops) if stops else 0
        return slots

    def admit(self, slots: Sequence[int]) -> None:
        """Process the prompts of added rows and add the rows to the batch. Neighbors with the same prompt share its
        forward pass."""
        logits_BV, new = _prefill(self._policy, [self._rows[slot] for slot in slots], slots, self._recorder)
        if self._live is None:
            self._logits_BV, self._live = logits_BV, new
        elif self.num_alive + len(slots) <= len(self._live.rows_B) and new.width <= self._live.width:
            self._logits_BV[self._live.replace_finished(new)] = logits_BV
        else:
            if self.num_alive < len(self._live.rows_B):
                self._logits_BV = self._logits_BV[self._live.alive_B]
                self._live.keep_alive()
            self._live.admit(new)
            self._logits_BV = torch.cat([self._logits_BV, logits_BV])
        self.num_alive += len(slots)
        self._on_step(0)

    def step(self) -> list[int]:
        """Sample the next token of every row, and process the tokens of the unfinished rows. Returns the slots of the
        rows that have finished. Raises Quarantined if a logit is not finite."""
        live, output = self._live, self._output
        assert live is not None, "a step needs rows"
        self._require_finite(live)
        at_B = output.ends(live)
        tokens_B, logprobs_B = sample_tokens(
            self._logits_BV, output.uniforms_RT[live.rows_B, at_B], self.sampling, banned=self._policy.banned
        )
        _store_tokens(live, output, at_B, tokens_B, logprobs_B)
        before_B = live.alive_B
        self._end_rows(live, at_B)
        num_before, self.num_alive = self.num_alive, int(live.alive_B.sum())
        finished = live.rows_B[before_B & ~live.alive_B].tolist() if self.num_alive < num_before else []
        self.has_shrunk = self.num_alive < _KEEP_SHARE * len(live.rows_B)
        if self.num_alive:
            self._decode_tokens(live)
        else:
            self._live = None
        return finished

    def pop(self, slots: Sequence[int]) -> list[Completion]:
        """Return the completions of finished rows. Their slots become free when the rows are no longer in the batch."""
        output, recorder = self._output, self._recorder
        lengths, stopped = output.lengths_R[slots].tolist(), output.stopped_R[slots].tolist()
        tokens = [row[:length] for row, length in zip(output.tokens_RT[slots].tolist(), lengths, strict=True)]
        logprobs = [row[:length] for row, length in zip(output.logprobs_RT[slots].tolist(), lengths, strict=True)]
        texts = decode_texts(self._policy.tokenizer, tokens)
        completions = []
        for index, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            begun, longest = self._rows.pop(slot).num_existing_tokens, self._samplings[slot].max_new_tokens
            completion = Completion(
                tokens=tuple(tokens[index][begun:]),
                logprobs=tuple(logprobs[index][begun:]),
                text=texts[index],
                finish_reason=FinishReason.STOP if stopped[index] else length_finish_reason(length, longest),
                experts=None if recorder is None else recorder.read_row(slot, length - begun),
            )
            completions.append(completion)
        return completions

    def drop(self, slots: Sequence[int]) -> None:
        """Discard unfinished rows of the batch. Like finished rows, they stay in the batch until rows are removed."""
        live = self._live
        assert live is not None, "dropped rows are in the batch"
        live.alive_B = live.alive_B & ~torch.isin(live.rows_B, torch.tensor(slots, device=live.rows_B.device))
        self.num_alive -= len(slots)
        for slot in slots:
            del self._rows[slot]
        if not self.num_alive:
            self._live, self.has_shrunk = None, True

    def _decode_tokens(self, live: DecodingBatch) -> None:
        """Process the newest token of every row of the batch, after many finished rows and wide padding were
        removed."""
        if self.has_shrunk:
            live.keep_alive()
        if live.width >= self._max_width + ROOM:
            live.trim()
        at_B = self._output.ends(live)
        self._logits_BV = _decode_token(self._policy, live, self._output.tokens_RT[live.rows_B, at_B])
        if self._recorder is not None:
            self._recorder.record_tokens(live.rows_B, at_B)
        self._on_step(self.num_alive)

    def _require_finite(self, live: DecodingBatch) -> None:
        # The sum reads the logits once; isfinite alone would read memory three times.
        finite_B = self._logits_BV.sum(dim=1, dtype=torch.float64).isfinite() | ~live.alive_B
        if not finite_B.all():
            row = self._rows[int(live.rows_B[~finite_B][0])]
            raise Quarantined(
                f"the policy with digest {self._policy.digest} computed NaN or infinite logits for prompt row "
                f"{row.prompt_row}, sample {row.sample}, so no token can be sampled. Check its weights, and lower "
                "update.learning_rate if an update has caused this"
            )

    def _end_rows(self, live: DecodingBatch, at_B: Tensor) -> None:
        """Mark the rows as finished whose completion ended with the token at index `at_B`, by an end token, a stop text
        or its maximum length."""
        output = self._output
        ended_B = torch.isin(output.tokens_RT[live.rows_B, at_B], self._policy.eos_E)
        if self._stop_window:
            ended_B |= self._end_with_stop_texts(live, at_B)
        ended_B &= live.alive_B
        ended_rows = live.rows_B[ended_B]
        output.lengths_R[ended_rows] = at_B[ended_B] + 1
        output.stopped_R[ended_rows] = True
        live.alive_B = live.alive_B & ~ended_B & (at_B + 1 < output.limits_R[live.rows_B])

    def _end_with_stop_texts(self, live: DecodingBatch, at_B: Tensor) -> Tensor:
        """Return, for each row of the batch, whether the token at index `at_B` of its completion completes a stop text
        in the current turn."""
        output, window = self._output, self._stop_window
        back_W = torch.arange(window - 1, -1, -1, device=at_B.device)
        recent_BW = output.tokens_RT[live.rows_B[:, None], (at_B[:, None] - back_W).clamp(min=0)]
        counts = (at_B + 1 - output.turns_R[live.rows_B]).clamp(max=window).tolist()
        recent = [tokens[window - count :] for tokens, count in zip(recent_BW.tolist(), counts, strict=True)]
        texts = decode_texts(self._policy.tokenizer, recent)
        stops = [self._samplings[slot].stop for slot in live.rows_B.tolist()]
        ends = [any(stop in text for stop in each) for text, each in zip(texts, stops, strict=True)]
        return torch.tensor(ends, device=at_B.device)


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
    decoder = RowDecoder(policy, sampling, on_step=on_step, recorder=recorder)
    slots = waiting = decoder.add(rows, [sampling] * len(rows))
    while waiting or decoder.num_alive:
        if waiting and decoder.has_shrunk and decoder.admits_rows:
            free = places - decoder.num_alive
            decoder.admit(waiting[:free])
            waiting = waiting[free:]
        decoder.step()
    return decoder.pop(slots)


def _prefill(
    policy: LoadedPolicy, rows: Sequence[CompletionRow], slots: Sequence[int], recorder: ExpertRecorder | None
) -> tuple[Tensor, DecodingBatch]:
    """Process the prompts of rows, padded on the left, and return the logits of the next tokens and the new batch. Each
    distinct prompt is processed once, and its cache rows are repeated for each of its completions."""
    device = policy.model.device
    firsts = [index for index, row in enumerate(rows) if index == 0 or not _shares_cache(row, rows[index - 1])]
    counts = np.diff([*firsts, len(rows)])
    prompts = [rows[index].input for index in firsts]
    logits_PV, mask_PT, offsets_P, cache = read_prompts(policy, prompts)
    prompt_B = torch.arange(len(prompts), device=device).repeat_interleave(torch.from_numpy(counts).to(device))
    if recorder is not None:
        recorder.record_prompts(slots, prompt_B, num_prompts=len(prompts))
    cache.reorder_cache(prompt_B)
    use_in_place_layers(cache)
    lengths_P = mask_PT.sum(dim=1)
    live = DecodingBatch(
        rows_B=torch.tensor(slots, device=device),
        alive_B=torch.ones(len(rows), dtype=torch.bool, device=device),
        width=mask_PT.shape[1],
        padding_B=(mask_PT.shape[1] - lengths_P)[prompt_B],
        lengths_B=lengths_P[prompt_B],
        offsets_B=offsets_P[prompt_B],
        cache=cache,
    )
    return logits_PV[prompt_B], live


def _shares_cache(row: CompletionRow, other: CompletionRow) -> bool:
    return row.request == other.request and row.input == other.input


def _decode_token(policy: LoadedPolicy, live: DecodingBatch, tokens_B: Tensor) -> Tensor:
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


def _store_tokens(live: DecodingBatch, output: _Output, at_B: Tensor, tokens_B: Tensor, logprobs_B: Tensor) -> None:
    """Store sampled tokens and their log-probs at the indices `at_B` of the rows' completions. Finished rows stay
    unchanged."""
    rows_B = live.rows_B
    output.tokens_RT[rows_B, at_B] = torch.where(live.alive_B, tokens_B, output.tokens_RT[rows_B, at_B])
    output.logprobs_RT[rows_B, at_B] = torch.where(live.alive_B, logprobs_B, output.logprobs_RT[rows_B, at_B])
