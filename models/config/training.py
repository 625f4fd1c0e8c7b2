"""Configuration of supervised warm-up, preference training, evaluation and retention. Torch-free."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from infra.config import Fraction, Positive, Settings, Since
from infra.renamed import RenamedFrom
from models.config.denoising import DenoisingConfig


class WarmupConfig(Settings):
    """Settings for supervised warm-up (SFT), before the first iteration."""

    steps: Positive = 1200
    """Number of optimizer steps."""
    batch_size: Positive = 32
    """Sequences per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-2
    """Peak learning rate. The rate rises linearly over the first 5% of the steps, then decays to a tenth (cosine). Use
    1e-5 for pretrained policies."""
    worked_answer_fraction: Annotated[Fraction, RenamedFrom("worked_fraction")] = 0.3
    """Share of examples that train on the worked answer (with its reasoning), among problems that have one. The other
    examples train on an answer without reasoning, which is a random guess. Problems of files have no worked answers, so
    their examples always train on the reference answer. The plan says if the share has no effect."""


class DpoConfig(Settings):
    """Direct preference optimization of the policy after its warm-up (DPO, arXiv 2305.18290, eq. 7)."""

    steps: Positive = 200
    """Number of optimizer steps."""
    batch_size: Positive = 32
    """Pairs per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate. The rate rises linearly over the first 5% of the steps, then decays to a tenth (cosine). Use
    5e-7 for pretrained policies."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the KL constraint, β in the paper. Larger values keep the policy closer to its start."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs whose preference is wrongly labeled (conservative DPO)."""


# ---- evaluation
class HeldoutConfig(Settings):
    """Settings for an evaluation on held-out problems: their number, and the sampling of completions."""

    problems: Positive = 256
    """Maximum number of held-out problems. The first ones are used."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Softmax temperature; 0 is greedy decoding."""
    samples: Annotated[Positive, Since("0.1.0", before=1)] = 1
    """Number of completions per problem. Their mean reward is reported. If all rewards are 0 or 1, pass@k is reported
    too."""

    def find_conflicts(self, denoising: DenoisingConfig | None) -> Iterator[str]:
        """Yield a reason if all samples of a problem would be equal, because decoding is greedy. Pictures are exempt,
        because each starts from different noise."""
        if self.samples > 1 and self.temperature == 0 and denoising is None:
            yield (
                f"samples is {self.samples}, but at temperature 0 all completions of a problem are equal. Raise "
                "temperature, or set samples = 1"
            )


class EvaluationConfig(HeldoutConfig):
    """Held-out evaluation before, during and after a run."""

    every: Annotated[int, Field(ge=0)] = 0
    """Interval between evaluations, in iterations. With 0, only the initial and the final policy are evaluated."""
    steps: Annotated[Positive | None, Since("0.1.0", before=None)] = None
    """Denoising steps for a text-to-image policy. The default is the number used in rollouts."""

    def is_due(self, number: int) -> bool:
        """Return whether the policy after `number` iterations is evaluated. The final policy is evaluated in any
        case."""
        return number == 0 or (self.every > 0 and number % self.every == 0)


class RetentionConfig(Settings):
    """Policy versions and rollouts whose files are kept. Manifests are never deleted."""

    keep_last: Annotated[int, Field(ge=2)] = 2
    """Number of newest policy versions whose files are kept. Resuming needs two."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Interval of policy versions whose files are kept permanently. With 0, only the first and the newest versions are
    kept."""
    rollouts_keep_last: Annotated[int, Field(ge=0)] = 0
    """Number of newest iterations whose rollouts, scores and samples are kept. Files that resuming needs are always
    kept. With 0, all iterations keep them."""
