"""Preferences between two completions of a prompt, generated from problems or read from a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Protocol, cast

from rheostat.infra.errors import BadInput
from rheostat.infra.variants import implementation_of
from rheostat.models.config.data import DataConfig
from rheostat.models.config.preferences import AnswerPreferences, FilePreferences, PreferenceFile, Preferences
from rheostat.models.data.columns import PairColumns, find_pair_columns
from rheostat.models.data.dropping import TiedRow
from rheostat.models.data.messages import omit_nulls, read_messages, read_text
from rheostat.models.data.pairs import CHOSEN_SCORE, MARGIN, REJECTED_SCORE, convert_pair
from rheostat.models.data.problems import (
    NO_ARGUMENTS,
    Message,
    Problem,
    Prompt,
    TemplateArguments,
    load_problems,
)
from rheostat.models.data.prompted_examples import PromptedExample, Row, read_examples, read_split, read_text_prompt
from rheostat.models.data.reading import ReadingReport
from rheostat.models.data.right_and_wrong import wrong_completion
from rheostat.models.data.shapes import SCORES


@dataclass(frozen=True, slots=True)
class Preference(PromptedExample):
    """Better and worse completion of the same prompt (a pair), or a single completion with a label."""

    source: str
    """Origin of the pair for messages, such as `pairs.jsonl:17`."""
    prompt: Prompt
    chosen: str
    """Text of the better completion. Empty if the completion has only other fields, such as tool calls."""
    rejected: str
    template: TemplateArguments = NO_ARGUMENTS
    """Arguments of the chat template, if the prompt is a chat."""
    chosen_message: Message | None = None
    """Better completion as a message, if it has other fields than its text, such as tool calls. None otherwise."""
    rejected_message: Message | None = None
    label: bool | None = None
    """Whether a single completion is desirable. A desirable completion is stored as the better one, an undesirable one
    as the worse one, and the other one is empty. None for a pair."""

    @property
    def completions(self) -> tuple[tuple[str, Message | None], ...]:
        """Better and worse completion, or only one of them if there is a label. Each is its text and, if it has other
        fields than the text, its message."""
        both = (self.chosen, self.chosen_message), (self.rejected, self.rejected_message)
        return both if self.label is None else both[:1] if self.label else both[1:]


class PreferenceSource(Protocol):
    """Function that generates or reads preference pairs, called by `load_preferences`. The same arguments give the same
    pairs in the same order."""

    def __call__(self, preferences: Any, data: DataConfig, split: str, seed: int, /) -> list[Preference]:  # noqa: ANN401 -- differs
        """Return the preference pairs of the split `train` or `heldout`."""
        ...


def load_preferences(preferences: Preferences, data: DataConfig, *, split: str, seed: int) -> list[Preference]:
    """Return the preference pairs of a split ("train" or "heldout") in a fixed order. No prompt is in both splits."""
    return cast(PreferenceSource, implementation_of(preferences))(preferences, data, split, seed)


def answer_preferences(preferences: AnswerPreferences, data: DataConfig, split: str, seed: int) -> list[Preference]:
    """Generate preference pairs: the worked solution of a problem, or else its reference answer, is better, and a wrong
    completion is worse.

    The problems are reshuffled after all have been used. Raises BadInput if such pairs cannot be built from the data
    source.
    """
    for reason in preferences.find_conflicts(data):
        raise BadInput(reason)
    problems, rng = load_problems(data, split, seed), Random(f"{seed}/preferences/{split}")
    count = preferences.train_pairs if split == "train" else preferences.heldout_pairs
    order: list[Problem] = []
    while len(order) < count:
        order += rng.sample(problems, k=min(len(problems), count - len(order)))
    return [
        Preference(
            source=f"pair {number} ({problem.source})",
            prompt=problem.prompt,
            chosen=problem.worked or problem.answer,
            rejected=wrong_completion(problem, problems, rng),
            template=problem.template,
        )
        for number, problem in enumerate(order)
    ]


def file_preferences(config: FilePreferences, data: DataConfig, split: str, seed: int) -> list[Preference]:
    """Read the preference pairs of a split ("train" or "heldout") in file order.

    Raises BadInput if the split is empty, a row is invalid or a held-out prompt is also a training prompt.
    """
    return read_split(config, split, lambda path: _read_and_count(path, config)[0])


def report_file(config: FilePreferences, split: str) -> ReadingReport:
    """Report the shape that was recognized in the file of a split, and the number of rows that are left out because of
    `drop`."""
    path = config.path if split == "train" else config.heldout_path
    if path is None:
        return ReadingReport()
    note = find_pair_columns(path, config).note
    dropped = _read_and_count(path, config)[1] if config.drop else {}
    return ReadingReport((note,) if note else (), dropped)


def _read_and_count(path: Path, config: FilePreferences) -> tuple[list[Preference], Mapping[str, int]]:
    """Read all pairs of a file, and count the rows that are left out because of `drop`, by reason."""
    found = find_pair_columns(path, config)
    optional = [CHOSEN_SCORE, REJECTED_SCORE, MARGIN, SCORES]
    build = partial(_build_pair, found=found)
    return read_examples(path, found.file, _list_columns(found), build, drop=config.drop, optional=optional)


def _list_columns(columns: PairColumns) -> list[str]:
    """Return the names of the columns that every row of a preference file must have."""
    config = columns.file
    prompts = [config.prompt_column] if columns.has_prompts else []
    pairs = [columns.completions_column] if columns.form == "ranked" else [config.chosen_column, config.rejected_column]
    return [*prompts, *pairs]


def _build_pair(place: str, original: Row, is_table: bool, *, found: PairColumns) -> Preference:
    """Return the preference pair in a row. `place` names the row in messages. Raises BadInput if a value is invalid."""
    row, config = convert_pair(place, original, found), found.file
    prompt, template = read_text_prompt(place, row, config, is_table=is_table, reader="preferences")
    (chosen, chosen_message), (rejected, rejected_message) = (
        read_completion(place, row, column, prompt=prompt, config=config)
        for column in (config.chosen_column, config.rejected_column)
    )
    if (chosen, chosen_message) == (rejected, rejected_message):
        columns = f"{config.chosen_column} and {config.rejected_column}"
        raise TiedRow(
            f"{place}: {columns}: a preference pair needs two different completions, but both are {chosen!r:.60}. "
            "Remove the row."
        )
    return Preference(place, prompt, chosen, rejected, template, chosen_message, rejected_message)


def read_completion(
    place: str, row: Mapping[str, object], column: str, *, prompt: Prompt, config: PreferenceFile
) -> tuple[str, Message | None]:
    """Return the text of the completion in a column of a row, and the completion as a message if it has other fields
    than the text. The message is None otherwise. The column contains plain text or a chat with one message of the
    assistant.

    Raises BadInput if the value has another form, or if a plain-text prompt has a message with other fields.
    """
    text, message = _read_message(place, row, column, config)
    if message is not None and isinstance(prompt, str):
        raise BadInput(
            f"{place}: {column}[0]: a message with other fields than `content` needs a chat as the prompt, found "
            "plain text. Write the prompt as a list of messages, or write the completion as text."
        )
    return text, message


def _read_message(
    place: str, row: Mapping[str, object], column: str, config: PreferenceFile
) -> tuple[str, Message | None]:
    """Return the text of a completion, and the completion as a message if it has other fields than the text. The
    message is None otherwise. Raises BadInput if the value is neither plain text nor a chat with one message of the
    assistant."""
    value = row[column]
    if not isinstance(value, list):
        return read_text(place, value, column), None
    turns = read_messages(place, [omit_nulls(turn) for turn in value], column, fields=config.message_fields)
    if [turn.role for turn in turns] != ["assistant"]:
        roles = ", ".join(turn.role for turn in turns) or "no message"
        raise BadInput(
            f"{place}: {column}: the completion must be exactly one message with role assistant, found {roles}. Move "
            "the earlier messages to the prompt."
        )
    turn = turns[0]
    if not all(isinstance(part, str) for part in turn.parts):
        raise BadInput(
            f"{place}: {column}[0].content: preferences support text only, but the content has an image. Remove "
            "the image, or the row."
        )
    if turn.fields or turn.name:
        return turn.text, turn
    return read_text(place, turn.text, column), None
