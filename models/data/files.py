"""Problems read from the rows of files, with plain-text or chat prompts.

Each error message names the place in the file.
"""

from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from infra.errors import BadInput, InputErrors
from models.config.data import ProblemFile
from models.data.canonical import write_number
from models.data.images import read_images
from models.data.json_rows import LongNumber
from models.data.messages import omit_nulls, read_prompt, read_text
from models.data.problems import (
    Problem,
    Prompt,
    add_system_message,
    check_columns,
    check_places,
    encode_columns,
    fill_prompt,
    is_heldout,
)
from models.data.rows import find_data_files, read_rows


def file_problems(data: ProblemFile, split: str, seed: int) -> list[Problem]:
    """Read the problems of a split in file order, with the template applied.

    Raises BadInput if the template has no `{prompt}`, a row is invalid or the split is empty.
    """
    if "{prompt}" not in data.template:
        raise BadInput(
            f"data.template is {data.template!r}, which does not contain {{prompt}}, so all prompts would be the "
            "same. Add {prompt} to the template."
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
            f"{data.path}: data.heldout_fraction is {data.heldout_fraction}, which leaves no {split} problem. Add "
            "problems, change the fraction, or set data.heldout_path."
        )
    return [_apply_template(problem, data) for problem in problems]


def read_problems(path: Path, data: ProblemFile) -> list[Problem]:
    """Read all problems of a file, before the template and the split are applied.

    Raises one BadInput that lists all invalid rows.
    """
    named = [
        data.prompt_column,
        *data.required_answer_columns,
        data.images_column,
        *data.environment_columns,
        *data.required_chat_columns,
    ]
    columns, optional = list(dict.fromkeys(filter(None, named))), data.optional_chat_columns
    found = find_data_files(path)
    root = data.images_root or (path if found.is_folder else path.parent)
    problems, input_errors = list[Problem](), InputErrors()
    rows = read_rows(path, columns, input_errors, optional=optional, version=data.version)
    for place, row in islice(rows, data.limit):
        with input_errors.collect(place):
            prompt, template = read_prompt(place, row, data, is_table=found.is_table, is_chat=data.system is not None)
            problem = _build_problem(place, row, data, prompt, root=root)
            problems.append(replace(problem, template=template))
    input_errors.check()
    if not problems:
        raise BadInput(
            f"{path}: the file is empty, but it must contain at least one problem. Check that the file was written "
            "completely, or set the path of another file."
        )
    unused = "chat_template_kwargs" if data.chat_template_kwargs else next(iter(data.set_chat_keys), None)
    if unused is not None and data.system is None and all(isinstance(each.prompt, str) for each in problems):
        raise BadInput(
            f"{path}: data.{unused} is set, but it has no effect, because all prompts of the file are plain text. "
            "Remove it, write the prompts as chats, or set data.system, which makes every prompt a chat."
        )
    return problems


def _build_problem(place: str, row: Mapping[str, object], data: ProblemFile, prompt: Prompt, *, root: Path) -> Problem:
    """Build a problem from a row and its prompt. Raises BadInput, which names the row's `place`, if it is invalid."""
    answer = _read_answers(place, row, data)
    images = read_images(row, data.images_column, place=place, root=root) if data.images_column else ()
    check_places(prompt, len(images), source=place)
    columns = {column: cast(JsonValue, row[column]) for column in data.environment_columns}
    check_columns(columns, source=place)  # tables can contain dates and bytes
    return Problem(
        source=place,
        prompt=prompt,
        answer=answer,
        images=images,
        images_column=data.images_column or "",
        columns=columns,
        identity_version=data.version,
    )


def _read_answers(place: str, row: Mapping[str, object], data: ProblemFile) -> str:
    """Return the reference answer: the value of one column, a JSON object with the values of several columns, or an
    empty text if there are no answers.

    Raises BadInput if a value is invalid or missing.
    """
    if not data.answer_columns:
        return _read_answer(place, row[data.answer_column], data) if data.answer_column else ""
    values = {column: cast(JsonValue, omit_nulls(row[column])) for column in data.answer_columns}
    for column, value in values.items():
        if value is None or value in ("", []):
            raise BadInput(
                f"{place}: {column}: the value is {value!r}, but the reference answer needs a value in each of "
                "data.answer_columns. Fill in the value, or remove the row."
            )
    check_columns(values, source=place)
    return encode_columns(values)


def _read_answer(place: str, value: object, data: ProblemFile) -> str:
    """Return the reference answer as text. Numbers are converted to text. All other values must be non-blank text.

    Raises BadInput for other values, and in version 2 of the rules for NaN and infinity, which often mean missing
    values.
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
                f"{place}: {column}: the answer must be text or a finite number, found {value}. NaN and infinity "
                "often stand for a missing answer. Fill in the answer, or remove the row."
            )
        return write_number(value)
    return read_text(place, value, column)


def _apply_template(problem: Problem, data: ProblemFile) -> Problem:
    """Return the problem with its prompt inserted into the template, and with the configured system message added."""
    prompt = fill_prompt(problem.prompt, data.template)
    return replace(problem, prompt=prompt if data.system is None else add_system_message(prompt, data.system))
