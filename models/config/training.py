"""Configuration of supervised warm-up, preference training, evaluation and retention. Torch-free."""

from collections.abc import Iterator
from math import ceil
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rheostat.infra.config import Fraction, Positive, Settings, Since
from rheostat.infra.counts import format_count
from rheostat.infra.renamed import RenamedFrom
from rheostat.infra.store.inputs import DataLocation, Location
from rheostat.models.config.chat_files import ChatColumns
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.file_rules import FileRules
from rheostat.models.config.hub_datasets import HubDatasetChoice
from rheostat.models.config.preference_losses import (
    DpoLoss,
    LabelSmoothing,
    PreferenceLoss,
    PreferenceLossConfig,
    Strength,
)

TrainedTurns = Literal["assistant", "last", "completion", "all"]


class SupervisedWarmup(Settings):
    """Settings for supervised training (SFT) of a policy, judge or simulated user before the first iteration, called
    warm-up."""

    steps: Positive = 1200
    """Number of optimizer steps."""
    batch_size: Positive = 32
    """Number of sequences per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-2
    """Peak learning rate. The rate rises linearly over the first 5% of the steps, then decays to a tenth (cosine). Use
    1e-5 for pretrained policies."""
    worked_answer_fraction: Annotated[Fraction, RenamedFrom("worked_fraction")] = 0.3
    """Share of examples that train on the worked answer (the answer with its reasoning), for problems that have one.
    The other examples train on an answer without reasoning, which is a random guess. Problems of files have no worked
    answers, so their examples always train on the reference answer. `rheostat plan` says if this setting has no
    effect."""


class ChatTraining(HubDatasetChoice, ChatColumns, FileRules):
    """Chats from a file on which warm-up trains the policy (SFT), instead of on the answers of the problems."""

    referenced_files: ClassVar[str] = "rheostat.models.data.image_files:image_files"
    """Import path `pkg.mod:function` that yields the paths of the image files that the rows of the file name."""

    path: DataLocation
    """File or folder of training chats, on this machine or at s3://bucket/name, in a format that `[data]` reads, or a
    dataset on the Hugging Face Hub."""
    heldout_path: DataLocation | None = None
    """File of chats on which the loss is measured but not trained. If not set, `heldout_fraction` of the chats in
    `path` is used."""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of chats that are held out for measuring the loss if there is no second file. A hash of the messages before
    the first turn of the assistant selects them. With 0, the loss is not measured on held-out chats."""
    messages_column: str = "messages"
    """Column with the messages of a chat, including the turns of the assistant to train on: `role` and `content`
    (OpenAI), or `from` and `value` (ShareGPT). If a file lacks the default column, other columns with chats, or a
    prompt and a completion, are searched."""
    prompt_column: Annotated[str, Since("0.2.0", before="prompt")] = "prompt"
    """Column with the prompt of rows that have a prompt and a completion: plain text, or a list of messages. Prompts
    are not trained. If this key or `completion_column` is set, `messages_column` is not read."""
    completion_column: Annotated[str, Since("0.2.0", before="completion")] = "completion"
    """Column with the completion of rows that have a prompt and a completion: plain text, or a list of messages."""
    text_column: Annotated[str, Since("0.2.0", before="text")] = "text"
    """Column with plain text that is trained as a whole, without the chat template. If this key is set,
    `messages_column` is not read. The default column is read if a file has neither chats nor completions."""
    images_column: str | None = None
    """Column with the images of a chat, in the order of their placeholders in the messages. If not set, chats have no
    images."""
    images_root: Location | None = None
    """Directory to which image paths are relative. The default is the directory of the data file."""
    image_mark: Annotated[str, Since("0.2.0", before="")] = "<image>"
    """Placeholder of an image in the texts of messages, as in files of LLaVA. Each mark becomes the next image of the
    row in `images_column`. Set "" to read marks as text. Has no effect without `images_column`."""
    loss: TrainedTurns = "assistant"
    """Tokens on which the loss is computed: "assistant" uses all turns of the assistant, "last" only the last one, and
    "all" every token except the first one. If rows have a prompt and a completion, "assistant" uses only turns in the
    completion, and "completion" uses every token of the completion."""
    packing: bool = False
    """Whether several chats are packed into one row of a batch instead of padding each to the same length. A chat never
    attends to another one, so losses and gradients are the same as without packing. Architectures that combine tokens
    outside of attention, such as state-space layers, are refused."""
    epochs: Positive | None = None
    """Number of passes over the training chats, rounded up to whole optimizer steps. If set, it replaces
    `warmup.steps`."""
    on_too_long: Literal["refuse", "drop"] = "refuse"
    """Action for chats that are longer than the policy's context: "refuse" ends the run before it begins, "drop" leaves
    them out and records their number."""

    @property
    def used_image_mark(self) -> str:
        """Placeholder of an image in the texts of messages. Empty if there is no column with images."""
        return self.image_mark if self.images_column is not None else ""


