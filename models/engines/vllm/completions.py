"""Unfinished completions: the requests sent to a server, the tokens received, and the reason why each ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from transformers import PreTrainedTokenizerFast

from rheostat.infra.errors import EndpointDown, Quarantined, WorkerFailed, WorkerLost
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.protocol import Completion
from rheostat.models.engines.requests import CompletionRow, decode_texts, length_finish_reason, stop_window
from rheostat.models.engines.vllm.client import Chunk, CompletionRequest, RoutedRows
from rheostat.models.records.model_input import Experts
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.seeds import derive_seed

SEED_LIMIT: Final = 2**63
"""Exclusive upper limit of the seeds sent to a vLLM server. On GPUs vLLM stores seeds as signed 64-bit integers."""

MAX_ABORTS: Final = 8
"""Maximum number of times that loading weights may interrupt the generation of one completion before the completion
fails."""


@dataclass(slots=True)
class PendingRequest:
    """Unfinished completion (a draft) and the request to a vLLM server that continues it. `fresh_tokens` and
    `fresh_logprobs` arrived in answer to the current request and are dropped if that request fails."""

    row: CompletionRow
    end: int
    """Maximum length of the completion in tokens, including tokens from earlier iterations or turns."""
    at_end: FinishReason
    """Finish reason if the completion reaches its maximum length `end`."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    fresh_tokens: list[int] = field(default_factory=list)
    fresh_logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    records_experts: bool = False
    experts: Experts | None = None
    """Experts that the routers chose for all tokens except the last. If several requests processed a token, the choice
    of the first request is kept."""
    seams: list[int] = field(default_factory=list)
    """Lengths of the completion, in tokens, at which generation was continued by another request."""

    @property
    def all_tokens(self) -> list[int]:
        """Tokens of the completion so far, including tokens from earlier iterations or turns."""
        return [*self.row.input.completion.tolist(), *self.tokens]

    def build_request(self, number: int) -> CompletionRequest:
        """Build a request for the completion's remaining tokens. `number` is the request's ID. A continued completion
        uses another seed than the request before. Seeds are taken modulo `SEED_LIMIT`."""
        num_done = self.row.num_existing_tokens + len(self.tokens)
        return CompletionRequest(
            id=number,
            input=self.row.input.append_completion(self.tokens),
            seed=(derive_seed("continued", self.row.seed, num_done) if num_done else self.row.seed) % SEED_LIMIT,
            max_tokens=self.end - num_done,
            experts=self.records_experts,
        )

    def add(self, chunk: Chunk) -> None:
        """Append the tokens of a server's chunk to the completion, and finish it after the last chunk. Raises
        EndpointDown if the numbers of tokens and log-probs differ. After the last chunk, raises WorkerFailed if the
        length is wrong, and WorkerLost after too many interruptions."""
        tokens = np.frombuffer(chunk.tokens, "<i4").tolist()
        logprobs = np.frombuffer(chunk.logprobs, "<f4").tolist()
        if len(tokens) != len(logprobs):
            raise EndpointDown(
                f"the vLLM server returned {len(tokens)} tokens but {len(logprobs)} log-probs, although each token "
                "needs one"
            )
        self.fresh_tokens += tokens
        self.fresh_logprobs += logprobs
        if chunk.finish is not None:
            has_tokens = bool(self.fresh_tokens)
            self._finish(chunk.finish)
            if self.records_experts and has_tokens:
                self._store_experts(chunk.experts)

    def _finish(self, reason: str) -> None:
        self.tokens += self.fresh_tokens
        self.logprobs += self.fresh_logprobs
        self.forget_fresh()
        length = self.row.num_existing_tokens + len(self.tokens)
        if length > self.end or (reason == "length" and length != self.end) or not (self.tokens or reason == "abort"):
            raise WorkerFailed(
                f"the vLLM server ended a completion at {length} tokens with the reason {reason!r}, but it should end "
                f"at a stop token or at {self.end} tokens"
            )
        if length == self.end and reason != "stop":
            self.finish = self.at_end
        elif reason == "stop":
            self.finish = FinishReason.STOP
        elif len(self.seams) == MAX_ABORTS:
            raise WorkerLost(
                f"the vLLM server interrupted a completion {MAX_ABORTS + 1} times. Check that no other run loads "
                "weights into the same server"
            )
        else:
            self.seams.append(length)

    def _store_experts(self, experts: RoutedRows | None) -> None:
        """Store the experts of tokens that are processed for the first time. Later requests do not replace them."""
        tokens = len(self.row.input) + len(self.tokens) - 1
        if experts is None or len(experts.rows) != tokens * experts.width * np.dtype(experts.dtype).itemsize:
            actual = "none" if experts is None else f"{len(experts.rows)} bytes with {experts.width} experts per token"
            raise WorkerFailed(
                f"the vLLM server must return the chosen experts of {tokens} tokens, but it returned {actual}"
            )
        rows: Experts = np.frombuffer(experts.rows, experts.dtype).reshape(tokens, experts.width)
        earlier = rows[:0] if self.experts is None else self.experts
        if earlier.shape[1] != experts.width:
            raise WorkerFailed(
                f"the vLLM server returned {experts.width} experts per token, but {earlier.shape[1]} for earlier "
                "tokens of the same completion"
            )
        self.experts = np.concatenate([earlier, rows[len(earlier) :]])

    def forget_fresh(self) -> None:
        """Drop the tokens of a request that failed before it was complete. If the request is sent again, it returns the
        same tokens."""
        self.fresh_tokens, self.fresh_logprobs = [], []


