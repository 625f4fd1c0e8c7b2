"""Solve rates of training prompts: the results of the credit stage that contain them, and the choice of the next
prompts by them."""

from collections.abc import Mapping

from rheostat.infra.config import Settings, read_recorded
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.rollout import RolloutConfig
from rheostat.models.data.curriculum import PromptChoice, PromptOrder, learnable_weights
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import StageKey, iteration_key


class SolveRates(Settings):
    """Solve rates of an iteration's prompts, as the result of its credit stage stores them."""

    rows: tuple[int, ...] = ()
    """Row numbers of the prompts."""
    rates: tuple[float, ...] = ()
    """Solve rate of each prompt, between 0 and 1."""


def solve_rate_term(rollout: RolloutConfig, scoring: ScoringConfig) -> str:
    """Return the name of the reward term from which solve rates are computed, or an empty string if there is no
    curriculum."""
    return "" if rollout.curriculum is None else rollout.curriculum.metric or scoring.terms[0]


def recorded_solve_rate_term(iteration: Iteration) -> str:
    """Return the name of the reward term from which the solve rates of an iteration were computed, or an empty string
    if there was no curriculum."""
    if iteration.rollout.curriculum is None:
        return ""
    scoring = iteration.run.config_at(iteration.number)["scoring"]
    return solve_rate_term(iteration.rollout, read_recorded(ScoringConfig, scoring))


def read_solve_rates(credit: Manifest) -> dict[int, float]:
    """Return the solve rate of each prompt row in the result of a credit stage. Empty if it was computed without a
    curriculum."""
    stored = SolveRates.model_validate(credit.detail.get("solve_rates", {}))
    return dict(zip(stored.rows, stored.rates, strict=True))


class SolveRateHistory:
    """Last known solve rate of each prompt of a run. The result of each credit stage is read only once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rates: dict[int, float] = {}
        self._last = 0

    def up_to(self, last: int) -> Mapping[int, float]:
        """Return the last known solve rate by prompt row, after iteration `last`. The mapping is valid until the next
        call."""
        if last < self._last:
            self._rates, self._last = {}, 0
        for number in range(self._last + 1, last + 1):
            self._rates |= read_solve_rates(self._run.require(StageKey.of(iteration_key(number), "credit")))
            self._last = number
        return self._rates


def prompt_order(iteration: Iteration, rollout: RolloutConfig, history: SolveRateHistory) -> PromptOrder:
    """Return the order of the training prompts from which an iteration takes the next ones.

    The solve rates for a curriculum are those of the iterations on which the generating policy was trained. With
    `rollout.staleness` = s, these are the iterations up to i - 1 - s, and they are always trained before iteration i is
    planned. Therefore an interrupted run that continues chooses the same prompts.
    """
    curriculum, choice, weights = rollout.curriculum, None, None
    if curriculum is not None:
        solve_rates = history.up_to(max(0, iteration.number - 1 - rollout.staleness))
        if curriculum.min_part_factor is not None and iteration.data_parts:
            weights = learnable_weights(
                iteration.data_parts,
                solve_rates,
                min_factor=curriculum.min_part_factor,
                num_prompts=rollout.prompts,
            )
        choice = PromptChoice(
            solve_rates=solve_rates,
            target=curriculum.target,
            candidates=curriculum.candidates,
            explore=curriculum.explore,
            unseen=curriculum.unseen_solve_rate,
        )
    num_prompts = iteration.prompts.shards[0].rows
    return PromptOrder(num_prompts, iteration.seed, iteration.data_parts, choice, weights)


def summarize_choices(iteration: Iteration) -> dict[str, float]:
    """Return metrics on the solve rates of an iteration's new prompts before the iteration, and the share of each part
    of the data if these shares follow the solve rates. Empty if there is no curriculum, or if the iteration has no new
    prompts."""
    plans = [batch.plan_manifest.metrics for batch in iteration.batches]
    num_prompts = sum(len(batch.plan.rows) for batch in iteration.batches)
    if not num_prompts or not any("seen_prompts" in metrics for metrics in plans):
        return {}
    seen = sum(metrics["seen_prompts"] for metrics in plans)
    metrics = {"plan/unseen_fraction": 1 - seen / num_prompts}
    curriculum = iteration.rollout.curriculum
    if curriculum is not None and curriculum.min_part_factor is not None:
        rows = [row for batch in iteration.batches for row in batch.plan.rows]
        for number, part in enumerate(iteration.data_parts):
            metrics[f"plan/part_fraction_{number}"] = sum(row in part.rows for row in rows) / num_prompts
    return metrics | (
        {"plan/solve_rate_mean": sum(metrics["solve_rate_sum"] for metrics in plans) / seen} if seen else {}
    )
