"""Generation of completions and scoring of continuations, many at once to keep vLLM's batch full.

Requests contain token IDs, and answers contain token IDs and log-probs, so no text is tokenized here.

vLLM's own route for token IDs, `/inference/v1/generate`, accepts one prompt per request. For 256 completions of 64
tokens with a tiny model on a CPU, it returned the same tokens and log-probs, but its server process needed 2.4 times
the CPU time of the route here, or 3.0 times with streamed chunks.
"""

import asyncio
import base64
import json
import math
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import TypeVar

from rheostat_experts import RECORDED_AS
from rheostat_images import render
from rheostat_requests import CompletionRequest, Prompt, Questions, Refused, Sampling, Scoring, Work
from rheostat_serving import Serving
from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, RequestOutputKind

T = TypeVar("T")
Outputs = AsyncIterator[RequestOutput]

CHUNK_TOKENS = 32
_numbers = count()


async def generate(serving: Serving, work: Work) -> AsyncGenerator[bytes]:
    """Generate completions, and yield JSON lines with their next tokens, followed by a line with sums over decoding
    steps. Raises Refused if the server serves another policy or vLLM refuses a request."""
    serving.require(work.digest)
    names = [_next_name() for _ in work.requests]
    needs_experts = any(one.experts for one in work.requests)
    if needs_experts:
        await serving.experts.begin()
    lines: asyncio.Queue[bytes | None] = asyncio.Queue()
    tasks: list[asyncio.Task[None]] = []
    try:
        async with _end_tasks(serving, tasks, num_requests=len(names)):
            for name, one in zip(names, work.requests, strict=True):
                outputs = await _submit(serving, name, one, _parameters(name, one, work.sampling))
                tasks.append(asyncio.create_task(_follow(serving, name, one, outputs, digest=work.digest, lines=lines)))
            ended = asyncio.ensure_future(_end(tasks, lines))
            while (line := await lines.get()) is not None:
                parts = [line]
                while not lines.empty() and (line := lines.get_nowait()) is not None:
                    parts.append(line)
                yield b"".join(parts)
                if line is None:
                    break
            await ended
            yield _line({"done": True, **serving.steps.sums()})
    finally:
        if needs_experts:
            await serving.experts.forget(names)


async def _end(tasks: list[asyncio.Task[None]], lines: asyncio.Queue[bytes | None]) -> None:
    try:
        await asyncio.gather(*tasks)
    finally:
        lines.put_nowait(None)


async def likelihoods(serving: Serving, questions: Questions) -> str:
    """Return the summed log-prob of each continuation after each prompt, at temperature 1, as float64 in base64. Raises
    Refused if the server serves another policy or vLLM refuses a request.

    Each vLLM request scores the tokens that may follow one common beginning (stem) of the continuations. vLLM's prompt
    log-probs would need fewer requests, but they compute logits for the whole prompt, and on a CPU they crash an engine
    with adapters.
    """
    serving.require(questions.digest)
    followers: dict[tuple[int, ...], set[int]] = {}
    for continuation in questions.continuations:
        for end, token in enumerate(continuation):
            followers.setdefault(tuple(continuation[:end]), set()).add(token)
    queries = [
        (row, stem, tokens[start : start + MAX_LOGPROB_TOKEN_IDS])
        for row in range(len(questions.prompts))
        for stem, tokens in ((stem, sorted(following)) for stem, following in followers.items())
        for start in range(0, len(tokens), MAX_LOGPROB_TOKEN_IDS)
    ]
    logprobs: dict[tuple[int, tuple[int, ...], int], float] = {}
    tasks: list[asyncio.Task[dict[int, float]]] = []
    async with _end_tasks(serving, tasks, num_requests=len(queries)):
        for row, stem, tokens in queries:
            prompt = questions.prompts[row].append_completion([*stem])
            outputs = await _submit(serving, _next_name(), prompt, _scoring(tokens, questions.banned))
            tasks.append(asyncio.create_task(_score(outputs, tokens, digest=questions.digest)))
        for (row, stem, _), by_token in zip(queries, await asyncio.gather(*tasks), strict=True):
            logprobs |= {(row, stem, token): logprob for token, logprob in by_token.items()}
    return _base64(
        array(
            "d",
            (
                sum(logprobs[row, tuple(tokens[:end]), token] for end, token in enumerate(tokens))
                for row in range(len(questions.prompts))
                for tokens in questions.continuations
            ),
        )
    )


async def score_tokens(serving: Serving, scoring: Scoring) -> dict[str, object]:
    """Return the log-prob at temperature 1 of each token of a sequence after the first one (`logprobs`), and the most
    probable tokens in its place in descending order (`best`, as pairs of token and log-prob). Raises Refused if the
    server serves another policy or vLLM refuses the request."""
    serving.require(scoring.digest)
    await serving.ban(scoring.banned)
    tasks: list[asyncio.Task[RequestOutput]] = []
    async with _end_tasks(serving, tasks, num_requests=1):
        outputs = await _submit(serving, _next_name(), Prompt(scoring.tokens), _prompt_scoring(scoring.top))
        tasks.append(asyncio.create_task(_collect(outputs, digest=scoring.digest)))
        output = await tasks[0]
    places = output.prompt_logprobs[1:]
    best = [sorted((each.rank, token, each.logprob) for token, each in place.items()) for place in places]
    return {
        "logprobs": [place[token].logprob for place, token in zip(places, scoring.tokens[1:], strict=True)],
        "best": [[(token, logprob) for _, token, logprob in place[: scoring.top]] for place in best],
    }


