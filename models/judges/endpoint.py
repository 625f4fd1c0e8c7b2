"""Judge that queries an OpenAI-compatible endpoint: builds chat completion requests and validates the responses."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from infra.errors import BadInput
from infra.plain_values import repair_text
from models.config.engines import SamplingConfig
from models.config.judges import EndpointJudge
from models.config.verdicts import ChoiceVerdict, LogprobVerdict, VerdictConfig
from models.data.images import data_address
from models.endpoints.client import EndpointClient, EndpointRequest
from models.judges.verdicts import Answer, Question
from models.records.media import Gallery, ImageSource

SEEDS = 1 << 31  # servers accept seeds of different sizes; all accept 31 bits

TOP_LOGPROBS = 20  # the maximum of the API


class _Read(BaseModel):
    """Base class of the JSON objects in an endpoint's response. Unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Likely(_Read):
    """Token that the judge might have generated at a position, with its log-prob."""

    token: str
    logprob: Annotated[float, Field(le=0.01)]  # above 0 only by rounding; NaN is rejected too


class _Position(_Read):
    """Most likely tokens at one position of the judge's answer."""

    top_logprobs: tuple[_Likely, ...]


class _Logprobs(_Read):
    """Log-probs of the answer, position by position."""

    content: Annotated[tuple[_Position, ...], Field(min_length=1)]


class _Message(_Read):
    """Message that the judge's model generated, in a response."""

    content: str | None = None


class _Choice(_Read):
    """One generated answer in a response. Rheostat requests only one."""

    message: _Message
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Usage(_Read):
    """Numbers of tokens that the endpoint reports for a request."""

    prompt_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    completion_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] = 0


class _Completion(_Read):
    """Body of an endpoint's chat completion response, with the fields that are read."""

    choices: Annotated[tuple[_Choice, ...], Field(min_length=1)]
    usage: _Usage | None = None


def check_request(judge: EndpointJudge, sampling: SamplingConfig, verdict: VerdictConfig) -> None:
    """Raise BadInput if the endpoint does not support the verdict or the sampling settings."""
    if isinstance(verdict, ChoiceVerdict) and verdict.constrained and judge.guided == "none":
        raise BadInput(
            f"judge at {judge.base_url!r}: verdict.constrained = true needs a server that supports constrained "
            'decoding. Set model.guided = "vllm" if the server is vLLM, else set verdict.constrained = false.'
        )
    if sampling.top_k and judge.guided != "vllm":
        raise BadInput(
            f"judge at {judge.base_url!r}: sampling.top_k is {sampling.top_k}, but the OpenAI API has no parameter "
            'top_k. Set sampling.top_k = 0, or model.guided = "vllm" if the server is vLLM.'
        )


def request_body(
    question: Question,
    images: Sequence[bytes],
    judge: EndpointJudge,
    *,
    sampling: SamplingConfig,
    verdict: VerdictConfig,
) -> dict[str, JsonValue]:
    """Build the request body for one question. The encoded images precede the text."""
    parts: list[JsonValue] = [{"type": "image_url", "image_url": {"url": data_address(image)}} for image in images]
    body: dict[str, JsonValue] = {
        "model": judge.model,
        "messages": [
            {"role": "user", "content": [*parts, {"type": "text", "text": question.text}] if parts else question.text}
        ],
        "seed": question.seed % SEEDS,
    }
    if isinstance(verdict, LogprobVerdict):
        # Some servers apply the temperature to the log-probs that they report. At temperature 1 they are the model's
        # own.
        options: dict[str, JsonValue] = {"logprobs": True, "top_logprobs": TOP_LOGPROBS, "temperature": 1, "top_p": 1}
        return {**body, **options, "max_tokens": 1}
    body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_new_tokens}
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if isinstance(verdict, ChoiceVerdict) and verdict.constrained:
        body["structured_outputs"] = {"choice": list(verdict.choices)}
    return body


