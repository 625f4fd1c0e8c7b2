"""Configuration reference, generated from the models.

`python -m tasks.config.reference` prints docs/configuration.md.
"""

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from infra.validation_errors import field_models
from tasks.config.run import RunConfig

HEAD = """# Configuration

A run is one TOML file; every key can be overridden on the command line as `dotted.key=value`. Unknown keys are errors.
With `extends = "base.toml"` at the top, the settings of another file, named from where this one lies, hold where this
one has none, key by key; a list, or a table of another `kind`, replaces what was there.

Relative paths in a file start in the folder of that file, so a job can be committed and moved together with its files.
The run continues in the new place, because it records relative paths and the content of data files. Relative paths on
the command line start in the working directory. `store` and `tracking.directory` are different: what a run writes
starts in the working directory, as for the `--store` of every command. Parameters of a deployed run have no file, and
all their paths start in the run's working directory. Words of a `command`, and `options` of functions, are passed as
they are.

Each table is described once, under the first place where it may stand; a key that holds a table links to it.
The default of such a key is spelt as TOML: its `kind`, and what differs from the defaults of that kind.

This page is generated from the models (`make docs`).
"""


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a table in the configuration, with the `kind` of the enclosing table if it has one."""

    path: str
    around: str
    model: type[BaseModel]

    def title(self) -> str:
        kinds = _kinds(self.model)
        return (f"`[{self.path}]`" if self.path else "Top level") + (f" with `kind` {kinds}" if kinds else "")


def reference() -> str:
    """Return the Markdown reference of all configuration tables. Each table is described once."""
    places = [_Place("", "", RunConfig), *_places(RunConfig, "")]
    first = {place.model: place for place in reversed(places)}
    repeated = Counter(place.title() for place in first.values())
    titles = {
        model: place.title() + (f" in `{place.around}`" if repeated[place.title()] > 1 else "")
        for model, place in first.items()
    }
    sections = [HEAD]
    for model in dict.fromkeys(place.model for place in places):
        others = dict.fromkeys(f"`[{place.path}]`" for place in places if place.model is model)
        also = [f"The same table stands at {', '.join([*others][1:])}."] if len(others) > 1 else []
        parts = [f"## {titles[model]}", inspect.cleandoc(model.__doc__ or ""), *also, *_rows(model, titles)]
        sections.append("\n\n".join(parts) + "\n")
    return "\n".join(sections)


def _places(model: type[BaseModel], path: str) -> Iterator[_Place]:
    for name, field in model.model_fields.items():
        inner = f"{path}.{name}" if path else name
        parts = field_models(field)
        yield from (_Place(inner, _kinds(model).strip("`"), part) for part in parts)
        for part in parts:
            yield from _places(part, inner)


def _rows(model: type[BaseModel], titles: Mapping[type[BaseModel], str]) -> Iterator[str]:
    keys = {name: field for name, field in model.model_fields.items() if name != "kind"}
    if keys:
        lines = ["| key | default | what it is |", "|---|---|---|"]
        for name, field in keys.items():
            limits = f" One of {choices}." if (choices := _choices(field)) else _limits(field)
            text = " ".join((field.description or "").split()).replace("|", "\\|")
            lines.append(f"| `{name}` | {_default(field)} | {text}{limits}{_links(field, titles)} |")
        yield "\n".join(lines)


def _links(field: FieldInfo, titles: Mapping[type[BaseModel], str]) -> str:
    """Return links to the sections of the tables that a key may contain, with anchors as GitHub and the site build
    them."""
    links = [
        f"[{_kinds(model) or 'its keys'}](#{re.sub(r'[^a-z0-9_ -]', '', titles[model].lower()).replace(' ', '-')})"
        for model in field_models(field)
    ]
    return f" → {', '.join(links)}" if links else ""


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "none"
    text = _toml(field.default)
    return "its defaults" if text == "{}" and field_models(field) else f"`{text}`".replace("|", "\\|")


def _toml(value: object) -> str:
    """Return a default value as TOML. A table is given by its kind and the values that differ from that kind's
    defaults."""
    if isinstance(value, BaseModel):
        written, named = value.model_dump(exclude_defaults=True), {"kind": value.kind} if hasattr(value, "kind") else {}
        if not isinstance(written, dict):
            return _toml(written)
        value = {**named, **{name: getattr(value, name) for name in written}}
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key} = {_toml(part)}" for key, part in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(part) for part in value)}]"
    if isinstance(value, str):
        return f"'{value}'" if "\\" in value else json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kinds(model: type[BaseModel]) -> str:
    kind = model.model_fields.get("kind")
    return _choices(kind) if kind is not None else ""


def _choices(field: FieldInfo) -> str:
    if get_origin(field.annotation) is not Literal:
        return ""
    return ", ".join(f"`{choice}`" for choice in get_args(field.annotation))


def _limits(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in signs.items()
        if hasattr(rule, name)
    ]
    return f" ({', '.join(found)})" if found else ""


if __name__ == "__main__":
    sys.stdout.write(reference())
