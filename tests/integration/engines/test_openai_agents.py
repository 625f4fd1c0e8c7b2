"""Agents of the package openai-agents: the example of the page, and the prompts of the demonstration."""

import re
import subprocess
import sys

import pytest

from rheostat.models.text.tokenizer import tokenize_problems
from rheostat.tasks.views.query import query_runs
from tests.support.jobs import ROOT, demo
from tests.support.openai_agents import find_openai_agents, problems_and_tokenizer
from tests.support.policies import write_chat_policy

pytestmark = [pytest.mark.openai_agents, pytest.mark.timeout(1000)]


def test_the_example_of_the_page_trains(tmp_path, monkeypatch):
    """The policy is tiny, and the run has one iteration."""
    python = find_openai_agents()
    page = (ROOT / "docs/openai-agents.md").read_text()
    names = {"python": "my_agent.py", "json": "questions.jsonl", "toml": "job.toml"}
    for kind, name in names.items():
        [block] = re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)
        (tmp_path / name).write_text(block)
    write_chat_policy(tmp_path / "policy", "qwen-2.5", likely={"<|im_end|>": 0.05})
    monkeypatch.chdir(tmp_path)
    settings = ["policy.path=policy", "iterations=1", "rollout.group_size=2", "rollout.environment.turn_tokens=8"]
    settings += [f"rollout.environment.python={python}", "rollout.sampling.max_new_tokens=900"]
    command = [sys.executable, "-m", "rheostat", "train", "job.toml", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    rows = query_runs("runs", "select finish_reason, reward, messages from rollouts", names=["calculator"]).to_pylist()
    assert len(rows) == 4 and {row["finish_reason"] for row in rows} <= {"stop", "length"}
    assert [row["reward"] for row in rows] == [0.0] * 4


def test_the_first_request_of_the_demonstration_is_the_prompt_that_warm_up_trains(tmp_path):
    small = ["iterations=1", "warmup.steps=1", "rollout.prompts=2", "rollout.shard_prompts=2", "rollout.group_size=2"]
    settings = [f"rollout.environment.python={find_openai_agents()}", "evaluation.problems=2", "pools.workers=1"]
    demo(tmp_path, *small, *settings, config="configs/demos/agent/job.toml")
    rows = query_runs(str(tmp_path / "runs"), "select prompt_tokens, reward from rollouts", names=["agent"]).to_pylist()
    problems, tokenizer = problems_and_tokenizer()
    prompts = [prompt.input.tokens.tolist() for prompt in tokenize_problems(problems, tokenizer)]
    assert len(rows) == 4 and all(row["prompt_tokens"] in prompts for row in rows)
    assert all(row["reward"] is not None for row in rows)
