"""Descriptions of the fields of settings classes, read from the source only when they are needed.

Pydantic's `use_attribute_docstrings` reads them when it builds a class. For the configuration of a job this takes half
a second of each process, but only forms and the documentation use descriptions.
"""

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from rheostat.infra.syntax import parse_source


@functools.cache
def describe_fields(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the descriptions of the fields of a settings class by name, without fields that have none.

    The description of a field is the argument `description` of `Field`, otherwise the docstring under the field.
    """
    texts = dict[str, str]()
    for base in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        docstrings = _read_module(base.__module__).get(base.__qualname__, {})
        for name in inspect.get_annotations(base):
            texts[name] = docstrings.get(name, "")  # a field that is declared again inherits no docstring
    fields = model.model_fields.items()
    return {name: text for name, field in fields if (text := field.description or texts.get(name, ""))}


@functools.cache
def _read_module(name: str) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings under the annotated names of every class of a module, by the classes' qualified names.
    Return an empty mapping if the module has no source file, as in a notebook."""
    try:
        source = inspect.getsource(sys.modules[name])
    except (KeyError, OSError, TypeError):
        return {}
    return dict(_read_classes(parse_source(source), ""))


def _read_classes(parent: ast.AST, prefix: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    for node in ast.iter_child_nodes(parent):
        match node:
            case ast.ClassDef(name=name):
                yield f"{prefix}{name}", dict(_read_docstrings(node.body))
                yield from _read_classes(node, f"{prefix}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from _read_classes(node, f"{prefix}{name}.<locals>.")
            case ast.stmt():
                yield from _read_classes(node, prefix)


def _read_docstrings(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for pair in itertools.pairwise(body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)
