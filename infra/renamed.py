"""Renamed keys and values of configurations. Both the old and the present name can be read, and runs record the old
name.

A renamed key or value is annotated at its declaration with `RenamedFrom` or `RenamedValue`. Python code and users'
documents use the present name. Records and identities of runs keep the old name. Therefore a renamed key changes no
fingerprint, and older versions of Rheostat can read the records of newer versions.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, get_args

from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from rheostat.infra.demos import FORMER_TARGETS, find_example
from rheostat.infra.errors import DeprecatedSpelling
from rheostat.infra.validation_errors import field_models

_KIND: Final = "kind"
"""Name of the key with which a table selects one of several configuration classes."""


@dataclass(frozen=True, slots=True)
class RenamedFrom:
    """Annotation for a renamed configuration key, added to the type of the key. The old name is still accepted.

    Example: `exclude_ids_path: Annotated[Location | None, RenamedFrom("without")] = None`.
    """

    key: str
    """Old name of the key, which stored runs contain."""


@dataclass(frozen=True, slots=True)
class RenamedValue:
    """Annotation for a configuration key one of whose values was renamed. It is added to the type of the key, once for
    each renamed value. The old name is still accepted."""

    old: str
    """Old name of the value, which stored runs contain."""
    new: str
    """Present name of the value."""


@dataclass(frozen=True, slots=True)
class Renames:
    """Renamed keys and values of one configuration class, used to convert old names."""

    keys: Mapping[str, str]
    """Mapping from the old name of each renamed key to its present name."""
    values: Mapping[str, Mapping[str, str]]
    """Mapping from old to present names of the renamed values of each key. The outer keys are present names of
    configuration keys."""
    kinds: Mapping[str, Mapping[str, str]]
    """Mapping from old to present names of the values of `kind` in inner tables. The outer keys are present names of
    the keys that contain these tables."""

    def __bool__(self) -> bool:
        """Return whether there are any renamed keys or values."""
        return bool(self.keys or self.values or self.kinds)


def find_renames(model: type[BaseModel]) -> Renames:
    """Collect the renamed keys and values of a configuration class from the annotations of its fields."""
    fields = model.model_fields
    kinds = {name: _renamed_kinds(field_models(field)) for name, field in fields.items()}
    values = {name: _renamed_values(field) for name, field in fields.items()}
    return Renames(
        keys={mark.key: name for name, field in fields.items() for mark in field.metadata if _is_key(mark)},
        values={name: renamed for name, renamed in values.items() if renamed},
        kinds={name: renamed for name, renamed in kinds.items() if renamed},
    )


renames_of: Final = cache(find_renames)
"""Cached version of `find_renames`. Call it only after all types in the class's annotations are defined."""


def _is_key(mark: object) -> bool:
    return isinstance(mark, RenamedFrom)


def _renamed_values(field: FieldInfo) -> dict[str, str]:
    return {mark.old: mark.new for mark in field.metadata if isinstance(mark, RenamedValue)}


def _renamed_kinds(models: Sequence[type[BaseModel]]) -> dict[str, str]:
    kinds = [model.model_fields[_KIND] for model in models if _KIND in model.model_fields]
    return {old: new for kind in kinds for old, new in _renamed_values(kind).items()}


Report = Callable[[str, str], None]
"""Function that is called for each old name that is found in a document, with the old and the present name."""


def read_names(
    table: Mapping[str, object], renames: Renames, *, report: Report = lambda old, new: None
) -> dict[str, Any]:
    """Return a table in which old names of keys and values are replaced by present names. In its inner tables, only
    values of `kind` are replaced.

    Raises ValueError if the table contains both the old and the present name of a key.
    """
    present = dict[str, object]()
    for key, value in table.items():
        name = renames.keys.get(key, key)
        if name != key:
            if name in table:
                raise ValueError(
                    f"{key} and {name} are both set, but they are the same key. Remove {key}, which is the old name."
                )
            report(key, name)
        values = renames.values.get(name, {})
        if isinstance(value, str) and value in values:
            report(f"{name} = {str(value)!r}", repr(values[value]))
            value = values[value]
        present[name] = _rename_kind(value, renames.kinds.get(name, {}), name, report)
    return present


def _rename_kind(value: object, kinds: Mapping[str, str], name: str, report: Report) -> object:
    """Replace an old value of `kind` in a table, or in each table of a list, by the present value. `name` is the key
    that contains the table, for `report`."""
    if isinstance(value, list | tuple) and kinds:
        return [_rename_kind(each, kinds, name, report) for each in value]
    if not isinstance(value, Mapping) or not isinstance(kind := value.get(_KIND), str) or kind not in kinds:
        return value
    report(f"{name}.{_KIND} = {str(kind)!r}", repr(kinds[kind]))
    return {**value, _KIND: kinds[kind]}


def stored_names(table: Mapping[str, JsonValue], model: type[BaseModel]) -> dict[str, JsonValue]:
    """Return a table in which renamed keys and values have their old names, in the format in which runs store them.
    Inner tables are not changed."""
    renames = renames_of(model)
    keys = {name: key for key, name in renames.keys.items()}
    values = {name: {new: old for old, new in renamed.items()} for name, renamed in renames.values.items()}
    return {
        keys.get(name, name): values.get(name, {}).get(value, value) if isinstance(value, str) else value
        for name, value in table.items()
    }


