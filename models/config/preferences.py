"""Configuration of preferences between completions. Torch-free."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rheostat.infra.config import Positive, Since
from rheostat.infra.renamed import RenamedValue
from rheostat.infra.variants import Variant
from rheostat.models.config.data import DataSource
from rheostat.models.config.example_files import ExampleFile
from rheostat.models.config.file_rules import DropReason
from rheostat.models.config.training import DpoConfig


class Preferences(Variant):
    """Fields common to all sources of preferences. A preference is a pair (a better and a worse completion of the same
    prompt) or a labeled completion. `implementation` names a `rheostat.models.data.preferences.PreferenceSource`."""

    checks = {"policy": "rheostat.models.inspection.preferences:check_preferences"}
    reading_reporter: ClassVar[str] = ""
    """Import path `pkg.mod:function` of a `rheostat.models.data.reading.ReadingReporter`, which reports how this source
    reads its files. Empty if the source reads no files."""
    noun: ClassVar[str] = "pair"
    """Singular noun for one preference in messages."""

    @property
    def drops_long_pairs(self) -> bool:
        """Whether pairs that are longer than the model's context are left out instead of ending the run."""
        return False

    def find_conflicts(self, data: DataSource) -> Iterator[str]:
        """Yield one message for each reason why these preferences cannot be used with the problems of `data`."""
        yield from ()

    def find_training_conflicts(self, dpo: DpoConfig | None, reward_models: Sequence[str]) -> Iterator[str]:
        """Yield one message for each training that cannot use these preferences. `dpo` contains the settings of
        `[dpo]`, and `reward_models` the names of the reward models that the run trains."""
        yield from ()


class AnswerPreferences(Preferences):
    """Pairs built from the reference answers of the problems: the better completion is correct, the worse one is
    wrong."""

    implementation = "rheostat.models.data.preferences:answer_preferences"

    kind: Annotated[Literal["answers"], RenamedValue("arithmetic", "answers")] = "answers"
    train_pairs: Positive = 8192
    """Number of training pairs."""
    heldout_pairs: Positive = 256
    """Number of pairs built from held-out problems, on which the accuracy of preferences is measured."""

    def find_conflicts(self, data: DataSource) -> Iterator[str]:
        """Yield a message if pairs cannot be built from the problems of the data source."""
        if not data.makes_pairs:
            yield (
                f"preferences.kind = 'answers' builds pairs from problems with answers that a program can change, but "
                f"data.kind is {data.label!r}, whose class does not set makes_pairs. Use preferences.kind = 'file'"
            )


class PreferenceFile(ExampleFile, Preferences):
    """Fields common to the sources that read preferences from a file or from a folder of files."""

    table = "preferences"

    @property
    def drops_long_pairs(self) -> bool:
        """Whether rows that are longer than the model's context are left out, because `drop` contains "too_long"."""
        return "too_long" in self.drop


class FilePreferences(PreferenceFile):
    """Preference pairs read from a file or from a folder of files."""

    implementation = "rheostat.models.data.preferences:file_preferences"
    reading_reporter = "rheostat.models.data.preferences:report_file"

    kind: Literal["file"] = "file"
    chosen_column: str = "chosen"
    """Column with the better completion: a text, a message of the assistant, or a chat that ends with such a message.
    Both completions of a pair may begin with the prompt."""
    rejected_column: str = "rejected"
    """Column with the worse completion, in the same form as the better one."""
    drop: Annotated[tuple[DropReason, ...], Since("0.2.0", before=())] = ()
    """Kinds of rows that are left out and counted, instead of refusing the file: "ties" (equal completions, or equal
    scores in the columns `score_chosen` and `score_rejected`, or a `margin` of 0), "empty" (a blank or missing prompt,
    message or completion), "too_long" (more tokens than the model's context), and "mismatched" (two completions of
    different prompts)."""


class LabeledPreferences(PreferenceFile):
    """Single completions that are labeled as desirable or undesirable, read from a file or from a folder of files. Only
    the loss `kto` of `[dpo]` trains on such completions."""

    implementation = "rheostat.models.data.labeled:labeled_preferences"
    reading_reporter = "rheostat.models.data.labeled:report_file"
    noun = "completion"

    kind: Literal["labels"] = "labels"
    completion_column: str = "completion"
    """Column with the completion: a text, or a chat with one message of the assistant."""
    label_column: str = "label"
    """Column with the label: `true` (or 1) for a desirable completion, `false` (or 0) for an undesirable one."""
    drop: tuple[Literal["empty", "too_long"], ...] = ()
    """Kinds of rows that are left out and counted, instead of refusing the file: "empty" (a blank or missing prompt,
    message or completion) and "too_long" (more tokens than the model's context)."""

    def find_training_conflicts(self, dpo: DpoConfig | None, reward_models: Sequence[str]) -> Iterator[str]:
        """Yield one message for each training that needs pairs: a loss of `[dpo]` that compares two completions, and
        reward models."""
        if dpo is not None and not dpo.objective.accepts_labels:
            yield (
                f"dpo.loss.kind = {dpo.objective.label!r} compares two completions of a prompt, but preferences.kind = "
                "'labels' has single completions with labels. Set dpo.loss = {kind = 'kto'}, or use pairs "
                "(preferences.kind = 'file')"
            )
        for term in reward_models:
            yield (
                f"reward {term!r} is a model that the run trains on preference pairs, but preferences.kind = 'labels' "
                "has single completions with labels. Use pairs (preferences.kind = 'file')"
            )


PreferencesConfig = Annotated[AnswerPreferences | FilePreferences | LabeledPreferences, Field(discriminator="kind")]
