"""Problems from the rows of files, as texts or chats.

Each error message names its place in the file.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import islice
from math import isnan
from pathlib import Path
from typing import Final, cast

from pydantic import JsonValue

from infra.errors import BadInput, InputErrors
from models.config.data import ProblemFile
from models.data.canonical import write_number
from models.data.images import read_images
from models.data.json_rows import LongNumber, decode_text
from models.data.problems import (
    Content,
    ImagePlace,
    Message,
    Problem,
    Prompt,
    add_system_message,
    check_columns,
    check_places,
    fill_prompt,
    is_heldout,
)
from models.data.rows import find_format, read_rows

MISSING_IN_CSV: Final = ("nan", "NaN", "-nan", "-NaN")
"""Answers that stand for a missing number in CSV files, in which all values are texts."""


def read_prompt(place: str, row: Mapping[str, object], column: str) -> Prompt:
    """Return the prompt in a column, which is either plain text or a chat whose last message is not the assistant's.

    Raises BadInput if the value has another form.
    """
    prompt = row[column]
    if not isinstance(prompt, list):
        return read_text(place, prompt, column)
    messages = read_messages(place, prompt, column)
    if not messages or messages[-1].role == "assistant":
        fault = "no messages" if not messages else "a message of the assistant at its end"
        raise BadInput(f"{place}: {column}: expected a chat whose last message is not by the assistant, found {fault}")
    return messages


def read_messages(place: str, turns: Sequence[object], column: str) -> tuple[Message, ...]:
    """Read the messages of a chat. Raises BadInput if a turn lacks `role` or `content`, or has invalid content."""
    messages = []
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
            raise BadInput(
                f"{place}: {column}[{index}] is not a chat message. Expected {{role, content}}, found {turn!r:.80}"
            )
        role = read_text(place, turn["role"], f"{column}[{index}].role")
        messages.append(Message(role, _read_content(place, turn["content"], f"{column}[{index}].content")))
    return tuple(messages)


def _read_content(place: str, value: object, column: str) -> Content:
    """Read the content of a message, which is text or a list of text and image parts.

    Raises BadInput if the content is empty or has other parts.
    """
    if not isinstance(value, list):
        return read_text(place, value, column)
    parts: list[str | ImagePlace] = []
    for index, part in enumerate(value):
        match part:
            case {"type": "image"}:
                parts.append(ImagePlace())
            case {"type": "text", "text": text}:
                parts.append(read_text(place, text, f"{column}[{index}].text"))
            case _:
                raise BadInput(
                    f'{place}: {column}[{index}]: expected {{type: "image"}} or {{type: "text", text}}, '
                    f"found {part!r:.80}"
                )
    if not parts:
        raise BadInput(f"{place}: {column}: expected text or images, found an empty list")
    return tuple(parts)


def read_text(place: str, value: object, column: str) -> str:
    """Return the value if it is non-blank text, or bytes that are such a text in UTF-8.

    Raises BadInput if the value is something else, or if the text cannot be encoded as UTF-8.
    """
    if isinstance(value, bytes):
        value = decode_text(f"{place}: {column}", value)
    if not isinstance(value, str):
        raise BadInput(f"{place}: {column}: expected text, found {type(value).__name__} {value!r:.60}{_hint_at(value)}")
    if not value.strip():
        raise BadInput(f"{place}: {column}: expected text, found only blank characters or none")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can encode half a surrogate pair, which tokenizers reject
        raise BadInput(
            f"{place}: {column}: the text is not valid Unicode: {error.reason} at character {error.start}"
        ) from error
    return value


def _hint_at(value: object) -> str:
    """Return the end of a message about a value that stands for a missing value, or an empty text."""
    is_missing = value is None or (isinstance(value, float) and isnan(value))
    return ", which stands for a missing value. Fill it in, or remove the row." if is_missing else ""


def file_problems(data: ProblemFile, split: str, seed: int) -> list[Problem]:
    """Read the problems of a split in file order and apply the template.

    Raises BadInput if the template has no `{prompt}`, a row is invalid or the split is empty.
    """
    if "{prompt}" not in data.template:
        raise BadInput(
            f"data.template {data.template!r} does not contain {{prompt}}, so all prompts would be the same. "
            "Add {prompt} to the template."
        )
    if data.heldout_path is not None:
        problems = read_problems(data.path if split == "train" else data.heldout_path, data)
    else:
        in_heldout = split == "heldout"
        problems = [
            problem
            for problem in read_problems(data.path, data)
            if is_heldout(problem.split_key, data.heldout_fraction) == in_heldout
        ]
    if not problems:
        raise BadInput(
            f"{data.path}: data.heldout_fraction = {data.heldout_fraction} leaves no {split} problem. "
            "Add problems, change the fraction, or set data.heldout_path."
        )
    return [_apply_template(problem, data) for problem in problems]


def read_problems(path: Path, data: ProblemFile) -> list[Problem]:
    """Read all problems of a file, before the template and the split are applied.

    Raises one BadInput that lists all invalid rows.
    """
    named = [data.prompt_column, data.answer_column, data.images_column, *data.environment_columns]
    columns = list(dict.fromkeys(filter(None, named)))
    root = data.images_root or path.parent
    problems, input_errors = list[Problem](), InputErrors()
    missing = MISSING_IN_CSV if find_format(path) == ".csv" else ()
    for place, row in islice(read_rows(path, columns, input_errors, version=data.version), data.limit):
        with input_errors.collect(place):
            problems.append(_build_problem(place, row, data, root=root, missing=missing))
    input_errors.check()
    if not problems:
        raise BadInput(f"{path}: the file is empty. Expected at least one problem.")
    return problems


def _build_problem(
    place: str, row: Mapping[str, object], data: ProblemFile, *, root: Path, missing: Collection[str]
) -> Problem:
    """Build a problem from a row. `missing` are the answers that stand for a missing answer.

    Raises BadInput if the row is invalid.
    """
    prompt = read_prompt(place, row, data.prompt_column)
    answer = _read_answer(place, row[data.answer_column], data, missing) if data.answer_column else ""
    images = read_images(row, data.images_column, place=place, root=root) if data.images_column else ()
    check_places(prompt, len(images), source=place)
    columns = {column: cast(JsonValue, row[column]) for column in data.environment_columns}
    check_columns(columns, source=place)  # tables can contain dates and bytes
    return Problem(
        source=place, prompt=prompt, answer=answer, images=images, columns=columns, identity_version=data.version
    )


def _read_answer(place: str, value: object, data: ProblemFile, missing: Collection[str]) -> str:
    """Return the reference answer as text. Numbers are converted, other values must be non-blank text.

    Raises BadInput for other values, and in version 2 for NaN and infinity, which often stand for missing values.
    """
    column = data.answer_column or ""
    if data.version == 1:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return str(value) if is_number else read_text(place, value, column)
    if isinstance(value, LongNumber):
        value = Decimal(value.literal)
    if isinstance(value, int | float | Decimal):
        if not Decimal(value).is_finite():
            raise BadInput(
                f"{place}: {column}: expected a finite number or text, found {value}. NaN and infinity often stand for "
                "a missing answer. Fill in the answer, or remove the row."
            )
        return write_number(value)
    text = read_text(place, value, column)
    if text.strip() in missing:
        raise BadInput(
            f"{place}: {column}: expected an answer, found {text.strip()!r}, which stands for a missing number in CSV "
            "files. Fill in the answer, or remove the row."
        )
    return text


def _apply_template(problem: Problem, data: ProblemFile) -> Problem:
    """Fill the prompt into the template and add the system message, if one is configured."""
    prompt = fill_prompt(problem.prompt, data.template)
    return replace(problem, prompt=prompt if data.system is None else add_system_message(prompt, data.system))
