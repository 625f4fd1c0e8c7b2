"""Check of tool call arguments against the tools' JSON schemas. Torch-free.

If an argument is wrong, the policy reads a message about it, as it does when a call cannot be parsed. Without the
check, a tool that receives an argument of a wrong type may raise an error, which would count as a failure of the
environment.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import SchemaError
from jsonschema.validators import extend, validator_for
from pydantic import JsonValue
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import nearest_name
from rheostat.models.text.calls import Call, ParsedTurn, Parser, decode_arguments
from rheostat.models.text.tokenizer import ToolSchema

logger = logging.getLogger(__name__)

_TYPES: Final = ("array", "boolean", "integer", "null", "number", "object", "string")
_DATA_KEYS: Final = ("const", "default", "enum", "examples")
"""Keywords of JSON Schema whose values are data, not schemas."""
_NAMED_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of JSON Schema whose value is an object that maps names to schemas."""
_OPEN_KEYS: Final = ("$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties")
"""Keywords that can make a JSON schema accept arguments that are not listed under `properties`."""
_MAX_PROBLEMS: Final = 3
"""Maximum number of wrong tool-call arguments that one message to the policy lists."""

Validator = Any  # a class that jsonschema generates
Argument = tuple[str | int, ...]
"""Path to a value inside the arguments of a tool call: names of fields and indices into lists."""


def check_arguments(parse: Parser, tools: Sequence[ToolSchema]) -> Parser:
    """Return a parser that works like `parse` and also checks the arguments of tool calls against the schemas of
    `tools`. A call with wrong arguments gets an error message for the policy.

    Arguments that are a JSON text are decoded. Tools without a schema, or with an invalid one, accept all arguments.
    """
    validators = {name: built for name, built in map(_build_validator, tools) if built is not None}

    def parse_and_check(text: str) -> ParsedTurn:
        """Parse the text of a turn and check the arguments of its tool calls."""
        turn = parse(text)
        return replace(turn, calls=tuple(_check_call(decode_arguments(call), validators) for call in turn.calls))

    return parse_and_check


def _check_call(call: Call, validators: Mapping[str, Validator]) -> Call:
    """Return the tool call, with an error message added if its arguments do not match the schema of its tool.
    `validators` is keyed by tool name."""
    if call.error or call.name not in validators:
        return call
    try:
        errors = [*validators[call.name].iter_errors(dict(call.arguments))]
    except OverflowError:  # an integer of hundreds of digits in a comparison with a float
        return replace(call, error=f"{call.name}: arguments: a number is too large")
    except Exception:  # a schema can contain references and patterns that only fail when they are used
        logger.warning(
            "tool %r: its JSON schema cannot be applied, so the arguments of its calls are not checked", call.name
        )
        return call
    problems = list(dict.fromkeys(problem for error in errors for problem in _describe_errors(error)))
    shown = "; ".join(problems[:_MAX_PROBLEMS])
    more = f"; {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
    return replace(call, error=f"{call.name}: {shown}{more}") if problems else call


# ---- schemas


def _build_validator(tool: ToolSchema) -> tuple[str, Validator | None]:
    """Return the name of a tool and a validator for its arguments, or None instead of the validator if the schema is
    missing or invalid."""
    function = cast(Mapping[str, JsonValue], tool.get("function", tool))
    name, schema = str(function.get("name", "")), _read_schema(function)
    if schema is None:
        return name, None
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        logger.warning(
            "tool %r: its JSON schema is invalid, so the arguments of its calls are not checked: %s",
            name,
            error.message,
        )
        return name, None
    strict = extend(kind, type_checker=kind.TYPE_CHECKER.redefine("integer", _is_integer))
    return name, strict(schema, registry=Registry())  # an own registry, because the default one fetches remote schemas


def _read_schema(function: Mapping[str, JsonValue]) -> dict[str, JsonValue] | None:
    """Return the schema of a function's arguments as standard JSON Schema, or None if the function has no schema."""
    parameters = function.get("parameters")
    if not isinstance(parameters, dict):
        return None
    schema = cast(dict[str, JsonValue], _normalize(parameters))
    if "properties" in schema and not any(key in schema for key in _OPEN_KEYS):
        schema["additionalProperties"] = False
    return schema


def check_schemas(tools: Sequence[ToolSchema], *, where: str) -> None:
    """Raise BadInput if arguments cannot be checked with the schema of a tool. Such a schema has an invalid keyword, a
    reference to another document or to a missing part, or an invalid pattern. `where` names the environment in the
    message."""
    for tool in tools:
        function = cast(Mapping[str, JsonValue], tool.get("function", tool))
        if (fault := _find_fault(function)) is not None:
            raise BadInput(
                f"{where}: the schema of tool {str(function.get('name', ''))!r} is invalid: {fault}. Correct the "
                'schema, or set rollout.environment.arguments = "unchecked" to call the tool with any arguments.'
            )


def _find_fault(function: Mapping[str, JsonValue]) -> str | None:
    """Return a description of the first error in the schema of a function's arguments, or None if the schema is
    valid."""
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        return f"parameters: expected an object, found {_quote(parameters)}"
    if (schema := _read_schema(function)) is None:
        return None
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        return f"{_format_path(('parameters', *error.absolute_path))}: {error.message:.200}"
    resource = DRAFT202012.create_resource(schema)
    resolver = Registry().with_resource(resource.id() or "", resource).resolver(resource.id() or "")
    for path, key, value in _iterate_texts(schema, ("parameters",)):
        try:
            if key == "$ref":
                resolver.lookup(value)
        except Unresolvable:
            return f"{_format_path(path)}: {value!r} is no part of this schema, and other documents are not read"
    return None


