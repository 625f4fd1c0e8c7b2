"""Solutions whose steps are labeled as right or wrong, read from files, for training process reward models."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rheostat.infra.errors import BadInput
from rheostat.models.config.process_models import StepLabelFile
from rheostat.models.data.dropping import EmptyRow
from rheostat.models.data.messages import read_text
from rheostat.models.data.problems import NO_ARGUMENTS, Prompt, TemplateArguments
from rheostat.models.data.prompted_examples import PromptedExample, Row, read_examples, read_split, read_text_prompt


@dataclass(frozen=True, slots=True)
class LabeledSolution(PromptedExample):
    """Solution of a prompt that is divided into steps, each with the probability that the step is right."""

    source: str
    """Origin of the solution for messages, such as `steps.jsonl:17`."""
    prompt: Prompt
    steps: tuple[str, ...]
    labels: tuple[float, ...]
    """Probability, from 0 to 1, that each step is right. Hard labels are 0 and 1."""
    template: TemplateArguments = NO_ARGUMENTS
    """Arguments of the chat template, if the prompt is a chat."""


def load_step_labels(config: StepLabelFile, split: str) -> tuple[list[LabeledSolution], int]:
    """Read the labeled solutions of a split ("train" or "heldout") in file order, and count the rows that `drop` left
    out of the files of this split because they are empty.

    Raises BadInput if the split is empty, a row is invalid or a held-out prompt is also a training prompt.
    """
    dropped = dict[Path, int]()

    def read(path: Path) -> list[LabeledSolution]:
        columns = [config.prompt_column, config.steps_column, config.labels_column]
        build = partial(_build_solution, config=config)
        solutions, reasons = read_examples(path, config, columns, build, drop=config.drop)
        dropped[path] = sum(reasons.values())
        return solutions

    solutions, own_path = read_split(config, split, read), config.path if split == "train" else config.heldout_path
    return solutions, 0 if own_path is None else dropped[own_path]


def _build_solution(place: str, row: Row, is_table: bool, *, config: StepLabelFile) -> LabeledSolution:
    """Return the labeled solution in a row. `place` names the row in messages. Raises BadInput if a value is
    invalid."""
    reader = "process reward models"
    prompt, template = read_text_prompt(place, row, config, is_table=is_table, reader=reader)
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
