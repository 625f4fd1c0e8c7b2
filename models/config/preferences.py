"""Configuration of preferences between completions. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from infra.config import Positive, Since
from infra.store.inputs import DataLocation
from infra.variants import Variant
from models.config.chat_files import ChatFile
from models.config.data import DataSource
from models.config.file_rules import DropReason, FileRules
from models.config.hub_datasets import HubDatasetChoice


class Preferences(Variant):
    """Fields common to all sources of preferences (pairs of a better and a worse completion). `implementation` names a
    `models.data.preferences.PreferenceSource`."""

    reading_reporter: ClassVar[str] = ""
    """`pkg.mod:function` that reports how this kind reads files, a `models.data.reading.ReadingReporter`. Empty if
    it reads no files."""

    @property
    def drops_long_pairs(self) -> bool:
        """Whether pairs that are longer than the model's context are left out."""
        return False

    def find_conflicts(self, data: DataSource) -> Iterator[str]:
        """Yield one line per reason why these preferences cannot be used with the problems of `data`."""
        yield from ()


class ArithmeticPreferences(Preferences):
    """Pairs built from arithmetic problems, with a correct completion as the better and a wrong one as the worse."""

    implementation = "models.data.preferences:arithmetic_preferences"

    kind: Literal["arithmetic"] = "arithmetic"
    train_pairs: Positive = 8192
    """Number of training pairs."""
    heldout_pairs: Positive = 256
    """Number of pairs from held-out problems, on which pair accuracy is measured."""

    def find_conflicts(self, data: DataSource) -> Iterator[str]:
        """Yield a conflict if the data source does not generate arithmetic problems, because wrong answers are then
        unknown."""
        if not data.makes_pairs:
            yield (
                f"preferences.kind = 'arithmetic' builds pairs from arithmetic problems, but data.kind is "
                f"{data.label!r}. Use preferences.kind = 'file'"
            )


class FilePreferences(HubDatasetChoice, ChatFile, FileRules, Preferences):
    """Preference pairs from a file, or from a folder of files."""

    implementation = "models.data.preferences:file_preferences"
    reading_reporter = "models.data.preferences:report_file"

    kind: Literal["file"] = "file"
    path: DataLocation
    """File or folder of training pairs, on this machine, at s3://bucket/name, or the name of a
    dataset on the Hugging Face Hub, in the formats of `[data]`."""
    heldout_path: DataLocation | None = None
    """File or folder of evaluation pairs. If not set, `heldout_fraction` of the training pairs is kept."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of pairs kept for evaluation if there is no second file, selected by a hash of the prompt."""
    chosen_column: str = "chosen"
    """Column with the better completion: a text, a message of the assistant, or a chat that ends with it. Both
    completions may begin with the prompt."""
    rejected_column: str = "rejected"
    """Column with the worse completion."""
    drop: Annotated[tuple[DropReason, ...], Since("0.2.0", before=())] = ()
    """Rows that are left out and counted, instead of refusing the file: "ties" (equal completions, or equal scores in
    the columns `score_chosen` and `score_rejected`, or a `margin` of 0), "empty" (a blank or missing prompt, message or
    completion), "too_long" (more tokens than the model's context), and "mismatched" (two completions of different
    prompts)."""
    template: str = "{prompt}"
    """Template that turns plain text into a prompt; `{prompt}` is replaced by the text of the column."""

    @property
    def drops_long_pairs(self) -> bool:
        """Whether `drop` contains "too_long"."""
        return "too_long" in self.drop


PreferencesConfig = Annotated[ArithmeticPreferences | FilePreferences, Field(discriminator="kind")]
