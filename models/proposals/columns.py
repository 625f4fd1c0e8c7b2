"""Columns of a data file that contain the prompt and the reference answer, found by their names and contents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Literal

from infra.errors import BadInput, InputErrors
from infra.store.inputs import fetch_path, format_path
from models.data.rows import is_table, read_rows
from models.data.tables import read_column_names

Content = Literal["text", "chat", "structure", "other"]
"""Content of a column: text or numbers, lists of messages, other lists and objects, or values that cannot be used."""

SAMPLE: Final = 500
"""Number of rows from which columns are recognized."""
SHOWN: Final = 40
"""Maximum number of characters of a value in a message."""
DEPTH: Final = 2
"""Maximum number of names in the path of a nested column, such as `reward_model.ground_truth`."""

PROMPTS: Final = (
    ("prompt",),
    ("question", "problem", "instruction", "input", "query", "task"),
    ("messages", "conversations", "conversation", "chat", "dialog"),
    ("text", "problem_statement", "user", "goal"),
)
"""Names of prompt columns, in lower case. Columns of an earlier group are preferred."""
ANSWERS: Final = (
    ("answer", "ground_truth", "expected_answer", "reference_answer", "final_answer", "gold"),
    ("solution", "target", "label", "reference", "output", "response", "completion", "answers"),
    ("tests", "test_cases", "test", "schema", "expected", "result", "summary", "highlights", "translation"),
)
"""Names of columns with reference answers, in lower case. Columns of an earlier group are preferred."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a data file that a job reads."""

    prompt: str
    answer: str | None
    """Column with the reference answer, or None if there is none."""
    unused: tuple[str, ...]
    """Other columns at the top level of the file, which a job does not read."""
    is_chat: bool
    """Whether prompts are lists of messages."""


def find_columns(path: Path, *, prompt: str | None = None, answer: str | None = None) -> Columns:
    """Find the columns with prompts and reference answers. `prompt` and `answer` are the names that the user gave.

    Raises BadInput, with the columns of the file and the option that names one, if no column or several columns fit.
    """
    rows = read_sample(path)
    if not rows:
        raise BadInput(f"{format_path(path)}: the file is empty. Expected at least one row.")
    contents = _describe_contents(rows)
    where = format_path(path)
    chosen = _require_column(where, prompt, contents, "--prompt-column") if prompt else None
    chosen = chosen or _choose(where, PROMPTS, contents, rows, kinds=("text", "chat"), what="prompt")
    if chosen is None:
        raise BadInput(
            f"{where}: no column has the name of a prompt (such as prompt, question or messages). Name the column with "
            f"--prompt-column. The columns are: {_list_columns(rows, contents)}."
        )
    others = {name: kind for name, kind in contents.items() if name != chosen and not name.startswith(f"{chosen}.")}
    reference = _require_column(where, answer, contents, "--answer-column") if answer else None
    reference = reference or _choose(where, ANSWERS, others, rows, kinds=("text", "structure"), what="answer")
    used = {name.partition(".")[0] for name in (chosen, reference) if name}
    unused = tuple(name for name in contents if "." not in name and name not in used)
    return Columns(chosen, reference, unused, is_chat=contents[chosen] == "chat")


def read_sample(path: Path) -> list[Mapping[str, object]]:
    """Return the first rows of a file with all of their columns. Raises BadInput if a row is invalid."""
    names = read_column_names(fetch_path(path)) if is_table(path) and fetch_path(path).is_file() else []
    input_errors = InputErrors()
    rows = [row for _, row in islice(read_rows(path, names, input_errors, version=2), SAMPLE)]
    input_errors.check()
    return rows


def read_value(row: Mapping[str, object], column: str) -> object:
    """Return the value of a column, which may be nested, or None if the row has none."""
    value: object = row.get(column)
    if value is None and "." in column:
        outer, _, inner = column.partition(".")
        nested = row.get(outer)
        value = read_value(nested, inner) if isinstance(nested, Mapping) else None
    return value


def _describe_contents(rows: Sequence[Mapping[str, object]]) -> dict[str, Content]:
    """Return the content of each column, in the order of the file. Columns of nested objects have names with dots."""
    names: dict[str, None] = {}
    for row in rows:
        for name in _iterate_names(row):
            names.setdefault(name)
    return {name: _classify([read_value(row, name) for row in rows]) for name in names}


def _iterate_names(row: Mapping[str, object], above: tuple[str, ...] = ()) -> list[str]:
    names: list[str] = []
    for name, value in row.items():
        path = (*above, name)
        names.append(".".join(path))
        if isinstance(value, Mapping) and len(path) < DEPTH:
            names += _iterate_names(value, path)
    return names


def _classify(values: Sequence[object]) -> Content:
    """Return the kind of the values that are present, which must all be of one kind."""
    present = [value for value in values if value is not None and value != ""]
    if not present:
        return "other"
    if all(isinstance(value, str) or _is_number(value) for value in present):
        return "text"
    if all(isinstance(value, list) and value and all(map(_is_message, value)) for value in present):
        return "chat"
    return "structure" if all(isinstance(value, list | Mapping) for value in present) else "other"


def _is_number(value: object) -> bool:
    return not isinstance(value, bool | list | Mapping | bytes) and hasattr(value, "__trunc__")


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and bool({"role", "from"} & set(value))


def _require_column(where: str, name: str, contents: Mapping[str, Content], option: str) -> str:
    if name not in contents:
        raise BadInput(f"{where}: {option} {name!r} is no column of the file. The columns are: {', '.join(contents)}.")
    return name


def _choose(
    where: str,
    groups: Sequence[Sequence[str]],
    contents: Mapping[str, Content],
    rows: Sequence[Mapping[str, object]],
    *,
    kinds: Sequence[Content],
    what: str,
) -> str | None:
    """Return the column with the most typical name, or None if no name fits. Columns at the top level of the file are
    preferred to nested ones.

    Raises BadInput if several columns of the same group fit and have different values.
    """
    usable = [name for name, kind in contents.items() if kind in kinds]
    for nested in (False, True):
        here = [name for name in usable if ("." in name) == nested]
        for group in groups:
            found = [name for name in here if name.rpartition(".")[2].lower() in group]
            if len(found) > 1 and any(_differ(rows, found[0], other) for other in found[1:]):
                raise BadInput(
                    f"{where}: several columns could be the {what}: {_list_columns(rows, found)}. Name one with "
                    f"--{what}-column."
                )
            if found:
                return found[0]
    return None


def _differ(rows: Sequence[Mapping[str, object]], one: str, other: str) -> bool:
    return any(read_value(row, one) != read_value(row, other) for row in rows)


def _list_columns(rows: Sequence[Mapping[str, object]], names: Sequence[str] | Mapping[str, Content]) -> str:
    """Return the names of columns, each with the start of its first value."""
    first = {
        name: next((value for row in rows if (value := read_value(row, name)) is not None), None) for name in names
    }
    return ", ".join(f"{name} ({_shorten(value)})" for name, value in first.items())


def _shorten(value: object) -> str:
    text = " ".join(str(value).split())
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…")
