"""Preferences between two completions of a prompt, generated from problems or read from a file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol, cast

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.infra.variants import implementation_of
from rheostat.models.config.data import DataConfig
from rheostat.models.config.preferences import AnswerPreferences, FilePreferences, PreferenceFile, Preferences
from rheostat.models.data.columns import PairColumns, find_pair_columns
from rheostat.models.data.dropping import RowErrors, TiedRow, describe_empty_file
from rheostat.models.data.messages import omit_nulls, read_messages, read_prompt, read_text
from rheostat.models.data.pairs import CHOSEN_SCORE, MARGIN, REJECTED_SCORE, convert_pair
from rheostat.models.data.problems import (
    NO_ARGUMENTS,
    Message,
    Problem,
    Prompt,
    TemplateArguments,
    count_image_places,
    fill_prompt,
    identity,
    is_heldout,
    load_problems,
    split_key,
)
from rheostat.models.data.reading import ReadingReport
from rheostat.models.data.right_and_wrong import wrong_completion
from rheostat.models.data.rows import find_data_files, read_rows
from rheostat.models.data.shapes import SCORES


@dataclass(frozen=True, slots=True)
class Preference:
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

    def identity(self, version: int) -> str:
        """Return the text that identifies the prompt when pairs are compared. `version` is the version of the rules for
        reading files."""
        return identity(self.prompt, tools=self.template.tools, version=version)

    def split_key(self, version: int) -> str:
        """Return the text whose hash decides whether the pair is held out. `version` is the version of the rules for
        reading files."""
        return split_key(self.prompt, tools=self.template.tools, version=version)


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


def read_split(config: PreferenceFile, split: str, read: Callable[[Path], Sequence[Preference]]) -> list[Preference]:
    """Return the preferences of a split ("train" or "heldout") in file order. `read` returns all preferences of a file,
    before the template is applied.

    Raises BadInput if the split is empty or a held-out prompt is also a training prompt.
    """
    if "{prompt}" not in config.template:
        raise BadInput(
            f"preferences.template is {config.template!r}, which does not contain {{prompt}}, so all prompts would be "
            "the same. Add {prompt} to the template."
        )
    if config.heldout_path is not None:
        pairs = [*read(config.path if split == "train" else config.heldout_path)]
        if split == "heldout":
            _require_new_prompts(pairs, read(config.path), config)
    else:
        in_heldout = split == "heldout"
        pairs = [
            pair
            for pair in read(config.path)
            if is_heldout(pair.split_key(config.version), config.heldout_fraction) == in_heldout
        ]
    if not pairs:
        raise BadInput(
            f"{config.path}: preferences.heldout_fraction is {config.heldout_fraction}, which leaves no {split} "
            f"{config.noun}. Add rows with other prompts, change the fraction, or set preferences.heldout_path."
        )
    return [replace(pair, prompt=fill_prompt(pair.prompt, config.template)) for pair in pairs]


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
    pairs, input_errors = list[Preference](), RowErrors(config.drop)
    is_table, config = find_data_files(path).is_table, found.file
    optional = [*config.optional_chat_columns, CHOSEN_SCORE, REJECTED_SCORE, MARGIN, SCORES]
    rows = read_rows(path, _list_columns(found), input_errors, optional=optional, version=config.version)
    for place, row in rows:
        with input_errors.collect(place):
            pairs.append(_build_pair(place, convert_pair(place, row, found), config, is_table=is_table))
    input_errors.check()
    if not pairs:
        dropped = sum(input_errors.dropped.values())
        raise describe_empty_file(path, "preference pair", dropped=dropped, key="preferences.drop")
    return pairs, input_errors.dropped


def _list_columns(columns: PairColumns) -> list[str]:
    """Return the names of the columns that every row of a preference file must have."""
    config = columns.file
    prompts = [config.prompt_column] if columns.has_prompts else []
    pairs = [columns.completions_column] if columns.form == "ranked" else [config.chosen_column, config.rejected_column]
    return [*prompts, *pairs, *config.required_chat_columns]


def _build_pair(place: str, row: Mapping[str, object], config: FilePreferences, *, is_table: bool) -> Preference:
    """Return the preference pair in a row. `place` names the row in messages. Raises BadInput if a value is invalid."""
    prompt, template = read_text_prompt(place, row, config, is_table=is_table)
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


def read_text_prompt(
    place: str, row: Mapping[str, object], config: PreferenceFile, *, is_table: bool
) -> tuple[Prompt, TemplateArguments]:
    """Return the prompt in a row of preferences and the arguments of its chat template. `place` names the row in
    messages. Raises BadInput if the prompt is invalid or contains an image."""
    prompt, template = read_prompt(place, row, config, is_table=is_table)
    if count_image_places(prompt):
        raise BadInput(
            f"{place}: {config.prompt_column}: preferences support text only, but the prompt contains an image. "
            "Remove the images, or the row."
        )
    return prompt, template


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


def _require_new_prompts(heldout: Sequence[Preference], train: Sequence[Preference], config: PreferenceFile) -> None:
    """Raise BadInput if a held-out prompt is also the prompt of a training preference."""
    training_prompts, input_errors = {each.identity(config.version) for each in train}, InputErrors()
    for pair in heldout:
        with input_errors.collect(pair.source):
            if pair.identity(config.version) in training_prompts:
                raise BadInput(
                    f"{pair.source}: this held-out prompt is also the prompt of a training {config.noun}, so the "
                    "held-out accuracy would not measure unseen prompts. Remove one of the two rows."
                )
    input_errors.check()
