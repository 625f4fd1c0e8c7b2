"""Log-probs of given tokens from a vLLM server: its completions API with token ids as the prompt and `prompt_logprobs`.

For each position of the prompt, the server returns a mapping from token ids to log-probs that includes the prompt's
token at this position. The first position has none. A missing log-prob is an error, because training on an arbitrary
value would be noise. Shapes: N completion tokens of one text.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from rheostat.infra.errors import BadInput, WorkerFailed
from rheostat.models.config.endpoints import Endpoint
from rheostat.models.endpoints.client import EndpointClient, EndpointRequest
from rheostat.models.records.model_input import ModelInput

IMPOSSIBLE = -9999.0
"""Number that vLLM sends in place of a log-prob of -inf, which JSON cannot represent."""
MAX_BODY_BYTES = 64 << 20
"""Maximum size of a response in bytes, which is enough for two candidates at each of 400,000 positions."""

TokenText = Callable[[int], str]
"""Function that returns the text of a token, given its ID, in the policy's tokenizer."""


class _Read(BaseModel):
    """Base class of the JSON objects in a response. Unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Candidate(_Read):
    """Candidate token at one position of the prompt, with its log-prob."""

    logprob: Annotated[float, Field(gt=IMPOSSIBLE, le=0.01)]  # above 0 only by rounding; NaN is rejected too
    decoded_token: str | None = None


class _Choice(_Read):
    """One choice in a completions response, with the log-probs of the prompt's tokens."""

    prompt_logprobs: tuple[dict[str, _Candidate] | None, ...]


class _Completion(_Read):
    """Body of a response from the completions API."""

    choices: Annotated[tuple[_Choice, ...], Field(min_length=1, max_length=1)]


class TokenScorer:
    """Client that requests the log-probs of several texts from a vLLM server concurrently. Raises EndpointDown if the
    endpoint does not answer, and WorkerFailed if a response does not match its request."""

    def __init__(self, config: Endpoint, *, spell: TokenText, on_progress: Callable[[], None]) -> None:
        """Validate the settings without network access. `spell` returns the text of a token ID, and `on_progress` is
        called after every attempt. Raises BadInput if the endpoint may not be used."""
        self._model, self._spell = config.model, spell
        self._client = EndpointClient(config, "/completions", max_bytes=MAX_BODY_BYTES, on_progress=on_progress)

    def score(self, texts: Sequence[ModelInput]) -> list[NDArray[np.float32]]:
        """Return the log-prob of each completion token of each text at temperature 1, as one array per text."""
        return self._client.post([self._request(text) for text in texts])

    def _request(self, text: ModelInput) -> EndpointRequest[NDArray[np.float32]]:
        """Build the request for one text. Raises BadInput if the text has images."""
        if text.images:
            raise BadInput(
                f"{self._client}: a teacher behind an endpoint supports text only, but a prompt has images. Use a "
                "vision-language teacher of kind 'directory'."
            )
        # Explicit values, because a server may have other defaults, and some versions apply them to these log-probs
        # too.
        plain: dict[str, JsonValue] = {"temperature": 1, "top_p": 1, "top_k": -1, "repetition_penalty": 1}
        body: dict[str, JsonValue] = {
            "model": self._model,
            "prompt": text.tokens.tolist(),
            "prompt_logprobs": 1,
            "max_tokens": 1,  # the minimum that every version accepts
            **plain,
        }
        return EndpointRequest(
            body=lambda: body,
            answer=partial(self._read, text),
            refusal=partial(self._refuse, text),
        )

    def _read(self, text: ModelInput, data: bytes) -> NDArray[np.float32]:
        """Read the log-probs of the completion tokens of `text` from the body of a response. Raises WorkerFailed if the
        response does not match the text."""
        try:
            [choice] = _Completion.model_validate_json(data).choices
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            self._refuse(
                text,
                f"the response contains no valid prompt_logprobs ({where}: {first['msg']}). Use a vLLM server, which "
                "returns them",
            )
        candidates = choice.prompt_logprobs
        if len(candidates) != len(text):
            self._refuse(
                text,
                f"the response contains log-probs at {len(candidates)} positions, but the text has {len(text)} tokens",
            )
        places, tokens = text.trained_positions.tolist(), text.tokens.tolist()
        logprobs = [self._candidate(text, place, tokens[place], candidates[place]).logprob for place in places]
        return np.minimum(np.array(logprobs, np.float32), np.float32(0))

    def _candidate(
        self, text: ModelInput, position: int, token: int, candidates: dict[str, _Candidate] | None
    ) -> _Candidate:
        """Return the candidate for the text's own `token` at a position, with its log-prob. Raises WorkerFailed if the
        candidate is missing or the server uses another tokenizer."""
        candidate = (candidates or {}).get(str(token))
        if candidate is None:
            returned = "none" if candidates is None else f"those of {', '.join(candidates) or 'no token'}"
            self._refuse(
                text,
                f"at position {position}, the response must contain the log-prob of token {token}, but it contains "
                f"{returned}",
            )
        ours, theirs = self._spell(token).strip(), (candidate.decoded_token or "").strip()
        # Servers differ in how they write spaces, special tokens and parts of characters, but not plain words.
        if ours and theirs and ours.isascii() and theirs.isascii() and ours != theirs:
            self._refuse(
                text,
                f"token {token} is {ours!r} for the policy but {theirs!r} for the teacher. Use a teacher with the "
                "policy's tokenizer",
            )
        return candidate

    def _refuse(self, text: ModelInput, reason: str) -> NoReturn:
        """Raise WorkerFailed with a message that describes the text and the `reason` why it has no log-probs."""
        raise WorkerFailed(
            f"the teacher at {self._client} returned no usable log-probs for a text of {len(text)} tokens "
            f"({text.num_prompt_tokens} of them in the prompt): {reason}"
        )
