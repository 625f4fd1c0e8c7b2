"""Entry points that vLLM's processes import: `Gateway`, an ASGI middleware, and `Weights`, a mixin of vLLM's workers.

None of this code runs in the pipeline, because the folder is on the PYTHONPATH of the server only.
"""

import hmac
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial

import torch
import transformers
import vllm
from rheostat_completions import generate, likelihoods, score_tokens
from rheostat_http import Message, Receive, Send, answer_errors, refuse_stranger, reply, stream
from rheostat_internals import get_engine
from rheostat_requests import Load, Questions, Scoring, Work, read_request
from rheostat_serving import Serving
from rheostat_weights import Weights
from starlette.requests import Request
from vllm.platforms import current_platform

__all__ = ["Gateway", "Weights"]

App = Callable[[Message, Receive, Send], Awaitable[None]]
Routes = dict[tuple[str, str], Callable[[Request, Send], Awaitable[None]]]

KEY_VARIABLE = "VLLM_API_KEY"


class Gateway:
    """ASGI middleware of a vLLM server that checks API keys, handles the routes under `/rheostat/`, and blocks vLLM's
    own routes while no policy is served. vLLM's own key protects only some of its paths. The middleware therefore
    checks the key on all paths except `GET /health`."""

    def __init__(self, app: App) -> None:
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise ValueError(
                f"the environment variable {KEY_VARIABLE} is empty. Set it to an API key, because the server would "
                "accept requests from everybody otherwise"
            )
        self._app = app
        self._expected = f"Bearer {key}".encode()
        self._serving: Serving | None = None
        self._routes: Routes = {
            ("GET", "/rheostat/about"): self._about,
            ("GET", "/rheostat/proof"): self._proof,
            ("POST", "/rheostat/load"): self._load,
            ("POST", "/rheostat/sleep"): self._sleep,
            ("POST", "/rheostat/generate"): self._generate,
            ("POST", "/rheostat/likelihoods"): self._likelihoods,
            ("POST", "/rheostat/score"): self._score,
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        method, path = scope.get("method"), scope.get("path")
        if scope["type"] == "lifespan" or (method, path) == ("GET", "/health"):
            await self._app(scope, receive, send)
        elif not self._knows_key(scope):
            await refuse_stranger(scope["type"], send)
        elif route := self._routes.get((str(method), str(path))):
            self._serving = self._serving or Serving(get_engine(scope))
            await answer_errors(partial(route, Request(scope, receive)), send)
        elif method in ("GET", "HEAD") or (self._serving is not None and await self._serving.wait_for_load()):
            await self._app(scope, receive, send)
        else:
            await reply(send, 409, {"error": "no weights are loaded", "digest": ""})

    def _knows_key(self, scope: Message) -> bool:
        headers: list[tuple[bytes, bytes]] = scope.get("headers", [])  # type: ignore[assignment]
        header = next((value for name, value in headers if name == b"authorization"), b"")
        return hmac.compare_digest(header, self._expected)

    @property
    def _served(self) -> Serving:
        assert self._serving is not None, "created before every route"
        return self._serving

    async def _about(self, _request: Request, send: Send) -> None:
        await reply(send, 200, _versions() | await self._served.about())

    async def _proof(self, _request: Request, send: Send) -> None:
        await reply(send, 200, {"digest": await self._served.verify_digest()})

    async def _load(self, request: Request, send: Send) -> None:
        load = read_request(Load, await request.body())
        await reply(send, 200, await self._served.load(load.directory, adapter=load.adapter, drain=load.drain))

    async def _sleep(self, _request: Request, send: Send) -> None:
        await reply(send, 200, {"slept": await self._served.sleep()})

    async def _generate(self, request: Request, send: Send) -> None:
        work = read_request(Work, await request.body())
        await stream(generate(self._served, work), request.receive, send=send)

    async def _likelihoods(self, request: Request, send: Send) -> None:
        questions = read_request(Questions, await request.body())
        logprobs = await likelihoods(self._served, questions)
        await reply(send, 200, {"logprobs": logprobs, "done": True, **self._served.steps.sums()})

    async def _score(self, request: Request, send: Send) -> None:
        scores = await score_tokens(self._served, read_request(Scoring, await request.body()))
        await reply(send, 200, {**scores, "done": True, **self._served.steps.sums()})


def _versions() -> dict[str, object]:
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "platform": current_platform.device_type,
        "device": current_platform.get_device_name(),
    }
