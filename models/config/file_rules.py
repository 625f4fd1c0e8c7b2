"""Configuration of the rules for reading files of problems and preferences. Torch-free."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, JsonValue

from rheostat.infra.config import Settings, Since

AnySettings = TypeVar("AnySettings", bound=Settings)
DropReason = Literal["ties", "empty", "too_long", "mismatched"]
CURRENT_RULES: Final = 2
"""Newest version of the rules for reading data files."""


class FileRules(Settings):
    """Rules for reading the rows of a data file and for splitting them into training and evaluation."""

    version: Annotated[Literal[1, 2], Since("0.2.0", before=1)] = 2
    """Version of the rules for reading and splitting the file. In version 2, the split does not depend on the file
    format, on letter case, on white space or on Unicode normalization. Numeric answers are converted to text without
    exponents. Files with repeated keys or columns, and answers that are NaN or infinite, are refused. Runs that began
    before this key existed use version 1, and so does a retrain of a champion from such a run, unless this key is
    set."""


def find_file_version(data: JsonValue) -> int | None:
    """Return the version of the rules by which the files of a recorded `[data]` table are read. Returns the lowest
    version if there are several files, and None if the table names no files.

    A recorded file without a version is read by version 1.
    """
    if not isinstance(data, dict):
        return None
    sources = data.get("sources", data.get("source", []))
    nested = [find_file_version(each) for each in (sources if isinstance(sources, list) else [sources])]
    versions = [version for version in nested if version is not None]
    if "path" in data and "prompt_column" in data:
        version = data.get("version", 1)
        versions.append(version if isinstance(version, int) else CURRENT_RULES)
    return min(versions, default=None)


def with_file_version(data: AnySettings, version: Literal[1, 2], *, keeps_set: bool = False) -> AnySettings:
    """Return a copy of a `[data]` table in which every file is read by this version of the rules.

    With `keeps_set`, files whose version is set in the configuration keep their version.
    """
    update: dict[str, object] = {}
    if isinstance(data, FileRules) and not (keeps_set and "version" in data.model_fields_set):
        update["version"] = version
    for name in ("source", "sources"):
        value = getattr(data, name, None)
        if isinstance(value, Settings):
            update[name] = with_file_version(value, version, keeps_set=keeps_set)
        elif isinstance(value, tuple):
            update[name] = tuple(with_file_version(each, version, keeps_set=keeps_set) for each in value)
    return data.model_copy(update=update)


DATA_PATHS: Final = ("path", "heldout_path", "corpus")
"""Configuration keys that contain the path of a data file or folder."""


def iterate_data_paths(settings: object) -> Iterator[Path]:
    """Yield the paths of all data files and folders in some settings, including nested settings."""
    match settings:
        case BaseModel():
            if isinstance(settings, FileRules):
                values = (getattr(settings, name, None) for name in DATA_PATHS)
                yield from (path for path in values if isinstance(path, Path))
            for _, part in settings:
                yield from iterate_data_paths(part)
        case tuple() | list():
            for part in settings:
                yield from iterate_data_paths(part)
