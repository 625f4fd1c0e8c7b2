"""The configuration reference, generated from the models.

`python -m tasks.config.reference` prints docs/configuration.md.
"""

import sys
from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tasks.config.run import RunConfig
from tasks.config.validation_errors import models_in

HEAD = """# Configuration

A run is one TOML file; every key can be overridden on the command line as `dotted.key=value`. Unknown keys are errors.
This page is generated from the models (`make docs`).
"""


def reference() -> str:
    """Render every table of the configuration as Markdown."""
    sections = [HEAD]
    for path, model in _tables(RunConfig, ""):
        title = f"`[{path}]`" if path else "Top level"
        kind = model.model_fields.get("kind")
        variant = f" with `kind` {_choices(kind)}" if kind is not None else ""
        sections.append(f"## {title}{variant}\n\n{(model.__doc__ or '').strip()}\n\n{_rows(model)}")
    return "\n".join(sections)


def _tables(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        inner = f"{path}.{name}" if path else name
        for part in models_in(field.annotation):
            yield from _tables(part, inner)


def _rows(model: type[BaseModel]) -> str:
    lines = ["| key | default | what it is |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        if name != "kind":
            limits = f" One of {choices}." if (choices := _choices(field)) else _limits(field)
            text = " ".join((field.description or "").split()).replace("|", "\\|")
            lines.append(f"| `{name}` | {_default(field)} | {text}{limits} |")
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "none"
    if models_in(field.annotation):
        return "see below"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    if isinstance(field.default, str):
        return f'`"{field.default}"`'.replace("|", "\\|")
    return f"`{field.default}`"


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