class WarmupConfig(SupervisedWarmup):
    """Supervised training (SFT) of the policy before the first iteration, on the answers of the problems or on whole
    chats."""

    checks = {
        "problems": "rheostat.models.inspection.problems:check_examples",
        "policy": "rheostat.models.inspection.chats:check_chats",
    }

    chats: Annotated[ChatTraining | None, Since("0.2.0", before=None)] = None
    """Chats on which warm-up trains. If not set, warm-up trains on the answers of the problems."""

    @model_validator(mode="after")
    def _check_chats(self) -> Self:
        if self.chats is None:
            return self
        default = type(self).model_fields["steps"].default
        if self.chats.epochs is not None and self.steps != default:
            raise ValueError(
                f"chats.epochs is {self.chats.epochs} and steps is {self.steps}, but only one of them sets the length "
                "of the training. Remove one"
            )
        if self.worked_answer_fraction != type(self).model_fields["worked_answer_fraction"].default:
            raise ValueError("worked_answer_fraction has no effect on chats. Remove it, or remove chats")
        return self

    def for_chats(self, num_chats: int) -> Self:
        """Return the settings with `steps` computed from `chats.epochs` for this number of training chats. Unchanged if
        `chats.epochs` is not set."""
        if self.chats is None or self.chats.epochs is None:
            return self
        return self.model_copy(update={"steps": ceil(self.chats.epochs * num_chats / self.batch_size)})

    def describe(self) -> str:
        """Return the length of the training as text for `rheostat plan`, such as `1,200 steps of 32 examples`."""
        if self.chats is None:
            return f"{format_count(self.steps, 'step')} of {format_count(self.batch_size, 'example')}"
        epochs = self.chats.epochs
        length = format_count(self.steps, "step") if epochs is None else format_count(epochs, "epoch")
        turns = {
            "assistant": "the assistant's turns",
            "last": "the last turn",
            "completion": "the completions",
            "all": "all tokens",
        }[self.chats.loss]
        return (
            f"{length} of {format_count(self.batch_size, 'chat')} per step, loss on {turns}"
            + ", packed" * self.chats.packing
        )


