"""What work takes: tokens, time of workers, bytes of the store, calls of judges, and the price of all that."""

import time
from collections.abc import Iterable, Mapping

from infra.config import Settings

HOUR = 3600.0


class Cost(Settings):
    """What one role, or several together, took of an iteration, an evaluation or a whole run."""

    prompt_tokens: int = 0
    """Tokens read: prompts, once for all completions of a group; by judges, as far as they tell."""
    written_tokens: int = 0
    """Tokens written, by the policy and by judges."""
    learnt_tokens: int = 0
    """Tokens of completions that an update learnt from."""
    worker_seconds: float = 0.0
    """Seconds that workers were held, at work or not, summed over them."""
    busy_seconds: float = 0.0
    """Of these, seconds at work on what was committed."""
    gpu_seconds: float = 0.0
    """Seconds that workers were held, times the GPUs of each."""
    bytes: int = 0
    """Size of the shards and bundles that are new in the store."""
    judge_calls: int = 0
    """Answers of models behind rewards, those to canaries and second attempts counted each."""
    price: float = 0.0
    """By `[budget.prices]` as they were at the time."""

    @property
    def tokens(self) -> int:
        """Tokens read, written and learnt."""
        return self.prompt_tokens + self.written_tokens + self.learnt_tokens

    @property
    def worker_hours(self) -> float:
        """Hours that workers were held."""
        return self.worker_seconds / HOUR

    @property
    def gpu_hours(self) -> float:
        """Hours that GPUs were held."""
        return self.gpu_seconds / HOUR

    def cells(self) -> dict[str, str]:
        """The numbers as tables show them."""
        return {
            "tokens read": f"{self.prompt_tokens:,}",
            "written": f"{self.written_tokens:,}",
            "learnt": f"{self.learnt_tokens:,}",
            "worker s": f"{self.worker_seconds:,.1f}",
            "busy s": f"{self.busy_seconds:,.1f}",
            "GPU s": f"{self.gpu_seconds:,.1f}",
            "MB stored": f"{self.bytes / 1e6:,.2f}",
            "judge calls": f"{self.judge_calls:,}",
            "price": f"{self.price:,.4f}",
        }

    def line(self) -> str:
        """The numbers in one line, those that are 0 left out."""
        told = {
            "tokens": f"{self.tokens:,}",
            "worker hours": f"{self.worker_hours:,.3f}",
            "GPU hours": f"{self.gpu_hours:,.3f}" if self.gpu_seconds else "",
            "MB stored": f"{self.bytes / 1e6:,.2f}",
            "judge calls": f"{self.judge_calls:,}" if self.judge_calls else "",
        }
        price = f", price {self.price:,.4f}" if self.price else ""
        return ", ".join(f"{number} {name}" for name, number in told.items() if number) + price


def total(costs: Iterable[Cost]) -> Cost:
    """Add costs up."""
    each = [cost.model_dump() for cost in costs]
    return Cost.model_validate({name: sum(cost[name] for cost in each) for name in Cost.model_fields})


class Account:
    """What a run has taken so far, as the process that drives it counts."""

    def __init__(self) -> None:
        self.spent = Cost()
        """All that was counted."""
        self.unsealed: dict[int, Mapping[str, Cost]] = {}
        """Costs by role of iterations that were learnt from and are not sealed yet."""
        self._since = time.monotonic()

    def lap(self) -> float:
        """Seconds since this was asked last, at first since the run was opened."""
        before, self._since = self._since, time.monotonic()
        return self._since - before

    def take(self, costs: Mapping[str, Cost]) -> None:
        """Count costs by role."""
        self.spent = total([self.spent, *costs.values()])