def read_answer(data: bytes, verdict: VerdictConfig | None) -> Answer:
    """Parse the body of an endpoint's response into an answer of the judge.

    Any response that is not a complete answer becomes an invalid answer with its error.

    Without a verdict, the answer is plain text.
    """
    try:
        completion = _Completion.model_validate_json(_repair_characters(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        return invalid_answer(f"no chat completion: {where}: {first['msg']}")
    usage = completion.usage or _Usage()
    answer = _answer(completion.choices[0], verdict, tokens=usage.completion_tokens)
    return replace(answer, tokens_read=usage.prompt_tokens)


def _repair_characters(data: bytes) -> bytes:
    """Return JSON in which each half of a surrogate pair without its other half is U+FFFD. Other data is unchanged."""
    if rb"\ud" not in data.lower():
        return data
    try:
        return repair_text(json.dumps(json.loads(data), ensure_ascii=False)).encode()
    except (ValueError, RecursionError):  # the caller reports invalid JSON
        return data


def _answer(choice: _Choice, verdict: VerdictConfig | None, *, tokens: int) -> Answer:
    """Convert a choice of a response into an answer."""
    if isinstance(verdict, LogprobVerdict):
        return _likelihoods(choice.logprobs, verdict, tokens=tokens)
    if choice.finish_reason not in ("stop", None):  # a truncated answer may end with a truncated number
        reason = f"the answer was not finished: finish_reason {choice.finish_reason[:40]!r}"
        return Answer(text=choice.message.content, probabilities=None, tokens=tokens, error=reason)
    if not choice.message.content:
        return invalid_answer("the answer is empty", tokens=tokens)
    return Answer(text=choice.message.content, probabilities=None, tokens=tokens, error=None)


def invalid_answer(error: str, *, tokens: int = 0) -> Answer:
    """Return an answer without a verdict, with the reason as `error`."""
    return Answer(text=None, probabilities=None, tokens=tokens, error=error)


def _likelihoods(logprobs: _Logprobs | None, verdict: LogprobVerdict, *, tokens: int) -> Answer:
    """Compute the probabilities of yes and no from the log-probs of the first token."""
    if logprobs is None:
        return invalid_answer("the endpoint gave no log-probs", tokens=tokens)
    likely = {entry.token: min(1.0, math.exp(entry.logprob)) for entry in logprobs.content[0].top_logprobs}
    probabilities = {
        verdict.yes: _mass(likely, verdict.yes, against=verdict.no),
        verdict.no: _mass(likely, verdict.no, against=verdict.yes),
    }
    if not any(probabilities.values()):
        return invalid_answer(
            f"neither {verdict.yes!r} nor {verdict.no!r} is among the likely first tokens", tokens=tokens
        )
    return Answer(text=None, probabilities=probabilities, tokens=tokens, error=None)


def _mass(likely: Mapping[str, float], word: str, *, against: str) -> float:
    """Sum the probabilities of tokens with which `word` begins, ignoring case.

    Tokens with which the other word, `against`, begins too are ambiguous and not counted.
    """
    word, against = word.strip().casefold(), against.strip().casefold()
    begins = {token: token.strip().casefold() for token in likely}
    return min(
        1.0,
        sum(
            likely[token] for token, text in begins.items() if text and word.startswith(text) > against.startswith(text)
        ),
    )


MAX_BODY_BYTES = 4 << 20


class ChatJudge:
    """Judge that queries a model over HTTP with concurrent requests. Answers keep the order of the questions.

    Raises EndpointDown if the endpoint does not answer after all attempts, and WorkerFailed if it rejects the requests.
    Neither case is ever converted into an answer.
    """

    def __init__(self, config: EndpointJudge, *, sampling: SamplingConfig, verdict: VerdictConfig) -> None:
        """Validate the settings without network access. Raises BadInput if the endpoint cannot be used."""
        check_request(config, sampling, verdict)
        self.progress = 0
        self._images = Gallery()
        self._body = partial(request_body, judge=config, sampling=sampling, verdict=verdict)
        self._read = partial(read_answer, verdict=verdict)
        self._client = EndpointClient(
            config, "/chat/completions", max_bytes=MAX_BODY_BYTES, on_progress=self._on_progress
        )

    def show(self, images: ImageSource) -> None:
        """Set the source of the images in the questions that follow."""
        self._images.source = images

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Return one answer for each question, in order."""
        return self._client.post(
            [EndpointRequest(partial(self._put, each), answer=self._read, refusal=invalid_answer) for each in questions]
        )

    def _put(self, question: Question) -> dict[str, JsonValue]:
        """Build the request body for a question. The images are read from the source that `show` has set."""
        return self._body(question, [self._images.encoded(digest) for digest in question.images])

    def _on_progress(self) -> None:
        """Count an attempt at a request as progress, so that the worker is not considered stuck."""
        self.progress += 1