def build_drafts(
    rows: Sequence[CompletionRow], sampling: SamplingConfig, *, records_experts: bool = False
) -> list[PendingRequest]:
    """Build one unfinished completion (draft) per row. With `records_experts`, servers must report the experts chosen
    for each token."""
    longest = sampling.max_new_tokens
    return [
        PendingRequest(
            row=row, end=row.limit, at_end=length_finish_reason(row.limit, longest), records_experts=records_experts
        )
        for row in rows
    ]


def build_completions(
    drafts: Sequence[PendingRequest], tokenizer: PreTrainedTokenizerFast, stop: tuple[str, ...], *, digest: str
) -> list[Completion]:
    """Return the completions of finished drafts. Raises Quarantined, with the policy's `digest` in the message, if a
    log-prob is not finite."""
    for draft in drafts:
        if stop:
            _cut_at_seams(draft, tokenizer, stop)
        if not np.isfinite(draft.logprobs).all():
            raise Quarantined(
                f"the policy with digest {digest} has NaN or infinite log-probs for prompt row "
                f"{draft.row.prompt_row}, sample {draft.row.sample}. Check its weights, and lower "
                "update.learning_rate if an update has caused this"
            )
    texts = decode_texts(tokenizer, [draft.all_tokens for draft in drafts])
    return [_build_completion(draft, text) for draft, text in zip(drafts, texts, strict=True)]


def _build_completion(draft: PendingRequest, text: str) -> Completion:
    assert draft.finish is not None, "a completion has ended before it is read"
    num_read = len(draft.row.input) + len(draft.tokens) - 1
    experts = None if draft.experts is None else draft.experts[:num_read]
    return Completion(tuple(draft.tokens), tuple(draft.logprobs), text, draft.finish, experts)


def _cut_at_seams(draft: PendingRequest, tokenizer: PreTrainedTokenizerFast, stop: tuple[str, ...]) -> None:
    """End a completion at a stop text that began in one request and was completed in the next, because no server can
    detect such a stop text. Only the tokens just after the boundary between two requests are checked."""
    window, begun, tokens = stop_window(stop), draft.row.num_existing_tokens, draft.all_tokens
    for seam in ([begun] if begun else []) + draft.seams:
        ends = range(seam + 1, min(len(tokens), seam + window) + 1)
        texts = decode_texts(tokenizer, [tokens[max(draft.row.turn_start, end - window) : end] for end in ends])
        for end, text in zip(ends, texts, strict=True):
            if any(stop_text in text for stop_text in stop):
                draft.tokens, draft.logprobs = draft.tokens[: end - begun], draft.logprobs[: end - begun]
                draft.finish = FinishReason.STOP
                return
