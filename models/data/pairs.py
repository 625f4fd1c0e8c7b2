"""Preference pairs in the shapes of published data sets, converted to a prompt and two completions.

Both completions may begin with the prompt, as chats or as texts. Texts may be transcripts of the data set HH-RLHF. A
row may also have a list of completions with scores. `place` is the place of the row in messages.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.models.config.preferences import FilePreferences
from rheostat.models.data.columns import PairColumns
from rheostat.models.data.dropping import EmptyRow, MismatchedRow, TiedRow
from rheostat.models.data.messages import omit_nulls, read_text
from rheostat.models.data.nested import find_field, has_field
from rheostat.models.data.shapes import ASSISTANT, HUMAN, SCORE_FIELDS, SCORES, TEXT_FIELDS
from rheostat.models.data.sharegpt import convert_turns

_TURN: Final = re.compile(r"\n\n(Human|Assistant):")
_ROLES: Final = {"Human": "user", "Assistant": "assistant"}
CHOSEN_SCORE: Final = "score_chosen"
REJECTED_SCORE: Final = "score_rejected"
"""Names of the columns with the scores of the better and of the worse completion."""
MARGIN: Final = "margin"
"""Name of the column with the difference between the scores of the two completions."""


def convert_pair(place: str, row: Mapping[str, object], columns: PairColumns) -> Mapping[str, object]:
    """Return a row of preference data as a prompt and two completions that do not repeat the prompt.

    Rows that already have this form are returned unchanged. Raises BadInput, which names the row as `place`, if the row
    has another shape. Raises TiedRow if both completions have the same score and `drop` contains "ties".
    """
    config = columns.file
    if columns.form == "ranked":
        return _choose_extremes(place, row, columns)
    if "ties" in config.drop:
        _require_unequal_scores(place, row)
    names = (config.chosen_column, config.rejected_column)
    values = [omit_nulls(row[name]) for name in names]
    if all(isinstance(value, list) for value in values):
        chats = [
            convert_turns(place, value, name)
            for value, name in zip(values, names, strict=True)
            if isinstance(value, list)
        ]
        if not columns.has_prompts or max(map(len, chats)) > 1:
            return {**row, **_split_chats(place, row, chats, columns)}
    elif not columns.has_prompts:
        chosen, rejected = (read_text(place, row[name], name) for name in names)
        return {**row, **_split_texts(place, chosen, rejected, config)}
    return row


def _split_chats(
    place: str, row: Mapping[str, object], chats: Sequence[list[object]], columns: PairColumns
) -> dict[str, object]:
    """Split two chats into their common prompt and the last message of each, which is the completion. Raises BadInput
    if they do not begin with the same prompt, or if the row's prompt column contains another one."""
    config, (chosen, rejected) = columns.file, chats
    if not chosen or not rejected:
        name = config.rejected_column if chosen else config.chosen_column
        raise EmptyRow(f"{place}: {name}: expected a chat, found no messages")
    given = omit_nulls(row[config.prompt_column]) if columns.has_prompts else None
    prompt = convert_turns(place, given, config.prompt_column) if isinstance(given, list) else chosen[:-1]
    names = f"{config.chosen_column} and {config.rejected_column}"
    if not prompt or any(chat[:-1] != prompt for chat in chats):
        at = len([*takewhile(lambda pair: pair[0] == pair[1], zip(chosen[:-1], rejected[:-1], strict=False))])
        raise MismatchedRow(
            f"{place}: {names}: expected two chats that begin with the same prompt and end with one message of the "
            f"assistant each, found chats of {len(chosen)} and {format_count(len(rejected), 'message')} with "
            f"{format_count(at, 'message')} in "
            f"common{' and another prompt column' if isinstance(given, list) else ''}. Correct the row, or set "
            'preferences.drop = ["mismatched"].'
        )
    if isinstance(given, str) and not any(_text_of(turn) == given.strip() for turn in prompt):
        raise MismatchedRow(
            f"{place}: {config.prompt_column}: the prompt {given!r:.40} is not a message of the chats in {names}. "
            'Correct the row, or set preferences.drop = ["mismatched"].'
        )
    return {config.prompt_column: prompt, config.chosen_column: chosen[-1:], config.rejected_column: rejected[-1:]}


def _text_of(turn: object) -> str:
    content = turn.get("content") if isinstance(turn, dict) else None
    return content.strip() if isinstance(content, str) else ""


