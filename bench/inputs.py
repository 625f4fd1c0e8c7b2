"""Inputs of a job that another trainer can use too: a policy directory, problem files, a configuration."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.policies import write_policy

REWARD_PATTERN = "[02468]"
"""Regular expression that gives a completion the reward 1 if it contains an even digit.

Some completions of a random policy match it, so that rewards in a group differ.
"""
PROMPTS, GROUP, MINIBATCHES = 64, 8, 4
LEARNING_RATE = 1e-6  # so small that completions keep their length during the benchmark
HELDOUT = 8


@dataclass(frozen=True, slots=True)
class Inputs:
    """Configuration file, policy directory and prompts of a job that a benchmark runs."""

    config: Path
    policy: Path
    prompts: tuple[str, ...]
    """All training prompts of the job. Every iteration uses all of them."""
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
    """Write the policy, problems and configuration of a benchmark job to a directory.

    The policy is random, and its completions end at different lengths. `shape` overrides its sizes. Problems have 12 to
    24 tokens, and `preamble` is inserted before each. Every problem has the reference answer `answer`, which rollouts
    carry as payload to the rewards.
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
    """Return the TOML configuration of a job that trains the policy in a directory on the problems next to it.

    `data` is added to the `[data]` section.
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
