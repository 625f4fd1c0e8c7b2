"""Configuration of a run's budget and prices. Torch-free. The results of a run do not depend on it."""

from typing import Annotated

from pydantic import Field

from infra.config import Positive, Settings
from infra.costs import Cost

Price = Annotated[float, Field(ge=0)]
Limit = Annotated[float, Field(gt=0)]


class JudgePrices(Settings):
    """Prices for the answers of a judge behind an endpoint."""

    per_thousand_calls: Price = 0
    """Price of 1,000 answers."""
    per_million_tokens_read: Price = 0
    """Price of 1,000,000 prompt tokens, if the endpoint reports them (`usage.prompt_tokens`)."""
    per_million_tokens_written: Price = 0
    """Price of 1,000,000 completion tokens (`usage.completion_tokens`)."""

    def price_answers(self, cost: Cost) -> float:
        """Return the price of a judge's calls and tokens."""
        tokens = self.per_million_tokens_read * cost.prompt_tokens
        tokens += self.per_million_tokens_written * cost.written_tokens
        return self.per_thousand_calls * cost.judge_calls / 1e3 + tokens / 1e6


class Prices(Settings):
    """Prices in one currency of your choice."""

    per_worker_hour: Price = 0
    """Price of one reserved worker for an hour."""
    per_gpu_hour: Price = 0
    """Price of one reserved GPU for an hour, in addition to its worker."""
    judges: dict[str, JudgePrices] = {}
    """Prices of judges behind endpoints, by reward term: `judges.quality = { per_thousand_calls = 0.5 }`."""

    def price_workers(self, cost: Cost) -> float:
        """Return the price of the time of workers and GPUs."""
        return self.per_worker_hour * cost.worker_hours + self.per_gpu_hour * cost.gpu_hours


class BudgetConfig(Settings):
    """Limits for a whole run: it ends after the iteration that reaches a limit, and continues if the limit is
    raised."""

    tokens: Positive | None = None
    """Maximum number of tokens read, generated and trained on by all roles. If not set, there is no limit."""
    worker_hours: Limit | None = None
    """Maximum hours for which workers are reserved, busy or idle, summed over all workers."""
    gpu_hours: Limit | None = None
    """Maximum hours for which GPUs are reserved, summed over all GPUs."""
    judge_calls: Positive | None = None
    """Maximum number of answers from models behind rewards."""
    bytes: Positive | None = None
    """Maximum bytes of shards and bundles written to the store. Deletions by retention are not subtracted."""
    price: Limit | None = None
    """Maximum total price."""
    prices: Prices = Prices()
    """Prices of workers, GPUs and judges."""

    def find_spent_limit(self, spent: Cost) -> str | None:
        """Return a message with the first limit that is reached and the amount spent, or None if no limit is
        reached."""
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
                return f"budget.{name} is {limit:,}, and the run has used {used:,{digits}}"
        return None
