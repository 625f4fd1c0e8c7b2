"""Messages about invalid configurations, in one line: the key, the expected value and the actual value."""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Final, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

Models = list[type[BaseModel]]

SHOWN = 4  # problems that are listed; a misplaced table can cause dozens
DEEP = 3  # dots from which a key is only suggested if few keys have its name
NAMES = 20  # names that are listed if none is similar


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """Describe all problems of an invalid configuration in one line, from pydantic's error. `root` is the class of the
    configuration. Unknown keys come first, because they often cause the other problems."""
    errors = error.errors()
    # A list with wrong items is also reported as too short. Only the innermost problem helps.
    inner = {problem["loc"][:depth] for problem in errors for depth in range(1, len(problem["loc"]))}
    problems = [problem for problem in errors if problem["loc"] not in inner]
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    lines = [_describe_problem(problem, root) for problem in problems[:SHOWN]]
    more = len(problems) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more else "")


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the text `; did you mean 'x'?` with the known name that is most similar to `name`, or "" if no known name
    is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _describe_problem(problem: ErrorDetails, root: type[BaseModel]) -> str:
    key, models, variants = _locate(problem["loc"], root)
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key {key!r}{_hint(key, models, variants, root)}"
    if kind == "union_tag_not_found":
        return f"{key}.kind is missing; expected {_choice(_tags(_variants_at(problem['loc'], root)))}"
    if kind == "union_tag_invalid":
        tags = _tags(_variants_at(problem["loc"], root))
        return f"{key}.kind must be {_choice(tags)}, got {context['tag']!r}{nearest(str(context['tag']), tags)}"
    if kind == "missing":
        return f"{key} is missing{_show_example(key, models)}"
    if kind == "value_error":  # our own validators already name the values
        return f"{key}: {context['error']}" if key else str(context["error"])
    if kind == "string_pattern_mismatch":
        return f"{key} {_describe_pattern(context['pattern'], value)}, got {value!r:.80}"
    hint = nearest(str(value), re.findall(r"'([^']*)'", problem["msg"])) if kind == "literal_error" else ""
    message = _translate(problem["msg"])
    colon = "" if message.startswith("must ") else ":"
    return f"{key or 'the document'}{colon} {message}, got {value!r:.80}{hint}"


def _show_example(key: str, models: Models) -> str:
    """Return a sentence with an example value of a required key, or "" if its field names none."""
    name = key.rpartition(".")[2]
    fields = [model.model_fields[name] for model in models if name in model.model_fields]
    tables = [table for field in fields for table in field.examples or ()]
    if not tables:
        return ""
    return f". Write for example {name} = {{ {', '.join(f'{k} = {json.dumps(v)}' for k, v in tables[0].items())} }}"


_NAME_PATTERN: Final = re.compile(r"\^\[(?P<first>[^]]+)\]\[(?P<others>[^]]+)\]\{0,(?P<more>\d+)\}\$")
_TARGET_PATTERN: Final = r"^[\w.]+:[\w.]+$"


def _describe_pattern(pattern: str, value: str) -> str:
    """Describe which texts a regular expression accepts. If it is a pattern of names, suggest a valid name that is
    similar to `value`."""
    if pattern == _TARGET_PATTERN:
        return "must have the form module:function"
    if (name := _NAME_PATTERN.fullmatch(pattern)) is None:
        return f"must match the pattern {pattern}"
    marks = [repr(mark) for mark in name["others"].replace("a-z", "").replace("0-9", "")]
    allowed = ", ".join(["lowercase letters", "digits", *marks])
    first = "a letter or digit" if "0-9" in name["first"] else "a letter"
    filler = "-" if "-" in name["others"].replace("a-z", "").replace("0-9", "") else "_"
    near = re.sub(rf"[^{name['others']}]+", filler, value.lower()).strip("-_.")[: int(name["more"]) + 1]
    hint = f", such as {near!r}" if re.fullmatch(pattern, near) else ""
    return f"must have at most {int(name['more']) + 1} characters ({allowed}) and start with {first}{hint}"


