"""Configuration of preferences between completions. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rheostat.infra.config import Positive, Since
from rheostat.infra.renamed import RenamedValue
from rheostat.infra.store.inputs import DataLocation
from rheostat.infra.variants import Variant
from rheostat.models.config.chat_files import ChatFile
from rheostat.models.config.data import DataSource
from rheostat.models.config.file_rules import DropReason, FileRules
from rheostat.models.config.hub_datasets import HubDatasetChoice


class Preferences(Variant):
    """Fields common to all sources of preference pairs (a better and a worse completion of the same prompt).
    `implementation` names a `rheostat.models.data.preferences.PreferenceSource`."""

    checks = {"policy": "rheostat.models.inspection.preferences:check_preferences"}
    reading_reporter: ClassVar[str] = ""
    """Import path `pkg.mod:function` of a `rheostat.models.data.reading.ReadingReporter`, which reports how this source
    reads its files. Empty if the source reads no files."""

    @property
    def drops_long_pairs(self) -> bool:
        """Whether pairs that are longer than the model's context are left out instead of ending the run."""
        return False

    def find_conflicts(self, data: DataSource) -> Iterator[str]:
        """Yield one message for each reason why these preferences cannot be used with the problems of `data`."""
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


class FilePreferences(HubDatasetChoice, ChatFile, FileRules, Preferences):
    """Preference pairs read from a file or from a folder of files."""

    implementation = "rheostat.models.data.preferences:file_preferences"
    reading_reporter = "rheostat.models.data.preferences:report_file"

    kind: Literal["file"] = "file"
    path: DataLocation
    """File or folder of training pairs, on this machine or at s3://bucket/name, in a format that `[data]` reads. Or the
    name of a dataset on the Hugging Face Hub."""
    heldout_path: DataLocation | None = None
    """File or folder of evaluation pairs. If not set, `heldout_fraction` of the training pairs is kept."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of pairs kept for evaluation if there is no second file. A hash of the prompt selects the pairs."""
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
    template: str = "{prompt}"
    """Template into which a plain-text prompt is inserted; `{prompt}` is replaced by the text of the column."""

    @property
    def drops_long_pairs(self) -> bool:
        """Whether pairs that are longer than the model's context are left out, because `drop` contains "too_long"."""
        return "too_long" in self.drop


PreferencesConfig = Annotated[AnswerPreferences | FilePreferences, Field(discriminator="kind")]