def _split_texts(place: str, chosen: str, rejected: str, config: FilePreferences) -> dict[str, object]:
    """Split two texts into their common beginning, which is the prompt, and the rest of each, which is the completion.

    Transcripts of HH-RLHF become chats. Raises BadInput if the texts have no common beginning.
    """
    names = (config.chosen_column, config.rejected_column)
    if all(text.startswith(HUMAN) and ASSISTANT in text for text in (chosen, rejected)):
        chats = [_read_transcript(text) for text in (chosen, rejected)]
        return _split_chats(place, {}, chats, PairColumns(config, has_prompts=False))
    end = find_prompt_end(chosen, rejected)
    if chosen == rejected:
        raise TiedRow(
            f"{place}: {' and '.join(names)}: expected two different completions, but both are {chosen!r:.60}"
        )
    if not chosen[:end].strip():
        raise MismatchedRow(
            f"{place}: there is no column {config.prompt_column!r}, and {' and '.join(names)} have no common beginning "
            "that could be the prompt. Set prompt_column, or begin both texts with the prompt."
        )
    return {config.prompt_column: chosen[:end], names[0]: chosen[end:], names[1]: rejected[end:]}


def find_prompt_end(chosen: str, rejected: str) -> int:
    """Return the length of the common beginning of two texts. A space at its end is not counted, so that the
    completions begin with the space, as in TRL's `extract_prompt`."""
    end = len([*takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))])
    return end - 1 if end and chosen[end - 1] == " " else end


def _read_transcript(text: str) -> list[object]:
    """Return the turns of a transcript in the format of the data set HH-RLHF as messages."""
    _, *parts = _TURN.split(text)
    return [
        {"role": _ROLES[author], "content": said.strip()} for author, said in zip(parts[::2], parts[1::2], strict=True)
    ]


# ---- scores
def _require_unequal_scores(place: str, row: Mapping[str, object]) -> None:
    """Raise TiedRow if the row has equal scores for both completions, or a margin of 0."""
    scores = [row.get(name) for name in (CHOSEN_SCORE, REJECTED_SCORE)]
    if row.get(MARGIN) == 0 or (scores[0] is not None and scores[0] == scores[1]):
        raise TiedRow(f"{place}: both completions have the same score")


def _choose_extremes(place: str, row: Mapping[str, object], columns: PairColumns) -> Mapping[str, object]:
    """Return a row whose pair consists of the completions with the highest and the lowest score in its list.

    Raises TiedRow if several completions have the highest or the lowest score, and BadInput if a completion has no text
    or no score.
    """
    column, config = columns.completions_column, columns.file
    values = omit_nulls(row[column])
    values = values if isinstance(values, list) else []
    scores = omit_nulls(row.get(SCORES))
    if isinstance(scores, list) and len(scores) == len(values):
        ranked = [*zip(scores, values, strict=True)]
    else:
        ranked = [(_first_field(each, SCORE_FIELDS), _first_field(each, TEXT_FIELDS)) for each in values]
    if len(ranked) < 2:
        raise EmptyRow(f"{place}: {column}: expected at least two completions, found {len(ranked)}")
    numbers = [_read_score(place, score, f"{column}[{index}]") for index, (score, _) in enumerate(ranked)]
    highest, lowest = max(numbers), min(numbers)
    if numbers.count(highest) > 1 or numbers.count(lowest) > 1:
        score = highest if numbers.count(highest) > 1 else lowest
        raise TiedRow(
            f"{place}: {column}: {numbers.count(score)} completions have the score {score:g}, so the "
            f"{'best' if score == highest else 'worst'} one is ambiguous. Correct the scores, or set "
            'preferences.drop = ["ties"].'
        )
    return {
        **row,
        config.chosen_column: ranked[numbers.index(highest)][1],
        config.rejected_column: ranked[numbers.index(lowest)][1],
    }


def _first_field(completion: object, names: Sequence[str]) -> object:
    if not isinstance(completion, Mapping):
        return None
    return next((find_field(completion, name) for name in names if has_field(completion, name)), None)


def _read_score(place: str, score: object, column: str) -> float:
    """Return the score of a completion as a number. Raises BadInput for values, and texts, that are not numbers."""
    try:
        number = float(score) if isinstance(score, int | float | str) else None
    except ValueError:
        number = None
    if number is None or number != number:
        raise BadInput(f"{place}: {column}: expected a score, found {score!r:.40}. Add the score, or remove the row.")
    return number
