"""Answer of a what-if run: what the policy would have learned from the same rollouts, and up to which iteration this
answer can be trusted."""

from typing import Final

from rheostat.infra.config import Settings, read_recorded
from rheostat.infra.errors import BadInput, Quarantined
from rheostat.infra.store.dependencies import dependency_records
from rheostat.infra.store.runs import Run
from rheostat.infra.terminal import table, wrap_text
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.gate.comparison import PairedDifference
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.views.metrics import Accuracy, evaluations_of, sealed_iterations
from rheostat.tasks.views.report.sections import difference_line, paired_difference
from rheostat.tasks.views.runs import open_known_run

BOUND: Final = 0.5
"""Default for the lowest effective sample size with which an iteration is trusted."""


class ReplayedIteration(Settings):
    """Iteration of a what-if run that was trained on stored rollouts of another run."""

    number: int
    """Number of the iteration."""
    effective_sample_size: float
    """Effective sample size of the importance weights, as a share of the samples. It is 1 if the policy before the
    update generated the samples itself, and lower the more it differs from the policy that did."""
    behavior_kl: float
    """Estimated KL divergence from the policy that generated the samples to the policy before the update, in nats per
    token."""
    reward: float
    """Mean reward of the stored rollouts, under the rewards of the what-if run."""


class WhatIfAnswer(Settings):
    """What a run would have learned from its rollouts with other settings."""

    run: str
    """Name of the what-if run."""
    parent: str
    """Name of the run whose rollouts are used."""
    bound: float
    """Lowest effective sample size with which an iteration is trusted."""
    iterations: tuple[ReplayedIteration, ...]
    """Iterations that were trained on stored rollouts, in order."""
    last: int
    """Last iteration of which the parent's rollouts are shared."""
    holds_until: int
    """Last iteration for which the answer can be trusted: the effective sample size is not below the bound in this
    iteration and all replayed iterations before."""
    evaluated: int | None
    """Last iteration up to `holds_until` after which both policies were evaluated, or None."""
    before: Accuracy | None
    """Held-out accuracy of the parent's policy after iteration `evaluated`."""
    after: Accuracy | None
    """Held-out accuracy of the what-if run's policy after iteration `evaluated`."""
    difference: PairedDifference | None
    """Paired difference of the two accuracies, or None if there is no test."""
    reason: str
    """Reason why there is no test. Empty if there is one."""

    def text(self) -> str:
        """Describe the answer as lines for the terminal: a table of the iterations, and the conclusion."""
        rows = [
            {
                "iteration": f"{each.number:,}",
                "effective sample size": f"{each.effective_sample_size:.3f}",
                "KL, nats per token": f"{each.behavior_kl:.2e}",
                "reward": f"{each.reward:.3f}",
                "trusted": "yes" if each.number <= self.holds_until else "no",
            }
            for each in self.iterations
        ]
        return "\n".join([table(rows), "", *(wrap_text(line, indent=0) for line in self.conclusion())])

    def conclusion(self) -> list[str]:
        """Return sentences that say how far the answer can be trusted and what it is."""
        lines = []
        if self.holds_until == self.last:
            lines.append(
                f"The answer holds up to iteration {self.last}, the last one of {self.parent}: the effective sample "
                f"size is at least {min(each.effective_sample_size for each in self.iterations):.3f}."
            )
        else:
            broken = next(each for each in self.iterations if each.number > self.holds_until)
            lines.append(
                f"The answer holds up to iteration {self.holds_until} of {self.last}. In iteration {broken.number} the "
                f"effective sample size is {broken.effective_sample_size:.3f}, below {self.bound:g}."
            )
        if self.evaluated is None or self.before is None or self.after is None:
            lines.append(f"There is no comparison: {self.reason}.")
            return lines
        lines.append(
            f"After iteration {self.evaluated}, the held-out accuracy would have been {self.after.mean:.3f} instead of "
            f"{self.before.mean:.3f}."
        )
        lines.append(
            f"There is no test of the difference: {self.reason}."
            if self.difference is None
            else f"Difference {self.difference.mean:+.3f}, {difference_line(self.difference)}."
        )
        return lines


def effective_sample_size(run: Run, number: int) -> float:
    """Return the effective sample size of an iteration, as a share of its samples."""
    return Iteration(run, number).update.metrics["effective_sample_size"]


def read_answer(store: str, name: str, *, bound: float, last: int) -> WhatIfAnswer:
    """Return the answer of a what-if run, from its completed iterations. `last` is the last iteration of which it
    shares rollouts."""
    run = open_known_run(store, name)
    assert run.fork is not None, "a what-if run is a fork"
    first, parent = run.fork.iteration + 1, open_known_run(store, run.fork.parent)
    iterations = [_read_iteration(run, number) for number in range(first, min(last, len(sealed_iterations(run))) + 1)]
    below = (each.number for each in iterations if each.effective_sample_size < bound)
    holds_until = next(below, last + 1) - 1
    known = {each.number: each for each in evaluations_of(parent)}
    evaluated = [each for each in evaluations_of(run) if first <= each.number <= holds_until and each.number in known]
    after = evaluated[-1] if evaluated else None
    difference, reason = None, ""
    if after is None:
        reason = (
            f"{parent.name} was not evaluated after an iteration from {first} to {holds_until}. Set evaluation.every "
            "in later runs"
            if holds_until >= first
            else "no iteration can be trusted"
        )
    elif _first_reward(parent) != _first_reward(run):
        reason = "the first rewards of the two runs differ, so their accuracies have different meanings"
    else:
        try:
            difference = paired_difference(parent, after.number, run, after.number)
        except (BadInput, Quarantined) as error:
            reason = str(error).rstrip(".")
    return WhatIfAnswer(
        run=name,
        parent=parent.name,
        bound=bound,
        iterations=tuple(iterations),
        last=last,
        holds_until=holds_until,
        evaluated=None if after is None else after.number,
        before=None if after is None else known[after.number],
        after=after,
        difference=difference,
        reason=reason,
    )


def _read_iteration(run: Run, number: int) -> ReplayedIteration:
    metrics = Iteration(run, number).metrics
    return ReplayedIteration(
        number=number,
        effective_sample_size=metrics["update/effective_sample_size"],
        behavior_kl=metrics["update/behavior_kl"],
        reward=metrics["credit/reward_mean"],
    )


def _first_reward(run: Run) -> tuple[object, object]:
    """Return the settings and the code of the reward whose mean on held-out problems is the accuracy of a run."""
    reward = read_recorded(ScoringConfig, run.record.config["scoring"]).rewards[0]
    code = {} if not (records := dependency_records(run)) else records[-1].dependencies.code
    return reward, code.get(getattr(reward, "target", ""))
