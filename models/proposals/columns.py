"""Columns of a data file that contain the prompt and the reference answer, found by their names and contents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.infra.store.inputs import format_path
from rheostat.models.data.dropping import describe_empty_file
from rheostat.models.data.nested import find_field, has_field
from rheostat.models.data.rows import peek_rows, read_rows
from rheostat.models.data.rubrics import parse_rubric
from rheostat.models.data.shapes import ANSWER_GROUPS, CHAT_COLUMNS, PROMPT_GROUPS, recognize

Content = Literal["text", "chat", "structure", "other"]
"""Content of a column: "text" (texts or numbers), "chat" (lists of messages), "structure" (other lists and objects), or
"other" (values that cannot be used)."""

SHOWN: Final = 40
"""Maximum number of characters that a message shows of a value."""

PROMPTS: Final = (*PROMPT_GROUPS[:2], CHAT_COLUMNS, *PROMPT_GROUPS[2:])
"""Common names of prompt columns, in lower case. Names in an earlier group are preferred."""
RUBRICS: Final = ("rubric", "rubrics")
"""Common names of columns with rubrics."""
INSTRUCTION_COLUMNS: Final = ("instruction_id_list", "kwargs")
"""Names of the columns in which google/IFEval stores its instructions, which a program can check."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a data file that the proposed job reads."""

    prompt: str
    answer: str | None
    """Column with the reference answer, or None if there is none."""
    answers: tuple[str, ...]
    """Columns that form the reference answer together. Empty if the answer comes from one column or there is none."""
    rubric: str | None
    """Column with a rubric (criteria for a judge), or None if there is none."""
    unused: tuple[str, ...]
    """Other columns at the top level of the file, which the proposed job does not read."""
    is_chat: bool
    """Whether prompts are chats, that is, lists of messages."""


def find_columns(path: Path, *, prompt: str | None = None, answer: str | None = None) -> Columns:
    """Choose the columns with prompts and reference answers. `prompt` and `answer` are the columns that the user named,
    if any.

    Raises BadInput, with the columns of the file and the option that names one, if no column or several columns fit.
    """
    where = format_path(path)
    names, rows = peek_rows(path)
    if not rows:
        _report_unreadable(path)
    if prompt is None:
        _refuse_other_shapes(where, names, rows)
    contents = {name: _classify([read_value(row, name) for row in rows]) for name in names}
    chosen = _require_column(where, prompt, contents, "--prompt-column") if prompt else None
    chosen = chosen or _choose(where, PROMPTS, contents, rows, kinds=("text", "chat"), what="prompt")
    if chosen is None:
        raise BadInput(
            f"{where}: no column has the name of a prompt (such as prompt, question or messages). Name the column with "
            f"--prompt-column. The columns are: {_list_columns(rows, contents)}."
        )
    others = {name: kind for name, kind in contents.items() if name != chosen and not name.startswith(f"{chosen}.")}
    reference = _require_column(where, answer, contents, "--answer-column") if answer else None
    if reference is None and {*INSTRUCTION_COLUMNS} <= {*contents}:
        unused = tuple(name for name in contents if "." not in name and name not in (chosen, *INSTRUCTION_COLUMNS))
        return Columns(chosen, None, INSTRUCTION_COLUMNS, None, unused, is_chat=contents[chosen] == "chat")
    rubric = next((name for name in RUBRICS if name in others and all(_is_rubric(row, name) for row in rows)), None)
    reference = reference or _choose(where, ANSWER_GROUPS, others, rows, kinds=("text", "structure"), what="answer")
    used = {name.partition(".")[0] for name in (chosen, reference, rubric) if name}
    unused = tuple(name for name in contents if "." not in name and name not in used)
    return Columns(chosen, reference, (), rubric, unused, is_chat=contents[chosen] == "chat")


def _report_unreadable(path: Path) -> None:
    """Raise BadInput with the reason why the rows of a file cannot be read."""
    input_errors = InputErrors()
    for _ in read_rows(path, [], input_errors, version=2):
        break
    input_errors.check()
    raise describe_empty_file(path, "row")


def _refuse_other_shapes(where: str, names: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Raise BadInput if the rows are not prompts but preferences, labeled completions or whole chats."""
    shape = recognize(names, rows)
    if shape.kind in ("pairs", "ranked", "labels"):
        raise BadInput(
            f"{where}: {shape.label} are not problems to train on. `rheostat init` writes jobs for files of prompts. "
            "Name a file of prompts, or the column with the prompts with --prompt-column."
        )
    if shape.kind == "chats" and any(_ends_with_answer(read_value(row, shape.columns[0])) for row in rows):
        raise BadInput(
            f"{where}: the {shape.label} end with an answer of the assistant, but prompts must end with a message of "
            "the user. Remove the answers, or name another column with --prompt-column."
        )


def _ends_with_answer(chat: object) -> bool:
    last = chat[-1] if isinstance(chat, list) and chat else None
    return isinstance(last, Mapping) and last.get("role", last.get("from")) in ("assistant", "gpt", "chatgpt", "model")


def _is_rubric(row: Mapping[str, object], column: str) -> bool:
    try:
        parse_rubric(read_value(row, column))
    except ValueError:
        return False
    return True


def read_value(row: Mapping[str, object], column: str) -> object:
    """Return the value of a column, which may be a nested field, or None if the row does not have it."""
    return find_field(row, column) if has_field(row, column) else None


def _classify(values: Sequence[object]) -> Content:
    """Return the kind of content of a column, given some of its values. Missing values are ignored. "other" if the
    values are of several kinds."""
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
        raise BadInput(
            f"{where}: {option} is {name!r}, but the file has no such column. The columns are: {', '.join(contents)}."
        )
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
    """Return the column whose name is in the earliest of `groups`, or None if there is none. Only columns whose content
    is in `kinds` are considered. Columns at the top level of the file are preferred to nested ones. `what` names the
    wanted column in messages.

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
    """Return the names of some columns as text, each with the start of its first value."""
    first = {
        name: next((value for row in rows if (value := read_value(row, name)) is not None), None) for name in names
    }
    return ", ".join(f"{name} ({_shorten(value)})" for name, value in first.items())


def _shorten(value: object) -> str:
    text = " ".join(str(value).split())
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…")
