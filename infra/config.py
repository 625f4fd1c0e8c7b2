"""The base of every configuration model, what tells two configurations apart, and that of the worker pools."""

import hashlib
import inspect
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema, to_jsonable_python

from infra.errors import BadInput

RECORDED: Final = "recorded"
"""Validation context under which a key that a stored document lacks takes its value of `Since.before`."""


@dataclass(frozen=True, slots=True)
class Since:
    """Mark of a key that stored runs may lack, placed in the key's type.

    Example: `attention: Annotated[Attention | None, Since("0.1.0", before=None)] = None`.
    """

    version: str
    """Version of Rheostat that added the key."""
    before: object
    """Value under which a run computes the same as runs did before the key existed."""


def since_of(field: FieldInfo) -> Since | None:
    """Return the mark of a key, or None if the key is as old as the oldest stored runs."""
    return next((mark for mark in field.metadata if isinstance(mark, Since)), None)


M = TypeVar("M", bound=BaseModel)


def read_recorded(model: type[M], document: object) -> M:
    """Validate settings that a stored run recorded; keys that are younger than the run mean "as before"."""
    return model.model_validate(document, context=RECORDED)


def omit_unchanged_keys(document: Mapping[str, JsonValue], settings: BaseModel) -> dict[str, JsonValue]:
    """Return a JSON document without the keys marked `Since` whose value is `before`, at every depth.

    `settings` says which keys are marked. The document is a dump of these settings, or of those that they are compared
    with; a part of another shape is returned unchanged.
    """
    fields = _fields_of(document, settings)
    kept = dict(fields)
    for name, field in type(settings).model_fields.items():
        if name not in fields:
            continue
        kept[name] = _omit_within(fields[name], getattr(settings, name))
        if (since := since_of(field)) is not None and kept[name] == _plain(since.before):
            del kept[name]
    return kept if fields is document else {**document, "options": kept}


def _omit_within(value: JsonValue, part: object) -> JsonValue:
    if isinstance(part, BaseModel) and isinstance(value, dict):
        return omit_unchanged_keys(value, part)
    if isinstance(part, tuple) and isinstance(value, list) and len(part) == len(value):
        return [_omit_within(each, other) for each, other in zip(value, part, strict=True)]
    return value


def _plain(value: object) -> JsonValue:
    """Return a value of a key as the JSON that `omit_unchanged_keys` leaves of it."""
    return _omit_within(to_jsonable_python(value), value)


def adopt_recorded(settings: M, recorded: Mapping[str, JsonValue]) -> M:
    """Return the settings with `Since.before` for each key that is younger than the recorded settings and not set."""
    fields = _fields_of(recorded, settings)
    changes = dict[str, object]()
    for name, field in type(settings).model_fields.items():
        value, since = getattr(settings, name), since_of(field)
        if name in fields:
            changes[name] = _adopt_within(value, fields[name])
        elif since is not None and name not in settings.model_fields_set:
            changes[name] = since.before
    changes = {name: value for name, value in changes.items() if value != getattr(settings, name)}
    return settings.model_copy(update=changes) if changes else settings


def _adopt_within(part: object, value: JsonValue) -> object:
    if isinstance(part, BaseModel) and isinstance(value, dict):
        return adopt_recorded(part, value)
    if isinstance(part, tuple) and isinstance(value, list) and len(part) == len(value):
        return tuple(_adopt_within(other, each) for each, other in zip(value, part, strict=True))
    return part


def _fields_of(document: Mapping[str, JsonValue], settings: BaseModel) -> Mapping[str, JsonValue]:
    """Return the part of a document that has the fields: a class of the user's own is recorded with its `options`."""
    options = document.get("options")
    is_target = "target" in document and "target" not in type(settings).model_fields
    return options if is_target and isinstance(options, dict) else document


