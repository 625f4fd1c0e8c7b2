"""Configuration of a run's budget and prices. They limit a run but do not change its results. Torch-free."""

from typing import Annotated

from pydantic import Field

from infra.config import Positive, Settings
from infra.costs import Cost

Price = Annotated[float, Field(ge=0)]
Limit = Annotated[float, Field(gt=0)]


class JudgePrices(Settings):
    """Prices of the answers of a judge behind an endpoint."""

    per_thousand_calls: Price = 0
    """Price of 1,000 answers."""
    per_million_tokens_read: Price = 0
    """Price of 1,000,000 prompt tokens, if the endpoint reports them (`usage.prompt_tokens`)."""
    per_million_tokens_written: Price = 0
    """Price of 1,000,000 completion tokens (`usage.completion_tokens`)."""

    def price_answers(self, cost: Cost) -> float:
        """Return the total price of a judge's calls and tokens."""
        tokens = self.per_million_tokens_read * cost.prompt_tokens
        tokens += self.per_million_tokens_written * cost.written_tokens
        return self.per_thousand_calls * cost.judge_calls / 1e3 + tokens / 1e6


class Prices(Settings):
    """Prices of workers, GPUs and judges, all in one currency of your choice."""

    per_worker_hour: Price = 0
    """Price of reserving one worker for an hour."""
    per_gpu_hour: Price = 0
    """Price of reserving one GPU for an hour, in addition to the price of its worker."""
    judges: dict[str, JudgePrices] = {}
    """Prices of judges behind endpoints, by reward term: `judges.quality = { per_thousand_calls = 0.5 }`."""

    def price_workers(self, cost: Cost) -> float:
        """Return the total price of the hours for which workers and GPUs were reserved."""
        return self.per_worker_hour * cost.worker_hours + self.per_gpu_hour * cost.gpu_hours


class BudgetConfig(Settings):
    """Limits for a whole run. The run ends after the iteration that reaches a limit, and continues if the limit is
    raised."""

    tokens: Positive | None = None
    """Maximum number of tokens read, generated or trained on by all models of the run. If not set, there is no
    limit."""
    worker_hours: Limit | None = None
    """Maximum hours for which workers are reserved, busy or idle, summed over all workers."""
    gpu_hours: Limit | None = None
    """Maximum hours for which GPUs are reserved, summed over all GPUs."""
    judge_calls: Positive | None = None
    """Maximum number of answers from judges and reward models."""
    bytes: Positive | None = None
    """Maximum bytes written to the store. Bytes of files that retention deletes later still count."""
    price: Limit | None = None
    """Maximum total price, in the currency of `prices`."""
    prices: Prices = Prices()
    """Prices of workers, GPUs and judges, from which the total price is computed."""

    def find_spent_limit(self, spent: Cost) -> str | None:
        """Return a message with the first limit that `spent` has reached, or None if it has reached no limit."""
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
