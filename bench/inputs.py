"""Inputs of a job that another trainer can use too: a policy directory, problem files, a configuration."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.policies import write_policy

REWARD_PATTERN = "[02468]"
"""Regular expression of the reward: an even digit in the completion.
Random policies match it at times, so that groups are informative.
"""
PROMPTS, GROUP, MINIBATCHES = 64, 8, 4
LEARNING_RATE = 1e-6  # so small that completions keep their length during the benchmark
HELDOUT = 8


@dataclass(frozen=True, slots=True)
class Inputs:
    """Files of a job."""

    config: Path
    policy: Path
    prompts: tuple[str, ...]
    """All training prompts. Every iteration uses all of them."""
    max_new_tokens: int


def write_inputs(
    directory: Path,
    *,
    shape: Mapping[str, object],
    max_new_tokens: int = 32,
    update_ranks: int = 1,
    answer: str = "x",
    preamble: str = "",
) -> Inputs:
    """Write a random policy whose completions end at different lengths, and problems of 12 to 24 tokens.

    `preamble` is inserted before each problem. Every problem has the same reference answer, which is payload that
    rollouts carry to the rewards.
    """
    write_policy(directory / "policy", changes=shape, eos_share=1 / max_new_tokens)
    train = tuple(
        f"{preamble}Ana has {row} pens, buys {row % 7} and sells {row % 5}. How many? " for row in range(PROMPTS)
    )
    _write_problems(directory / "train.jsonl", train, answer)
    _write_problems(directory / "heldout.jsonl", tuple(f"Held out: {row}. " for row in range(HELDOUT)), answer)
    config = directory / "config.toml"
    config.write_text(job_config(directory, max_new_tokens=max_new_tokens, update_ranks=update_ranks))
    return Inputs(config=config, policy=directory / "policy", prompts=train, max_new_tokens=max_new_tokens)


def _write_problems(path: Path, prompts: tuple[str, ...], answer: str) -> None:
    lines = (json.dumps({"prompt": prompt, "answer": answer}) for prompt in prompts)
    path.write_text("\n".join(lines))


def job_config(directory: Path, *, max_new_tokens: int, update_ranks: int, data: str = "") -> str:
    """Return the configuration of a job whose policy and problems are in a directory.
    `data` is added to its `[data]` section.
    """
    return f"""
iterations = 2
[data]
kind = "file"
path = "{directory}/train.jsonl"
heldout_path = "{directory}/heldout.jsonl"
{data}
[policy]
kind = "directory"
path = "{directory}/policy"
[rollout]
prompts = {PROMPTS}
group_size = {GROUP}
shard_prompts = {PROMPTS // 2}
[rollout.sampling]
max_new_tokens = {max_new_tokens}
[scoring]
rewards = [{{ kind = "regex", pattern = "{REWARD_PATTERN}" }}]
[algorithm]
kind = "grpo"
keep_uninformative = true
[update]
learning_rate = {LEARNING_RATE}
minibatches = {MINIBATCHES}
[pools]
workers = 2
update_ranks = {update_ranks}
[evaluation]
problems = {HELDOUT}
"""
