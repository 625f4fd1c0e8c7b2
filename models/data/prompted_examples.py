"""Training examples that begin with a prompt, read from files and divided into training data and held-out data."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.infra.store.inputs import format_path
from rheostat.models.config.example_files import ExampleFile
from rheostat.models.config.file_rules import DropReason
from rheostat.models.data.dropping import RowErrors, describe_empty_file
from rheostat.models.data.messages import read_prompt
from rheostat.models.data.problems import (
    Prompt,
    TemplateArguments,
    count_image_places,
    fill_prompt,
    identity,
    is_heldout,
    split_key,
)
from rheostat.models.data.rows import find_data_files, read_rows


class PromptedExample:
    """Base class of data classes for training examples."""

    __slots__ = ()

    source: str
    """Origin of the example for messages, such as `pairs.jsonl:17`."""
    prompt: Prompt
    template: TemplateArguments
    """Arguments of the chat template, if the prompt is a chat."""

    def identity(self, version: int) -> str:
        """Return the text that identifies the prompt when examples are compared. `version` is the version of the rules
        for reading files."""
        return identity(self.prompt, tools=self.template.tools, version=version)

    def split_key(self, version: int) -> str:
        """Return the text whose hash decides whether the example is held out. `version` is the version of the rules for
        reading files."""
        return split_key(self.prompt, tools=self.template.tools, version=version)


E = TypeVar("E", bound=PromptedExample)

Row = Mapping[str, object]


def read_split(config: ExampleFile, split: str, read: Callable[[Path], Sequence[E]]) -> list[E]:
    """Return the examples of a split ("train" or "heldout") in file order. `read` returns all examples of a file,
    before the template is applied.

    Raises BadInput if the split is empty or a held-out prompt is also a training prompt.
    """
    in_heldout = split == "heldout"
    path = config.heldout_path if in_heldout and config.heldout_path is not None else config.path
    examples = [*read(path)]
    if config.heldout_path is None:
        keys = [each.split_key(config.version) for each in examples]
        kept = [is_heldout(key, config.heldout_fraction) == in_heldout for key in keys]
        examples = [each for each, is_kept in zip(examples, kept, strict=True) if is_kept]
    elif in_heldout:
        _require_new_prompts(examples, read(config.path), config)
    if not examples:
        raise BadInput(
            f"{format_path(path)}: {config.table}.heldout_fraction is {config.heldout_fraction}, which leaves no "
            f"{split} {config.noun}. Add rows with other prompts, change {config.table}.heldout_fraction, or set "
            f"{config.table}.heldout_path."
        )
    return [_fill(each, config.template) for each in examples]


def _fill(example: E, template: str) -> E:
    """Return the example with its plain-text prompt inserted into a template."""
    data_class: Any = example  # every example is a data class
    filled: E = replace(data_class, prompt=fill_prompt(example.prompt, template))
    return filled


def read_examples(
    path: Path,
    config: ExampleFile,
    columns: Sequence[str],
    build: Callable[[str, Row, bool], E],
    *,
    drop: Collection[DropReason],
    optional: Sequence[str] = (),
) -> tuple[list[E], Mapping[str, int]]:
    """Read all examples of a file, and count the rows that are left out because of `drop`, by reason.

    Every row must have `columns` and the required columns of chats, and may have those in `optional`. `build` returns
    the example in a row, given the name of the row in messages, the row, and whether the file is a table. Raises
    BadInput if a row is invalid or no row is left.
    """
    examples, input_errors = list[E](), RowErrors(drop)
    is_table = find_data_files(path).is_table
    required = [*columns, *config.required_chat_columns]
    optional = [*config.optional_chat_columns, *optional]
    for place, row in read_rows(path, required, input_errors, optional=optional, version=config.version):
        with input_errors.collect(place):
            examples.append(build(place, row, is_table))
    input_errors.check()
    if not examples:
        dropped = sum(input_errors.dropped.values())
        raise describe_empty_file(path, config.noun, dropped=dropped, key=f"{config.table}.drop")
    return examples, input_errors.dropped


def read_text_prompt(
    place: str, row: Row, config: ExampleFile, *, is_table: bool, reader: str
) -> tuple[Prompt, TemplateArguments]:
    """Return the prompt in a row and the arguments of its chat template. `place` names the row in messages, and
    `reader` what cannot read images. Raises BadInput if the prompt is invalid or contains an image."""
    prompt, template = read_prompt(place, row, config, is_table=is_table)
    if count_image_places(prompt):
        raise BadInput(
            f"{place}: {config.prompt_column}: {reader} support text only, but the prompt contains an image. Remove "
            "the images, or the row."
        )
    return prompt, template


def _require_new_prompts(
    heldout: Sequence[PromptedExample], train: Sequence[PromptedExample], config: ExampleFile
) -> None:
    """Raise BadInput if a held-out prompt is also the prompt of a training example."""
    training_prompts, input_errors = {each.identity(config.version) for each in train}, InputErrors()
    for each in heldout:
        with input_errors.collect(each.source):
            if each.identity(config.version) in training_prompts:
                raise BadInput(
                    f"{each.source}: this held-out prompt is also the prompt of a training {config.noun}, so the "
                    "held-out accuracy would not measure unseen prompts. Remove one of the two rows."
                )
    input_errors.check()
