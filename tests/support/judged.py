"""Judges for whole runs, what servers of judges answer about images, and rollouts for judges."""

import re
from pathlib import Path

import pyarrow as pa

from rheostat.infra.store.shards import ShardRef, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.judges import DirectoryJudge, JudgeReward
from rheostat.models.config.verdicts import VerdictConfig
from rheostat.models.judges.prompts import build_question_text
from rheostat.models.judges.verdicts import Answer, Judgement, read_verdict
from rheostat.models.records.schemas import ROLLOUT_SCHEMA
from rheostat.models.vision.color_conversion import decode_rgb
from tests.support.chat_server import ChatRequest, Reply, reply_with

JUDGE = (
    "scoring.rewards=["
    "{kind = 'target', target = 'tests.support.rewards:even', weight = 0.5},"
    "{kind = 'judge', model = {kind = 'trained', warmup = {steps = 30},"
    " shape = {kind = 'scratch', hidden_size = 16, intermediate_size = 32, context = 192}}}]"
)
"""Rewards of a rule and of a judge that the run trains, each with half of the weight."""


def rollouts(home: Path, *completions: str, group: int = 2) -> ShardRef:
    rows = [
        {
            "prompt_row": 4 + index // group,
            "sample": index % group,
            "prompt_id": "",
            "prompt": f"prompt {index // group}",
            "completion": completion,
            "answer": "1",
            "prompt_tokens": [1],
            "completion_tokens": [1],
            "logprobs": [0.0],
            "finish_reason": "stop",
            "seed": 0,
            "segments": [],
        }
        for index, completion in enumerate(completions)
    ]
    table = pa.Table.from_pylist(rows, schema=ROLLOUT_SCHEMA)
    return write_shard(open_store(f"{home}/run"), table, kind="rollouts", metadata={})


def read_colour(image: bytes) -> str:
    """Return the colour of a picture's first pixel."""
    pixel = decode_rgb(image).getpixel((0, 0))
    return {(255, 0, 0): "red", (0, 0, 255): "blue", (0, 128, 0): "green"}.get(pixel, "something else")


def answer_from_image(asked: ChatRequest, before: int) -> Reply:
    """Answer which colour is shown, or for a completion whether it names the colour that the prompt shows."""
    colour = read_colour(asked.images[0]) if asked.images else "nothing"
    if "What colour is the square" in asked.text:
        return reply_with(f"{colour.title()}.")
    completion = re.search(r"(fence-\w+)\n(.*?)\n\1", asked.text, re.S)
    return reply_with("yes" if completion is not None and colour in completion[2] else "no")


def answer_without_image(asked: ChatRequest, before: int) -> Reply:
    """Answer like servers that ignore images silently."""
    return reply_with("I see no image." if "What colour is the square" in asked.text else "yes")


def build_question(completion: str, verdict: VerdictConfig, *, answer: str = "4", seed: int = 7) -> str:
    """Return the question about a completion that a judge with this verdict reads."""
    reward = JudgeReward(name="judge", model=DirectoryJudge(path=Path("judge")), verdict=verdict)
    return build_question_text(reward, prompt="What is 2 + 2?", completion=completion, answer=answer, seed=seed)


def find_fences(question: str) -> list[str]:
    """Return the lines of a question that are fences around quoted text."""
    return re.findall(r"^fence-[0-9a-f]{16}$", question, re.MULTILINE)


def read_answer(text: str, verdict: VerdictConfig, *, error: str | None = None, **options: int) -> Judgement:
    """Return the judgement in the text of a judge's answer."""
    return read_verdict(Answer(text=text, probabilities=None, tokens=3, error=error), verdict, **options)
