"""Models that play the user in dialogues, loaded in the rollout worker or queried at an endpoint."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from pydantic import JsonValue
from transformers import PreTrainedTokenizerFast

from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.config.texts import RULES_BEFORE, TextRules
from rheostat.models.config.users import EndpointUser
from rheostat.models.data.problems import Prompt
from rheostat.models.endpoints.client import EndpointClient, EndpointRequest
from rheostat.models.engines.protocol import Completion, Engine, Request, build_engine
from rheostat.models.engines.requests import context_of
from rheostat.models.environments.user_view import Transcript
from rheostat.models.judges.endpoint import MAX_BODY_BYTES, SEEDS, read_answer
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.versions import ModelVersion
from rheostat.models.text.tokenizer import load_tokenizer, tokenize_prompts

_MARKED: Final = re.compile(r"<(?=\||/?s>|[a-z]+_of_[a-z]+>)|\[(?=/?[A-Z_]+\])")
"""Pattern of the first character of a likely special token, such as `<|end|>`, `</s>` or `[INST]`. Used for models
behind endpoints, whose tokenizer is unknown."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of the simulated user, or the reason why the reply failed."""

    text: str
    failure: str = ""


class SimulatedUser(Protocol):
    """Model that plays the user in dialogues. `Dialogues` calls it; `LocalUser` and `RemoteUser` implement it."""

    @property
    def progress(self) -> int:
        """Counter that grows with every forward pass or request and with every load, so that a stuck worker can be
        detected."""

    def reply(self, transcripts: Sequence[Transcript], seeds: Sequence[int]) -> list[Reply]:
        """Return the simulated user's reply to the last turn of each transcript. `seeds` are the sampling seeds of the
        replies."""


class LocalUser:
    """Simulated user that generates its replies with an engine in this process. Each batch of replies is one engine
    call.

    The same weights, transcripts and seeds give bit-identical replies, regardless of earlier calls.
    """

    def __init__(
        self, engine: TransformersEngine, sampling: SamplingConfig, *, chats: bool, rules: TextRules = RULES_BEFORE
    ) -> None:
        self._settings = engine
        # created by the first `load`: building an engine imports torch, and checks run without torch
        self._engine: Engine | None = None
        self._sampling, self._chats, self._rules = sampling, chats, rules
        self._tokenizer: PreTrainedTokenizerFast | None = None
        self._context: int | None = None

    @property
    def progress(self) -> int:
        """Counter that grows with every forward pass and every load, so that a stuck worker can be detected."""
        return 0 if self._engine is None else self._engine.progress

    def load(self, directory: Path, model: ModelVersion) -> None:
        """Load the model from `directory`, unless a model with the same digest is already loaded."""
        if self._engine is None:
            self._engine = build_engine(self._settings)
        if self._engine.loaded_digest() == model.digest:
            return
        self._engine.load(directory, model)
        self._tokenizer = load_tokenizer(directory)
        self._context = context_of(directory)

    def sleep(self) -> None:
        """Release the GPU memory of the model's weights and of the KV cache."""
        if self._engine is not None:
            self._engine.sleep()

    def close(self) -> None:
        """Close the engine."""
        if self._engine is not None:
            self._engine.close()

    def reply(self, transcripts: Sequence[Transcript], seeds: Sequence[int]) -> list[Reply]:
        """Return the simulated user's replies to the last turns, generated in one batch.

        A dialogue that does not fit into the model's context gets a failed reply; the other dialogues are not affected.
        """
        assert self._engine is not None, "the model must be loaded before a reply"
        assert self._tokenizer is not None, "the model must be loaded before a reply"
        inputs = user_inputs(transcripts, self._tokenizer, chats=self._chats, rules=self._rules)
        room = self._sampling.max_new_tokens
        fits = [self._context is None or len(each) + room <= self._context for each in inputs]
        requests = [
            Request(row=row, inputs=(each,), seeds=(seed,))
            for row, (each, seed, fit) in enumerate(zip(inputs, seeds, fits, strict=True))
            if fit
        ]
        completions = iter(self._engine.generate(requests, self._sampling) if requests else [])
        return [
            _reply_from_completion(next(completions)[0], in_chat=self._in_chat)
            if fit
            else Reply("", f"the dialogue has {len(each)} tokens and a reply up to {room}, expected {self._context}")
            for each, fit in zip(inputs, fits, strict=True)
        ]

    @property
    def _in_chat(self) -> bool:
        """Whether the dialogue is rendered with the tokenizer's chat template."""
        assert self._tokenizer is not None, "the model must be loaded before a reply"
        return self._chats and bool(self._tokenizer.chat_template)


