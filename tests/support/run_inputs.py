"""Models and data of the families in runs.toml, written into a directory."""

import json
from pathlib import Path

from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.data.problems import load_problems
from rheostat.models.modeling.policy import build_scratch, save_policy
from rheostat.models.text.tokenizer import scratch_tokenizer
from tests.support.demos import ArithmeticData
from tests.support.policies import write_chat_policy, write_policy


def write_teacher(inputs: Path) -> None:
    """Write a larger policy with the tokenizer of the tiny job."""
    problems = load_problems(ArithmeticData(train_problems=64, heldout_problems=8), "train", 0)
    tokenizer = scratch_tokenizer(ScratchPolicy(), problems)
    save_policy(build_scratch(ScratchPolicy(layers=3), tokenizer, seed=9), tokenizer, inputs / "teacher")


def write_judge(inputs: Path) -> None:
    """Write the model of a judge that reads long prompts."""
    write_policy(inputs / "judge", changes={"max_position_embeddings": 8192})


def write_mixture(inputs: Path) -> None:
    """Write a mixture-of-experts policy."""
    write_policy(inputs / "policy", "qwen3_moe", eos_share=0.15)


def write_thinking_policy(inputs: Path) -> None:
    """Write a chat policy that thinks, and chats."""
    likely = {"<|im_end|>": 0.15, "</think>": 0.1, "<think>": 0.03}
    write_chat_policy(inputs / "policy", "qwen-3", likely=likely)
    _write_chats(inputs / "chats.jsonl", 12)


def write_training_chats(inputs: Path) -> None:
    """Write chats of several turns for supervised training."""
    rows = [
        {
            "messages": [
                {"role": role, "content": f"{role} {number} {turn}"}
                for turn in range(1 + number % 3)
                for role in ("user", "assistant")
            ]
        }
        for number in range(20)
    ]
    (inputs / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_chat_inputs(inputs: Path) -> None:
    """Write a chat policy and chats."""
    write_chat_policy(inputs / "policy", "qwen-2.5", likely={"<|im_end|>": 0.15})
    _write_chats(inputs / "chats.jsonl", 24)


def _write_chats(path: Path, count: int) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"How many are {number} and 2?"}], "answer": str(number + 2)}
        for number in range(count)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
