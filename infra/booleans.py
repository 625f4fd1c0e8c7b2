"""Refusal of booleans as numbers in settings. Python and pydantic count `True` as 1."""

from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from pydantic import BaseModel
from pydantic_core import CoreSchema, PydanticKnownError, core_schema


@dataclass(frozen=True, slots=True)
class _RefuseBoolean:
    """Pydantic validation step that refuses a boolean where a number is expected. Python counts `True` as 1."""

    error: Literal["int_type", "float_type", "literal_error"]
    """Pydantic's type of the error."""
    expected: str = ""
    """Values that a literal allows, as text."""

    def __call__(self, value: object) -> object:
        if isinstance(value, bool):
            raise PydanticKnownError(self.error, {"expected": self.expected} if self.expected else None)
        return value


_BEFORE: Final = {"int": _RefuseBoolean("int_type"), "float": _RefuseBoolean("float_type")}
_WITHIN: Final = ("schema", "items_schema", "keys_schema", "values_schema", "choices", "fields")
"""Keys of a pydantic core schema whose values are or contain other core schemas."""


def refuse_booleans(schema: Any, model: type[BaseModel]) -> Any:  # noqa: ANN401 -- pydantic's, of many types
    """Return a copy of a model's pydantic core schema in which every number refuses booleans. Nested models are not
    changed, because they have their own checks."""
    if isinstance(schema, list | tuple):
        return type(schema)(refuse_booleans(each, model) for each in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if kind is None:  # fields or choices by name
        return {name: refuse_booleans(each, model) for name, each in schema.items()}
    if kind == "function-before" and isinstance(schema["function"]["function"], _RefuseBoolean):
        return schema  # pydantic reuses a schema that already has the check
    if kind in _BEFORE:
        return core_schema.no_info_before_validator_function(_BEFORE[kind], cast(CoreSchema, schema))
    if kind == "literal" and any(type(value) is int for value in schema["expected"]):
        check = _RefuseBoolean("literal_error", " or ".join(map(repr, schema["expected"])))
        return core_schema.no_info_before_validator_function(check, cast(CoreSchema, schema))
    if kind == "model" and schema["cls"] is not model:
        return schema
    return schema | {key: refuse_booleans(schema[key], model) for key in _WITHIN if key in schema}
