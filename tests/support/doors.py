"""A door for agents with a scripted policy: each turn is the next text of a list, encoded letter by letter."""

import threading
from contextlib import contextmanager

import httpx

from rheostat.models.agents.door import Door
from rheostat.models.agents.replies import ReplyHead
from rheostat.models.agents.routes import AgentRoutes
from rheostat.models.agents.sampler import OpenEpisode, TurnLimits, TurnSampler
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.protocol import Completion
from rheostat.models.records.schemas import FinishReason
from rheostat.models.text.turns import turn_format
from tests.support.chat_templates import PUBLISHED, tokenizer_of

LIMITS = TurnLimits(turn_tokens=200, episode_tokens=10_000, requests=100, concurrent=8, context=4000)
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def form_of(name):
    """Return the format of turns of a published template, without tools."""
    tokenizer = tokenizer_of(name)
    return turn_format(tokenizer, stated=tokenizer.convert_tokens_to_ids(list(PUBLISHED[name].stops)))


def letters(form, text):
    """Encode a text letter by letter, as no tokenizer would, and add the end token."""
    pieces = form.tokenizer(list(text), add_special_tokens=False)["input_ids"]
    return (*(token for piece in pieces for token in piece), form.tokenizer.eos_token_id)


def completion_of(form, text, *, limit=None, stop=()):
    """Return a turn with this text. It has no end token if a stop text ends it."""
    tokens = letters(form, text)
    tokens = tokens[:-1] if stop and text.endswith(tuple(stop)) else tokens
    cut = tokens[:limit]
    reason = FinishReason.STOP if len(cut) == len(tokens) else FinishReason.LENGTH
    return Completion(cut, (-0.5,) * len(cut), text, reason)


class ScriptedPolicy:
    """Engine whose turns are given. It waits while `gate` is not set."""

    def __init__(self, form, texts):
        self.form, self.texts, self.batches = form, iter(texts), []
        self.gate = threading.Event()
        self.gate.set()

    @property
    def requests(self):
        return [request for batch, _ in self.batches for request in batch]

    def __call__(self, requests, sampling):
        assert self.gate.wait(20)
        self.batches.append((list(requests), sampling))
        return [
            [completion_of(self.form, next(self.texts), limit=request.max_tokens, stop=sampling.stop)]
            for request in requests
        ]


class OpenedDoor:
    """A door with one admitted episode, and a client for its key."""

    def __init__(self, name, texts, limits, history):
        self.form = form_of(name)
        self.policy = ScriptedPolicy(self.form, texts)
        sampler = TurnSampler(self.policy, SamplingConfig(temperature=0.7), version=3)
        head = ReplyHead("policy", created=0)
        self.door = Door(AgentRoutes(sampler, self.form, head, parser="hermes", history=history))
        self.episode = OpenEpisode(seed=5, limits=limits)
        self.key = self.door.admit(self.episode)
        self.client = self.client_of(self.key)

    def client_of(self, key):
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.door.url, headers=headers, trust_env=False, timeout=30)

    def chat(self, *messages, headers=None, **fields):
        body = {"model": "policy", "messages": list(messages), **fields}
        return self.client.post("/chat/completions", json=body, headers=headers)

    @property
    def root(self):
        return self.door.url.removesuffix("/v1")


@contextmanager
def open_door(*texts, name="qwen-2.5", limits=LIMITS, history="append"):
    opened = OpenedDoor(name, texts, limits, history)
    try:
        yield opened
    finally:
        opened.policy.gate.set()
        opened.client.close()
        opened.door.close()


def user(text):
    return {"role": "user", "content": text}
