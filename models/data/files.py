"""Problems from JSON Lines, Parquet and Arrow files; every fault is one line that names the place."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from infra.errors import BadInput
from models.config import FileData
from models.data.problems import Problem, fill_prompt, identity, is_heldout
from models.data.tables import prompt_of, read_rows, text_of


def file_problems(data: FileData, split: str) -> list[Problem]:
    """Read the split's problems, in file order."""
    if "{prompt}" not in data.template:
        raise BadInput(f"data.template {data.template!r} has no {{prompt}}: every prompt would be the same")
    if data.heldout_path is not None:
        problems = read_problems(data.path if split == "train" else data.heldout_path, data)
    else:
        wanted = split == "heldout"
        problems = [
            problem
            for problem in read_problems(data.path, data)
            if is_heldout(identity(problem.prompt), data.heldout_fraction) == wanted
        ]
    if not problems:
        raise BadInput(
            f"{data.path}: data.heldout_fraction = {data.heldout_fraction} leaves no {split} problem; "
            "use more problems, another fraction, or data.heldout_path"
        )
    return [_templated(problem, data.template) for problem in problems]


def read_problems(path: Path, data: FileData) -> list[Problem]:
    """Read one file as it is, before template and split."""
    columns = [data.prompt_column, *([data.answer_column] if data.answer_column else [])]
    problems = [_problem(place, row, data) for place, row in islice(read_rows(path, columns), data.limit)]
    if not problems:
        raise BadInput(f"{path}: no problems, the file is empty")
    return problems


def _problem(place: str, row: Mapping[str, object], data: FileData) -> Problem:
    prompt = prompt_of(place, row, data.prompt_column)
    answer = _answer(place, row[data.answer_column], data.answer_column) if data.answer_column else ""
    return Problem(source=place, prompt=prompt, answer=answer)


def _answer(place: str, value: object, column: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return text_of(place, value, column)


def _templated(problem: Problem, template: str) -> Problem:
    return replace(problem, prompt=fill_prompt(problem.prompt, template))
