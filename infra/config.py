"""Base of all configuration models, comparison of configurations, and the configuration of the worker pools."""

import hashlib
import inspect
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol, TypeVar, get_args

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
from pydantic_core import CoreSchema, core_schema, to_jsonable_python

from rheostat.infra.booleans import refuse_booleans
from rheostat.infra.errors import BadInput
from rheostat.infra.field_descriptions import describe_fields
from rheostat.infra.renamed import (
    RenamedFrom,
    Renames,
    accept_old_names,
    find_renames,
    read_names,
    renames_of,
    stored_names,
    warn,
    with_present_names,
)

RECORDED: Final = "recorded"
"""Pydantic validation context for configurations that are read from stored runs. In this context, a missing key gets
the value `Since.before` instead of its present default."""


@dataclass(frozen=True, slots=True)
class Since:
    """Annotation of a configuration key that was added after the first release, so that stored runs may lack the key.

    Example: `attention: Annotated[Attention | None, Since("0.1.0", before=None)] = None`.
    """

    version: str
    """Version of Rheostat that added the key."""
    before: object
    """Value that a stored run without the key is given. With this value, the run computes the same results as before
    the key was added."""


def since_of(field: FieldInfo) -> Since | None:
    """Return the `Since` annotation of a key, or None if the key has none because all stored runs have it."""
    return next((mark for mark in field.metadata if isinstance(mark, Since)), None)


M = TypeVar("M", bound=BaseModel)


def read_recorded(model: type[M], document: object) -> M:
    """Validate settings that were read from a stored run. A missing key with a `Since` annotation gets the value
    `Since.before`."""
    return model.model_validate(document, context=RECORDED)


def encode_recorded(document: Mapping[str, JsonValue], settings: BaseModel) -> dict[str, JsonValue]:
    """Convert a JSON dump of settings to the format in which runs store it.

    At every depth, keys with a `Since` annotation are omitted if their value is `before`, and renamed keys and values
    get their old names.

    `settings` determines which keys have an annotation. The document is a dump of these settings, or of settings to
    which they are compared. A part of the document whose structure differs from the settings is returned unchanged.
    """
    part = _fields_of(document, settings)
    fields = read_names(part, renames_of(type(settings)))
    kept = dict(fields)
    for name, field in type(settings).model_fields.items():
        if name not in fields:
            continue
        kept[name] = _encode_within(fields[name], getattr(settings, name))
        if (since := since_of(field)) is not None and kept[name] == _plain_json(since.before):
            del kept[name]
    stored = stored_names(kept, type(settings))
    return stored if part is document else {**document, "options": stored}


def _encode_within(value: JsonValue, part: object) -> JsonValue:
    if isinstance(part, BaseModel) and isinstance(value, dict):
        return encode_recorded(value, part)
    if isinstance(part, tuple) and isinstance(value, list) and len(part) == len(value):
        return [_encode_within(each, other) for each, other in zip(value, part, strict=True)]
    return value


def _plain_json(value: object) -> JsonValue:
    """Convert the value of a configuration key to JSON, in the format in which runs store it."""
    return _encode_within(to_jsonable_python(value), value)


def adopt_recorded(settings: M, recorded: Mapping[str, JsonValue]) -> M:
    """Return a copy of the settings that is compatible with a stored run. A key with a `Since` annotation gets the
    value `Since.before` if the user has not set the key and the stored configuration `recorded` does not contain it."""
    fields = read_names(_fields_of(recorded, settings), renames_of(type(settings)))
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
    """Return the part of a document that contains the fields of the settings. This is the table `options` if the
    settings are a user's own class, otherwise the whole document."""
    options = document.get("options")
    is_target = "target" in document and "target" not in type(settings).model_fields
    return options if is_target and isinstance(options, dict) else document


def _title(model: type[BaseModel]) -> str:
    """Return the title of a settings class in forms. For a variant (a class that users select with `kind`), this is its
    kind and the first clause of its docstring."""
    kind = model.model_fields.get("kind")
    if kind is None:
        return model.__name__
    what = re.split(r"; | \(|\.(?: |$)", inspect.cleandoc(model.__doc__ or model.__name__).replace("\n", " "))[0]
    return f"{', '.join(get_args(kind.annotation))}: {what.replace('`', '')}"


