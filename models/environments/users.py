"""Models that play the user: one that the worker holds beside the policy, or one behind an endpoint. Torch-free."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from pydantic import JsonValue
from transformers import PreTrainedTokenizerFast

from models.config.engines import SamplingConfig, TransformersEngine
from models.config.users import EndpointUser
from models.data.problems import Prompt
from models.endpoints.client import EndpointClient, EndpointRequest
from models.engines.protocol import Completion, Engine, Request, build_engine
from models.engines.requests import context_of
from models.environments.transcripts import Transcript
from models.judges.endpoint import MAX_BODY_BYTES, SEEDS, read_answer
from models.records.model_input import ModelInput
from models.records.schemas import FinishReason
from models.records.versions import ModelVersion
from models.text.tokenizer import load_tokenizer, tokenize_prompts

_MARKED: Final = re.compile(r"<(?=\||/?s>|[a-z]+_of_[a-z]+>)|\[(?=/?[A-Z_]+\])")
"""Begins what most tokenizers have as a special token; that of an endpoint's model is not known."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the user says, or why nothing came of it."""

    text: str
    failure: str = ""


class PlaysUser(Protocol):
    """A model that plays the user."""

    @property
    def progress(self) -> int:
        """Moves with every pass or request, and every load."""

    def reply(self, transcripts: Sequence[Transcript], seeds: Sequence[int]) -> list[Reply]:
        """Answer the last turn of each."""


class HeldUser:
    """Replies with an engine of its own: one call for all of a batch.

    The same weights, transcripts and seeds give the same replies, to the bit, whatever was asked before.
    """

    def __init__(self, engine: TransformersEngine, sampling: SamplingConfig, *, chats: bool) -> None:
        self._settings = engine
        self._engine: Engine | None = None  # from the first load: it brings torch in, which checks do without
        self._sampling, self._chats = sampling, chats
        self._tokenizer: PreTrainedTokenizerFast | None = None
        self._context: int | None = None

    @property
    def progress(self) -> int:
        """Moves with every forward pass and every load."""
        return 0 if self._engine is None else self._engine.progress

    def load(self, directory: Path, model: ModelVersion) -> None:
        """Take the model, unless it is the one that replies."""
        if self._engine is None:
            self._engine = build_engine(self._settings)
        if self._engine.serves() == model.digest:
            return
        self._engine.load(directory, model)
        self._tokenizer = load_tokenizer(directory)
        self._context = context_of(directory)

    def sleep(self) -> None:
        """Give the memory of weights and cache back."""
        if self._engine is not None:
            self._engine.sleep()

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()

    def reply(self, transcripts: Sequence[Transcript], seeds: Sequence[int]) -> list[Reply]:
        """Answer together; a dialogue that is longer than the context fails alone."""
        assert self._engine is not None, "reply before load"
        assert self._tokenizer is not None, "reply before load"
        read = user_inputs(transcripts, self._tokenizer, chats=self._chats)
        room = self._sampling.max_new_tokens
        fits = [self._context is None or len(each) + room <= self._context for each in read]
        requests = [
            Request(row=row, inputs=(each,), seeds=(seed,))
            for row, (each, seed, fit) in enumerate(zip(read, seeds, fits, strict=True))
            if fit
        ]
        written = iter(self._engine.generate(requests, self._sampling) if requests else [])
        return [
            _reply(next(written)[0], in_chat=self._in_chat)
            if fit
            else Reply("", f"the dialogue has {len(each)} tokens and a reply up to {room}, expected {self._context}")
            for each, fit in zip(read, fits, strict=True)
        ]

    @property
    def _in_chat(self) -> bool:
        assert self._tokenizer is not None, "reply before load"
        return self._chats and bool(self._tokenizer.chat_template)


def user_inputs(
    transcripts: Sequence[Transcript], tokenizer: PreTrainedTokenizerFast, *, chats: bool
) -> list[ModelInput]:
    """Tokenize dialogues, as chats where the tokenizer has a template for them. Raises BadInput where it refuses one.

    Special tokens that a policy spells are broken in two.
    """
    special = sorted((token for token in tokenizer.all_special_tokens if len(token) > 1), key=len, reverse=True)
    spelt = re.compile("|".join(map(re.escape, special)) or "(?!)")
    broken = [_broken(each, spelt) for each in transcripts]
    in_chat = chats and bool(tokenizer.chat_template)
    prompts: list[Prompt] = [each.messages if in_chat else each.text for each in broken]
    found = tokenize_prompts(prompts, tokenizer, sources=["the user's dialogue"] * len(prompts))
    return [each.input for each in found]


class AskedUser:
    """Replies over HTTP; an endpoint that is down, or gives no whole answer, fails the dialogue that asked."""

    def __init__(self, model: EndpointUser, sampling: SamplingConfig) -> None:
        """Check what can be checked without the network. Raises BadInput."""
        self._progress = 0
        self._model, self._sampling = model, sampling
        self._client = EndpointClient(
            model, "/chat/completions", max_bytes=MAX_BODY_BYTES, on_progress=self._on_progress
        )

    @property
    def progress(self) -> int:
        """Moves with every attempt at a request."""
        return self._progress

    def reply(self, transcripts: Sequence[Transcript], seeds: Sequence[int]) -> list[Reply]:
        """Ask for all at once; the endpoint's `concurrency` says how many wait."""
        failed = partial(Reply, "")
        return self._client.ask(
            [
                EndpointRequest(partial(self._body, each, seed), answer=_read, refusal=failed, outage=failed)
                for each, seed in zip(transcripts, seeds, strict=True)
            ]
        )

    def _body(self, transcript: Transcript, seed: int) -> dict[str, JsonValue]:
        sampling, messages = self._sampling, _broken(transcript, _MARKED).messages
        return {
            "model": self._model.model,
            "messages": [each.spelt() for each in messages],
            "seed": seed % SEEDS,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
        }

    def _on_progress(self) -> None:
        self._progress += 1


def _read(data: bytes) -> Reply:
    answer = read_answer(data, None)
    return Reply("", answer.error) if answer.error is not None else _said(answer.text or "", in_chat=True)


def _reply(completion: Completion, *, in_chat: bool) -> Reply:
    if completion.finish_reason is FinishReason.LENGTH:
        return Reply("", f"the user's reply did not end within {len(completion.tokens)} tokens")
    return _said(completion.text, in_chat=in_chat)


def _said(text: str, *, in_chat: bool) -> Reply:
    if not text.strip():
        return Reply("", "the user's reply is empty")
    return Reply(text.strip() if in_chat else text)


def _broken(transcript: Transcript, special: re.Pattern[str]) -> Transcript:
    """Put a space behind the first character of what would be read as a special token, in the policy's turns."""
    turns = tuple(special.sub(lambda token: f"{token[0][0]} {token[0][1:]}", turn) for turn in transcript.turns)
    return replace(transcript, turns=turns)
