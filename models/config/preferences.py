"""Configuration of preferences between completions. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from infra.config import Positive
from infra.store.inputs import DataLocation
from infra.variants import Variant
from models.config.chat_files import ChatFile
from models.config.data import DataSource
from models.config.file_rules import FileRules
from models.config.hub_datasets import HubDatasetChoice


class Preferences(Variant):
    """Fields common to all sources of preferences (pairs of a better and a worse completion). `implementation` names a
    `models.data.preferences.PreferenceSource`."""

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

    kind: Literal["file"] = "file"
    path: DataLocation
    """File or folder of training pairs, on this machine, at s3://bucket/name, or the name of a
    dataset on the Hugging Face Hub, in the formats of `[data]`."""
    heldout_path: DataLocation | None = None
    """File or folder of evaluation pairs. If not set, `heldout_fraction` of the training pairs is kept."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of pairs kept for evaluation if there is no second file, selected by a hash of the prompt."""
    chosen_column: str = "chosen"
    """Column with the better completion."""
    rejected_column: str = "rejected"
    """Column with the worse completion."""
    template: str = "{prompt}"
    """Template that turns plain text into a prompt; `{prompt}` is replaced by the text of the column."""


PreferencesConfig = Annotated[ArithmeticPreferences | FilePreferences, Field(discriminator="kind")]
