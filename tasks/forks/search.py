"""Search for the cause among the differences between two runs, and the result of the search."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Final, Literal

from rheostat.infra.config import Settings
from rheostat.infra.terminal import table, wrap_text
from rheostat.models.gate.comparison import PairedDifference
from rheostat.tasks.forks.causes import Candidate
from rheostat.tasks.views.report.sections import difference_line

NOISE_SHARE: Final = 0.25
"""If undoing one half of the candidates restores less than this share of the gain, or more than one minus this share,
the rest is treated as noise. Otherwise both halves are assumed to contribute."""


class Trial(Settings):
    """Fork in which some differences were undone, and its comparison with the worse run."""

    run: str
    """Name of the fork."""
    undone: tuple[int, ...]
    """Indices of the undone candidates."""
    difference: PairedDifference | None
    """Fork minus worse run, or None if the fork could not be trained."""
    reason: str = ""
    """Reason why the fork could not be trained. Empty if it was trained."""

    @property
    def is_better(self) -> bool:
        """Whether the fork is significantly better than the worse run."""
        return self.difference is not None and self.difference.lower > 0

    @property
    def gain(self) -> float:
        """Mean score of the fork minus that of the worse run."""
        return 0.0 if self.difference is None else self.difference.mean


@dataclass(frozen=True, slots=True)
class SearchState:
    """State of a search."""

    suspected: tuple[int, ...]
    """Indices of the candidates that contain the cause, if there is one."""
    confirmed: tuple[int, ...] = ()
    """Indices of the smallest tested set of candidates whose undoing made a fork significantly better. Empty if there
    is none."""


Search = Generator[tuple[SearchState, tuple[int, ...]], Trial, SearchState]


def search_candidates(candidates: Sequence[Candidate]) -> Search:
    """Search for the cause among candidates. Yields the state and the indices of the candidates to undo next, receives
    the trial, and returns the final state. At most `max_trials` of the forks are trained.

    First all candidates are undone. If that helps, they are halved. If undoing the first half restores at least half of
    what undoing both restored, the search continues there, and otherwise in the other half, which is only tested at the
    end. If only ranges of training prompts are left and both halves restore a part, the search ends, because the wrong
    prompts are in both. If a fork without the first half cannot be trained, the other half is tested at once, and if
    that does not help either, the search ends.
    """
    everything = tuple(range(len(candidates)))
    state, gain = SearchState(everything), 0.0
    trial = yield state, everything
    if trial.difference is not None:
        if not trial.is_better:
            return SearchState(())
        state, gain = SearchState(everything, everything), trial.gain
    while len(state.suspected) > 1:
        middle = ceil(len(state.suspected) / 2)
        half, rest = state.suspected[:middle], state.suspected[middle:]
        trial = yield state, half
        if trial.difference is None:
            trial = yield SearchState(rest, state.confirmed), rest
            if not trial.is_better:
                return state
            state, gain = SearchState(rest, rest), trial.gain
            continue
        share = trial.gain / gain if gain else float(trial.is_better)
        if (
            trial.is_better
            and NOISE_SHARE < share < 1 - NOISE_SHARE
            and all(candidates[index].rows for index in state.suspected)
        ):
            break
        if trial.is_better and share >= 1 / 2:
            state, gain = SearchState(half, half), trial.gain
        else:
            state, gain = SearchState(rest, state.confirmed), max(0.0, gain - trial.gain)
    if state.confirmed != state.suspected:
        trial = yield state, state.suspected
        state = SearchState(state.suspected, state.suspected if trial.is_better else state.confirmed)
    return state


def max_trials(count: int) -> int:
    """Return the maximum number of forks that a search among `count` candidates needs."""
    return ceil(log2(count)) + 2 if count > 1 else count


Outcome = Literal["found", "not_worse", "not_restored", "nothing_differs", "budget"]


class BisectResult(Settings):
    """Result of a bisection."""

    name: str
    """Name of the bisection."""
    good: str
    """Name of the better run."""
    bad: str
    """Name of the worse run."""
    outcome: Outcome
    """"found": the causes in `found` were confirmed. "not_worse": the worse run is not significantly worse.
    "not_restored": no fork is significantly better than the worse run. "nothing_differs": no difference can be undone.
    "budget": the budget does not allow another fork."""
    difference: PairedDifference
    """Better run minus worse run."""
    candidates: tuple[Candidate, ...]
    """Differences that forks can undo."""
    untested: tuple[str, ...]
    """Differences that cannot be undone."""
    trials: tuple[Trial, ...]
    """Forks, in order."""
    found: tuple[int, ...]
    """Indices of the smallest tested set of candidates whose undoing made a fork significantly better."""
    suspected: tuple[int, ...]
    """Indices of the candidates among which the search would continue."""

    @property
    def confirmation(self) -> Trial | None:
        """Trial in which exactly the found candidates were undone, or None if nothing was found."""
        return next((trial for trial in self.trials if self.found and trial.undone == self.found), None)

    def text(self) -> str:
        """Describe the result as lines for the terminal: a table of the forks, and the conclusion."""
        rows = [
            {
                "run": trial.run,
                "undone": format_numbers(trial.undone),
                "held-out": "-" if trial.difference is None else f"{trial.difference.challenger:.3f}",
                f"minus {self.bad}": "-" if trial.difference is None else f"{trial.gain:+.3f}",
                "significantly better": "not trained" if trial.reason else "yes" if trial.is_better else "no",
            }
            for trial in self.trials
        ]
        reasons = [f"{trial.run} was not trained: {trial.reason}" for trial in self.trials if trial.reason]
        sentences = [wrap_text(line, indent=0) for line in (*reasons, *self.conclusion())]
        return "\n".join([*([f"{table(rows)}\n"] if rows else []), *sentences])

    def conclusion(self) -> list[str]:
        """Return sentences that state what was found."""
        compared = (
            f"held-out score {self.difference.champion:.3f}, {self.good} has {self.difference.challenger:.3f}. "
            f"{self.good} minus {self.bad}: {_describe(self.difference)}."
        )
        if self.outcome == "not_worse":
            return [f"{self.bad} is not significantly worse than {self.good}: {compared} No fork was trained."]
        lines = [f"{self.bad} is worse than {self.good}: {compared}"]
        if self.outcome == "nothing_differs":
            lines.append("A fork can undo none of the differences between the two runs.")
        if self.outcome == "not_restored":
            untested = "the differences that are listed as not tested, " if self.untested else ""
            lines.append(
                f"Nothing significant was found: no fork is significantly better than {self.bad}. Possible reasons: "
                f"{untested}too few held-out problems to detect the effect, or chance, such as the order of the "
                "prompts."
            )
        if self.outcome == "budget":
            lines.append(
                "The search stopped, because the budget does not allow another fork. The cause, if it can be undone, "
                f"is among the differences {format_numbers(self.suspected or range(len(self.candidates)))}. Run the "
                "same command with a larger budget to continue."
            )
        if self.outcome == "found" and (trial := self.confirmation) is not None and trial.difference is not None:
            lines += self._describe_cause(trial, trial.difference)
        return lines

    def _describe_cause(self, trial: Trial, difference: PairedDifference) -> list[str]:
        texts = "; ".join(self.candidates[index].text for index in self.found)
        share = trial.gain / self.difference.mean
        is_one = len(self.found) == 1
        lead = "Cause:" if is_one else "Undoing these differences together helps, but undoing fewer was not enough:"
        lines = [
            f"{lead} {texts}.",
            f"With {'this' if is_one else 'these'} undone, the held-out score is {difference.challenger:.3f} "
            f"({trial.run}), which restores {share:.0%} of the difference. {trial.run} minus {self.bad}: "
            f"{_describe(difference)}.",
        ]
        if share < 1 - NOISE_SHARE and len(self.found) < len(self.candidates):
            lines.append(
                f"Other differences contribute, too. To find them, bisect {self.good} and {trial.run} under another "
                "name."
            )
        return lines


def _describe(difference: PairedDifference) -> str:
    return f"{difference.mean:+.3f}, {difference_line(difference)}"


def list_candidates(candidates: Sequence[Candidate], untested: Sequence[str]) -> list[str]:
    """Return lines that list the differences between two runs, with the numbers of those that can be undone."""
    numbered = [f"{number:>3}  {cause.text}" for number, cause in enumerate(candidates, start=1)]
    return [*numbered, *(f"  -  not tested: {line}" for line in untested)]


def format_numbers(indices: Sequence[int]) -> str:
    """Return indices of candidates as the numbers with which they are listed, with ranges, such as "1-3, 5"."""
    spans = list[list[int]]()
    for index in indices:
        if spans and spans[-1][-1] == index - 1:
            spans[-1].append(index)
        else:
            spans.append([index])
    return ", ".join(f"{span[0] + 1}-{span[-1] + 1}" if len(span) > 1 else f"{span[0] + 1}" for span in spans)