def with_present_names(
    document: Mapping[str, Any], model: type[BaseModel], *, report: Report = lambda old, new: None
) -> dict[str, Any]:
    """Return a document in which old names of keys and values are replaced by present names, at every depth. `model` is
    the configuration class of the document.

    The document may be incomplete or invalid. A table that contains both names of a key is not changed, because its
    validation reports the error. `report` is called with dotted keys.
    """
    renamed = _rename_within(document, [model], "", report)
    assert isinstance(renamed, dict)
    return renamed


def _rename_within(value: object, models: Sequence[type[BaseModel]], path: str, report: Report) -> object:
    if isinstance(value, list | tuple) and models:
        return [_rename_within(each, models, path, report) for each in value]
    if not isinstance(value, Mapping) or not models:
        return value
    if former := _find_former_kind(value, models):
        report(
            f"{path}{_KIND} = {value[_KIND]!r}",
            f"{_KIND} = 'target' and {_describe_target(FORMER_TARGETS.get(former, former))}",
        )
        return value  # validation reads the table
    if place := FORMER_TARGETS.get(str(value.get("target"))):
        report(f"{path}target = {value['target']!r}", _describe_target(place))
    candidates = _select_variants(value, models)
    present = dict[str, object]()
    for key, inner in value.items():
        known = any(key in model.model_fields for model in candidates)
        name = key if known else _present_key(key, candidates, value) or _present_key(key, models, value) or key
        values = {old: new for model in candidates for old, new in renames_of(model).values.get(name, {}).items()}
        if name != key:
            report(path + key, path + name)
        if isinstance(inner, str) and inner in values:
            report(f"{path}{name} = {str(inner)!r}", repr(values[inner]))
            present[name] = values[inner]
            continue
        parts = [part for model in candidates if name in model.model_fields for part in _models_of(model, name)]
        present[name] = _rename_within(inner, parts, f"{path}{name}.", report)
    return present


@cache
def _models_of(model: type[BaseModel], name: str) -> tuple[type[BaseModel], ...]:
    return tuple(field_models(model.model_fields[name]))


def _select_variants(table: Mapping[str, object], models: Sequence[type[BaseModel]]) -> Sequence[type[BaseModel]]:
    """Return the configuration classes whose `kind` is that of the table. Return all of `models` if the table's `kind`
    is missing or unknown."""
    kind = table.get(_KIND)
    return (isinstance(kind, str) and [model for model in models if kind in _kinds_of(model)]) or models


@cache
def _kinds_of(model: type[BaseModel]) -> frozenset[str]:
    field = model.model_fields.get(_KIND)
    return frozenset() if field is None else frozenset({*get_args(field.annotation), *_renamed_values(field)})


def _find_former_kind(table: Mapping[str, object], models: Sequence[type[BaseModel]]) -> str | None:
    """Return the place or former import string, in a table of infra/demos.py, of the code that the table's `kind` named
    formerly. Return None if `kind` is missing or is not a former one."""
    kind, former = table.get(_KIND), (getattr(model, "former_kinds", {}) for model in models)
    return next((kinds[kind] for kinds in former if kind in kinds), None) if isinstance(kind, str) else None


def _describe_target(place: str) -> str:
    target = place.partition("/")[2]
    module = target.partition(":")[0]
    return f"target = {target!r}, with {module}.py from `rheostat init DIR --example {find_example(place)}`"


def _present_key(key: str, models: Sequence[type[BaseModel]], table: Mapping[str, object]) -> str | None:
    """Return the present name of a key that one of the models has renamed, or None if there is none. Return None also
    if the name is ambiguous, or if the table already contains the present name."""
    names = {renames_of(model).keys[key] for model in models if key in renames_of(model).keys}
    return names.pop() if len(names) == 1 and names.isdisjoint(table) else None


def warn(old: str, new: str, *, source: str = "") -> None:
    """Issue a deprecation warning that a user's document contains the old name of a key or value. The message begins
    with `source`, such as "job.toml: "."""
    warnings.warn(f"{source}{old} is deprecated. Write {new}.", DeprecatedSpelling, stacklevel=2)


def present_names_in(document: Mapping[str, Any], model: type[BaseModel], *, source: str) -> dict[str, Any]:
    """Return a user's document in which old names of keys and values are replaced by present names. Warn about each old
    name. `source` is the name of the document in warnings."""
    return with_present_names(document, model, report=_report_once(source))


def _report_once(source: str) -> Report:
    reported = set[str]()

    def report(old: str, new: str) -> None:
        if old not in reported:
            warn(old, new, source=source)
        reported.add(old)

    return report


def accept_old_names(schema: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return a copy of the JSON schema of a table that also accepts old names of keys and values. Forms created from it
    only show present names."""
    renames, former_kinds = renames_of(model), getattr(model, "former_kinds", {})
    changed = dict(schema)
    if former_kinds:
        kinds = {"enum": ["target", *former_kinds], "default": "target"}
        changed |= {
            "properties": {**schema["properties"], _KIND: kinds},
            "patternProperties": {".": {}},
            "required": [],
        }
    if renames.keys:
        changed["patternProperties"] = {f"^({'|'.join(renames.keys)})$": {}}
        changed["required"] = [name for name in schema.get("required", []) if name not in renames.keys.values()]
    if renames.values:
        properties = dict(schema["properties"])
        for name, values in renames.values.items():
            part = dict(properties[name])
            part["enum"] = [*(part.pop("enum", None) or [part.pop("const")]), *values]
            properties[name] = part
        changed["properties"] = properties
    return changed