class DpoConfig(Settings):
    """Settings for training the policy on preference pairs after its warm-up, with direct preference optimization (DPO,
    arXiv 2305.18290, eq. 7) or another loss."""

    steps: Positive = 200
    """Number of optimizer steps."""
    batch_size: Positive = 32
    """Number of preference pairs per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate. The rate rises linearly over the first 5% of the steps, then decays to a tenth (cosine). Use
    5e-7 for pretrained policies."""
    beta: Strength = 0.1
    """Strength of the KL constraint, β in the paper. Larger values keep the policy closer to the one with which DPO
    starts. If `loss` is set, use the keys of `loss` instead."""
    label_smoothing: LabelSmoothing = 0.0
    """Probability with which the preference of a pair is assumed to be labeled wrongly (conservative DPO). If `loss` is
    set, use the keys of `loss` instead."""
    loss: Annotated[PreferenceLossConfig | None, Since("0.2.0", before=None)] = None
    """Loss of a preference pair. The default is DPO with `beta` and `label_smoothing` of this table."""

    @property
    def objective(self) -> PreferenceLoss:
        """Loss of a preference pair, with all its settings."""
        return self.loss or DpoLoss(beta=self.beta, label_smoothing=self.label_smoothing)

    def describe(self, noun: str = "pair") -> str:
        """Describe the length of the training, and the loss unless it is DPO, for plans and messages. `noun` is the
        singular noun for one preference."""
        length = f"{format_count(self.steps, 'step')} of {format_count(self.batch_size, noun)}"
        return length if self.objective.label == "dpo" else f"{length}, loss {self.objective.label!r}"

    def find_conflicts(self) -> Iterator[str]:
        """Yield one message for each setting that the loss does not read or with which it cannot be computed."""
        for name in ("beta", "label_smoothing"):
            value = getattr(self, name)
            if self.loss is not None and value != type(self).model_fields[name].default:
                yield (
                    f"dpo.{name} is {value:g}, but it has no effect if dpo.loss is set (dpo.loss.kind = "
                    f"{self.loss.label!r}). Remove dpo.{name}, and set the keys of [dpo.loss]"
                )
        if self.objective.uses_reference_point and self.batch_size < 2:
            yield (
                f"dpo.batch_size is {self.batch_size}, but dpo.loss.kind = {self.objective.label!r} combines prompts "
                "with the completions of other pairs of the step. Set dpo.batch_size to at least 2"
            )


# ---- evaluation
class HeldoutConfig(Settings):
    """Settings for an evaluation on held-out problems: how many problems, and how their completions are sampled."""

    problems: Positive = 256
    """Maximum number of held-out problems. If there are more, the first ones are used."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Softmax temperature; 0 is greedy decoding."""
    samples: Annotated[Positive, Since("0.1.0", before=1)] = 1
    """Number of completions per problem. The mean of their rewards is reported, and pass@k if all rewards are 0 or
    1."""

    def find_conflicts(self, denoising: DenoisingConfig | None) -> Iterator[str]:
        """Yield a message if several completions per problem are configured with greedy decoding, because they would
        all be equal. Pictures (`denoising` is set) are exempt, because each starts from different noise."""
        if self.samples > 1 and self.temperature == 0 and denoising is None:
            yield (
                f"samples is {self.samples}, but at temperature 0 all completions of a problem are equal. Raise "
                "temperature, or set samples = 1"
            )


class EvaluationConfig(HeldoutConfig):
    """Settings for the evaluation on held-out problems before, during and after a run."""

    every: Annotated[int, Field(ge=0)] = 0
    """Number of iterations between two evaluations. With 0, only the initial and the final policy are evaluated."""
    steps: Annotated[Positive | None, Since("0.1.0", before=None)] = None
    """Number of denoising steps for a text-to-image policy. The default is the number used in rollouts."""

    def is_due(self, number: int) -> bool:
        """Return whether the policy is evaluated after `number` iterations. The final policy is always evaluated,
        whatever this returns."""
        return number == 0 or (self.every > 0 and number % self.every == 0)


class RetentionConfig(Settings):
    """Settings for how long the files of policy versions and rollouts are kept. Manifests, which describe the files,
    are never deleted."""

    keep_last: Annotated[int, Field(ge=2)] = 2
    """Number of newest policy versions whose files are kept. Resuming a run needs two."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Interval, in versions, of the policy versions whose files are kept for good. With 0, only the first and the
    newest versions are kept."""
    rollouts_keep_last: Annotated[int, Field(ge=0)] = 0
    """Number of newest iterations whose rollouts, scores and samples are kept. Files that are needed for resuming are
    kept in any case. With 0, the files of all iterations are kept."""
