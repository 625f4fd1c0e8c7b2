"""Columns of the files of a job: the configured ones, or the ones in which a known shape was recognized."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from rheostat.infra.errors import BadInput
from rheostat.infra.store.inputs import format_path
from rheostat.models.config.data import ProblemFile
from rheostat.models.config.preferences import FilePreferences
from rheostat.models.config.training import ChatTraining
from rheostat.models.data.messages import omit_nulls, read_messages
from rheostat.models.data.rows import peek_rows
from rheostat.models.data.shapes import Shape, first_value, name_chat, recognize
from rheostat.models.data.sharegpt import convert_turns
from rheostat.models.data.tables import describe_missing_column


@dataclass(frozen=True, slots=True)
class ProblemColumns:
    """Settings with which a file of problems is read. Columns that were recognized replace the default ones."""

    file: ProblemFile
    note: str = ""
    """Sentence for `rheostat plan` about the recognized shape of the file. Empty if the configured columns are read."""
    answers_in_chats: bool = False
    """Whether the reference answer of a row is the last message of its chat, which is by the assistant."""


def find_problem_columns(path: Path, data: ProblemFile) -> ProblemColumns:
    """Return the settings with which the problems of a file are read.

    Configured columns are always read. If the file lacks the default prompt column, a column with whole chats is
    searched. If the file also lacks the default answer column, the last message of the assistant is the answer. Raises
    BadInput, with the file's columns and the two keys to set, if the default prompt column is missing and there are no
    chats.
    """
    columns, rows = peek_rows(path)
    if not columns:
        return ProblemColumns(data)
    is_recognized = False
    if data.prompt_column not in columns and _is_default(data, "prompt_column"):
        shape = recognize(columns, rows)
        if shape.kind != "chats":
            raise _refuse_problems(path, columns, shape)
        data, is_recognized = data.model_copy(update={"prompt_column": shape.keys["prompt_column"]}), True
    chat = name_chat(first_value(rows, data.prompt_column))
    takes_answers = (
        chat is not None
        and not data.answer_columns
        and _is_default(data, "answer_column")
        and data.answer_column not in columns
    )
    parts = [f"recognized as {chat} in column {data.prompt_column}"]
    if takes_answers:
        parts.append("the last message of each chat is the reference answer, because the file has no column 'answer'")
    if reads_system := chat is not None and data.system_column in columns:
        parts.append(f"the column {data.system_column!r} contains system messages")
    is_noted = is_recognized or takes_answers or reads_system or (chat is not None and chat != "OpenAI chats")
    return ProblemColumns(data, f"{format_path(path)}: {'; '.join(parts)}." if is_noted else "", takes_answers)


def split_answer(place: str, row: Mapping[str, object], data: ProblemFile) -> Mapping[str, object]:
    """Move the last message of a row's chat, which must be by the assistant, to the column of reference answers.
    `place` names the row in messages.

    Raises BadInput if the chat does not end with a message of the assistant.
    """
    column = data.prompt_column
    turns = omit_nulls(row[column])
    messages = convert_turns(place, turns, column) if isinstance(turns, list) else []
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        raise BadInput(
            f"{place}: there is no column {data.answer_column!r}, and the last message of the chat in {column} is not "
            'by the assistant, so there is no reference answer. Set answer_column, or answer_column = "" if no reward '
            "needs answers."
        )
    [answer] = read_messages(place, [last], column, fields=data.message_fields)
    return {**row, column: messages[:-1], data.answer_column or "": answer.text}


def _refuse_problems(path: Path, columns: Sequence[str], shape: Shape) -> BadInput:
    """Return the error for a file that lacks the prompt column and has no column with chats."""
    name = format_path(path)
    if shape.kind in ("pairs", "ranked"):
        return BadInput(
            f"{name}: there is no column 'prompt'. The file contains {shape.label}. Set the path of such a file in "
            "[preferences], or set prompt_column and answer_column to read the file as problems."
        )
    keys = shape.keys if shape.kind == "prompts" else {}
    example = [
        f"{key} = {keys.get(key) or next(iter(get_close_matches(name, columns, n=1)), '…')!r}"
        for key, name in (("prompt_column", "prompt"), ("answer_column", "answer"))
    ]
    return BadInput(
        f"{describe_missing_column(name, 'prompt', columns)} The shape of the file was not recognized. Set the columns "
        f"of prompts and answers, such as {' and '.join(example)}."
    )


# ---- preferences
PairForm = Literal["pairs", "ranked"]


@dataclass(frozen=True, slots=True)
class PairColumns:
    """Settings with which a file of preference pairs is read. Columns that were recognized replace the default ones."""

    file: FilePreferences
    form: PairForm = "pairs"
    """Form of a row: "pairs" if it has two completions, "ranked" if it has a list of completions with scores."""
    has_prompts: bool = True
    """Whether the file has a prompt column. If not, both completions of a row begin with the prompt."""
    completions_column: str = ""
    """Column with the list of completions if `form` is "ranked", else empty."""
    note: str = ""
    """Sentence for `rheostat plan` about the recognized shape of the file. Empty if the configured columns are read."""


def find_pair_columns(path: Path, config: FilePreferences) -> PairColumns:
    """Return the settings with which the preference pairs of a file are read.

    Configured columns are always read. Raises BadInput if the file contains single completions with labels instead of
    pairs. Raises BadInput, with the file's columns and the two keys to set, if it has neither the two completions nor
    lists of completions.
    """
    columns, rows = peek_rows(path)
    if not columns:
        return PairColumns(config)
    name, shape = format_path(path), recognize(columns, rows)
    has_prompts = config.prompt_column in columns or not _is_default(config, "prompt_column")
    missing = [key for key in ("chosen_column", "rejected_column") if getattr(config, key) not in columns]
    if not missing or not all(_is_default(config, key) for key in ("chosen_column", "rejected_column")):
        is_noted = shape.kind == "pairs" and (not has_prompts or shape.has_prompt_in_completions)
        note = f"{name}: recognized as {shape.label}." if is_noted else ""
        return PairColumns(config, has_prompts=has_prompts, note=note)
    if shape.kind == "ranked":
        update = {} if config.prompt_column in columns else {"prompt_column": shape.keys["prompt_column"]}
        note = f"{name}: recognized as {shape.label}; each pair is the best and the worst completion of a row."
        config = config.model_copy(update=update)
        return PairColumns(config, "ranked", completions_column=shape.columns[0], note=note)
    if shape.kind == "labels":
        raise BadInput(
            f"{name}: the file contains {shape.label}, but preferences.kind = 'file' reads pairs. Set preferences.kind "
            "= 'labels' and dpo.loss = {kind = 'kto'}, or use a file with the columns chosen and rejected."
        )
    missing_column = getattr(config, missing[0])
    raise BadInput(
        f"{describe_missing_column(name, missing_column, columns)} The shape of the file was not recognized. Set "
        "chosen_column and rejected_column to the columns of the better and the worse completion."
    )


def _is_default(settings: ProblemFile | FilePreferences | ChatTraining, key: str) -> bool:
    return bool(getattr(settings, key) == type(settings).model_fields[key].default)


# ---- chats for supervised training
@dataclass(frozen=True, slots=True)
class TrainingColumns:
    """Settings with which a file of chats is read for supervised training. Columns that were recognized replace the
    default ones."""

    file: ChatTraining
    has_completions: bool = False
    """Whether a row has a prompt and a completion instead of a whole chat."""
    has_chats: bool = True
    """Whether the first rows of the file are chats instead of plain text."""
    note: str = ""
    """Sentence for `rheostat plan` about the recognized shape of the file. Empty if the configured columns are read."""
    has_texts: bool = False
    """Whether a row has one plain text instead of a whole chat."""


def find_chat_columns(path: Path, config: ChatTraining) -> TrainingColumns:
    """Return the settings with which the chats of a file are read.

    Configured columns are always read. If the file lacks the default column, a prompt and a completion are searched,
    then a column with whole chats, then a column with plain text. Raises BadInput, with the file's columns and the keys
    to set, if there is none of them.
    """
    columns, rows = peek_rows(path)
    names, name = (config.prompt_column, config.completion_column), format_path(path)
    has_chats, note = _describe_completions(name, rows, names)
    if not all(_is_default(config, key) for key in ("prompt_column", "completion_column")):
        return TrainingColumns(config, True, has_chats, note)
    text = (
        f"{name}: recognized as plain text in column {config.text_column}. Each text is trained as a whole, without "
        "the chat template, and other columns are not read."
    )
    if not _is_default(config, "text_column"):
        return TrainingColumns(config, has_texts=True, has_chats=False, note=text)
    if not columns or config.messages_column in columns or not _is_default(config, "messages_column"):
        return TrainingColumns(config)
    shape = recognize(columns, rows)
    if shape.kind == "labels":
        raise BadInput(
            f"{name}: the file contains {shape.label}, and supervised training would also train on the bad completions."
            " Remove the rows with bad completions and the column label."
        )
    if {*names} <= {*columns}:
        return TrainingColumns(config, True, has_chats, note)
    if shape.kind == "chats":
        config = config.model_copy(update={"messages_column": shape.columns[0]})
        return TrainingColumns(config, note=f"{name}: recognized as {shape.label}.")
    if config.text_column in columns and shape.keys.get("prompt_column") == config.text_column:
        return TrainingColumns(config, has_texts=True, has_chats=False, note=text)
    raise BadInput(
        f"{describe_missing_column(name, config.messages_column, columns)} The shape of the file was not recognized. "
        "Set warmup.chats.messages_column to the column with whole chats, or set prompt_column and completion_column "
        "to the columns of prompts and completions, or text_column to a column of plain text that is trained as a "
        "whole."
    )


def _describe_completions(name: str, rows: Sequence[Mapping[str, object]], names: tuple[str, str]) -> tuple[bool, str]:
    """Return whether the prompts in the first rows are chats, and the note that the file `name` has prompts and
    completions in the columns `names`."""
    chat = name_chat(first_value(rows, names[0]))
    form = "plain text, which is trained without the chat template" if chat is None else chat
    return chat is not None, f"{name}: recognized as prompts and completions in columns {' and '.join(names)} ({form})."
