"""Tables of input that must be refused: the records of `tests/unit/refusals/*.toml`, and the ways to present them.

A table has `[folder.NAME]` sections (a job document and files, shared by cases) and `[[claim]]` sections. A claim has a
name, defaults for its cases, and `cases`, one inline table per refused input. The `stage` of a case says which part of
the product must refuse the input:

- `settings`: the validation of the job document with its overrides.
- `check`: the input check that `rheostat train` runs before it starts, on a valid document.
- `command`: a `rheostat` command in this process. It must exit with code 2, print one line and write nothing.
- `call`: any function, named `module:function`.

A case that starts a process with torch has the marks of such tests, so that `pytest.mark.system` selects it.
"""

import functools
import importlib
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from rheostat.flows.cli.app import main
from rheostat.models.commands.preflight import Inputs, check
from rheostat.tasks.config.run import override_config
from tests.support.demos import ARITHMETIC

TABLES = Path(__file__).parents[1] / "unit/refusals"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Folder(_Record):
    """Working directory of a case before its own files are written."""

    document: str = ""
    """Job document in TOML, written to `job.toml`."""
    files: Mapping[str, str] = {}
    """Text of each file by its relative path."""
    build: str = ""
    """Function `module:function` that gets the directory and adds what TOML cannot hold, such as a model."""
    variables: Mapping[str, str] = {}
    """Environment variables."""


class Case(_Record):
    """One input that must be refused, and the parts of the message that a user needs."""

    names: tuple[str, ...]
    """Parts that the message must contain: the key or file, what was found, the nearest valid name."""
    stage: Literal["settings", "check", "command", "call"] = "settings"
    folder: str = ""
    document: str = ""
    """Job document in TOML, appended to the document of the folder."""
    set: tuple[str, ...] = ()
    """Overrides of the job document, `key=value`."""
    files: Mapping[str, str] = {}
    """Files that are added to the folder or replace files of the folder."""
    edit: Mapping[str, Mapping[str, object]] = {}
    """Keys to set in JSON files of the folder, by the path of the file."""
    links: Mapping[str, str] = {}
    """Targets of symbolic links that replace files of the folder, by the path of the link."""
    remove: tuple[str, ...] = ()
    """Files of the folder that are deleted."""
    variables: Mapping[str, str] = {}
    """Environment variables."""
    command: tuple[str, ...] = ()
    call: str = ""
    arguments: tuple[object, ...] = ()
    options: Mapping[str, object] = {}
    """Keyword arguments of the call."""
    marks: tuple[Literal["system", "smoke", "thorough"], ...] = ()
    """Markers of the test of this case, in addition to the default ones."""
    error: str = "rheostat.infra.errors:BadInput"
    """Class of the exception, `module:class` or the name of a built-in class; a subclass is not accepted."""


def named(target: str) -> Callable[..., object]:
    """Return the attribute that `module:attribute` names; `attribute` may have dots."""
    module, _, path = target.rpartition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module or "builtins"))


def read_cases() -> Iterator[pytest.param]:
    """Yield the cases of all tables with their folders, named after their tables and claims."""
    for table in sorted(TABLES.glob("*.toml")):
        yield from _read_table(table)


def _read_table(table: Path) -> Iterator[pytest.param]:
    document = tomllib.loads(table.read_text())
    folders = {name: Folder.model_validate(folder) for name, folder in document.get("folder", {}).items()}
    for claim in document["claim"]:
        defaults = {key: value for key, value in claim.items() if key not in ("name", "cases")}
        for number, case in enumerate(claim["cases"], start=1):
            record = Case.model_validate(defaults | case)
            assert record.names, f"{table.stem}: {claim['name']}: a case must name parts of the message"
            folder = folders[record.folder] if record.folder else Folder()
            marks = [getattr(pytest.mark, name) for name in record.marks]
            yield pytest.param(record, folder, marks=marks, id=f"{table.stem}: {claim['name']}: {number}")


def build_folder(table: str, name: str, place: Path) -> None:
    """Write a folder of a table below a directory, for tests of the input next to what is refused."""
    document = tomllib.loads((TABLES / f"{table}.toml").read_text())
    write_folder(Case(names=()), Folder.model_validate(document["folder"][name]), place)


def write_folder(case: Case, folder: Folder, place: Path) -> None:
    """Write the files of a case below a directory, and set its environment variables, which every test restores."""
    os.environ.update(folder.variables)
    _write_files(place, {**folder.files, "job.toml": f"{folder.document}\n{case.document}"})
    if folder.build:
        named(folder.build)(place)
    os.environ.update(case.variables)
    _write_files(place, case.files)
    for name, changes in case.edit.items():
        (place / name).write_text(json.dumps(json.loads((place / name).read_text()) | changes))
    for name in (*case.remove, *case.links):
        (place / name).unlink(missing_ok=name in case.links)
    for name, target in case.links.items():
        (place / name).symlink_to(target)


def _write_files(place: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)


def refusal(case: Case, place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Present a case in the current directory and return the message with which it is refused."""
    if case.stage == "command":
        before = tree(place)
        assert main(list(case.command)) == 2
        assert tree(place) == before
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("rheostat: ")
        return err.removesuffix("\n")
    with pytest.raises(named(case.error)) as refused:
        if case.stage == "call":
            named(case.call)(*case.arguments, **case.options)
        else:
            document = {"data": ARITHMETIC} | tomllib.loads((place / "job.toml").read_text())
            settings = override_config(document, case.set, source="job.toml")
            assert case.stage == "check", "the document with its overrides is valid"
            check(Inputs.model_validate_json(settings.model_dump_json()))
    assert type(refused.value) is named(case.error)
    return str(refused.value)


def tree(root: Path) -> dict[str, bytes | None]:
    """Return the bytes of every file below a directory; a directory has None."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))}
