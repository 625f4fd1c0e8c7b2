"""Single completions with labels (desirable or undesirable), read from files."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from rheostat.infra.errors import BadInput
from rheostat.models.config.data import DataConfig
from rheostat.models.config.preferences import LabeledPreferences
from rheostat.models.data.messages import omit_nulls
from rheostat.models.data.preferences import Preference, read_completion
from rheostat.models.data.prompted_examples import Row, read_examples, read_split, read_text_prompt
from rheostat.models.data.reading import ReadingReport
from rheostat.models.data.sharegpt import convert_turns


def labeled_preferences(config: LabeledPreferences, data: DataConfig, split: str, seed: int) -> list[Preference]:
    """Read the labeled completions of a split ("train" or "heldout") in file order.

    Raises BadInput if the split is empty, a row is invalid or a held-out prompt is also a training prompt.
    """
    return read_split(config, split, lambda path: _read_and_count(path, config)[0])


def report_file(config: LabeledPreferences, split: str) -> ReadingReport:
    """Report the number of rows in the file of a split that are left out because of `drop`."""
    path = config.path if split == "train" else config.heldout_path
    return ReadingReport((), _read_and_count(path, config)[1] if path is not None and config.drop else {})


def _read_and_count(path: Path, config: LabeledPreferences) -> tuple[list[Preference], Mapping[str, int]]:
    """Read all labeled completions of a file, and count the rows that are left out because of `drop`, by reason."""
    columns = [config.prompt_column, config.completion_column, config.label_column]
    return read_examples(path, config, columns, partial(_build_preference, config=config), drop=config.drop)


def _build_preference(place: str, row: Row, is_table: bool, *, config: LabeledPreferences) -> Preference:
    """Return the labeled completion in a row. `place` names the row in messages. Raises BadInput if a value is
    invalid."""
    prompt, template = read_text_prompt(place, row, config, is_table=is_table, reader="preferences")
    column = config.completion_column
    if isinstance(turns := omit_nulls(row[column]), list):
        row = {**row, column: convert_turns(place, turns, column)}
    text, message = read_completion(place, row, column, prompt=prompt, config=config)
    label = row[config.label_column]
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        raise BadInput(
            f"{place}: {config.label_column}: the label must be true (desirable) or false (undesirable), or 1 or 0, "
            f"found {label!r:.40}. Correct the label, or remove the row."
        )
    if label:
        return Preference(place, prompt, text, "", template, chosen_message=message, label=True)
    return Preference(place, prompt, "", text, template, rejected_message=message, label=False)
