"""Configuration of process reward models, which score every step of a completion, and of their data. Torch-free."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rheostat.infra.config import Positive
from rheostat.infra.store.inputs import ModelLocation
from rheostat.models.config.example_files import ExampleFile
from rheostat.models.config.reward_terms import BlankLines, Granularity, ProbabilityAggregation, Segmentation
from rheostat.models.config.served_models import HostedModelReward, ServedModel


class StepLabelFile(ExampleFile):
    """File or folder of solutions that are divided into steps, with one label for each step. The default columns are
    those of TRL's datasets for stepwise supervision."""

    table = "labels"
    noun = "row with labeled steps"

    steps_column: str = "completions"
    """Column with the steps of a solution: a list of texts without the text between the steps."""
    labels_column: str = "labels"
    """Column with the labels of the steps: a list of booleans or of numbers from 0 to 1, one for each step. A number
    between 0 and 1 is a soft label: the probability that the step is right."""
    drop: tuple[Literal["empty", "too_long"], ...] = ()
    """Kinds of rows that are left out instead of refusing the file: "empty" (a blank or missing prompt or step, or no
    step) and "too_long" (more tokens than the model's context)."""


class ProcessModel(ServedModel):
    """Fields common to all process reward models."""

    @property
    def step_labels(self) -> StepLabelFile | None:
        """Labeled solutions on which the run trains the model, or None if the run does not train the model."""
        return None


class DirectoryProcessModel(ProcessModel):
    """Process reward model loaded from a directory in Hugging Face format: a token classifier with two labels, as TRL's
    former PRMTrainer wrote it. The run stores a copy of the directory."""

    implementation = "rheostat.models.modeling.initial:write_process_model"
    inspection = "rheostat.models.inspection.other_models:check_directory_process_model"

    kind: Literal["directory"] = "directory"
    path: ModelLocation
    """Directory with config.json, safetensors and tokenizer, or a model on the Hugging Face Hub (docs/hub.md)."""


class TrainedProcessModel(ProcessModel):
    """Process reward model that the run trains on step labels, by the binary cross-entropy of each label (arXiv
    2305.20050, 2312.08935). Training starts from the initial policy with a head of two outputs."""

    training = "rheostat.models.records.training_orders:order_process_model_training"

    kind: Literal["trained"] = "trained"
    labels: StepLabelFile
    """Solutions with a label for each step."""
    steps: Positive = 600
    """Number of optimizer steps."""
    batch_size: Positive = 32
    """Number of solutions per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate. The rate rises linearly over the first 5% of the steps, then decays to a tenth (cosine). Use
    1e-5 for pretrained policies."""

    @property
    def step_labels(self) -> StepLabelFile | None:
        """Labeled solutions on which the run trains the model."""
        return self.labels

    @property
    def begins_as_policy(self) -> bool:
        """Whether the model starts as a copy of the policy. This is always true."""
        return True


ProcessModelConfig = Annotated[DirectoryProcessModel | TrainedProcessModel, Field(discriminator="kind")]


class ProcessModelReward(HostedModelReward):
    """Reward of every step of a completion, computed by a process reward model: the probability that the step is
    right."""

    scorer = "rheostat.models.workers.process_model:StepScorer"
    checks = {"policy": "rheostat.models.inspection.step_labels:check_step_labels"}
    example = '{ kind = "process_model", model = { kind = "directory", path = "models/process" } }'

    kind: Literal["process_model"] = "process_model"
    model: ProcessModelConfig
    """Process reward model that scores the steps."""
    steps: Segmentation = BlankLines()
    """Method that divides the completion into steps."""
    separator: Annotated[str, Field(min_length=1)] = "\n"
    """Text that the model reads after each step, in training and in scoring. The score of a step is computed at the
    last token of this text. The default is that of TRL's former PRMTrainer."""
    aggregate: ProbabilityAggregation = "min"
    """Method that combines the scores of the steps into one number per completion, for metrics, evaluations and
    algorithms that do not assign credit to steps: the lowest score ("min", as in Math-Shepherd), the product of the
    scores ("product", as in arXiv 2305.20050), the mean, or the score of the last step."""
    batch_tokens: Positive = 16384
    """Maximum number of tokens, including padding, in one forward pass."""

    chat_prompt: ClassVar[Literal["messages"]] = "messages"
    """Form in which the model receives chat prompts: always the messages, for the model's chat template."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Lowest and highest score: 0 and 1."""
        return 0.0, 1.0

    @property
    def granularity(self) -> Granularity:
        """Unit that this reward scores: always "step"."""
        return "step"

    @property
    def aggregation(self) -> ProbabilityAggregation:
        """Method that combines the scores of steps into one number per completion."""
        return self.aggregate

    @property
    def model_steps(self) -> Segmentation | None:
        """Method that divides completions into the steps that the model scores."""
        return self.steps

    @property
    def is_trained(self) -> bool:
        """Whether the run trains the process reward model."""
        return self.model.training is not None
