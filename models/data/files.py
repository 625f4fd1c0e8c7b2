"""Problems read from the rows of files, with plain-text or chat prompts.

Each error message names the place in the file.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from rheostat.infra.errors import BadInput
from rheostat.models.config.data import FileData, ProblemFile
from rheostat.models.config.file_rules import DropReason
from rheostat.models.data.canonical import write_number
from rheostat.models.data.columns import find_problem_columns, split_answer
from rheostat.models.data.dropping import EmptyRow, RowErrors, describe_empty_file
from rheostat.models.data.image_files import find_image_root
from rheostat.models.data.images import read_images
from rheostat.models.data.json_rows import LongNumber
from rheostat.models.data.messages import check_marks, omit_nulls, read_prompt, read_text
from rheostat.models.data.problems import (
    Problem,
    Prompt,
    add_system_message,
    check_columns,
    check_places,
    encode_columns,
    fill_prompt,
    is_heldout,
)
from rheostat.models.data.reading import ReadingReport
from rheostat.models.data.rows import find_data_files, read_rows
from rheostat.models.data.rubrics import RUBRIC, encode_rubric, parse_rubric


def file_problems(data: FileData, split: str, seed: int) -> list[Problem]:
    """Read the problems of a split ("train" or "heldout") in file order, with the template applied. See
    `read_split`."""
    return read_split(data, split, data.drop)


def read_split(data: ProblemFile, split: str, drop: Collection[DropReason]) -> list[Problem]:
    """Read the problems of a split ("train" or "heldout") in file order, with the template applied.

    Rows that are unusable for a reason in `drop` are left out. Raises BadInput if the template has no `{prompt}`, a row
    is invalid or the split is empty.
    """
    if "{prompt}" not in data.template:
        raise BadInput(
            f"data.template is {data.template!r}, which does not contain {{prompt}}, so all prompts would be the "
            "same. Add {prompt} to the template."
        )
    if data.heldout_path is not None:
        problems = read_problems(data.path if split == "train" else data.heldout_path, data, drop)
    else:
        in_heldout = split == "heldout"
        problems = [
            problem
            for problem in read_problems(data.path, data, drop)
            if is_heldout(problem.split_key, data.heldout_fraction) == in_heldout
        ]
    if not problems:
        raise BadInput(
            f"{data.path}: data.heldout_fraction is {data.heldout_fraction}, which leaves no {split} problem. Add "
            "problems, change the fraction, or set data.heldout_path."
        )
    return [_apply_template(problem, data) for problem in problems]


def read_problems(path: Path, data: ProblemFile, drop: Collection[DropReason] = ()) -> list[Problem]:
    """Read all problems of a file, before the template is applied and the split is chosen.

    Rows that are unusable for a reason in `drop` are left out. Raises one BadInput that lists all invalid rows.
    """
    return _read_and_count(path, data, drop)[0]


def report_file(data: FileData, split: str) -> ReadingReport:
    """Report how the file of a split is read. If both splits come from one file, the report belongs to the training
    split."""
    return report_problems(data, split, data.drop)


def report_problems(data: ProblemFile, split: str, drop: Collection[DropReason]) -> ReadingReport:
    """Report the shape that was recognized in the file of a split, and the number of rows that are left out because of
    `drop`."""
    path = data.path if split == "train" else data.heldout_path
    if path is None:
        return ReadingReport()
    note = find_problem_columns(path, data).note
    dropped = _read_and_count(path, data, drop)[1] if "empty" in drop else {}
    return ReadingReport((note,) if note else (), dropped)


def _read_and_count(
    path: Path, data: ProblemFile, drop: Collection[DropReason]
) -> tuple[list[Problem], Mapping[str, int]]:
    """Read all problems of a file, and count the rows that are left out because of `drop`, by reason."""
    columns_found = find_problem_columns(path, data)
    data = columns_found.file
    named = [
        data.prompt_column,
        *data.required_answer_columns,
        data.images_column,
        data.rubric_column,
        *data.environment_columns,
        *data.required_chat_columns,
    ]
    columns, optional = list(dict.fromkeys(filter(None, named))), data.optional_chat_columns
    if columns_found.answers_in_chats:
        columns.remove(data.answer_column or "")
    found = find_data_files(path)
    root = find_image_root(path, data)
    problems, input_errors = list[Problem](), RowErrors(drop)
    rows = read_rows(path, columns, input_errors, optional=optional, version=data.version)
    for place, row in islice(rows, data.limit):
        with input_errors.collect(place):
            row = split_answer(place, row, data) if columns_found.answers_in_chats else row
            prompt, template = read_prompt(
                place,
                row,
                data,
                is_table=found.is_table,
                is_chat=data.system is not None,
                image_mark=data.used_image_mark,
            )
            problem = _build_problem(place, row, data, prompt, root=root)
            problems.append(replace(problem, template=template))
    input_errors.check()
    if not problems:
        dropped = sum(input_errors.dropped.values())
        raise describe_empty_file(path, "problem", dropped=dropped, key="data.drop")
    unused = "chat_template_kwargs" if data.chat_template_kwargs else next(iter(data.set_chat_keys), None)
    if unused is not None and data.system is None and all(isinstance(each.prompt, str) for each in problems):
        raise BadInput(
            f"{path}: data.{unused} is set, but it has no effect, because all prompts of the file are plain text. "
            "Remove it, write the prompts as chats, or set data.system, which makes every prompt a chat."
        )
    return problems, input_errors.dropped


def _build_problem(place: str, row: Mapping[str, object], data: ProblemFile, prompt: Prompt, *, root: Path) -> Problem:
    """Build a problem from a row of a file. `root` is the directory of its images, and `place` names the row in
    messages. Raises BadInput if a value is invalid."""
    answer = _read_answers(place, row, data)
    images = read_images(row, data.images_column, place=place, root=root) if data.images_column else ()
    check_places(prompt, len(images), source=place)
    if data.used_image_mark:
        check_marks(row[data.prompt_column], prompt, len(images), data.used_image_mark, source=place)
    columns = {column: cast(JsonValue, row[column]) for column in data.environment_columns}
    if data.rubric_column:
        columns[RUBRIC] = _read_rubric(place, row[data.rubric_column], data.rubric_column)
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


def _read_rubric(place: str, value: object, column: str) -> JsonValue:
    """Return the rubric in a column of a row as JSON. Raises BadInput if the value is not a rubric."""
    try:
        return encode_rubric(parse_rubric(omit_nulls(value)))
    except ValueError as error:
        raise BadInput(f"{place}: {column}: {error}. Fix the rubric, or remove the row.") from error


def _read_answers(place: str, row: Mapping[str, object], data: ProblemFile) -> str:
    """Return the reference answer of a row: the value of one column, a JSON object with the values of several columns,
    or an empty text if no answers are read. Raises BadInput if a value is invalid or missing."""
    if not data.answer_columns:
        return _read_answer(place, row[data.answer_column], data) if data.answer_column else ""
    values = {column: cast(JsonValue, omit_nulls(row[column])) for column in data.answer_columns}
    for column, value in values.items():
        if value is None or value in ("", []):
            raise EmptyRow(
                f"{place}: {column}: the value is {value!r}, but the reference answer needs a value in each of "
                "data.answer_columns. Fill in the value, or remove the row."
            )
    check_columns(values, source=place)
    return encode_columns(values)


def _read_answer(place: str, value: object, data: ProblemFile) -> str:
    """Return the reference answer in a column as text. Numbers are converted to text.

    Raises BadInput for values that are neither numbers nor non-blank text. In version 2 of the rules for reading files,
    also for NaN and infinity, which often stand for missing values.
    """
    column = data.answer_column or ""
    if data.version == 1:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return str(value) if is_number else read_text(place, value, column)
    if isinstance(value, LongNumber):
        value = Decimal(value.literal)
    if isinstance(value, int | float | Decimal):
        if not Decimal(value).is_finite():
            kind = EmptyRow if Decimal(value).is_nan() else BadInput
            raise kind(
                f"{place}: {column}: the answer must be text or a finite number, found {value}. NaN and infinity "
                "often stand for a missing answer. Fill in the answer, or remove the row."
            )
        return write_number(value)
    return read_text(place, value, column)


def _apply_template(problem: Problem, data: ProblemFile) -> Problem:
    """Return the problem with its prompt inserted into the configured template, and with the configured system message
    added."""
    prompt = fill_prompt(problem.prompt, data.template)
    return replace(problem, prompt=prompt if data.system is None else add_system_message(prompt, data.system))