@dataclass(frozen=True, slots=True)
class _ReadOlder:
    """Pydantic validation step that runs before the fields of a model are validated. It replaces old names of keys and
    values with the present names. In documents of stored runs, it also adds missing keys with the value
    `Since.before`."""

    marks: Mapping[str, Since]
    renames: Renames

    def __call__(self, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, dict):
            return value
        if info.context != RECORDED:
            return read_names(value, self.renames, report=warn)
        return {**{name: mark.before for name, mark in self.marks.items()}, **read_names(value, self.renames)}

    def add_to(self, schema: Any) -> Any:  # noqa: ANN401 -- pydantic's, of many types
        """Add this validation step to the pydantic core schema of a model, and return the schema. If the schema already
        contains the step, because pydantic reuses it, nothing is added."""
        inner = schema["schema"]
        if schema["type"] != "model":
            return schema | {"schema": self.add_to(inner)}
        if inner["type"] == "function-before" and isinstance(inner["function"]["function"], _ReadOlder):
            return schema
        return schema | {"schema": core_schema.with_info_before_validator_function(self, inner)}


class Settings(BaseModel):
    """Base class of all settings. Settings are immutable, unknown keys are errors, and booleans are not accepted as
    numbers.

    The docstring of a field is also its description in forms and in the documentation.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        model_title_generator=_title,
    )

    checks: ClassVar[Mapping[str, str]] = {}
    """Import paths `pkg.mod:function` of the functions that check these settings before a run starts, by stage of the
    check. Functions of base classes are called too."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the core schema with checks that refuse booleans as numbers, as pydantic does in strict mode."""
        schema = handler(source)
        whole: dict[str, Any] = handler.resolve_ref_schema(schema)  # type: ignore[assignment]
        whole.update(refuse_booleans(whole, cls))
        marks = {name: mark for name, field in cls.model_fields.items() if (mark := since_of(field)) is not None}
        renames = find_renames(cls)
        if (marks or renames) and source is cls:
            whole.update(_ReadOlder(marks, renames).add_to(whole))
        return schema

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return a JSON schema with the descriptions of the fields. It also accepts the old names of renamed keys and
        values."""
        schema = handler(core)
        whole = handler.resolve_ref_schema(schema)
        for name, text in describe_fields(cls).items():
            if name in whole.get("properties", {}):
                whole["properties"][name].setdefault("description", text)
        whole.update(accept_old_names(whole, cls))
        return schema

    def as_recorded(self) -> dict[str, JsonValue]:
        """Return the settings as JSON, in the format in which runs store them. Keys with a `Since` annotation are
        omitted if their value is `before`, and renamed keys have their old names."""
        return encode_recorded(self.model_dump(mode="json"), self)

    def present_names(self, recorded: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Return a stored configuration with the present names of renamed keys and values, for use in messages."""
        return with_present_names(recorded, type(self))


class Identified(Protocol):
    """Settings with an identity, which are the keys and values that determine the results of a run. A run can only
    continue with settings of the same identity."""

    def identity(self, recorded: Mapping[str, JsonValue] | None = None) -> dict[str, JsonValue]:
        """Return the keys and values that determine the results of a run. `recorded` is the configuration of an
        existing run. If it is given, paths are written in the same way as in it."""
        ...

    def normalize(self, recorded: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Convert an identity that any version of Rheostat stored to the present format of `identity`."""
        ...

    def present_names(self, recorded: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Return a stored identity with the present names of renamed keys and values, for use in messages."""
        ...


class WorkerRange(Settings):
    """Number of worker slots (places for one worker each). A single number means a fixed number of slots. A table with
    a minimum and a maximum allows machines to join and leave. The number does not affect results."""

    min: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Minimum number of slots that a run needs to begin and to continue. By default a run waits for `max` slots before
    it begins, and continues as long as every role has a worker."""
    max: Annotated[int, Field(ge=1, le=4096)]
    """Maximum number of slots. Fewer slots are used if the cluster has no room for all of them."""

    @model_validator(mode="before")
    @classmethod
    def _read_number(cls, value: object) -> object:
        return value if isinstance(value, dict | WorkerRange) else {"max": value}

    @model_validator(mode="after")
    def _check_range(self) -> "WorkerRange":
        if self.min is not None and self.min > self.max:
            raise ValueError(f"min is {self.min}, but max is only {self.max}. Raise max, or lower min")
        return self

    @property
    def min_slots(self) -> int:
        """Minimum number of slots that a run needs to begin."""
        return self.max if self.min is None else self.min

    @model_serializer
    def _serialize_range(self) -> int | dict[str, int]:
        return self.max if self.min is None else {"min": self.min, "max": self.max}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return a JSON schema that also accepts a number."""
        whole = super().__get_pydantic_json_schema__(core, handler)
        return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 4096}, whole]}