def user_inputs(
    transcripts: Sequence[Transcript],
    tokenizer: PreTrainedTokenizerFast,
    *,
    chats: bool,
    rules: TextRules = RULES_BEFORE,
) -> list[ModelInput]:
    """Tokenize dialogues for the simulated user's model, with the tokenizer's chat template if `chats` is set and the
    tokenizer has one.

    Special tokens that occur as text in the policy's turns are broken up by a space, so they are tokenized as plain
    text. `rules` apply to all other control tokens. Raises BadInput if the chat template rejects a dialogue.
    """
    special = sorted((token for token in tokenizer.all_special_tokens if len(token) > 1), key=len, reverse=True)
    special_pattern = re.compile("|".join(map(re.escape, special)) or "(?!)")
    broken = [_break_special_tokens(each, special_pattern) for each in transcripts]
    in_chat = chats and bool(tokenizer.chat_template)
    prompts: list[Prompt] = [each.messages if in_chat else each.text for each in broken]
    sources = ["dialogue for the simulated user"] * len(prompts)
    tokenized = tokenize_prompts(prompts, tokenizer, sources=sources, rules=rules)
    return [each.input for each in tokenized]


class RemoteUser:
    """Simulated user that queries an OpenAI-compatible endpoint.

    If the endpoint is down or returns an incomplete reply, the dialogue gets a failed reply.
    """

    def __init__(self, model: EndpointUser, sampling: SamplingConfig) -> None:
        """Validate the endpoint's settings without network access. Raises BadInput if they are invalid."""
        self._progress = 0
        self._model, self._sampling = model, sampling
        self._client = EndpointClient(
            model, "/chat/completions", max_bytes=MAX_BODY_BYTES, on_progress=self._on_progress
        )

    @property
    def progress(self) -> int:
        """Counter that grows with every attempt of a request, so that a stuck worker can be detected."""
        return self._progress

    def reply(self, transcripts: Sequence[Transcript], seeds: Sequence[int]) -> list[Reply]:
        """Request the simulated user's reply to the last turn of each transcript. Requests run concurrently, limited by
        the endpoint's `concurrency`."""
        failed = partial(Reply, "")
        return self._client.post(
            [
                EndpointRequest(
                    partial(self._build_body, each, seed), answer=_read_reply, refusal=failed, outage=failed
                )
                for each, seed in zip(transcripts, seeds, strict=True)
            ]
        )

    def _build_body(self, transcript: Transcript, seed: int) -> dict[str, JsonValue]:
        """Build the JSON body of the chat completion request for one reply."""
        sampling, messages = self._sampling, _break_special_tokens(transcript, _MARKED).messages
        return {
            "model": self._model.model,
            "messages": [each.encode() for each in messages],
            "seed": seed % SEEDS,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
        }

    def _on_progress(self) -> None:
        """Increase the progress counter after each attempt of a request, so that the worker is not considered stuck."""
        self._progress += 1


def _read_reply(data: bytes) -> Reply:
    """Parse the body of an endpoint's response into a reply of the simulated user. An incomplete response becomes a
    failed reply."""
    answer = read_answer(data, None)
    return Reply("", answer.error) if answer.error is not None else _reply_from_text(answer.text or "", in_chat=True)


def _reply_from_completion(completion: Completion, *, in_chat: bool) -> Reply:
    """Convert the model's completion into a reply of the simulated user. A completion that was cut off at the length
    limit becomes a failed reply."""
    if completion.finish_reason is FinishReason.LENGTH:
        return Reply("", f"the user's reply did not end within {len(completion.tokens)} tokens")
    return _reply_from_text(completion.text, in_chat=in_chat)


def _reply_from_text(text: str, *, in_chat: bool) -> Reply:
    """Return a reply with this text, or a failed reply if the text is blank.

    In chats, white space around the text is removed, because the chat template adds its own.
    """
    if not text.strip():
        return Reply("", "the user's reply is empty")
    return Reply(text.strip() if in_chat else text)


def _break_special_tokens(transcript: Transcript, special: re.Pattern[str]) -> Transcript:
    """Insert a space after the first character of each special token in the policy's turns, so that it is read as plain
    text. `special` matches these first characters."""
    turns = tuple(special.sub(lambda token: f"{token[0][0]} {token[0][1:]}", turn) for turn in transcript.turns)
    return replace(transcript, turns=turns)
