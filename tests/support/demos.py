"""Parts of the demonstrations in configs/demos, loaded as the commands load them."""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from rheostat.infra.demos import DEMOS
from rheostat.infra.plugins import add_target_folders, find_target, register_demo, register_target_folder
from rheostat.tasks.config.run import RunConfig, load_config


def demo_part(place: str) -> Any:
    """Import a part of a demonstration, such as `dialogue/measures:MeasuresData`."""
    return find_target(register_demo(place), where=place)


ArithmeticData = demo_part("configs/arithmetic:ArithmeticData")
"""Settings of the word problems in configs/arithmetic.py, which tests use when any problems will do."""

ARITHMETIC = {"kind": "target", "target": "arithmetic:ArithmeticData"}
"""Table of a configuration with these word problems."""


def demo_module(demo: str, name: str) -> ModuleType:
    """Import a module of a demonstration."""
    register_target_folder(DEMOS / demo)
    add_target_folders()
    return import_module(name)


def demo_job(name: str) -> Path:
    """Return the path of a demonstration's job."""
    return DEMOS / name / "job.toml"


def load_demo(name: str, *overrides: str) -> RunConfig:
    """Load the configuration of a demonstration."""
    register_target_folder(DEMOS / name)
    return load_config(demo_job(name), overrides)
