"""A small real policy behind a real server that scores prompts as vLLM does."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rheostat.models.config.teachers import TeacherEndpoint
from rheostat.models.modeling.policy import load_policy
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.tokenizer import load_tokenizer
from tests.support.chat_server import ChatRequest, ChatServer, Reply, chat_server

Alter = Callable[[dict], None]
"""Function that changes an answer before it is sent."""


def scores_of(directory: Path) -> Callable[[ChatRequest], dict]:
    """Return a function that answers a request for prompt log-probs with those of the model in a directory."""
    model, tokenizer = load_policy(directory).eval(), load_tokenizer(directory)

    def answer(asked: ChatRequest) -> dict:
        tokens = asked.body["prompt"]
        with torch.no_grad():
            logprobs_TV = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        positions: list[dict | None] = [None]
        for token, logprobs_V in zip(tokens[1:], logprobs_TV[:-1], strict=True):
            ranked = {token, int(logprobs_V.argmax())}
            positions.append(
                {
                    str(candidate): {
                        "logprob": float(logprobs_V[candidate]),
                        "rank": int((logprobs_V > logprobs_V[candidate]).sum()) + 1,
                        "decoded_token": tokenizer.decode([candidate]),
                    }
                    for candidate in sorted(ranked)
                }
            )
        choice = {"index": 0, "text": "!", "finish_reason": "length", "logprobs": None, "prompt_logprobs": positions}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1, "total_tokens": len(tokens) + 1}
        return {"id": "cmpl-1", "object": "text_completion", "model": "teacher", "choices": [choice], "usage": usage}

    return answer


@contextmanager
def teacher_server(
    directory: Path,
    *,
    faults: Callable[[ChatRequest, int], Reply | None] = lambda asked, before: None,
    alter: Alter = lambda answer: None,
) -> Iterator[ChatServer]:
    """Serve a directory's model. `faults` may answer a request instead, `alter` may change the answer."""
    answer = scores_of(directory)

    def reply(asked: ChatRequest, before: int) -> Reply:
        fault = faults(asked, before)
        if fault is not None:
            return fault
        found = answer(asked)
        alter(found)
        return Reply(body=json.dumps(found).encode())

    with chat_server(reply) as server:
        yield server


def teacher_at(url: str, **changes) -> TeacherEndpoint:
    """Return a configuration for a local server with short timeouts."""
    known = {"base_url": url, "allowed_hosts": ("127.0.0.1",), "allow_private": True, "model": "teacher"}
    return TeacherEndpoint(**(known | {"backoff_seconds": 0.02, "timeout_seconds": 5, "retries": 4} | changes))


def compute_logprobs(directory: Path, inputs: Sequence[ModelInput], *, temperature: float) -> list[float]:
    """Compute the log-probs of all completion tokens, one by one, from the whole model's logits."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    found = []
    for each in inputs:
        with torch.no_grad():
            logits_TV = model(torch.from_numpy(each.tokens.astype(np.int64))[None]).logits[0].double()
        logprobs_TV = (logits_TV / temperature).log_softmax(-1)
        found += [
            float(logprobs_TV[place - 1, each.tokens[place]]) for place in range(each.num_prompt_tokens, len(each))
        ]
    return found