def _iterate_texts(schema: JsonValue, path: Argument) -> Iterator[tuple[Argument, str, str]]:
    """Yield the path, keyword and value of each entry of a schema whose value is a text, including nested entries."""
    if isinstance(schema, list):
        for index, each in enumerate(schema):
            yield from _iterate_texts(each, (*path, index))
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if isinstance(value, str):
                yield (*path, key), key, value
            elif key in _NAMED_SCHEMAS and isinstance(value, dict):
                for name, each in value.items():
                    yield from _iterate_texts(each, (*path, key, name))
            elif key not in _DATA_KEYS:
                yield from _iterate_texts(value, (*path, key))


def _is_integer(_: object, value: object) -> bool:
    """Return whether a value is a Python integer. JSON Schema accepts 3.0 as an integer, but a tool with an int
    parameter may reject it."""
    return isinstance(value, int) and not isinstance(value, bool)


def _normalize(schema: JsonValue) -> JsonValue:
    """Return a schema that uses only keywords and types of standard JSON Schema. transformers marks optional types as
    `nullable`, as OpenAPI does, and uses additional types such as `image`."""
    if isinstance(schema, list):
        return [_normalize(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    normalized = {key: _normalize_keyword(key, each) for key, each in schema.items()}
    if isinstance(normalized.get("type"), str) and normalized["type"] not in _TYPES:
        del normalized["type"]
    if normalized.get("nullable") is True:
        del normalized["nullable"]
        return {"anyOf": [normalized, {"type": "null"}]}
    return normalized


def _normalize_keyword(key: str, value: JsonValue) -> JsonValue:
    """Return the value of a schema's keyword as standard JSON Schema. If the value is an object that maps names to
    schemas, its keys are not keywords."""
    if key in _DATA_KEYS:
        return value
    if key in _NAMED_SCHEMAS and isinstance(value, dict):
        return {name: _normalize(each) for name, each in value.items()}
    return _normalize(value)


# ---- messages


def _describe_errors(error: ValidationError) -> Iterator[str]:
    """Yield messages for the policy about one validation error of a tool call's arguments. Each message names the wrong
    argument."""
    path = tuple(error.absolute_path)
    schema = cast(Mapping[str, JsonValue], error.schema)
    properties = cast(Mapping[str, JsonValue], schema.get("properties", {}))
    if error.validator == "required":
        for name in error.validator_value:
            if name not in error.instance:
                yield f"{_format_path((*path, name))}: expected {_describe_type(properties.get(name))}, found nothing"
    elif error.validator == "additionalProperties" and error.validator_value is False:
        for name in error.instance:
            if name not in properties:
                known = f"{', '.join(properties) or 'none':.200}"
                hint = nearest_name(name, properties)
                yield f"{_format_path((*path, name))}: no such argument{hint}{'' if hint else f'; expected {known}'}"
    elif error.validator in ("anyOf", "oneOf") and error.context:
        yield from _describe_alternatives(error)
    elif error.validator == "type":
        yield f"{_format_path(path)}: expected {_describe_type(schema)}, found {_quote(error.instance)}"
    elif error.validator == "enum":
        allowed = ", ".join(map(_quote, cast(Sequence[object], error.validator_value)))
        yield f"{_format_path(path)}: expected one of {allowed:.200}, found {_quote(error.instance)}"
    else:
        yield f"{_format_path(path)}: {error.message:.200}"


def _describe_alternatives(error: ValidationError) -> Iterator[str]:
    """Yield messages for the policy about a value that matches none of several alternative schemas. The messages are
    those for the first schema that allows the value's type. If no schema does, the message lists the allowed types."""
    branches: dict[object, list[ValidationError]] = {}
    for each in error.context or ():
        branches.setdefault(each.schema_path[0], []).append(each)
    for found in branches.values():
        if not any(each.validator == "type" and not each.relative_path for each in found):
            for each in found:
                yield from _describe_errors(each)
            return
    expected = _describe_type(error.schema)
    yield f"{_format_path(tuple(error.absolute_path))}: expected {expected}, found {_quote(error.instance)}"


def _describe_type(schema: object) -> str:
    """Return the types that a schema allows, as text for a message, such as `integer or null`."""
    if not isinstance(schema, dict):
        return "a value"
    if "type" not in schema:
        branches = cast(Sequence[object], schema.get("anyOf", schema.get("oneOf", ())))
        return " or ".join(dict.fromkeys(map(_describe_type, branches))) or "a value"
    return " or ".join(schema["type"]) if isinstance(schema["type"], list) else str(schema["type"])


def _format_path(path: Argument) -> str:
    """Return the path of a value in Python notation, such as `items[2].name`. The empty path, for all arguments,
    becomes 'arguments'.

    >>> _format_path(("items", 2, "name"))
    'items[2].name'
    """
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return f"{''.join(parts).removeprefix('.') or 'arguments':.200}"


def _quote(value: object) -> str:
    """Return a wrong value as JSON for an error message, shortened to 60 characters."""
    return f"{json.dumps(value, ensure_ascii=False):.60}"
