"""Configuration of problems and of preferences between completions. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from infra.config import Fraction, Positive, Settings, Since
from infra.store.inputs import Location
from infra.variants import OneOf, Target, Variant


# ---- data
class PixelLimits(NamedTuple):
    """Pixels that images are sized between, where something else is wanted than what comes with the policy."""

    least: int | None = None
    most: int | None = None


class DataSource(Variant):
    """What all sources share. `implementation` is a `models.data.problems.ProblemSource`."""

    makes_pairs: ClassVar[bool] = False
    """Whether preferences of kind `arithmetic` can be made from its problems."""
    guess: ClassVar[str] = "#### {}"
    """How warm-up answers without working, where problems have worked answers."""
    largest_guess: ClassVar[int] = 20
    """The largest number that it guesses."""
    beside: ClassVar[str] = ""
    """`pkg.mod:function` that names the files which its own files name in turn; empty where they name none."""

    left_out: ClassVar[str] = ""
    """`pkg.mod:function` that says which training problems the source leaves out by itself, a
    `models.data.problems.LeftOut`; empty where it leaves none out."""

    pictures: ClassVar[str] = ""
    """`pkg.mod:function` that makes pictures for the warm-up of policies that draw, a
    `models.data.examples.PictureSource`; empty where it has none."""

    without: Annotated[Location | None, Since("0.1.0", before=None)] = None
    """File with a prompt_id per line, of this machine or at s3://bucket/name: iterations leave these problems out."""
    too_long: Annotated[Literal["refuse", "drop"], Since("0.1.0", before="refuse")] = "refuse"
    """Problems whose prompt leaves a completion no room in the policy's context: end the run before it begins, or leave
    them out of iterations, evaluations and warm-up; how many is in the record of the prompts."""

    @property
    def has_answers(self) -> bool:
        """Whether every problem has a reference answer, which warm-up imitates and judges learn from."""
        return True

    @property
    def heldout_known(self) -> int | None:
        """How many held-out problems there are, where that is known before they are read or made."""
        return None

    @property
    def weights(self) -> tuple[float, ...]:
        """How much is drawn of each part of the training problems (`Problem.part`); none where all are one."""
        return ()

    @property
    def pixels(self) -> PixelLimits:
        """How large images are for the policy."""
        return PixelLimits()


class ArithmeticData(DataSource):
    """Templated word problems made from a seed; their answers are checked by a program."""

    implementation = "models.data.arithmetic:arithmetic_problems"
    makes_pairs = True

    kind: Literal["arithmetic"] = "arithmetic"
    operations: Annotated[int, Field(ge=1, le=8)] = 4
    """Additions or subtractions per problem."""
    train_problems: Positive = 4096
    """Problems to learn from."""
    heldout_problems: Positive = 256
    """Problems kept for evaluation; a hash of the question decides which, so the two never meet."""

    @property
    def heldout_known(self) -> int | None:
        """As many as are made."""
        return self.heldout_problems


class PicturesData(DataSource):
    """Pictures of 3 x 3 coloured shapes made from a seed, and how many have a colour; for policies that see."""

    implementation = "models.data.pictures:picture_problems"
    guess = " #### {}"
    largest_guess = 9

    kind: Literal["pictures"] = "pictures"
    train_problems: Positive = 3072
    """Problems to learn from."""
    heldout_problems: Positive = 256
    """Problems kept for evaluation; a hash of question and picture decides which, so the two never meet."""

    @property
    def heldout_known(self) -> int | None:
        """As many as are made."""
        return self.heldout_problems


class PaintingsData(DataSource):
    """Pictures to be painted, such as "red square left": 3 colours, 2 shapes, 4 places; for policies that draw.

    Held-out prompts ask the same pictures in another order of the same words: "left red square".
    """

    implementation = "models.data.paintings:painting_problems"
    pictures = "models.data.paintings:pretraining_pictures"

    kind: Literal["paintings"] = "paintings"
    lies: Fraction = 0.5
    """Share of the pictures which a policy from nothing begins with whose caption says any colour and any place."""

    @property
    def heldout_known(self) -> int | None:
        """One for each picture that can be asked."""
        return 24


