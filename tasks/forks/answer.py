"""Answer of a what-if run: what the policy would have learned from the same rollouts, and up to which iteration this
answer can be trusted."""

from typing import Final

from rheostat.infra.config import Settings, read_recorded
from rheostat.infra.errors import BadInput, Quarantined
from rheostat.infra.former_names import former_name
from rheostat.infra.store.dependencies import dependency_records
from rheostat.infra.store.runs import Run
from rheostat.infra.terminal import table, wrap_text
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.gate.comparison import PairedDifference
from rheostat.tasks.forks.replay import CONTINUED
from rheostat.tasks.run.dependencies import REWARD_CODE
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.views.metrics import Accuracy, evaluations_of, format_number, format_scientific, sealed_iterations
from rheostat.tasks.views.report.sections import difference_line, paired_difference
from rheostat.tasks.views.runs import open_known_run

BOUND: Final = 0.5
"""Default for the lowest effective sample size, relative to that of the parent, with which an iteration is trusted."""


class ReplayedIteration(Settings):
    """Iteration of a what-if run that was trained on stored rollouts of another run."""

    number: int
    """Number of the iteration."""
    effective_sample_size: float | None
    """Effective sample size of the importance weights of the samples, as a fraction of their number. The more the
    what-if policy at the start of the iteration differs from the policy that generated the samples, the lower it is.
    None if there was no update, for example because all rewards of each group were equal."""
    behavior_kl: float | None
    """Estimate of KL(generating policy ‖ what-if policy at the start of the iteration), in nats per token. None if
    there was no update."""
    parent_sample_size: float = 1.0
    """Effective sample size that the parent run measured in the same iteration. It is below 1 if its engine and its
    trainer compute different log-probs, or if rollouts are generated ahead (`rollout.staleness`). It counts as 1 if the
    parent did not measure it, or used rollouts of another run itself."""
    reward: float | None
    """Mean reward of the stored rollouts, under the rewards of the what-if run. None if no score exists."""

    def is_below(self, bound: float) -> bool:
        """Return whether the effective sample size, relative to that of the parent, is below a bound. Return False if
        there was no update."""
        size = self.effective_sample_size
        return size is not None and size < bound * self.parent_sample_size

    def cells(self) -> dict[str, str]:
        """Return the values as formatted table cells. Keys are the column headings."""
        return {
            "iteration": f"{self.number:,}",
            "effective sample size": format_number(self.effective_sample_size),
            "that of the parent": format_number(self.parent_sample_size),
            "KL, nats per token": format_scientific(self.behavior_kl),
            "mean reward": format_number(self.reward),
        }


class WhatIfAnswer(Settings):
    """Answer of a what-if run, with the measurements that show how far it can be trusted."""

    run: str
    """Name of the what-if run."""
    parent: str
    """Name of the run whose rollouts are used."""
    bound: float
    """Lowest effective sample size, relative to that of the parent, with which an iteration is trusted."""
    iterations: tuple[ReplayedIteration, ...]
    """Iterations that were trained on stored rollouts, in order."""
    last: int
    """Last iteration with shared rollouts of the parent."""
    last_trusted: int
    """Last iteration for which the answer can be trusted: the effective sample size is not below the bound in this
    iteration and all replayed iterations before."""
    compared_iteration: int | None
    """Last iteration up to `last_trusted` after which both policies were evaluated, or None."""
    parent_accuracy: Accuracy | None
    """Held-out accuracy of the parent's policy after this iteration."""
    what_if_accuracy: Accuracy | None
    """Held-out accuracy of the what-if run's policy after this iteration."""
    difference: PairedDifference | None
    """Paired difference of the two accuracies, or None if there is no test."""
    reason: str
    """Reason why there is no test. Empty if there is one."""

    def fork_arguments(self, iterations: int) -> list[str]:
        """Return the arguments of `rheostat fork` that train on from the last trusted iteration up to iteration
        `iterations`, or an empty list if there is nothing left to train."""
        if self.last_trusted >= iterations:
            return []
        return [f"{self.run}@{self.last_trusted}", f"{self.run}{CONTINUED}", f"iterations={iterations}"]

    def text(self) -> str:
        """Describe the answer as lines for the terminal: a table of the iterations, and the conclusion."""
        rows = [
            each.cells() | {"trusted": "yes" if each.number <= self.last_trusted else "no"} for each in self.iterations
        ]
        return "\n".join([table(rows), "", *(wrap_text(line, indent=0) for line in self.conclusion())])

    def conclusion(self) -> list[str]:
        """Return sentences that say how far the answer can be trusted and what it is."""
        if self.last_trusted == self.last:
            sizes = [size for each in self.iterations if (size := each.effective_sample_size) is not None]
            reason = f": the effective sample size is {min(sizes):.3f} or more" if sizes else ""
            lines = [f"The answer holds up to iteration {self.last}, the last one that was replayed{reason}."]
        else:
            broken = next((each for each in self.iterations if each.is_below(self.bound)), None)
            reason = (
                "the later iterations are not trained yet"
                if broken is None
                else f"in iteration {broken.number} the effective sample size is "
                f"{format_number(broken.effective_sample_size)}, less than {self.bound:g} times that of the parent "
                f"({format_number(broken.parent_sample_size)})"
            )
            lines = [f"The answer holds up to iteration {self.last_trusted} of {self.last}: {reason}."]
        if self.compared_iteration is None or self.parent_accuracy is None or self.what_if_accuracy is None:
            lines.append(f"There is no comparison: {self.reason}.")
            return lines
        ours, theirs = self.what_if_accuracy.mean, self.parent_accuracy.mean
        if self.difference is None:
            lines.append(
                f"After iteration {self.compared_iteration}, the held-out accuracy of the what-if run is {ours:.3f}, "
                f"and that of {self.parent} is {theirs:.3f}. There is no test of the difference: {self.reason}."
            )
        else:
            lines.append(
                f"After iteration {self.compared_iteration}, the held-out accuracy would have been {ours:.3f} instead "
                f"of {theirs:.3f}. Difference {self.difference.mean:+.3f}, {difference_line(self.difference)}."
            )
        return lines


