"""Configuration of the problems to train on, and of preferences between completions. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config import Fraction, Positive, Since
from infra.renamed import RenamedFrom
from infra.store.inputs import Location
from infra.variants import OneOf, Target, Variant
from models.config.chat_files import ChatFile
from models.config.file_rules import FileRules
from models.config.images import ImageFileSettings, PixelLimits
from models.config.texts import TextSettings

OnTooLong = Literal["refuse", "drop"]


class DataSource(TextSettings, Variant):
    """Fields common to all sources of problems. `implementation` names a `models.data.problems.ProblemSource`."""

    makes_pairs: ClassVar[bool] = False
    """Whether preferences of kind `arithmetic` can be built from the problems of this source."""
    guess_template: ClassVar[str] = "#### {}"
    """Template of a warm-up answer without reasoning, for problems with worked answers; `{}` is a random number."""
    max_guess: ClassVar[int] = 20
    """Largest number that can be inserted into `guess`."""
    referenced_files: ClassVar[str] = ""
    """`pkg.mod:function` that yields the files to which the source's own files refer, such as images. Empty if its
    files refer to no others."""
    exclusion_filter: ClassVar[str] = ""
    """`pkg.mod:function` that returns the training problems that this source excludes by itself, a
    `models.data.problems.ExclusionFilter`. Empty if the source excludes none."""

    pictures: ClassVar[str] = ""
    """`pkg.mod:function` that generates pictures for the warm-up of text-to-image policies, a
    `models.data.examples.PictureSource`. Empty if the source has no pictures."""

    exclude_ids_path: Annotated[Location | None, Since("0.1.0", before=None), RenamedFrom("without")] = None
    """File with one prompt_id per line, on this machine or at s3://bucket/name. These problems are excluded from
    iterations."""
    on_too_long: Annotated[OnTooLong, Since("0.1.0", before="refuse"), RenamedFrom("too_long")] = "refuse"
    """Action for problems whose prompt leaves no room for a completion in the policy's context: "refuse" ends the run
    before it begins, "drop" excludes them from iterations, evaluations and warm-up, and records their number."""

    image_background: Annotated[
        Annotated[str, Field(pattern=r"^(white|black|#[0-9a-fA-F]{6}|unconverted)$")],
        Since("0.2.0", before="unconverted"),
    ] = "white"
    """Color on which transparent images are composed: `white`, `black` or `#rrggbb`. Gray images with more than 8 bits
    are scaled to 8 bits. `unconverted` passes all images to the policy as they are, which drops transparency
    and makes most shades of 16 bits white."""

    @property
    def has_answers(self) -> bool:
        """Whether every problem has a reference answer, which warm-up imitates and from which judges are trained."""
        return True

    @property
    def num_heldout_problems(self) -> int | None:
        """Number of held-out problems if it is known before they are read or generated, else None."""
        return None

    @property
    def weights(self) -> tuple[float, ...]:
        """Sampling weight of each part of the training problems (`Problem.part`). Empty if the problems have only one
        part."""
        return ()

    @property
    def pixels(self) -> PixelLimits:
        """Minimum and maximum size of the images that the policy receives."""
        return PixelLimits()


class ArithmeticData(DataSource):
    """Word problems generated from templates and a seed, with answers that a program checks."""

    implementation = "models.data.arithmetic:arithmetic_problems"
    makes_pairs = True

    kind: Literal["arithmetic"] = "arithmetic"
    operations: Annotated[int, Field(ge=1, le=8)] = 4
    """Additions or subtractions per problem."""
    train_problems: Positive = 4096
    """Number of training problems."""
    heldout_problems: Positive = 256
    """Number of problems kept for evaluation. A hash of the question assigns each problem to training or evaluation, so
    no problem is in both."""

    @property
    def num_heldout_problems(self) -> int | None:
        """Number of held-out problems as configured."""
        return self.heldout_problems


class PicturesData(DataSource):
    """Pictures of 3 x 3 colored shapes generated from a seed, with the question how many shapes have a color; for
    vision-language policies."""

    implementation = "models.data.pictures:picture_problems"
    guess_template = " #### {}"
    max_guess = 9

    kind: Literal["pictures"] = "pictures"
    train_problems: Positive = 3072
    """Number of training problems."""
    heldout_problems: Positive = 256
    """Number of problems kept for evaluation. A hash of question and picture assigns each problem to training or
    evaluation, so no problem is in both."""

    @property
    def num_heldout_problems(self) -> int | None:
        """Number of held-out problems as configured."""
        return self.heldout_problems


class PaintingsData(DataSource):
    """Descriptions of pictures to generate, such as "red square left" (3 colors, 2 shapes, 4 places), for text-to-image
    policies.

    Held-out prompts describe the same pictures with the same words in another order: "left red square".
    """

    implementation = "models.data.paintings:painting_problems"
    pictures = "models.data.paintings:pretraining_pictures"

    kind: Literal["paintings"] = "paintings"
    caption_noise: Annotated[Fraction, RenamedFrom("lies")] = 0.5
    """Share of the pictures with a random color and place in their caption, among the pictures on which a policy
    without pretrained weights is trained first."""

    @property
    def num_heldout_problems(self) -> int | None:
        """Number of held-out problems: one for each possible picture."""
        return 24


class CalculationsData(DataSource):
    """Word problems of one calculation, generated from a seed, to be solved with a calculator tool; for policies in
    environments."""

    implementation = "models.data.calculations:calculation_problems"
    max_guess = 100

    kind: Literal["calculations"] = "calculations"
    train_problems: Positive = 4096
    """Number of training problems."""
    heldout_problems: Positive = 256
    """Number of problems kept for evaluation. A hash of the question assigns each problem to training or evaluation, so
    no problem is in both."""

    @property
    def num_heldout_problems(self) -> int | None:
        """Number of held-out problems as configured."""
        return self.heldout_problems


class MeasuresData(DataSource):
    """Questions about a measure that is missing in the prompt and known to the simulated user; for policies in
    dialogues."""

    implementation = "models.data.measures:measure_problems"
    max_guess = 40

    kind: Literal["measures"] = "measures"
    train_problems: Positive = 4096
    """Number of training problems."""
    heldout_problems: Positive = 256
    """Number of problems kept for evaluation. A hash of question and measures assigns each problem to training or
    evaluation, so no problem is in both."""

    @property
    def num_heldout_problems(self) -> int | None:
        """Number of held-out problems as configured."""
        return self.heldout_problems


class ProblemFile(ChatFile, FileRules, ImageFileSettings):
    """A file of problems and the way to read it."""

    path: Location
    """File of training problems: .jsonl, .json with an array, .csv (each of these also compressed as .gz), .parquet or
    .arrow, on this machine or at s3://bucket/name."""
    heldout_path: Location | None = None
    """File of evaluation problems. If not set, `heldout_fraction` of the training file is kept for evaluation."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of problems kept for evaluation if there is no second file, selected by a hash of the prompt."""
    answer_column: str | None = "answer"
    """Column with the reference answer. Not set means that no reward needs an answer."""
    environment_columns: Annotated[tuple[str, ...], Since("0.1.0", before=())] = ()
    """Columns that an environment receives in its `problem` in addition to prompt and answer. Problems that differ in
    these columns are different problems."""
    template: str = "{prompt}"
    """Template that turns plain text into a prompt; `{prompt}` is the text of the column. Chat messages use the
    tokenizer's chat template."""
    system: Annotated[Annotated[str, Field(min_length=1)] | None, Since("0.1.0", before=None)] = None
    """System message put before each chat that has none. If set, plain text becomes the user's message of a chat."""
    limit: Positive | None = None
    """Maximum number of problems to read from each file."""

    @field_validator("environment_columns")
    @classmethod
    def _require_unique_columns(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        if reserved := {"prompt", "answer"} & set(columns):
            raise ValueError(
                f"{sorted(reserved)[0]!r} must not be listed: environments always receive prompt and answer. Remove it"
            )
        if len(set(columns)) < len(columns):
            raise ValueError(f"each column may be listed only once, found {', '.join(columns)}. Remove the repetition")
        return columns

    @property
    def has_answers(self) -> bool:
        """Whether a column with reference answers is configured."""
        return self.answer_column is not None


class FileData(ProblemFile, DataSource):
    """Problems from a file of JSON, CSV, Parquet or Arrow."""

    implementation = "models.data.files:file_problems"
    referenced_files = "models.data.image_files:image_files"

    kind: Literal["file"] = "file"


class WeightedFile(ProblemFile):
    """One file of a mixture, read in the same way as a file of `kind = "file"`."""

    weight: Annotated[float, Field(gt=0)] = 1
    """Share of this file in the prompts of iterations, relative to the weights of the other files."""


class MixtureData(DataSource):
    """Problems from several files, from which iterations sample by weight, independent of the size of each file.

    Each file has its own random order and is repeated as often as needed. Warm-up uses every problem equally often.
    """

    implementation = "models.data.mixture:mixed_problems"
    referenced_files = "models.data.mixture:mixed_image_files"

    kind: Literal["mixture"] = "mixture"
    sources: Annotated[tuple[WeightedFile, ...], Field(min_length=1)]
    """The files, each with its weight. Held-out problems of all files are mixed by the same weights."""

    @model_validator(mode="after")
    def _require_same_pixels(self) -> Self:
        if len({source.pixels for source in self.sources}) > 1:
            raise ValueError("min_pixels and max_pixels must be the same in all sources. Set equal values")
        return self

    @property
    def has_answers(self) -> bool:
        """Whether every file has a column with reference answers."""
        return all(source.has_answers for source in self.sources)

    @property
    def weights(self) -> tuple[float, ...]:
        """Configured weight of each file."""
        return tuple(source.weight for source in self.sources)

    @property
    def pixels(self) -> PixelLimits:
        """Minimum and maximum image size, which is the same for all files."""
        return self.sources[0].pixels


class DeduplicatedData(DataSource):
    """Problems from files, without the training problems that a retriever finds nearly equal to a held-out problem."""

    implementation = "models.retrieval.deduplicated:deduplicated_problems"
    referenced_files = "models.retrieval.deduplicated:find_referenced_images"
    exclusion_filter = "models.retrieval.deduplicated:near_duplicates"

    kind: Literal["deduplicated"] = "deduplicated"
    source: Annotated[FileData | MixtureData, Field(discriminator="kind")]
    """The source of the problems."""
    retriever: Location
    """Directory of a sentence-transformers model, on this machine or at s3://bucket/name (docs/retrieval.md)."""
    similarity: Annotated[float, Field(gt=0, le=1), RenamedFrom("bound")] = 0.95
    """Cosine similarity to a held-out prompt at or above which a training problem is excluded."""

    @model_validator(mode="after")
    def _require_unset_in_source(self) -> Self:
        for key in ("exclude_ids_path", "on_too_long", "image_background", *TextSettings.model_fields):
            if getattr(self.source, key) not in (DataSource.model_fields[key].default, getattr(self, key)):
                raise ValueError(f"source.{key} must not be set. Set {key} next to source instead")
        return self

    @property
    def has_answers(self) -> bool:
        """Whether the wrapped source has reference answers."""
        return self.source.has_answers

    @property
    def weights(self) -> tuple[float, ...]:
        """Sampling weights of the wrapped source."""
        return self.source.weights

    @property
    def pixels(self) -> PixelLimits:
        """Image sizes of the wrapped source."""
        return self.source.pixels


class TargetData(Target):
    """User-defined source: a subclass of `models.config.data.DataSource` (see "Extending")."""


DataConfig = Annotated[
    DataSource,
    OneOf(
        (
            *(ArithmeticData, PicturesData, PaintingsData, CalculationsData, MeasuresData),
            *(FileData, MixtureData, DeduplicatedData, TargetData),
        )
    ),
]


# ---- preferences
class Preferences(Variant):
    """Fields common to all sources of preferences. `implementation` names a `models.data.examples.PreferenceSource`."""

    def find_conflicts(self, data: DataSource) -> Iterator[str]:
        """Yield one line per conflict with the source of the problems."""
        yield from ()


class ArithmeticPreferences(Preferences):
    """Pairs built from arithmetic problems, in which a correct completion is preferred to a wrong one."""

    implementation = "models.data.examples:arithmetic_preferences"

    kind: Literal["arithmetic"] = "arithmetic"
    train_pairs: Positive = 8192
    """Number of training pairs."""
    heldout_pairs: Positive = 256
    """Number of pairs from held-out problems, used to measure pair accuracy."""

    def find_conflicts(self, data: DataSource) -> Iterator[str]:
        """Yield a conflict if the problems have no known wrong answers."""
        if not data.makes_pairs:
            yield (
                f"preferences.kind = 'arithmetic' builds pairs from arithmetic problems, but data.kind is "
                f"{data.label!r}. Use preferences.kind = 'file'"
            )


class FilePreferences(ChatFile, FileRules, Preferences):
    """Pairs from a JSON Lines, Parquet or Arrow file."""

    implementation = "models.data.examples:file_preferences"

    kind: Literal["file"] = "file"
    path: Location
    """File of training pairs."""
    heldout_path: Location | None = None
    """File of evaluation pairs. If not set, `heldout_fraction` of the training file is kept for evaluation."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of pairs kept for evaluation if there is no second file, selected by a hash of the prompt."""
    chosen_column: str = "chosen"
    """Column with the better completion."""
    rejected_column: str = "rejected"
    """Column with the worse completion."""
    template: str = "{prompt}"
    """Template that turns plain text into a prompt; `{prompt}` is the text of the column."""


PreferencesConfig = Annotated[ArithmeticPreferences | FilePreferences, Field(discriminator="kind")]