async def _collect(outputs: Outputs, *, digest: str) -> RequestOutput:
    """Return the only output of a request. Raises Refused if weights were loaded in the meantime."""
    [output] = [output async for output in outputs]
    _require_version(output.outputs[0], digest)
    if output.outputs[0].finish_reason == "abort":
        raise Refused("the request was aborted, because weights were loaded in the meantime", status=409, digest="")
    return output


def _next_name() -> str:
    return f"rheostat-{next(_numbers)}"


@contextmanager
def _convert_refusals() -> Iterator[None]:
    """Raise Refused, with a message of one line, if vLLM refuses a request in the block."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        cause = error.__cause__ or error  # while it generates, vLLM wraps errors of other classes than its own
        if not isinstance(cause, VLLMClientError | ValueError | TypeError):
            raise
        raise Refused(" ".join(str(cause).split())) from error


@_convert_refusals()
def _parameters(name: str, one: CompletionRequest, sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logit_bias=_build_ban(sampling.banned),
        seed=one.seed,
        max_tokens=one.max_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=CHUNK_TOKENS,
        extra_args={RECORDED_AS: name} if one.experts else None,
        skip_clone=True,
    )


@_convert_refusals()
def _scoring(tokens: list[int], banned: list[int]) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        max_tokens=1,
        logit_bias=_build_ban(banned),
        logprob_token_ids=tokens,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


@_convert_refusals()
def _prompt_scoring(top: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        max_tokens=1,
        prompt_logprobs=top,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _build_ban(tokens: list[int]) -> dict[int, float] | None:
    """Return the logit bias for vLLM's sampling parameters that gives these tokens probability 0, or None if there are
    none. vLLM then normalizes over the other tokens."""
    return dict.fromkeys(tokens, -math.inf) or None


@asynccontextmanager
async def _end_tasks(serving: Serving, tasks: list[asyncio.Task[T]], *, num_requests: int) -> AsyncGenerator[None]:
    """Run a block that submits `num_requests` requests and adds tasks that read their outputs to the list. Tasks that
    are unfinished after the block are cancelled, and vLLM aborts their requests."""
    serving.steps.begin(num_requests)
    try:
        yield
    except Refused:
        await serving.engine.reset_mm_cache()  # the engine may not have received the images of every request
        raise
    finally:
        serving.steps.end(num_requests)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _submit(serving: Serving, name: str, prompt: Prompt, parameters: SamplingParams) -> Outputs:
    """Render the input of a request, and return an iterator over the request's outputs. The request is passed to vLLM's
    engine when the iteration begins. Raises Refused if the input cannot be rendered or the sequence would be too
    long. The iterator raises Refused if vLLM refuses the request."""
    longest, max_tokens = serving.engine.model_config.max_model_len, parameters.max_tokens or 0
    if len(prompt.tokens) + max_tokens > longest:  # vLLM would shorten the completion
        raise Refused(
            f"the prompt has {len(prompt.tokens)} tokens and max_tokens is {max_tokens}, but together they exceed the "
            f"server's max_model_len, which is {longest}"
        )
    with _convert_refusals():
        engine_input = await render(serving.engine, prompt)
    return _iterate(serving.engine.generate(engine_input, parameters, name, lora_request=serving.adapter))


async def _iterate(outputs: Outputs) -> Outputs:
    with _convert_refusals():
        async for output in outputs:
            yield output


async def _score(outputs: Outputs, tokens: list[int], *, digest: str) -> dict[int, float]:
    """Return the log-probs of the tokens that may follow a prompt, from the outputs of the prompt's request."""
    computed = (await _collect(outputs, digest=digest)).outputs[0].logprobs
    by_token = dict(zip(computed.token_ids[1:], computed.logprobs[1:], strict=True))
    return {token: by_token[token] for token in tokens}


async def _follow(
    serving: Serving,
    name: str,
    one: CompletionRequest,
    outputs: Outputs,
    *,
    digest: str,
    lines: asyncio.Queue[bytes | None],
) -> None:
    num_generated = 0
    async for output in outputs:
        completion = output.outputs[0]
        num_generated += len(completion.token_ids)
        extra: dict[str, object] = {}
        if completion.finish_reason is not None:
            try:
                _require_version(completion, digest)
            except Refused as refused:
                lines.put_nowait(_line({"id": one.id, **refused.answer}))
                return
            if one.experts and num_generated:  # for all tokens except the last, which was never an input
                num_read = len(one.tokens) + num_generated - 1
                extra["experts"] = await serving.experts.read(name, completion, num_read)
        lines.put_nowait(
            _line(
                {
                    "id": one.id,
                    "tokens": _base64(array("i", completion.token_ids)),
                    "logprobs": _base64(array("f", completion.logprobs.logprobs)),
                    "finish": completion.finish_reason,
                    **extra,
                }
            )
        )


def _require_version(completion: CompletionOutput, digest: str) -> None:
    other = {span.version for span in completion.weight_versions or ()} - {digest}
    if other:
        raise Refused(
            f"the request requires tokens of policy {digest}, but some tokens were generated by {other}, because "
            "weights were loaded in the meantime",
            status=409,
            digest=min(other),
        )


def _base64(values: Iterable[int] | Iterable[float]) -> str:
    return base64.b64encode(values.tobytes()).decode()  # type: ignore[union-attr]


def _line(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode() + b"\n"
