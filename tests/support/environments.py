"""Environments of policies and engines: episodes with calls of tools, and the files that an install of vLLM leaves."""

import sys
from dataclasses import asdict
from pathlib import Path

from rheostat.infra.environments.find import STAMP, Environment, Stamp, default_directory, pins_digest, python_in
from rheostat.infra.environments.gpus import Platform
from rheostat.infra.processes.episodes import EpisodeRequest
from rheostat.models.text.calls import Call, ParsedTurn

VERSIONS = {"vllm": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0", "python": "3.11.7"}


def leave_vllm(platform: Platform = "cpu") -> Path:
    """Write an environment's stamp in `$RHEOSTAT_ENGINES`, link this Python there, and return the link."""
    directory = default_directory("vllm", platform)
    python = python_in(directory)
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    made = Environment(engine="vllm", python=python, platform=platform, versions=VERSIONS)
    (directory / STAMP).write_text(Stamp(pins=pins_digest("vllm", platform), made=made).model_dump_json())
    return python


def episode_with_calls(*calls: Call, text: str = "") -> EpisodeRequest:
    """Return an episode whose only turn makes calls of tools."""
    return EpisodeRequest("0", problem={}, seed=0, turns=(asdict(ParsedTurn(text, calls)),))


def always_calls(text: str) -> ParsedTurn:
    """Parser of turns: whatever the policy generates is a call of `price`."""
    return ParsedTurn("", (Call("price", {"item": "bread"}),))
