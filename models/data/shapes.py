"""Shapes of users' data files, recognized from the names of the columns and the first rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Literal

from rheostat.models.data.nested import find_field, has_field
from rheostat.models.data.sharegpt import is_sharegpt_turn

ShapeKind = Literal["prompts", "chats", "pairs", "ranked", "labels", "unknown"]

CHAT_COLUMNS: Final = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog")
"""Names of columns in which published data sets store whole chats, the most common one first."""
PROMPT_GROUPS: Final = (
    ("prompt",),
    ("question", "problem", "instruction", "query", "input", "task"),
    ("text", "problem_statement", "user", "goal"),
)
"""Names of columns in which published data sets store prompts. Names in an earlier group are preferred."""
ANSWER_GROUPS: Final = (
    ("answer", "ground_truth", "expected_answer", "reference_answer", "final_answer", "gold"),
    ("solution", "target", "label", "reference", "output", "response", "completion", "answers"),
    ("tests", "test_cases", "test", "schema", "expected", "result", "summary", "highlights", "translation"),
)
"""Names of columns in which published data sets store reference answers. Names in an earlier group are preferred."""
IMAGE_COLUMNS: Final = ("images", "image")
"""Names of columns in which published data sets store the images of a prompt."""
COMPLETION_LISTS: Final = ("completions", "responses", "answers")
"""Names of columns in which published data sets store several completions of a prompt."""
TEXT_FIELDS: Final = ("text", "content", "response", "completion", "answer")
"""Names of the field with the text of a completion, in a column with a list of completions."""
SCORE_FIELDS: Final = ("score", "overall_score", "rating")
"""Names of the field with the score of a completion, in a column with a list of completions."""
SCORES: Final = "scores"
"""Name of the column with the scores, if the list of completions contains only texts."""
HUMAN: Final = "\n\nHuman:"
ASSISTANT: Final = "\n\nAssistant:"
"""Marks with which the turns of the user and the assistant begin in the texts of the data set HH-RLHF."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Kind of content that was recognized in the rows of a data file, and the configuration keys that read such
    rows."""

    kind: ShapeKind
    """Content of a row: "prompts" (with or without answers), whole "chats", preference "pairs", "ranked" completions (a
    list of completions with scores), "labels" (single completions labeled as good or bad), or "unknown"."""
    name: str
    """Name of the shape for messages, such as "ShareGPT chats". Empty for "unknown"."""
    columns: tuple[str, ...] = ()
    """Names of the columns by which the shape was recognized."""
    has_prompt_in_completions: bool = False
    """Whether the completions of a preference pair begin with the prompt."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of `[data]` or `[preferences]` that read the rows, such as `prompt_column`, with their values. Keys with
    default values are included."""

    @property
    def label(self) -> str:
        """Name of the shape and of its columns for messages, such as "ShareGPT chats in column conversations"."""
        noun = "column" if len(self.columns) == 1 else "columns"
        return f"{self.name} in {noun} {' and '.join(self.columns)}" if self.columns else self.name


UNKNOWN: Final = Shape("unknown", "")


def recognize(columns: Sequence[str], first_rows: Sequence[Mapping[str, object]]) -> Shape:
    """Return the shape of a data file, recognized from the names of its columns and its first rows.

    Columns may include nested fields as dotted paths. Preferences are recognized before chats, because files of
    preferences often also contain chats.
    """
    for find in (_find_pairs, _find_ranked, _find_labels, _find_chats, _find_prompts):
        if (shape := find(columns, first_rows)) is not None:
            return shape
    return UNKNOWN


def _find_pairs(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> Shape | None:
    """Return the shape of files with the columns `chosen` and `rejected`, or None for other files."""
    if not {"chosen", "rejected"} <= {*columns}:
        return None
    chosen, has_prompt = first_value(rows, "chosen"), "prompt" in columns
    is_chat = isinstance(chosen, list)
    is_whole = not has_prompt or (isinstance(chosen, list) and len(chosen) > 1)
    is_transcript = isinstance(chosen, str) and chosen.startswith(HUMAN) and ASSISTANT in chosen
    name = "HH-RLHF texts" if is_transcript else "chats" if is_chat else "texts"
    label = f"pairs of {name}{' that begin with the prompt' if is_whole else ''}"
    used = {"prompt_column": "prompt"} if has_prompt else {}
    used |= {"chosen_column": "chosen", "rejected_column": "rejected"}
    return Shape("pairs", label, ("chosen", "rejected"), is_whole, used)


def _find_ranked(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> Shape | None:
    """Return the shape of files with lists of completions and their scores, or None for other files."""
    prompt = find_name([name for name in columns if "." not in name], PROMPT_GROUPS)
    for name in COMPLETION_LISTS if prompt is not None else ():
        values = first_value(rows, name)
        if not isinstance(values, list) or not values:
            continue
        has_scores = all(isinstance(each, Mapping) and _has_score(each) for each in values)
        if has_scores or SCORES in columns:
            used = (name,) if has_scores else (name, SCORES)
            return Shape("ranked", "completions with scores", used, keys={"prompt_column": str(prompt)})
    return None


def _has_score(completion: Mapping[str, object]) -> bool:
    return any(name in completion for name in TEXT_FIELDS) and any(name in completion for name in SCORE_FIELDS)


def _find_labels(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> Shape | None:
    """Return the shape of files with single completions that are labeled as good or bad, or None for other files."""
    label = first_value(rows, "label")
    if {"prompt", "completion", "label"} <= {*columns} and (isinstance(label, bool) or label in (0, 1)):
        return Shape("labels", "unpaired completions with labels", ("prompt", "completion", "label"))
    return None


def _find_chats(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> Shape | None:
    """Return the shape of files with whole chats, or None for other files."""
    ends = [name for name in columns if name.rpartition(".")[2] in CHAT_COLUMNS]
    for column in sorted(ends, key=lambda name: (name.count("."), CHAT_COLUMNS.index(name.rpartition(".")[2]))):
        if (name := name_chat(first_value(rows, column))) is not None:
            keys = {"prompt_column": column} | _find_answer(columns, ())
            return Shape("chats", name, (column,), keys=keys)
    return None


def name_chat(value: object) -> str | None:
    """Return the name of a chat's format, such as "ShareGPT chats". Return None if the value is not a list of
    messages."""
    if not isinstance(value, list) or not value or not all(isinstance(turn, Mapping) for turn in value):
        return None
    if is_sharegpt_turn(value[0]):
        return "ShareGPT chats"
    return "OpenAI chats" if value[0].get("role") is not None else None


def _find_prompts(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> Shape | None:
    """Return the shape of files with prompts, and possibly answers, or None for other files."""
    prompt = find_name([name for name in columns if "." not in name], PROMPT_GROUPS)
    if prompt is None:
        return None
    answer = _find_answer(columns, (prompt,))
    chat = name_chat(first_value(rows, prompt))
    noun = "prompts" if chat is None else f"prompts as {chat}"
    return Shape("prompts", noun, (prompt, *answer.values()), keys={"prompt_column": prompt} | answer)


def _find_answer(columns: Sequence[str], used: Sequence[str]) -> dict[str, str]:
    """Return the configuration key `answer_column` with the name of the column that seems to contain reference answers.
    Empty if there is none. `used` lists columns with other content."""
    answer = find_name([name for name in columns if name not in used], ANSWER_GROUPS)
    return {} if answer is None else {"answer_column": answer}


def find_name(columns: Sequence[str], groups: Sequence[Sequence[str]]) -> str | None:
    """Return the column with the first of the names in `groups`, or None if there is none. Columns at the top level are
    preferred to nested fields."""
    for name in chain.from_iterable(groups):
        fields = [column for column in columns if column.rpartition(".")[2] == name]
        if fields:
            return min(fields, key=lambda column: column.count("."))
    return None


def first_value(rows: Sequence[Mapping[str, object]], column: str) -> object:
    """Return the first value of a column that is not null, or None if all are null. `column` may be a dotted path."""
    values = (find_field(row, column) for row in rows if has_field(row, column))
    return next((value for value in values if value is not None), None)
