"""Python environment with the package openai-agents, and parts of the demonstration that uses the package."""

import os
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rheostat.models.data.problems import Problem, load_problems
from rheostat.models.text.tokenizer import problem_texts
from tests.support.demos import demo_part, load_demo


def find_openai_agents() -> Path:
    """Return the Python interpreter with openai-agents. Skip the test if the environment does not exist."""
    folder = os.environ.get("RHEOSTAT_OPENAI_AGENTS") or f"{sys.prefix}-openai-agents"
    python = Path(folder) / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no environment with openai-agents in {folder}; `make test-openai-agents` creates it")
    return python


def problems_and_tokenizer() -> tuple[list[Problem], PreTrainedTokenizerFast]:
    """Return the training problems of the demonstration `agent`, and the tokenizer of its policy."""
    config = load_demo("agent")
    problems = load_problems(config.data, "train", config.seed)
    train = demo_part("agent/tool_policy:train_tool_tokenizer")
    return problems, train(config.policy, problem_texts(problems))
