"""What an install leaves behind, for tests of what only asks whether it is there."""

import sys
from pathlib import Path

from infra.environments.find import STAMP, Environment, Platform, Stamp, default_directory, pins_digest, python_in

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