class CalculationsData(DataSource):
    """Word problems of one calculation made from a seed, to be asked of a calculator; for policies in environments."""

    implementation = "models.data.calculations:calculation_problems"
    largest_guess = 100

    kind: Literal["calculations"] = "calculations"
    train_problems: Positive = 4096
    """Problems to learn from."""
    heldout_problems: Positive = 256
    """Problems kept for evaluation; a hash of the question decides which, so the two never meet."""

    @property
    def heldout_known(self) -> int | None:
        """As many as are made."""
        return self.heldout_problems


class MeasuresData(DataSource):
    """Questions about a measure that the prompt leaves out and the user knows; for policies in dialogues."""

    implementation = "models.data.measures:measure_problems"
    largest_guess = 40

    kind: Literal["measures"] = "measures"
    train_problems: Positive = 4096
    """Problems to learn from."""
    heldout_problems: Positive = 256
    """Problems kept for evaluation; a hash of question and measures decides which, so the two never meet."""

    @property
    def heldout_known(self) -> int | None:
        """As many as are made."""
        return self.heldout_problems


class ProblemFile(Settings):
    """A file of problems and how it is read."""

    path: Location
    """Training problems: .jsonl, .json with an array, .csv, each of them also .gz, .parquet or .arrow, of this machine
    or at s3://bucket/name."""
    heldout_path: Location | None = None
    """Evaluation problems; none keeps `heldout_fraction` of the training file back."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of problems kept for evaluation when there is no second file, chosen by a hash of the prompt."""
    prompt_column: str = "prompt"
    """Column with the prompt: plain text, or a list of chat messages with `role` and `content`."""
    answer_column: str | None = "answer"
    """Column with the reference answer; none where no reward needs one."""
    environment_columns: Annotated[tuple[str, ...], Since("0.1.0", before=())] = ()
    """Columns that an environment is told in its `problem`, beside prompt and answer; problems that differ in them are
    different ones."""
    template: str = "{prompt}"
    """How plain text becomes a prompt; `{prompt}` is the column's text. Chat messages use the tokenizer's template."""
    system: Annotated[Annotated[str, Field(min_length=1)] | None, Since("0.1.0", before=None)] = None
    """System message before each chat that has none; plain text is then what the user says in a chat."""
    limit: Positive | None = None
    """Read at most so many problems per file."""
    images_column: Annotated[str | None, Since("0.1.0", before=None)] = None
    """Column with the images of the prompt, one or a list: paths below `images_root`, bytes, structs `{bytes, path}` or
    texts `data:image/...;base64,`. None where prompts have no images."""
    images_root: Annotated[Location | None, Since("0.1.0", before=None)] = None
    """Directory in which paths of images begin, of this machine or at s3://bucket/name; none is that of the file."""
    min_pixels: Annotated[Positive | None, Since("0.1.0", before=None)] = None
    """Smaller images are enlarged to so many pixels, for policies whose image processor does that. None leaves it as
    it comes with the policy."""
    max_pixels: Annotated[Positive | None, Since("0.1.0", before=None)] = None
    """Larger images are shrunk to so many pixels: fewer tokens each."""

    @field_validator("environment_columns")
    @classmethod
    def _are_named_once(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        if taken := {"prompt", "answer"} & set(columns):
            raise ValueError(
                f"{sorted(taken)[0]!r} is what an environment is told anyway, from prompt_column or answer_column"
            )
        if len(set(columns)) < len(columns):
            raise ValueError(f"expected each column once, found {', '.join(columns)}")
        return columns

    @model_validator(mode="after")
    def _check_pixels(self) -> Self:
        if any(self.pixels) and self.images_column is None:
            raise ValueError("min_pixels and max_pixels need images_column")
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} exceeds max_pixels {self.max_pixels}")
        return self

    @property
    def has_answers(self) -> bool:
        """Whether there is a column of them."""
        return self.answer_column is not None

    @property
    def pixels(self) -> PixelLimits:
        """As configured."""
        return PixelLimits(self.min_pixels, self.max_pixels)


class FileData(ProblemFile, DataSource):
    """Problems from a file of JSON, CSV, Parquet or Arrow."""

    implementation = "models.data.files:file_problems"
    beside = "models.data.image_files:image_files"

    kind: Literal["file"] = "file"


class WeightedFile(ProblemFile):
    """One file of a mixture, read as `kind = "file"` reads it."""

    weight: Annotated[float, Field(gt=0)] = 1
    """Its share of the prompts that iterations draw, relative to the other files' weights."""


