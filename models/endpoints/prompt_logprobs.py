"""Log-probs of given tokens by a vLLM server: its completions API with token ids as the prompt, and `prompt_logprobs`.

Each position of the prompt is answered with a mapping from token ids to log-probs that holds at least the prompt's own
token; the first position has none. Whatever is missing is an error: a token without log-prob would teach at random.
Shapes: N completion tokens of one text.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from infra.errors import BadInput, WorkerFailed
from models.config.endpoints import Endpoint
from models.endpoints.client import EndpointClient, EndpointRequest
from models.records.model_input import ModelInput

IMPOSSIBLE = -9999.0
"""What vLLM writes for -inf, which JSON does not have."""
MAX_BODY_BYTES = 64 << 20
"""Two candidates at each of 400,000 positions."""

Spell = Callable[[int], str]
"""The text of one token in the policy's tokenizer."""


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Candidate(_Read):
    logprob: Annotated[float, Field(gt=IMPOSSIBLE, le=0.01)]  # above 0 only by rounding; NaN is refused too
    decoded_token: str | None = None


class _Choice(_Read):
    prompt_logprobs: tuple[dict[str, _Candidate] | None, ...]


class _Completion(_Read):
    choices: Annotated[tuple[_Choice, ...], Field(min_length=1, max_length=1)]


class TokenScorer:
    """Asks one model about several texts at once.

    Raises EndpointDown where it does not answer, WorkerFailed where an answer is not what was asked for.
    """

    def __init__(self, config: Endpoint, *, spell: Spell, on_progress: Callable[[], None]) -> None:
        """Check what needs no network. Raises BadInput. Calls `on_progress` after every attempt."""
        self._model, self._spell = config.model, spell
        self._client = EndpointClient(config, "/completions", max_bytes=MAX_BODY_BYTES, on_progress=on_progress)

    def score(self, texts: Sequence[ModelInput]) -> list[NDArray[np.float32]]:
        """Return the log-prob of every written token of each text, at temperature 1."""
        return self._client.ask([self._request(text) for text in texts])

    def _request(self, text: ModelInput) -> EndpointRequest[NDArray[np.float32]]:
        if text.images:
            raise BadInput(f"{self._client}: it is asked about token ids alone, found a prompt with images")
        # Spelt out, since a server may have other defaults, and some versions temper and filter these log-probs too.
        plain: dict[str, JsonValue] = {"temperature": 1, "top_p": 1, "top_k": -1, "repetition_penalty": 1}
        body: dict[str, JsonValue] = {
            "model": self._model,
            "prompt": text.tokens.tolist(),
            "prompt_logprobs": 1,
            "max_tokens": 1,  # the fewest that every version generates
            **plain,
        }
        return EndpointRequest(
            body=lambda: body,
            answer=partial(self._read, text),
            refusal=partial(self._refuse, text),
        )

    def _read(self, text: ModelInput, data: bytes) -> NDArray[np.float32]:
        try:
            [choice] = _Completion.model_validate_json(data).choices
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            self._refuse(text, f"no log-probs of its prompt: {where}: {first['msg']}")
        found = choice.prompt_logprobs
        if len(found) != len(text):
            self._refuse(text, f"expected log-probs at {len(text)} positions, found {len(found)}")
        places, tokens = text.written.tolist(), text.tokens.tolist()
        logprobs = [self._candidate(text, place, tokens[place], found[place]).logprob for place in places]
        return np.minimum(np.array(logprobs, np.float32), np.float32(0))

    def _candidate(
        self, text: ModelInput, position: int, token: int, candidates: dict[str, _Candidate] | None
    ) -> _Candidate:
        candidate = (candidates or {}).get(str(token))
        if candidate is None:
            found = "none" if candidates is None else f"those of {', '.join(candidates) or 'no token'}"
            self._refuse(text, f"position {position}: expected the log-prob of token {token}, found {found}")
        ours, theirs = self._spell(token).strip(), (candidate.decoded_token or "").strip()
        # Servers differ in how they spell spaces, special tokens and parts of characters; plain words are the same.
        if ours and theirs and ours.isascii() and theirs.isascii() and ours != theirs:
            self._refuse(text, f"token {token} is {ours!r} for the policy and {theirs!r} there: another tokenizer")
        return candidate

    def _refuse(self, text: ModelInput, reason: str) -> NoReturn:
        raise WorkerFailed(
            f"teacher at {self._client}: of a text of {len(text)} tokens, {text.num_prompt_tokens} of them the "
            f"prompt's: {reason}"
        )
