"""Solutions whose steps are labeled as right or wrong, read from files, for training process reward models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.infra.store.inputs import format_path
from rheostat.models.config.process_models import StepLabelFile
from rheostat.models.data.dropping import EmptyRow, RowErrors, describe_empty_file
from rheostat.models.data.messages import read_prompt, read_text
from rheostat.models.data.problems import (
    NO_ARGUMENTS,
    Prompt,
    TemplateArguments,
    count_image_places,
    fill_prompt,
    identity,
    is_heldout,
    split_key,
)
from rheostat.models.data.rows import find_data_files, read_rows


@dataclass(frozen=True, slots=True)
class LabeledSolution:
    """Solution of a prompt that is divided into steps, each with the probability that the step is right."""

    source: str
    """Origin of the solution for messages, such as `steps.jsonl:17`."""
    prompt: Prompt
    steps: tuple[str, ...]
    labels: tuple[float, ...]
    """Probability, from 0 to 1, that each step is right. Hard labels are 0 and 1."""
    template: TemplateArguments = NO_ARGUMENTS
    """Arguments of the chat template, if the prompt is a chat."""

    def identity(self, version: int) -> str:
        """Return the text that identifies the prompt when solutions and problems are compared. `version` is the version
        of the rules for reading files."""
        return identity(self.prompt, tools=self.template.tools, version=version)


def load_step_labels(config: StepLabelFile, split: str) -> tuple[list[LabeledSolution], int]:
    """Read the labeled solutions of a split ("train" or "heldout") in file order, and count the rows that `drop` left
    out of the files of this split because they are empty.

    Raises BadInput if the split is empty, a row is invalid or a held-out prompt is also a training prompt.
    """
    in_heldout = split == "heldout"
    path = config.heldout_path if in_heldout and config.heldout_path is not None else config.path
    rows, dropped = _read_solutions(path, config)
    if config.heldout_path is None:
        rows = [each for each in rows if _is_heldout(each, config) == in_heldout]
        dropped = 0 if in_heldout else dropped
    elif in_heldout:
        _require_new_prompts(rows, config)
    if not rows:
        raise BadInput(
            f"{format_path(path)}: labels.heldout_fraction is {config.heldout_fraction}, which leaves no {split} row. "
            "Add rows with other prompts, change labels.heldout_fraction, or set labels.heldout_path."
        )
    return [replace(each, prompt=fill_prompt(each.prompt, config.template)) for each in rows], dropped


def _is_heldout(each: LabeledSolution, config: StepLabelFile) -> bool:
    key = split_key(each.prompt, tools=each.template.tools, version=config.version)
    return is_heldout(key, config.heldout_fraction)


def _read_solutions(path: Path, config: StepLabelFile) -> tuple[list[LabeledSolution], int]:
    """Read all rows of a file before the template is applied and the split is chosen, and count the rows left out."""
    solutions, input_errors = list[LabeledSolution](), RowErrors(config.drop)
    is_table = find_data_files(path).is_table
    columns = [config.prompt_column, config.steps_column, config.labels_column, *config.required_chat_columns]
    rows = read_rows(path, columns, input_errors, optional=config.optional_chat_columns, version=config.version)
    for place, row in rows:
        with input_errors.collect(place):
            solutions.append(_build_solution(place, row, config, is_table=is_table))
    input_errors.check()
    dropped = sum(input_errors.dropped.values())
    if not solutions:
        raise describe_empty_file(path, "row with labeled steps", dropped=dropped, key="labels.drop")
    return solutions, dropped


def _build_solution(place: str, row: Mapping[str, object], config: StepLabelFile, *, is_table: bool) -> LabeledSolution:
    """Return the labeled solution in a row. `place` names the row in messages. Raises BadInput if a value is
    invalid."""
    prompt, template = read_prompt(place, row, config, is_table=is_table)
    if count_image_places(prompt):
        raise BadInput(
            f"{place}: {config.prompt_column}: process reward models read text only, but the prompt contains an image. "
            "Remove the images, or the row."
        )
    steps, labels = (_read_list(place, row[name], name) for name in (config.steps_column, config.labels_column))
    if len(steps) != len(labels):
        raise BadInput(
            f"{place}: {config.labels_column}: expected {len(steps)} labels, one for each step in "
            f"{config.steps_column}, found {len(labels)}. Give every step one label, or remove the row."
        )
    if not steps:
        raise EmptyRow(f"{place}: {config.steps_column}: the solution has no steps. Add its steps, or remove the row.")
    return LabeledSolution(
        place,
        prompt,
        tuple(read_text(place, step, f"{config.steps_column}[{at}]") for at, step in enumerate(steps)),
        tuple(_read_label(place, label, f"{config.labels_column}[{at}]") for at, label in enumerate(labels)),
        template,
    )


def _read_list(place: str, value: object, column: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadInput(
            f"{place}: {column}: expected a list with one item for each step, found {type(value).__name__} "
            f"{value!r:.60}. Write a list, or set steps_column and labels_column to other columns."
        )
    return value


def _read_label(place: str, value: object, column: str) -> float:
    """Return a label as the probability that the step is right. Raises BadInput for other values, such as NaN."""
    if isinstance(value, bool | int | float) and 0 <= value <= 1:
        return float(value)
    raise BadInput(
        f"{place}: {column}: expected true, false or a number from 0 to 1, found {type(value).__name__} {value!r:.40}. "
        "Replace the label, or remove the row."
    )


def _require_new_prompts(heldout: list[LabeledSolution], config: StepLabelFile) -> None:
    """Raise BadInput if the prompt of a held-out solution is also the prompt of a training solution."""
    train, _ = _read_solutions(config.path, config)
    training_prompts, input_errors = {each.identity(config.version) for each in train}, InputErrors()
    for each in heldout:
        with input_errors.collect(each.source):
            if each.identity(config.version) in training_prompts:
                raise BadInput(
                    f"{each.source}: this held-out prompt is also the prompt of a training row, so the held-out "
                    "accuracy would not measure unseen prompts. Remove one of the two rows."
                )
    input_errors.check()
