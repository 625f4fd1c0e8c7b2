"""Configuration of tasksets, harnesses and the Python environment of the package verifiers. Torch-free."""

from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, JsonValue

from rheostat.infra.config import Settings
from rheostat.infra.environments.find import find_python
from rheostat.infra.store.inputs import Program

PLUGIN: Final = Path(__file__).parents[1] / "agents" / "plugin"
"""Folder of the module `rheostat_verifiers`, which runs in the Python environment of verifiers."""
PACKAGE: Final = "verifiers"


class VerifiersPlugin(Settings):
    """Taskset or harness of verifiers, and its options."""

    id: Annotated[str, Field(min_length=1)]
    """Name of a module that exports the class in `__all__`: a module of verifiers, such as `harbor` or `bash`, a module
    of a package in its environment, or a module next to the configuration file."""
    options: dict[str, JsonValue] = {}
    """Fields of the configuration class of the taskset or harness."""

    @property
    def module(self) -> str:
        """Name of the module, which verifiers derives from the id in this way."""
        return self.id.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()

    @property
    def fields(self) -> dict[str, JsonValue]:
        """Fields of the configuration class in verifiers, including the id."""
        return {**self.options, "id": self.id}


class TasksetChoice(Settings):
    """Fields common to everything that loads a taskset: the taskset, and the Python that loads it."""

    taskset: VerifiersPlugin
    """Taskset of verifiers, which defines the tasks and their rewards."""
    python: Program | None = None
    """Python interpreter with verifiers. The default is the one that `rheostat engine install verifiers` installed."""

    def find_python(self) -> Path:
        """Return the Python interpreter with verifiers. Raises BadInput if it does not exist."""
        return find_python(PACKAGE, self.python)