class PoolsConfig(Settings):
    """Worker pools, and the cluster in which the workers run."""

    cluster: Literal["ray", "threads"] = "ray"
    """Kind of cluster. `ray` runs the workers as processes of a Ray cluster. `threads` runs them as threads of this
    process, on one CPU, for notebooks and tests."""
    ray_address: str | None = None
    """Address of a Ray cluster (`ray://…`, `host:port` or `auto`). By default an embedded cluster is started."""
    workers: WorkerRange = WorkerRange(max=2)
    """Number or range of worker slots. A slot is a reserved place for one model at a time. Rollout workers and served
    reward models share the slots."""
    wait_seconds: Annotated[float, Field(gt=0)] = 180
    """Maximum time in seconds for which a run waits if there are too few worker slots, at the start or later. After
    this time the run ends."""
    scoring_workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of additional worker processes that need no slot. They compute rule-based rewards and credit, and send
    requests to endpoints."""
    update_ranks: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of data-parallel DeepSpeed ranks for the update. To change this number for an existing run, pass
    `--accept-change`."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of CPU threads per worker. The number affects the rounding of sums, so it can be changed for an existing
    run only with `--accept-change`."""
    gpus_per_worker: Annotated[float, Field(ge=0, le=16)] = 0
    """Number of GPUs per worker slot: a whole number, or a fraction below 1, so that several slots can share a GPU."""
    gpus_per_update_rank: Annotated[float, Field(ge=0, le=16)] = 0
    """GPUs per update rank, at most 1. Ranks use the GPUs of worker slots, which sleep during the update."""
    dedicated_update_resources: Annotated[bool, RenamedFrom("update_apart")] = False
    """Whether workers stay awake during the update. The update then needs additional CPUs or GPUs and memory."""
    start_seconds: Annotated[float, Field(gt=0)] = 180
    """Maximum time in seconds that a worker may take to start."""
    stall_seconds: Annotated[float, Field(gt=0)] = 300
    """Maximum time in seconds without progress. After this time a worker is considered stalled."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Maximum number of times that a work unit is run again after its worker died."""

    @model_validator(mode="after")
    def _check_threads(self) -> "PoolsConfig":
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
                        f"{key} is {value!r}, but with cluster = 'threads' all workers share one process and its "
                        f"devices. Remove {key}, or set cluster = 'ray'."
                    )
        return self


Positive = Annotated[int, Field(ge=1)]

Fraction = Annotated[float, Field(ge=0, le=1)]


def read_number_variable(variable: str, default: float) -> float:
    """Return the value of an environment variable, which must be a whole number. Return the default if the variable is
    not set. Raises BadInput for any other value."""
    text = os.environ.get(variable) or f"{default:g}"
    if not text.isdecimal():
        raise BadInput(f"the environment variable {variable} must be a whole number, but is {text!r}. Change it")
    return int(text)


def fingerprint_of(config: Mapping[str, JsonValue]) -> str:
    """Return a hash of a configuration: the BLAKE2b digest of its JSON with sorted keys, as 16 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8).hexdigest()


def describe_difference(
    old: Mapping[str, JsonValue], new: Mapping[str, JsonValue], *, ignored: Collection[str] = (), shown: int = 5
) -> str:
    """Describe which settings differ between two configurations, each with its old and new value. Settings whose dotted
    keys are in `ignored` are omitted. At most `shown` settings are listed, followed by the number of the others."""
    before, after = dict(_dotted(old)), dict(_dotted(new))
    keys = [key for key in changed_keys(old, new) if key not in ignored]
    parts = [f"{key} was {before.get(key, 'absent')}, is {after.get(key, 'absent')}" for key in keys[:shown]]
    return "; ".join(parts) + (f"; and {len(keys) - shown} more" if len(keys) > shown else "")


def changed_keys(old: Mapping[str, JsonValue], new: Mapping[str, JsonValue]) -> list[str]:
    """Return the dotted keys of the settings that differ between two configurations."""
    before, after = dict(_dotted(old)), dict(_dotted(new))
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def _dotted(value: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _dotted(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(item, sort_keys=True)