def _translate(message: str) -> str:
    """Replace terms of Python in a message of pydantic by terms of TOML, such as "dictionary" by "table"."""
    for words, plain in [
        (r"^Input should be a valid dictionary.*", "must be a table"),
        (r"^Input should be a valid tuple", "must be a list"),
        (r"^(Input|String|Tuple|List|Set|Dictionary|URL|Data|Value) should ", "must "),
        (r"\ba valid (?=[aeiou])", "an "),
        (r"\ba valid ", "a "),
        (r", unable to parse .*", ""),
        (r" after validation, not 0", ""),
    ]:
        message = re.sub(words, plain, message)
    return message[:1].lower() + message[1:]


def _locate(location: Sequence[int | str], root: type[BaseModel]) -> tuple[str, Models, Models]:
    """Find the settings to which an error refers. Return the dotted key without pydantic's tags of unions, the classes
    that can contain the last part of the key, and all variants of the innermost union."""
    models: Models = [root]
    variants: Models = [root]
    key: list[str] = []
    for position, part in enumerate(location):
        tagged = [model for model in models if part in _tags([model])] if len(models) > 1 else []
        if tagged:
            models = tagged
            continue
        key.append(str(part))
        if position < len(location) - 1 and isinstance(part, str):
            models = variants = [inner for model in models for inner in _field_models(model, part)]
    return ".".join(key), models, variants


def _variants_at(location: Sequence[int | str], root: type[BaseModel]) -> Models:
    """Return the settings classes that are possible for the table at this location in the configuration."""
    _, models, _ = _locate([*location, ""], root)
    return models


def _hint(key: str, models: Models, variants: Models, root: type[BaseModel]) -> str:
    name = key.rpartition(".")[2]
    others = [tag for model in variants if name in model.model_fields for tag in _tags([model])]
    if others:
        return f", which only kind = {_choice(others)} has"
    siblings = [field for model in models for field in model.model_fields]
    near = nearest(name, siblings)
    elsewhere = [path for path in dict.fromkeys(_paths(root)) if path.rpartition(".")[2] == name]
    if len(elsewhere) > SHOWN:  # keys deep inside are rarely meant
        elsewhere = [path for path in elsewhere if path.count(".") < DEEP]
    if elsewhere and len(elsewhere) <= SHOWN:
        return f"; did you mean {_choice(elsewhere)}?"
    return near or f", expected one of {', '.join(siblings[:NAMES])}"


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name in model.model_fields:
        yield f"{prefix}{name}"
        if get_origin(model.model_fields[name].annotation) is not tuple:  # the items of a list have no path
            for inner in _field_models(model, name):
                yield from _paths(inner, f"{prefix}{name}.")


def _field_models(model: type[BaseModel], name: str) -> Models:
    return field_models(model.model_fields[name]) if name in model.model_fields else []


def field_models(field: FieldInfo) -> Models:
    """Return all settings classes that the value of a field can have: those in its annotation with variants, or else
    those in its type."""
    return _marked_variants(field.metadata) or models_in(field.annotation)


def models_in(annotation: object) -> Models:
    """Return all settings classes in a type annotation, including those in unions, tuples and lists of variants."""
    if variants := _marked_variants(getattr(annotation, "__metadata__", ())):
        return variants
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def _marked_variants(metadata: Sequence[object]) -> Models:
    """Return the variants (alternative settings classes) that are listed in the metadata of an annotation."""
    return [model for mark in metadata for model in getattr(mark, "variants", ())]


def _tags(models: Models) -> list[str]:
    """Return the values of the key `kind` that select these settings classes."""
    return [
        str(tag)
        for model in models
        if "kind" in model.model_fields
        for tag in get_args(model.model_fields["kind"].annotation)
    ]


def _choice(names: Sequence[str]) -> str:
    return " or ".join(repr(name) for name in names)