class MixtureData(DataSource):
    """Problems from several files, of which iterations draw by weight, however many problems each has.

    Each file is gone through in an order of its own, again and again. Warm-up shows every problem equally often.
    """

    implementation = "models.data.mixture:mixed_problems"
    beside = "models.data.mixture:mixed_image_files"

    kind: Literal["mixture"] = "mixture"
    sources: Annotated[tuple[WeightedFile, ...], Field(min_length=1)]
    """The files, each with its weight. Held-out problems of all are mixed by the same weights."""

    @model_validator(mode="after")
    def _are_seen_alike(self) -> Self:
        if len({source.pixels for source in self.sources}) > 1:
            raise ValueError("min_pixels and max_pixels are the policy's: expected the same in all sources")
        return self

    @property
    def has_answers(self) -> bool:
        """Whether every file has a column of them."""
        return all(source.has_answers for source in self.sources)

    @property
    def weights(self) -> tuple[float, ...]:
        """As configured, file by file."""
        return tuple(source.weight for source in self.sources)

    @property
    def pixels(self) -> PixelLimits:
        """Those of every file."""
        return self.sources[0].pixels


class DeduplicatedData(DataSource):
    """Problems from files, without training problems that a retriever takes for nearly a held-out one."""

    implementation = "models.retrieval.deduplicated:deduplicated_problems"
    beside = "models.retrieval.deduplicated:images_beside"
    left_out = "models.retrieval.deduplicated:near_duplicates"

    kind: Literal["deduplicated"] = "deduplicated"
    source: Annotated[FileData | MixtureData, Field(discriminator="kind")]
    """The problems."""
    retriever: Location
    """Directory of sentence-transformers, of this machine or at s3://bucket/name (docs/retrieval.md)."""
    bound: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Cosine of two prompts from which the training problem is left out."""

    @model_validator(mode="after")
    def _says_it_once(self) -> Self:
        for key in ("without", "too_long"):
            if getattr(self.source, key) != DataSource.model_fields[key].default:
                raise ValueError(f"source.{key}: expected it beside source, where it holds for what is left")
        return self

    @property
    def has_answers(self) -> bool:
        """As the source has them."""
        return self.source.has_answers

    @property
    def weights(self) -> tuple[float, ...]:
        """Those of the source."""
        return self.source.weights

    @property
    def pixels(self) -> PixelLimits:
        """Those of the source."""
        return self.source.pixels


class TargetData(Target):
    """A source of your own: a subclass of `models.config.data.DataSource` (see "Extending")."""


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
    """What all preferences share. `implementation` is a `models.data.examples.PreferenceSource`."""

    def reasons_against(self, data: DataSource) -> Iterator[str]:
        """Yield what does not go together with the source of the problems."""
        yield from ()


class ArithmeticPreferences(Preferences):
    """Pairs made from arithmetic problems: a right completion is preferred to a wrong one."""

    implementation = "models.data.examples:arithmetic_preferences"

    kind: Literal["arithmetic"] = "arithmetic"
    train_pairs: Positive = 8192
    """Pairs to learn from."""
    heldout_pairs: Positive = 256
    """Pairs of held-out problems, for pair accuracy."""

    def reasons_against(self, data: DataSource) -> Iterator[str]:
        """They are made of problems whose wrong answers are known."""
        if not data.makes_pairs:
            yield (
                f"preferences.kind 'arithmetic' with data.kind {data.known_as!r}: its pairs are made from arithmetic "
                "problems, use preferences.kind 'file'"
            )


class FilePreferences(Preferences):
    """Pairs from a JSON Lines, Parquet or Arrow file."""

    implementation = "models.data.examples:file_preferences"

    kind: Literal["file"] = "file"
    path: Location
    """Training pairs."""
    heldout_path: Location | None = None
    """Evaluation pairs; none keeps `heldout_fraction` of the training file back."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of pairs kept for evaluation when there is no second file, chosen by a hash of the prompt."""
    prompt_column: str = "prompt"
    """Column with the prompt: plain text, or a list of chat messages with `role` and `content`."""
    chosen_column: str = "chosen"
    """Column with the better completion."""
    rejected_column: str = "rejected"
    """Column with the worse completion."""
    template: str = "{prompt}"
    """How plain text becomes a prompt; `{prompt}` is the column's text."""


PreferencesConfig = Annotated[ArithmeticPreferences | FilePreferences, Field(discriminator="kind")]
