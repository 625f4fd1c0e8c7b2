"""Configuration of a run's budget and prices. They limit a run but do not change its results. Torch-free."""

from typing import Annotated

from pydantic import Field

from rheostat.infra.config import Positive, Settings
from rheostat.infra.costs import Cost

Price = Annotated[float, Field(ge=0)]
Limit = Annotated[float, Field(gt=0)]


class JudgePrices(Settings):
    """Prices for the use of a judge behind an endpoint."""

    per_thousand_calls: Price = 0
    """Price of 1,000 answers of the judge."""
    per_million_tokens_read: Price = 0
    """Price of 1,000,000 prompt tokens, if the endpoint reports them (`usage.prompt_tokens`)."""
    per_million_tokens_written: Price = 0
    """Price of 1,000,000 completion tokens, if the endpoint reports them (`usage.completion_tokens`)."""

    def price_answers(self, cost: Cost) -> float:
        """Return the total price of a judge's answers, from their number and their tokens in `cost`."""
        tokens = self.per_million_tokens_read * cost.prompt_tokens
        tokens += self.per_million_tokens_written * cost.written_tokens
        return self.per_thousand_calls * cost.judge_calls / 1e3 + tokens / 1e6


class Prices(Settings):
    """Prices of workers, GPUs and judges. All prices are in the same currency, which you choose."""

    per_worker_hour: Price = 0
    """Price of reserving one worker for an hour, whether it is busy or idle."""
    per_gpu_hour: Price = 0
    """Price of reserving one GPU for an hour. The price of the worker that uses the GPU is added."""
    judges: dict[str, JudgePrices] = {}
    """Prices of judges behind endpoints, by the name of the reward term: `judges.quality = { per_thousand_calls = 0.5
    }`."""

    def price_workers(self, cost: Cost) -> float:
        """Return the total price of the worker hours and GPU hours in `cost`. An hour counts from the reservation, busy
        or idle."""
        return self.per_worker_hour * cost.worker_hours + self.per_gpu_hour * cost.gpu_hours


class BudgetConfig(Settings):
    """Limits for a whole run. The run ends after the iteration in which it reaches a limit. It can be resumed after the
    limit is raised."""

    tokens: Positive | None = None
    """Maximum number of tokens read, generated or trained on by all models of the run. If not set, there is no
    limit."""
    worker_hours: Limit | None = None
    """Maximum hours for which workers are reserved, busy or idle, summed over all workers. If not set, there is no
    limit."""
    gpu_hours: Limit | None = None
    """Maximum hours for which GPUs are reserved, summed over all GPUs. If not set, there is no limit."""
    judge_calls: Positive | None = None
    """Maximum number of answers from judges and reward models. If not set, there is no limit."""
    bytes: Positive | None = None
    """Maximum bytes written to the store, including files that were deleted later. If not set, there is no limit."""
    price: Limit | None = None
    """Maximum total price, computed with `prices` and in the same currency. If not set, there is no limit."""
    prices: Prices = Prices()
    """Prices of workers, GPUs and judges, from which the total price is computed."""

    def find_spent_limit(self, spent: Cost) -> str | None:
        """Return a message that names the first limit reached by the costs `spent`, or None if no limit is reached."""
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
