"""Configuration of tasks that other packages define, and of the Python environments of these packages: tasksets of
verifiers, tasks of lm-eval and tasks of Inspect. Torch-free.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Final

from pydantic import Field, JsonValue

from rheostat.infra.config import Settings
from rheostat.infra.environments.find import find_python
from rheostat.infra.store.inputs import Location, Program, fetch_path
from rheostat.infra.variants import Variant

PLUGIN: Final = Path(__file__).parents[1] / "agents" / "plugin"
"""Folder of the modules that run in the Python environments of other packages."""


class TaskChoice(Settings, ABC):
    """Fields common to everything that loads tasks of another package."""

    package: ClassVar[str]
    """Name of the package, as in `rheostat engine install`. The module `rheostat_<package>` in the plugin folder loads
    its tasks."""
    chosen: ClassVar[tuple[str, ...]]
    """Names of the fields that choose the tasks."""
    python: Program | None = None
    """Python interpreter with the package. The default is the one that `rheostat engine install` installed."""

    @property
    @abstractmethod
    def tasks(self) -> dict[str, JsonValue]:
        """Description of the tasks for the module that loads them."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Name of the tasks in messages, such as `taskset 'letters'`."""

    def find_python(self) -> Path:
        """Return the Python interpreter with the package. Raises BadInput if it does not exist."""
        return find_python(self.package, self.python)

    def find_differences(self, data: Variant, where: str) -> Iterator[str]:
        """Yield a message if a data source with the configuration key `where` has other tasks than these."""
        if not isinstance(data, TaskChoice) or data.package != self.package:
            yield (
                f"environment.kind = {self.package!r} needs the same tasks as its data, but {where}.kind is "
                f"{data.label!r}. Set {where}.kind = {self.package!r}"
            )
            return
        for key in (*self.chosen, "python"):
            if getattr(data, key) != getattr(self, key):
                yield f"{where}.{key} and environment.{key} are different. Set them to the same value"
                return


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


class TasksetChoice(TaskChoice):
    """Fields common to everything that loads a taskset of verifiers."""

    package = "verifiers"
    chosen = ("taskset",)

    taskset: VerifiersPlugin
    """Taskset of verifiers, which defines the tasks and their rewards."""

    @property
    def tasks(self) -> dict[str, JsonValue]:
        """Fields of the configuration class of the taskset."""
        return {"taskset": self.taskset.fields}

    @property
    def title(self) -> str:
        """Name of the taskset in messages."""
        return f"taskset {self.taskset.id!r}"


class NamedTask(TaskChoice):
    """Fields common to everything that loads a task of lm-eval or of Inspect."""

    chosen = ("task", "file", "options")

    task: Annotated[str, Field(min_length=1)]
    """Name of a task in `file` or, without `file`, of a task that is installed with the package, such as `arc_easy`
    (lm-eval) or `inspect_evals/gsm8k` (Inspect). With lm-eval, it may also be a group of tasks, such as `mmlu`."""
    file: Location | None = None
    """File that defines the task: YAML for lm-eval, Python for Inspect. The default is an installed task."""
    options: dict[str, JsonValue] = {}
    """For lm-eval, fields of the task's YAML file with other values, such as `num_fewshot = 5`. For Inspect, keyword
    arguments of the task's function."""

    @property
    def tasks(self) -> dict[str, JsonValue]:
        """Name, file and options of the task."""
        file = None if self.file is None else str(fetch_path(self.file).absolute())
        return {"task": self.task, "file": file, "options": self.options}

    @property
    def title(self) -> str:
        """Name of the task in messages."""
        return f"task {self.task!r}"
