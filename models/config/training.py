"""Configuration of supervised warm-up, preference learning, evaluation and retention. Torch-free."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from infra.config import Fraction, Positive, Settings, Since
from models.config.denoising import DenoisingConfig


class WarmupConfig(Settings):
    """Supervised warm-up before the first iteration."""

    steps: Positive = 1200
    """Optimizer steps."""
    batch_size: Positive = 32
    """Sequences per step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-2
    """Peak learning rate; linear over 5% of the steps, then cosine to a tenth. Pretrained policies take 1e-5."""
    worked_fraction: Fraction = 0.3
    """Share of examples of problems with a worked answer that show it; the others show a bare guess."""


class DpoConfig(Settings):
    """Direct preference optimisation of the policy after its warm-up (DPO, arXiv 2305.18290, eq. 7)."""

    steps: Positive = 200
    """Optimizer steps."""
    batch_size: Positive = 32
    """Pairs per step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate; linear over 5% of the steps, then cosine to a tenth. Pretrained policies take 5e-7."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How closely the policy is held to where it starts."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that are taken to be the wrong way round (conservative DPO)."""


# ---- evaluation
class HeldoutConfig(Settings):
    """How many held-out problems are asked, and how."""

    problems: Positive = 256
    """Held-out problems used, the first so many."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Softmax temperature; 0 is greedy."""
    samples: Annotated[Positive, Since("0.1.0", before=1)] = 1
    """Completions of each problem; their mean counts, and pass@k stands beside it where rewards are 0 or 1."""

    def reasons_against(self, denoising: DenoisingConfig | None) -> Iterator[str]:
        """Yield a line where all samples of a problem would be the same; pictures begin with noise of their own."""
        if self.samples > 1 and self.temperature == 0 and denoising is None:
            yield f"samples {self.samples} at temperature 0 are all the same: use a temperature above 0, or samples 1"


class EvaluationConfig(HeldoutConfig):
    """Held-out evaluation before, during and after a run."""

    every: Annotated[int, Field(ge=0)] = 0
    """Iterations between evaluations; 0 evaluates only at the start and the end."""
    steps: Annotated[Positive | None, Since("0.1.0", before=None)] = None
    """Denoising steps, of a policy that draws; none takes those of rollouts."""

    def is_due(self, number: int) -> bool:
        """Whether the policy after so many iterations is evaluated, be it the last or not."""
        return number == 0 or (self.every > 0 and number % self.every == 0)


class RetentionConfig(Settings):
    """Which policy versions and rollouts keep their files; manifests always stay."""

    keep_last: Annotated[int, Field(ge=2)] = 2
    """Newest versions kept; resuming needs them."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Every n-th version is kept for good; 0 keeps none but the first and the newest."""
    rollouts_keep_last: Annotated[int, Field(ge=0)] = 0
    """Newest iterations that keep rollouts, scores and samples, beside those that resuming needs; 0 keeps all."""