def _title(model: type[BaseModel]) -> str:
    """What forms call a model: of a variant its kind, and what it is."""
    kind = model.model_fields.get("kind")
    if kind is None:
        return model.__name__
    what = re.split(r"; | \(|\.(?: |$)", inspect.cleandoc(model.__doc__ or model.__name__).replace("\n", " "))[0]
    return f"{', '.join(get_args(kind.annotation))}: {what.replace('`', '')}"


def _no_integer(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


def _no_float(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


_BEFORE: Final = {"int": _no_integer, "float": _no_float}
_WITHIN: Final = ("schema", "items_schema", "keys_schema", "values_schema", "choices", "fields")
"""Keys of a core schema under which there are others."""


def _fill_recorded(marks: Mapping[str, Since], schema: Any) -> Any:  # noqa: ANN401 -- pydantic's, of many types
    """Put the values of `Since.before` before the core schema of a model's fields, for documents of stored runs."""

    def fill(value: object, info: ValidationInfo) -> object:
        if info.context != RECORDED or not isinstance(value, dict):
            return value
        return {**{name: mark.before for name, mark in marks.items()}, **value}

    if schema["type"] == "model":
        filled = core_schema.with_info_before_validator_function(fill, schema["schema"])
        return schema | {"schema": filled}
    return schema | {"schema": _fill_recorded(marks, schema["schema"])}


def _without_booleans(schema: Any, model: type[BaseModel]) -> Any:  # noqa: ANN401 -- pydantic's, of many types
    """Put a check before each number in the core schema of a model; those in it have their own."""
    if isinstance(schema, list | tuple):
        return type(schema)(_without_booleans(each, model) for each in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if kind is None:  # fields or choices by name
        return {name: _without_booleans(each, model) for name, each in schema.items()}
    if kind == "function-before" and schema["function"]["function"] in _BEFORE.values():
        return schema  # pydantic gives a schema that it has made before
    if kind in _BEFORE:
        return core_schema.no_info_before_validator_function(_BEFORE[kind], cast(CoreSchema, schema))
    if kind == "model" and schema["cls"] is not model:
        return schema
    return schema | {key: _without_booleans(schema[key], model) for key in _WITHIN if key in schema}


class Settings(BaseModel):
    """Immutable settings: unknown keys are errors, field docstrings are the form's descriptions, true is no number."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        model_title_generator=_title,
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Take no boolean for a number, as pydantic does where it is not strict in everything."""
        schema = handler(source)
        whole: dict[str, Any] = handler.resolve_ref_schema(schema)  # type: ignore[assignment]
        whole.update(_without_booleans(whole, cls))
        marks = {name: mark for name, field in cls.model_fields.items() if (mark := since_of(field)) is not None}
        if marks and source is cls:
            whole.update(_fill_recorded(marks, whole))
        return schema

    def as_recorded(self) -> dict[str, JsonValue]:
        """Return the settings as JSON for a stored record: without keys that mean "as before they existed"."""
        return omit_unchanged_keys(self.model_dump(mode="json"), self)


class Identified(Protocol):
    """Settings that results depend on. A run is continued only by settings with the same identity."""

    def identity(self, recorded: Mapping[str, JsonValue] | None = None) -> dict[str, JsonValue]:
        """Return the keys and values that results depend on, with the names of paths that a record has for them."""
        ...

    def normalize(self, recorded: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Return a recorded identity in the form that `identity` returns today, whatever version recorded it."""
        ...


class WorkerRange(Settings):
    """How many worker slots: a number, or a table where machines come and go. Results do not depend on it."""

    min: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Fewest slots to begin and to go on with; none begins with `max`, and goes on with as many as the roles need."""
    max: Annotated[int, Field(ge=1, le=4096)]
    """Slots that are used where the cluster has room for them."""

    @model_validator(mode="before")
    @classmethod
    def _number_is_max(cls, value: object) -> object:
        return value if isinstance(value, dict | WorkerRange) else {"max": value}

    @model_validator(mode="after")
    def _grows_from_min_to_max(self) -> "WorkerRange":
        if self.min is not None and self.min > self.max:
            raise ValueError(f"min {self.min} exceeds max {self.max}")
        return self

    @property
    def fewest(self) -> int:
        """Slots to begin with."""
        return self.max if self.min is None else self.min

    @model_serializer
    def _written(self) -> int | dict[str, int]:
        return self.max if self.min is None else {"min": self.min, "max": self.max}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Let forms take a number, too."""
        return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 4096}, handler(core)]}


class PoolsConfig(Settings):
    """The workers and where they run."""

    cluster: Literal["ray", "threads"] = "ray"
    """Workers are processes of a Ray cluster, or `threads` of this process: for notebooks and tests, on one CPU."""
    ray_address: str | None = None
    """Address of a Ray cluster (`ray://…`, `host:port` or `auto`); none starts an embedded one."""
    workers: WorkerRange = WorkerRange(max=2)
    """Worker slots, a number or a range: places for a model each, dealt to rollout and to the served rewards."""
    wait_seconds: Annotated[float, Field(gt=0)] = 180
    """Longest time with too few worker slots for the run to begin, or to go on, in seconds; then it ends."""
    scoring_workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """Processes beside the slots that compute rule rewards and credit, and that ask endpoints."""
    update_ranks: Annotated[int, Field(ge=1, le=4096)] = 1
    """Data-parallel DeepSpeed ranks; a run goes on with others if that is accepted."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """CPU threads per worker; sums depend on it, so a run goes on with others if that is accepted."""
    gpus_per_worker: Annotated[float, Field(ge=0, le=16)] = 0
    """GPUs of each worker slot."""
    gpus_per_update_rank: Annotated[float, Field(ge=0, le=16)] = 0
    """GPUs reserved for each update rank."""
    update_apart: bool = False
    """Worker slots stay awake during the update, which has processors or GPUs, and memory, of its own."""
    start_seconds: Annotated[float, Field(gt=0)] = 180
    """Longest time a worker may take to start, in seconds."""
    stall_seconds: Annotated[float, Field(gt=0)] = 300
    """Longest time without progress before a worker counts as stalled, in seconds."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often one piece of work is tried again after its worker died."""

    @model_validator(mode="after")
    def _threads_can_do_it(self) -> "PoolsConfig":
        if self.cluster == "threads":
            beyond = {
                "ray_address": self.ray_address,
                "update_ranks": self.update_ranks if self.update_ranks > 1 else None,
                "gpus_per_worker": self.gpus_per_worker or None,
                "gpus_per_update_rank": self.gpus_per_update_rank or None,
            }
            for key, value in beyond.items():
                if value is not None:
                    raise ValueError(
                        f"{key} {value!r}: the workers of cluster 'threads' are in one process and share its devices; "
                        "leave it out, or use cluster 'ray'"
                    )
        return self


Positive = Annotated[int, Field(ge=1)]

Fraction = Annotated[float, Field(ge=0, le=1)]


def whole_number(variable: str, default: float) -> float:
    """Read a setting of the machine from the environment."""
    text = os.environ.get(variable) or f"{default:g}"
    if not text.isdecimal():
        raise BadInput(f"{variable}={text!r}: expected a whole number")
    return int(text)


def fingerprint_of(config: Mapping[str, JsonValue]) -> str:
    """Digest of a configuration, 16 hex digits."""
    return hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8).hexdigest()


def difference(
    old: Mapping[str, JsonValue], new: Mapping[str, JsonValue], *, besides: Collection[str] = (), shown: int = 5
) -> str:
    """Name the settings that differ, with both values, besides some by dotted key."""
    before, after = dict(_dotted(old)), dict(_dotted(new))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key) and key not in besides]
    parts = [f"{key} was {before.get(key, 'absent')}, is {after.get(key, 'absent')}" for key in keys[:shown]]
    return "; ".join(parts) + (f"; and {len(keys) - shown} more" if len(keys) > shown else "")


def _dotted(value: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _dotted(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(item, sort_keys=True)
