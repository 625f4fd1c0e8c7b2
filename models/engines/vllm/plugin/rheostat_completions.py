"""Generation of completions and scoring of continuations, many at once to keep vLLM's batch full.

Requests contain token IDs, and answers contain token IDs and log-probs, so no text is tokenized here.
"""

import asyncio
import base64
import json
import math
from array import array
from collections.abc import AsyncGenerator, Iterable
from itertools import count

from rheostat_experts import NOTED
from rheostat_images import render
from rheostat_requests import CompletionRequest, Prompt, Questions, Refused, Sampling, Work
from rheostat_serving import Serving
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

CHUNK_TOKENS = 32
_names = count()


async def generate(serving: Serving, work: Work) -> AsyncGenerator[bytes]:
    """Generate completions, and yield JSON lines with their next tokens, followed by a line with sums over decoding
    steps. Raises Refused if the server serves another policy or vLLM refuses a request."""
    serving.require(work.digest)
    needs_experts = any(one.experts for one in work.requests)
    if needs_experts:
        await serving.experts.begin()
    lines: asyncio.Queue[bytes | None] = asyncio.Queue()
    collectors: list[RequestOutputCollector] = []
    tasks: list[asyncio.Task[None]] = []
    serving.steps.begin(len(work.requests))
    try:
        collectors = await _admit(serving, ((one.prompt, _parameters(one, work.sampling)) for one in work.requests))
        tasks = [
            asyncio.create_task(_follow(serving, one, collector, digest=work.digest, lines=lines))
            for one, collector in zip(work.requests, collectors, strict=True)
        ]
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
        for task in tasks:
            task.cancel()
        serving.steps.end(len(work.requests))
        await _abandon(serving, [c for c, task in zip(collectors, tasks, strict=True) if not _finished(task)])
        if needs_experts:
            await serving.experts.forget([collector.request_id for collector in collectors])


async def _end(tasks: list[asyncio.Task[None]], lines: asyncio.Queue[bytes | None]) -> None:
    try:
        await asyncio.gather(*tasks)
    finally:
        lines.put_nowait(None)


def _finished(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


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
    collectors: list[RequestOutputCollector] = []
    logprobs: dict[tuple[int, tuple[int, ...], int], float] = {}
    serving.steps.begin(len(queries))
    try:
        banned = questions.banned
        prompts = ((questions.prompts[row].append_completion([*stem]), tokens) for row, stem, tokens in queries)
        collectors = await _admit(serving, ((prompt, _scoring(tokens, banned)) for prompt, tokens in prompts))
        for (row, stem, tokens), collector in zip(queries, collectors, strict=True):
            completion = (await collector.get()).outputs[0]
            _require_version(completion, questions.digest)
            token_logprobs = completion.logprobs
            by_token = dict(zip(token_logprobs.token_ids[1:], token_logprobs.logprobs[1:], strict=True))
            logprobs |= {(row, stem, token): by_token[token] for token in tokens}
    finally:
        serving.steps.end(len(queries))
        await _abandon(serving, collectors)
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


def _parameters(one: CompletionRequest, sampling: Sampling) -> SamplingParams:
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
        extra_args={NOTED: True} if one.experts else None,
        skip_clone=True,
    )


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


def _build_ban(tokens: list[int]) -> dict[int, float] | None:
    """Return the logit bias for vLLM's sampling parameters that gives these tokens probability 0, or None if there are
    none. vLLM then normalizes over the other tokens."""
    return dict.fromkeys(tokens, -math.inf) or None


async def _admit(serving: Serving, prompts: Iterable[tuple[Prompt, SamplingParams]]) -> list[RequestOutputCollector]:
    """Pass the requests to vLLM's engine and return a collector of each request's output. Raises Refused if vLLM
    refuses one of them. The other requests are then aborted."""
    longest = serving.engine.model_config.max_model_len
    collectors: list[RequestOutputCollector] = []
    try:
        for prompt, parameters in prompts:
            if len(prompt.tokens) + (parameters.max_tokens or 0) > longest:  # vLLM would shorten the completion
                raise ValueError(
                    f"the prompt has {len(prompt.tokens)} tokens and max_tokens is {parameters.max_tokens}, but "
                    f"together they exceed the server's max_model_len, which is {longest}"
                )
            engine_input = await render(serving.engine, prompt)
            name = f"rheostat-{next(_names)}"
            collectors.append(
                await serving.engine.add_request(name, engine_input, parameters, lora_request=serving.adapter)
            )
    except (Refused, VLLMClientError, ValueError, TypeError) as error:
        await _abandon(serving, collectors)
        await serving.engine.reset_mm_cache()  # the engine never received the images rendered for the other requests
        raise error if isinstance(error, Refused) else Refused(" ".join(str(error).split())) from error
    return collectors


async def _abandon(serving: Serving, collectors: list[RequestOutputCollector]) -> None:
    if collectors:
        await serving.engine.abort([collector.request_id for collector in collectors], internal=True)


async def _follow(
    serving: Serving,
    one: CompletionRequest,
    collector: RequestOutputCollector,
    *,
    digest: str,
    lines: asyncio.Queue[bytes | None],
) -> None:
    finish, num_generated = None, 0
    while finish is None:
        output = await collector.get()
        completion = output.outputs[0]
        finish, num_generated = completion.finish_reason, num_generated + len(completion.token_ids)
        extra: dict[str, object] = {}
        if finish is not None:
            try:
                _require_version(completion, digest)
            except Refused as refused:
                lines.put_nowait(_line({"id": one.name, **refused.answer}))
                return
            if one.experts and num_generated:  # for all tokens except the last, which was never an input
                num_read = len(one.prompt.tokens) + num_generated - 1
                extra["experts"] = await serving.experts.read(collector.request_id, completion, num_read)
        lines.put_nowait(
            _line(
                {
                    "id": one.name,
                    "tokens": _base64(array("i", completion.token_ids)),
                    "logprobs": _base64(array("f", completion.logprobs.logprobs)),
                    "finish": finish,
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