def read_iteration(run: Run, parent: Run, number: int) -> ReplayedIteration:
    """Return the measurements of an iteration of a what-if run, which need not be sealed."""
    metrics, update = Iteration(run, number).metrics, parent.find(StageKey.policy(number))
    theirs = {} if update is None or parent.replays(number) else update.metrics
    return ReplayedIteration(
        number=number,
        effective_sample_size=metrics.get("update/effective_sample_size"),
        behavior_kl=metrics.get("update/behavior_kl"),
        parent_sample_size=theirs.get("effective_sample_size", 1.0),
        reward=metrics.get("credit/reward_mean"),
    )


def read_answer(store: str, name: str, *, bound: float, last: int) -> WhatIfAnswer:
    """Return the answer of a what-if run, from its completed iterations. `last` is the last iteration with
    shared rollouts."""
    run = open_known_run(store, name)
    assert run.fork is not None, "a what-if run is a fork"
    first, parent = run.fork.iteration + 1, open_known_run(store, run.fork.parent)
    iterations = [
        read_iteration(run, parent, number) for number in range(first, min(last, len(sealed_iterations(run))) + 1)
    ]
    below = (each.number for each in iterations if each.is_below(bound))
    last_trusted = next(below, first + len(iterations)) - 1
    known = {each.number: each for each in evaluations_of(parent)}
    evaluated = [each for each in evaluations_of(run) if first <= each.number <= last_trusted and each.number in known]
    after = evaluated[-1] if evaluated else None
    difference, reason = None, ""
    if after is None:
        reason = (
            f"the two runs were not evaluated after the same iteration from {first} to {last_trusted}. Set "
            "evaluation.every in later runs"
            if last_trusted >= first
            else "no iteration can be trusted"
        )
    elif _first_reward(parent) != _first_reward(run):
        reason = "their first rewards differ, so the two numbers have different meanings"
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
        last_trusted=last_trusted,
        compared_iteration=None if after is None else after.number,
        parent_accuracy=None if after is None else known[after.number],
        what_if_accuracy=after,
        difference=difference,
        reason=reason,
    )


def _first_reward(run: Run) -> tuple[object, object]:
    """Return the settings and the code of the reward whose mean on held-out problems is the accuracy of a run. The
    weight does not affect this mean."""
    reward = read_recorded(ScoringConfig, run.record.config["scoring"]).rewards[0]
    code = {} if not (records := dependency_records(run)) else records[-1].dependencies.code
    return reward.model_copy(update={"weight": 1.0}), code.get(
        f"{REWARD_CODE}{former_name(getattr(reward, 'target', ''))}"
    )
