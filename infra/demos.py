"""Demonstrations: folders with a job and the Python modules that the job names by `target`, as a user writes them.

Stored runs and older jobs name parts of the demonstrations by a former `kind` or import string. The tables below map
these names to the modules. A run that uses a demonstration where Rheostat installed it still records the former name,
so its identity stays the same, and the version of Rheostat covers the code. A copy that `rheostat init --example` wrote
is code of the user.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

DEMOS: Final = (Path(__file__).parent / "deploy" / "configs" / "demos").resolve()
"""Folder of all demonstrations. In a checkout, this is configs/demos, to which infra/deploy/configs is a link."""

EXAMPLES: Final = DEMOS.parent
"""Folder of the example jobs, which contains the folder of the demonstrations."""

SHARED_MODULES: Final = frozenset({EXAMPLES / "arithmetic.py"})
"""Modules next to the example jobs that several examples and demonstrations name by `target`."""

FORMER_DATA_KINDS: Final = {
    "arithmetic": "configs/arithmetic:ArithmeticData",
    "calculations": "tools/calculations:CalculationsData",
    "measures": "dialogue/measures:MeasuresData",
    "paintings": "paint/paintings:PaintingsData",
    "pictures": "vision/pictures:PicturesData",
}
"""Former values of `data.kind`, with the folder, module and class of the data source."""

FORMER_POLICY_KINDS: Final = {
    "scratch_diffusion": "paint/scratch_diffusion:ScratchDiffusionPolicy",
    "seeing_scratch": "vision/scratch_vision:VisionScratchPolicy",
    "scratch_vision": "vision/scratch_vision:VisionScratchPolicy",
}
"""Former values of `policy.kind`, with the folder, module and class. The first name of a class is the one that runs
record."""

FORMER_REWARD_KINDS: Final = {"painting": "models.rewards.painting:painting_reward"}
"""Former values of `kind` in `scoring.rewards`, with their former import strings."""

FORMER_TARGETS: Final = {
    "models.data.lists:ListData": "soup/packing:ListData",
    "models.environments.calculator:Calculator": "tools/calculator:Calculator",
    "models.rewards.arithmetic_steps:wrong_steps": "capo/arithmetic_steps:wrong_steps",
    "models.rewards.list_length:near": "soup/list_length:near",
    "models.rewards.painting:painting_reward": "paint/painting:painting",
}
"""Former import strings, with the folder, module and name of the object."""


def demo_names() -> list[str]:
    """Return the names of all demonstrations, sorted."""
    return sorted(path.parent.name for path in DEMOS.glob("*/job.toml"))


def demo_folder(name: str) -> Path:
    """Return the folder of a demonstration, or the folder of the example jobs if `name` is "configs"."""
    return EXAMPLES if name == EXAMPLES.name else DEMOS / name


def demo_files(name: str) -> list[Path]:
    """Return the files of a demonstration, sorted, and the shared modules that its job names."""
    job = (DEMOS / name / "job.toml").read_text()
    shared = [path for path in sorted(SHARED_MODULES) if f'"{path.stem}:' in job]
    return [path for path in sorted((DEMOS / name).iterdir()) if path.is_file()] + shared


def find_example(place: str) -> str:
    """Return the name of a demonstration whose copy contains the module of `place`, an entry of the tables of this
    module."""
    folder, _, target = place.partition("/")
    module = target.partition(":")[0]
    names = [folder] if (DEMOS / folder).is_dir() else demo_names()
    return next(name for name in names if module in {path.stem for path in demo_files(name)})


def find_former_name(part: type, former: Mapping[str, str]) -> str | None:
    """Return the former name of a class that is part of an installed demonstration. Return None for other classes.
    `former` is one of the tables of this module."""
    file = Path(getattr(sys.modules.get(part.__module__), "__file__", None) or "")
    place = f"{file.parent.name}/{part.__module__}:{part.__qualname__}"
    return next((name for name, other in former.items() if other == place and is_in_demo(file)), None)


def is_in_demo(path: Path) -> bool:
    """Return whether a file belongs to an installed demonstration, or is a module that installed ones share."""
    place = path.resolve()
    return place.is_relative_to(DEMOS) or place in SHARED_MODULES
