"""Configurations before validation: TOML files, the files that they extend, and overrides `dotted.key=value`."""

import copy
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

from pydantic import BaseModel

from rheostat.infra.errors import BadInput
from rheostat.infra.renamed import present_names_in, with_present_names
from rheostat.infra.store.inputs import JobText, place_texts
from rheostat.infra.user_files import read_text_file

EXTENDS: Final = "extends"
"""Key for the path of another configuration file, relative to the current file. Settings of the other file apply unless
the current file sets them."""


def place_document(text: str, folder: Path) -> dict[str, object]:
    """Parse a TOML document that is to be written to a folder. Its relative paths start in this folder."""
    return {key: place_texts(value, folder) for key, value in tomllib.loads(text).items()}


def read_document(path: Path, model: type[BaseModel], *, above: Sequence[Path] = ()) -> dict[str, object]:
    """Read a TOML file and merge it into the file that it extends. `above` lists the files that extend this one.

    `model` is the class of the settings in the file. Old names of its keys and values are replaced, with a warning that
    names the file. Relative paths are relative to the folder of the file that contains them. Raises BadInput if a file
    is missing, is no TOML, or extends itself.
    """
    try:
        document = tomllib.loads(read_text_file(path, label=f"configuration file {path}"))
    except FileNotFoundError:
        by = f", which {above[-1]} extends," if above else ""
        where = f" (working directory {Path.cwd()})"
        raise BadInput(f"Configuration file {path}{by} does not exist{where}{_suggest_file(path)}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"The configuration file {path} is not valid TOML: {error}") from None
    base = document.pop(EXTENDS, None)
    job = above[0] if above else path
    document = {key: place_texts(value, path.parent, job=job.parent) for key, value in document.items()}
    document = present_names_in(document, model, source=f"{path}: ")
    if base is None:
        return document
    if not isinstance(base, str):
        raise BadInput(
            f'{path}: {EXTENDS} must be the path of another configuration file, such as "base.toml", found {base!r}'
        )
    extended = path.parent / base
    if extended.resolve() in {file.resolve() for file in (*above, path)}:
        raise BadInput(
            f"{path}: with {EXTENDS} = {base!r}, the file extends itself, through {above[-1] if above else path}. "
            "Remove one of these lines."
        )
    return extend(read_document(extended, model, above=(*above, path)), document)


def extend(base: Mapping[str, object], document: Mapping[str, object]) -> dict[str, object]:
    """Merge the settings in `document` into `base`, key by key. A list in `document` replaces the list in `base`. A
    table replaces the table in `base` if their `kind` differs, and is merged with it otherwise."""
    merged = dict(base)
    for key, value in document.items():
        under = merged.get(key)
        if (
            isinstance(value, dict)
            and isinstance(under, dict)
            and value.get("kind", under.get("kind")) == under.get("kind")
        ):
            merged[key] = extend(under, value)
        else:
            merged[key] = value
    return merged


def apply_overrides(
    document: Mapping[str, object], overrides: Sequence[str], model: type[BaseModel]
) -> dict[str, object]:
    """Apply overrides to a configuration document before validation. `model` is the class of the settings in the
    document.

    Relative paths in an override are relative to the folder recorded by `place_overrides`, if it was called.

    `dotted.key=value` sets a value, in TOML or as plain text. `dotted.key=` restores the default. An override of a
    `kind` clears the table that contains it before any other override applies, because each kind has different keys.
    Old names of keys and values are accepted in the document and in overrides. An old name in an override causes a
    warning. Raises BadInput if an override cannot be parsed.
    """
    changed = copy.deepcopy(with_present_names(document, model))
    parsed = [_with_present_names(_parse_override(override), model) for override in overrides]
    for override in sorted(parsed, key=lambda override: override.keys[-1] != "kind"):
        _apply_override(changed, override)
    return changed


def place_overrides(overrides: Sequence[str], folder: Path, *, job: Path) -> list[str]:
    """Attach `folder` to overrides typed on the command line, so that their relative paths start there. A run
    records these paths relative to `job`, the folder of its configuration."""
    return cast(list[str], place_texts([*overrides], folder, job=job))


@dataclass(frozen=True, slots=True)
class _Override:
    text: str
    keys: tuple[str, ...]
    value: object
    """Value to set. None restores the default."""


def _parse_override(text: str) -> _Override:
    key, equals, text_of_value = text.partition("=")
    keys = tuple(part.strip() for part in key.split("."))
    if not equals or not all(keys):
        raise BadInput(f"The override {text!r} must have the form dotted.key=value, such as update.learning_rate=1e-4.")
    text_of_value = text_of_value.strip()
    try:
        value: object = tomllib.loads(f"value = {text_of_value}")["value"] if text_of_value else None
    except tomllib.TOMLDecodeError as error:
        if text_of_value[0] in "[{\"'":
            raise BadInput(f"The value of override {text!r} is not valid TOML: {error}") from None
        value = text_of_value
    if isinstance(text, JobText):
        value = place_texts(value, text.folder, job=text.job)
    return _Override(text, keys, value)


def _with_present_names(override: _Override, model: type[BaseModel]) -> _Override:
    nested = override.value
    for key in reversed(override.keys):
        nested = {key: nested}
    assert isinstance(nested, dict)
    nested = present_names_in(nested, model, source="override ")
    keys = list[str]()
    for _ in override.keys:
        [(key, nested)] = nested.items()
        keys.append(key)
    return replace(override, keys=tuple(keys), value=nested)


def _apply_override(document: dict[str, object], override: _Override) -> None:
    *tables, last = override.keys
    table = document
    for name in tables:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise BadInput(
                f"The override {override.text!r} cannot be applied, because {name!r} is a value in the configuration, "
                "not a table with keys."
            )
        table = inner
    if last == "kind" and table.get("kind") != override.value:
        table.clear()
    if override.value is None:
        table.pop(last, None)
    else:
        table[last] = override.value


def _suggest_file(path: Path) -> str:
    """Return the end of an error message about a missing configuration file, with the file that the user probably
    meant: the same name in configs/, or a similar name. Empty if there is no such file."""
    folders = (path.parent, path.parent / "configs")
    paths_by_name = {file.stem: str(file) for folder in folders for file in sorted(folder.glob("*.toml"))}
    similar = difflib.get_close_matches(path.stem, paths_by_name, n=1)
    if "=" in path.name:
        return ". Put the configuration file first: rheostat train CONFIG key=value"
    return f"; did you mean {paths_by_name[similar[0]]}?" if similar else ""


def toml_key(key: str) -> str:
    """Return one part of a dotted key in TOML syntax, with quotes if TOML requires them."""
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def toml_value(value: object) -> str:
    """Return a value as TOML. Strings, numbers and booleans are encoded as in JSON."""
    if isinstance(value, list):
        return f"[{', '.join(toml_value(each) for each in value if each is not None)}]"
    if isinstance(value, Mapping):
        parts = (f"{toml_key(key)} = {toml_value(each)}" for key, each in value.items() if each is not None)
        return f"{{ {', '.join(parts)} }}" if value else "{}"
    # JSON does not escape this character, but TOML requires it
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
