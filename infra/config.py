"""The base of every configuration model, what tells two configurations apart, and that of the worker pools."""

import hashlib
import inspect
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from infra.errors import BadInput


def unwritten(default: object) -> FieldInfo:
    """Leave a key that is younger than stored runs out of their identities, and of all else, at its default.

    Stands beside the type: `attention: Annotated[Attention | None, unwritten(None)] = None`.
    """
    return Field(exclude_if=lambda value: bool(value == default))  # type: ignore[no-any-return]


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
        return schema


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
