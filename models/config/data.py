"""Configuration of the problems to train on. Torch-free."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rheostat.infra.config import Positive, Since
from rheostat.infra.demos import FORMER_DATA_KINDS
from rheostat.infra.renamed import RenamedFrom
from rheostat.infra.store.inputs import DataLocation, Location, ModelLocation
from rheostat.infra.variants import OneOf, Target, Variant
from rheostat.models.config.chat_files import ChatFile
from rheostat.models.config.file_rules import FileRules
from rheostat.models.config.hub_datasets import HubDatasetChoice
from rheostat.models.config.images import ImageFileSettings, PixelLimits
from rheostat.models.config.tasksets import NamedTask, TaskChoice, TasksetChoice
from rheostat.models.config.texts import TextSettings

OnTooLong = Literal["refuse", "drop"]


class DataSource(TextSettings, Variant):
    """Fields common to all sources of problems. `implementation` names a
    `rheostat.models.data.problems.ProblemSource`."""

    checks = {
        "settings": "rheostat.models.inspection.problems:check_source",
        "problems": "rheostat.models.inspection.problems:check_problems",
        "policy": "rheostat.models.inspection.problems:check_prompts",
    }
    makes_pairs: ClassVar[bool] = False
    """Whether preference pairs can be built from the problems of this source, with `preferences.kind =
    "answers"`. Every problem then has a reference answer or a worked solution that ends in a number."""
    guess_template: ClassVar[str] = "#### {}"
    """Template of an answer without reasoning on which warm-up trains, for problems that have worked answers. `{}` is
    replaced by a random number."""
    max_guess: ClassVar[int] = 20
    """Largest random number that replaces `{}` in `guess_template`."""
    referenced_files: ClassVar[str] = ""
    """Import path `pkg.mod:function` that yields the files named in the rows of the source's files, such as images.
    Empty if there are none."""
    reading_reporter: ClassVar[str] = ""
    """Import path `pkg.mod:function` of a `rheostat.models.data.reading.ReadingReporter`, which reports how this source
    reads its files. Empty if the source reads no files."""
    exclusion_filter: ClassVar[str] = ""
    """Import path `pkg.mod:function` of a `rheostat.models.data.problems.ExclusionFilter`, which returns the training
    problems that this source excludes, such as near-duplicates of held-out problems. Empty if it excludes none."""

    is_evaluation_only: ClassVar[bool] = False
    """Whether all problems of this source are held out, so that it can only be used in `[[evaluations]]`. Its training
    problems are then a single held-out problem, on which nothing is trained."""
    pictures: ClassVar[str] = ""
    """Import path `pkg.mod:function` of a `rheostat.models.data.examples.PictureSource`, which generates pictures for
    the warm-up of text-to-image policies. Empty if the source has no pictures."""

    exclude_ids_path: Annotated[Location | None, Since("0.1.0", before=None), RenamedFrom("without")] = None
    """File with one prompt_id per line, on this machine or at s3://bucket/name. Problems with these ids are not used
    for training iterations."""
    on_too_long: Annotated[OnTooLong, Since("0.1.0", before="refuse"), RenamedFrom("too_long")] = "refuse"
    """Action if the prompt of a problem leaves no room for a completion in the policy's context: "refuse" ends the run
    before it begins, unless `drop` contains "too_long". "drop" has the same effect as "too_long" in `drop`."""
    drop: Annotated[tuple[Literal["empty", "too_long"], ...], Since("0.2.0", before=())] = ()
    """Kinds of problems that are left out of iterations, evaluations and warm-up, and counted, instead of ending the
    run before it begins: "empty" (rows of files with a blank or missing prompt, message or answer) and "too_long" (the
    prompt leaves no room for a completion in the policy's context)."""

    image_background: Annotated[
        Annotated[str, Field(pattern=r"^(white|black|#[0-9a-fA-F]{6}|unconverted)$")],
        Since("0.2.0", before="unconverted"),
    ] = "white"
    """Background color that replaces the transparent parts of images: `white`, `black` or `#rrggbb`. Gray images with
    more than 8 bits are scaled to 8 bits. `unconverted` passes all images to the policy unchanged, which drops
    transparency and turns most shades of 16-bit images white."""
    image_version: Annotated[int, Field(ge=1, le=2), Since("0.2.0", before=1)] = 2
    """Version of the rules for reading images. In version 2, colors of 16 bits are rounded to 8 bits, and truncated
    images are refused. In version 1, the upper 8 bits are read, and missing pixels of PNG and JPEG files are black or
    gray. Runs that began before this key existed use version 1."""

    @property
    def long_prompts(self) -> OnTooLong:
        """Action for problems whose prompt is too long, as determined by `drop` and `on_too_long`."""
        return "drop" if "too_long" in self.drop else self.on_too_long

    @property
    def has_answers(self) -> bool:
        """Whether every problem has a reference answer. Warm-up trains on these answers, and the examples for training
        judges are built from them."""
        return True

    @property
    def has_rubrics(self) -> bool:
        """Whether every problem has a rubric: a list of criteria by which a judge can rate completions."""
        return False

    @property
    def num_heldout_problems(self) -> int | None:
        """Number of held-out problems, or None if it is not known before the problems are read or generated."""
        return None

    @property
    def weights(self) -> tuple[float, ...]:
        """Sampling weight of each part of the training problems, such as each file of a mixture, by index
        (`Problem.part`). Empty if the problems have only one part."""
        return ()

    @property
    def pixels(self) -> PixelLimits:
        """Minimum and maximum size, in pixels, of the images that the policy receives."""
        return PixelLimits()


class GeneratedData(DataSource):
    """Fields common to sources that generate a configured number of problems. A hash of each problem assigns it to
    training or evaluation, so no problem is in both."""

    train_problems: Positive = 4096
    """Number of training problems."""
    heldout_problems: Positive = 256
    """Number of problems that are kept for evaluation and never trained on."""

    @property
    def num_heldout_problems(self) -> int | None:
        """Number of held-out problems, as configured."""
        return self.heldout_problems


class ProblemFile(HubDatasetChoice, ChatFile, FileRules, ImageFileSettings):
    """Settings for a file of problems: its path, its columns, and how its rows become prompts."""

    path: DataLocation
    """File of training problems, on this machine or at s3://bucket/name: .jsonl, .json with an array, .csv or .tsv
    (each also compressed as .gz or .zst), .parquet, .arrow or .feather. Or a folder of such files, a folder that
    `save_to_disk` of `datasets` wrote, or the name of a dataset on the Hugging Face Hub, such as `openai/gsm8k`
    (docs/hub.md)."""
    heldout_path: DataLocation | None = None
    """File or folder of evaluation problems. If not set, `heldout_fraction` of the problems in `path` is kept for
    evaluation."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of problems kept for evaluation if there is no second file. A hash of the prompt selects the problems."""
    answer_column: str | None = "answer"
    """Column with the reference answer. Set "" to read no answers, which is possible if no reward needs them."""
    answer_columns: Annotated[tuple[str, ...], Since("0.2.0", before=())] = ()
    """Columns that form the reference answer together and replace `answer_column`. The answer is then a JSON object
    with the values of these columns. Use it for rewards such as `ifeval`, whose instructions are in two columns."""
    rubric_column: Annotated[str | None, Since("0.2.0", before=None)] = None
    """Column with the problem's rubric, for judges with `verdict.kind` "rubric": a list of objects, or JSON text of
    such a list. Each object has the text of a criterion in `criterion`, `description`, `text` or `title`, and its
    weight in `weight` or `points`. Environments receive the rubric as `rubric`. Rows that differ only in their rubrics
    are different problems."""
    environment_columns: Annotated[tuple[str, ...], Since("0.1.0", before=())] = ()
    """Columns that an environment receives in its `problem`, in addition to prompt and answer. Rows that differ only in
    these columns are different problems."""
    template: str = "{prompt}"
    """Template into which a plain-text prompt is inserted; `{prompt}` is replaced by the text of the column. Chats are
    formatted by the tokenizer's chat template instead. Markers such as `<|im_start|>` in this template are ordinary
    text, unless `special_tokens` is "parse"."""
    system: Annotated[Annotated[str, Field(min_length=1)] | None, Since("0.1.0", before=None)] = None
    """System message that is added at the start of each chat without one. A plain-text prompt then becomes a chat: this
    system message and one user message."""
    limit: Positive | None = None
    """Maximum number of problems to read from each file."""

    @field_validator("environment_columns")
    @classmethod
    def _require_unique_columns(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        if reserved := {"prompt", "answer"} & set(columns):
            raise ValueError(
                f"{sorted(reserved)[0]!r} must not be listed in environment_columns, because environments always "
                "receive the prompt and the answer. Remove it"
            )
        if len(set(columns)) < len(columns):
            raise ValueError(f"each column may be listed only once, found {', '.join(columns)}. Remove the repetition")
        return columns

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        default = ProblemFile.model_fields["answer_column"].default
        if self.answer_columns and (self.answer_column or default) != default:
            raise ValueError("answer_column and answer_columns are both set. Remove one of them")
        if self.rubric_column and "rubric" in self.environment_columns:
            raise ValueError("environment_columns must not list 'rubric', the name of the rubric. Remove it")
        return self

    @property
    def has_rubrics(self) -> bool:
        """Whether every problem has a rubric, because `rubric_column` is set."""
        return self.rubric_column is not None

    @property
    def required_answer_columns(self) -> tuple[str, ...]:
        """Names of the columns from which the reference answer is read. Empty if no answers are read."""
        return self.answer_columns or tuple(filter(None, (self.answer_column,)))

    @property
    def has_answers(self) -> bool:
        """Whether every problem has a reference answer, because a column of answers is configured."""
        return bool(self.answer_columns) or self.answer_column is not None


class FileData(ProblemFile, DataSource):
    """Problems from one file or folder of JSON, CSV, Parquet or Arrow."""

    implementation = "rheostat.models.data.files:file_problems"
    referenced_files = "rheostat.models.data.image_files:image_files"
    reading_reporter = "rheostat.models.data.files:report_file"

    kind: Literal["file"] = "file"


class WeightedFile(ProblemFile):
    """One file of a mixture, with the same settings as a file of `kind = "file"`, and its weight."""

    weight: Annotated[float, Field(gt=0)] = 1
    """Weight of this file: the share of prompts in an iteration that come from it is this weight divided by the sum of
    all weights."""


class MixtureData(DataSource):
    """Problems from several files. Iterations sample from the files by weight, whatever the number of problems in each.

    Each file has its own random order and is repeated as often as needed. Warm-up uses every problem equally often.
    """

    implementation = "rheostat.models.data.mixture:mixed_problems"
    referenced_files = "rheostat.models.data.mixture:mixed_image_files"
    reading_reporter = "rheostat.models.data.mixture:report_mixture"

    kind: Literal["mixture"] = "mixture"
    sources: Annotated[tuple[WeightedFile, ...], Field(min_length=1)]
    """Files of the mixture, each with its weight. The held-out problems of all files are mixed by the same weights."""

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
    def has_rubrics(self) -> bool:
        """Whether every file has a column with rubrics."""
        return all(source.has_rubrics for source in self.sources)

    @property
    def weights(self) -> tuple[float, ...]:
        """Configured weight of each file, in order."""
        return tuple(source.weight for source in self.sources)

    @property
    def pixels(self) -> PixelLimits:
        """Minimum and maximum image size in pixels, which must be the same for all files."""
        return self.sources[0].pixels


class DeduplicatedData(DataSource):
    """Problems from files, except the training problems that are nearly equal to a held-out problem. A retriever (text
    embedding model) measures the similarity."""

    implementation = "rheostat.models.retrieval.deduplicated:deduplicated_problems"
    referenced_files = "rheostat.models.retrieval.deduplicated:find_referenced_images"
    reading_reporter = "rheostat.models.retrieval.deduplicated:report_source"
    exclusion_filter = "rheostat.models.retrieval.deduplicated:near_duplicates"

    kind: Literal["deduplicated"] = "deduplicated"
    source: Annotated[FileData | MixtureData, Field(discriminator="kind")]
    """Source of the problems from which near-duplicates are then excluded."""
    retriever: ModelLocation
    """Retriever that measures the similarity: directory of a sentence-transformers model, on this machine or at
    s3://bucket/name, or a name on the Hugging Face Hub (docs/retrieval.md)."""
    similarity: Annotated[float, Field(gt=0, le=1), RenamedFrom("bound")] = 0.95
    """Cosine similarity from which a training problem is excluded, if a held-out prompt is that similar to its
    prompt."""

    @model_validator(mode="after")
    def _require_unset_in_source(self) -> Self:
        for key in (
            "exclude_ids_path",
            "on_too_long",
            "drop",
            "image_background",
            "image_version",
            *TextSettings.model_fields,
        ):
            if getattr(self.source, key) not in (DataSource.model_fields[key].default, getattr(self, key)):
                raise ValueError(f"source.{key} must not be set. Set {key} in the table that contains `source`")
        return self

    @property
    def has_answers(self) -> bool:
        """Whether every problem of `source` has a reference answer."""
        return self.source.has_answers

    @property
    def has_rubrics(self) -> bool:
        """Whether every problem of `source` has a rubric."""
        return self.source.has_rubrics

    @property
    def weights(self) -> tuple[float, ...]:
        """Sampling weight of each part of the problems of `source`, such as each file of a mixture."""
        return self.source.weights

    @property
    def pixels(self) -> PixelLimits:
        """Minimum and maximum size, in pixels, of the images of `source`."""
        return self.source.pixels


class PackageData(TaskChoice, DataSource):
    """Fields common to sources of tasks that another package defines and scores."""

    implementation = "rheostat.models.data.tasksets:list_problems"

    limit: Positive | None = None
    """Number of tasks to read. Tasksets without an end require it."""

    @property
    def has_answers(self) -> bool:
        """False, because the package computes the rewards."""
        return False

    @property
    def heldout_share(self) -> float:
        """Share of the tasks kept for evaluation."""
        return 1.0


class VerifiersData(TasksetChoice, PackageData):
    """Tasks of a taskset of the package verifiers, for `rollout.environment.kind = "verifiers"`."""

    kind: Literal["verifiers"] = "verifiers"
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the tasks kept for evaluation. A hash of the task selects them."""

    @property
    def heldout_share(self) -> float:
        """Share of the tasks kept for evaluation, as configured."""
        return self.heldout_fraction


class LmEvalData(NamedTask, PackageData):
    """Items of a task of lm-eval, for a suite of `[[evaluations]]`. All items are held out."""

    package = "lm_eval"
    is_evaluation_only = True

    kind: Literal["lm_eval"] = "lm_eval"


class InspectData(NamedTask, PackageData):
    """Samples of a task of Inspect, for a suite of `[[evaluations]]`. All samples are held out."""

    package = "inspect"
    is_evaluation_only = True

    kind: Literal["inspect"] = "inspect"


class TargetData(Target):
    """User-defined source of problems: a subclass of `rheostat.models.config.data.DataSource` (see "Extending" in the
    documentation)."""

    former_kinds = FORMER_DATA_KINDS


DataConfig = Annotated[
    DataSource,
    OneOf((FileData, MixtureData, DeduplicatedData, VerifiersData, LmEvalData, InspectData, TargetData)),
    Field(examples=[{"kind": "file", "path": "problems.jsonl"}]),
]
