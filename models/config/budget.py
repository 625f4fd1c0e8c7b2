"""Configuration of what a run may take, and of what that costs. Torch-free; no bit of a run depends on it."""

from typing import Annotated

from pydantic import Field

from infra.config import Positive, Settings
from infra.costs import Cost

Price = Annotated[float, Field(ge=0)]
Limit = Annotated[float, Field(gt=0)]


class JudgePrices(Settings):
    """What the answers of a judge behind an endpoint cost."""

    per_thousand_calls: Price = 0
    """Of 1,000 answers."""
    per_million_tokens_read: Price = 0
    """Of 1,000,000 tokens that it reads, as far as the endpoint tells them (`usage.prompt_tokens`)."""
    per_million_tokens_written: Price = 0
    """Of 1,000,000 tokens that it writes (`usage.completion_tokens`)."""

    def of(self, cost: Cost) -> float:
        """Price what was asked of it."""
        tokens = self.per_million_tokens_read * cost.prompt_tokens
        tokens += self.per_million_tokens_written * cost.written_tokens
        return self.per_thousand_calls * cost.judge_calls / 1e3 + tokens / 1e6


class Prices(Settings):
    """What things cost, in one currency of your choice."""

    per_worker_hour: Price = 0
    """Of one worker that is held for an hour."""
    per_gpu_hour: Price = 0
    """Of one GPU that is held for an hour, beside its worker."""
    judges: dict[str, JudgePrices] = {}
    """Of judges behind endpoints, by reward term: `judges.quality = { per_thousand_calls = 0.5 }`."""

    def of_workers(self, cost: Cost) -> float:
        """Price the time of workers and GPUs."""
        return self.per_worker_hour * cost.worker_hours + self.per_gpu_hour * cost.gpu_hours


class BudgetConfig(Settings):
    """What a run may take in all: it ends after the iteration that reaches a limit, and goes on with a larger one."""

    tokens: Positive | None = None
    """Tokens read, written and learnt, by all roles; none sets no limit."""
    worker_hours: Limit | None = None
    """Hours that workers are held, at work or not, summed over them."""
    gpu_hours: Limit | None = None
    """Hours that GPUs are held, summed over them."""
    judge_calls: Positive | None = None
    """Answers of models behind rewards."""
    bytes: Positive | None = None
    """Bytes of shards and bundles that the run writes to its store; what retention deletes is not taken off."""
    price: Limit | None = None
    """Sum of all prices."""
    prices: Prices = Prices()
    """What things cost."""

    def reached(self, spent: Cost) -> str | None:
        """Say which limit is reached and what was spent; none where there is room."""
        limits = {
            "tokens": (self.tokens, spent.tokens),
            "worker_hours": (self.worker_hours, spent.worker_hours),
            "gpu_hours": (self.gpu_hours, spent.gpu_hours),
            "judge_calls": (self.judge_calls, spent.judge_calls),
            "bytes": (self.bytes, spent.bytes),
            "price": (self.price, spent.price),
        }
        for name, (limit, used) in limits.items():
            if limit is not None and used >= limit:
                digits = "" if isinstance(used, int) else ".4g"
                return f"budget.{name} {limit:,}: {used:,{digits}} are spent"
        return None
