"""Configuration reference, generated from the models.

`python -m rheostat.tasks.config.reference` prints docs/configuration.md.
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

from rheostat.infra.field_descriptions import describe_fields
from rheostat.infra.validation_errors import field_models
from rheostat.tasks.config.run import RunConfig

HEAD = """# Configuration

A run is configured by one TOML file. Every key can be overridden on the command line as `dotted.key=value`. An unknown
key is an error.

`extends = "base.toml"` at the top of a file includes the settings of another file. The path of that file is relative to
the file that extends it. A key that both files set has the value of the extending file. Tables are merged key by key,
but a list, or a table with another `kind`, replaces the value of the other file.

Relative paths in a file start in the folder of that file. A job can therefore be committed and moved together with its
files, and the run continues in the new place, because it records relative paths and the content of data files. There
are these exceptions:

- Relative paths on the command line start in the working directory.
- A path that exists only in the working directory is used, with a warning. Relative paths started there before
  version 0.2.
- `store` and `tracking.directory`, to which a run writes, start in the working directory, like the `--store` of every
  command.
- Parameters of a deployed run come from no file. All their paths start in the working directory of the run.
- Words of a `command`, and the `options` of functions, are passed on unchanged.

Each table is described once, at the first key that can contain it. Other keys that can contain it link there. The
default of such a key is written as TOML: the `kind` of the table, and the values that differ from the defaults of that
kind.

This page is generated from the configuration models (`make docs`).
"""


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a table in the configuration, with the `kind` of the enclosing table if that table has a `kind`."""

    path: str
    around: str
    model: type[BaseModel]

    def title(self) -> str:
        kinds = _format_kinds(self.model)
        return (f"`[{self.path}]`" if self.path else "Top level") + (f" with `kind` {kinds}" if kinds else "")


def reference() -> str:
    """Return the Markdown reference of all configuration tables. Each table is described once."""
    places = [_Place("", "", RunConfig), *_find_places(RunConfig, "")]
    first = {place.model: place for place in reversed(places)}
    repeated = Counter(place.title() for place in first.values())
    titles = {
        model: place.title() + (f" in `{place.around}`" if repeated[place.title()] > 1 else "")
        for model, place in first.items()
    }
    sections = [HEAD]
    for model in dict.fromkeys(place.model for place in places):
        others = dict.fromkeys(f"`[{place.path}]`" for place in places if place.model is model)
        also = [f"The same table can be used at {', '.join([*others][1:])}."] if len(others) > 1 else []
        parts = [f"## {titles[model]}", inspect.cleandoc(model.__doc__ or ""), *also, *_build_rows(model, titles)]
        sections.append("\n\n".join(parts) + "\n")
    return "\n".join(sections)


def _find_places(model: type[BaseModel], path: str) -> Iterator[_Place]:
    for name, field in model.model_fields.items():
        inner = f"{path}.{name}" if path else name
        parts = field_models(field)
        yield from (_Place(inner, _format_kinds(model).strip("`"), part) for part in parts)
        for part in parts:
            yield from _find_places(part, inner)


def _build_rows(model: type[BaseModel], titles: Mapping[type[BaseModel], str]) -> Iterator[str]:
    keys = {name: field for name, field in model.model_fields.items() if name != "kind"}
    if keys:
        lines, descriptions = ["| key | default | description |", "|---|---|---|"], describe_fields(model)
        for name, field in keys.items():
            limits = f" One of {choices}." if (choices := _format_choices(field)) else _format_limits(field)
            text = " ".join(descriptions.get(name, "").split()).replace("|", "\\|")
            lines.append(f"| `{name}` | {_format_default(field)} | {text}{limits}{_build_links(field, titles)} |")
        yield "\n".join(lines)


def _build_links(field: FieldInfo, titles: Mapping[type[BaseModel], str]) -> str:
    """Return links to the sections of the tables that a key may contain, with anchors as GitHub and the site build
    them."""
    links = [
        f"[{_format_kinds(model) or 'its keys'}]"
        f"(#{re.sub(r'[^a-z0-9_ -]', '', titles[model].lower()).replace(' ', '-')})"
        for model in field_models(field)
    ]
    return f" → {', '.join(links)}" if links else ""


def _format_default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "none"
    text = _format_toml(field.default)
    return "its defaults" if text == "{}" and field_models(field) else f"`{text}`".replace("|", "\\|")


def _format_toml(value: object) -> str:
    """Return a default value as TOML. A table is given by its kind and the values that differ from that kind's
    defaults."""
    if isinstance(value, BaseModel):
        differing, kind = (
            value.model_dump(exclude_defaults=True),
            {"kind": value.kind} if hasattr(value, "kind") else {},
        )
        if not isinstance(differing, dict):
            return _format_toml(differing)
        value = {**kind, **{name: getattr(value, name) for name in differing}}
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key} = {_format_toml(part)}" for key, part in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, tuple):
        return f"[{', '.join(_format_toml(part) for part in value)}]"
    if isinstance(value, str):
        return f"'{value}'" if "\\" in value else json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _format_kinds(model: type[BaseModel]) -> str:
    kind = model.model_fields.get("kind")
    return _format_choices(kind) if kind is not None else ""


def _format_choices(field: FieldInfo) -> str:
    if get_origin(field.annotation) is not Literal:
        return ""
    return ", ".join(f"`{choice}`" for choice in get_args(field.annotation))


def _format_limits(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in signs.items()
        if hasattr(rule, name)
    ]
    return f" ({', '.join(limits)})" if limits else ""


if __name__ == "__main__":
    sys.stdout.write(reference())
