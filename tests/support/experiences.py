"""Small experiences for tests of advantages, built from lists or at random."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from rheostat.models.algorithms.experience import AuxiliaryScores, Experience, ScoredGroups, SpanColumns, Term
from rheostat.models.records.columns import Floats

NAN = float("nan")


@dataclass(frozen=True)
class Drawn:
    """Completions in plain lists."""

    rewards: list[float]
    """One outcome per completion, of a term of weight 1."""
    lengths: list[int]
    groups: list[int] | None = None
    steps: list[list[tuple[int, float]]] | None = None
    """First token and value of each step, of a process term."""
    step_weight: float = 1.0
    terms: dict[str, tuple[float, list[float]]] = field(default_factory=dict)
    """Further terms: weight and rewards."""


def flat(rows: Sequence[Sequence[float]]) -> Floats:
    return np.array([value for row in rows for value in row], np.float64)


def experience(drawn: Drawn, **settings: object) -> Experience:
    """Build the columns. A completion without an outcome has no reward."""
    rewards_N = np.array(drawn.rewards, np.float64)
    terms = [Term("outcome", 1.0, rewards_N)]
    terms += [Term(name, weight, np.array(values, np.float64)) for name, (weight, values) in drawn.terms.items()]
    if drawn.steps is not None:
        spans = SpanColumns(
            starts_S=np.array([start for steps in drawn.steps for start, _ in steps], np.int64),
            counts_N=np.array([len(steps) for steps in drawn.steps], np.int64),
            values_S=flat([[value for _, value in steps] for steps in drawn.steps]),
        )
        sums = [sum(value for _, value in steps) for steps in drawn.steps]
        terms.append(Term("steps", drawn.step_weight, np.array(sums, np.float64), spans))
    prompts_G, group_N = np.unique(np.array(drawn.groups or [0] * len(rewards_N), np.int64), return_inverse=True)
    total_N = sum((term.weight * term.rewards_N for term in terms), np.zeros(len(rewards_N)))
    scored = ScoredGroups(prompts_G, group_N, np.array(drawn.lengths, np.int64), total_N, tuple(terms))
    defaults = {
        "logprobs_T": np.zeros(sum(drawn.lengths)),
        "counted_N": scored.is_scored,
        "auxiliary_scores": AuxiliaryScores(),
    }
    return Experience(scored=scored, **defaults | settings)


@st.composite
def completions(draw: st.DrawFn, *, steps: bool = True, missing: bool = True, shortest: int = 0) -> Drawn:
    """Build random completions: groups interleave, some rewards are missing, some completions have no token."""
    number = draw(st.integers(1, 10))
    lengths = draw(st.lists(st.integers(shortest, 6), min_size=number, max_size=number))
    eighths = st.integers(-8, 8).map(lambda value: value / 8)
    reward = st.one_of(st.just(NAN), eighths) if missing else eighths
    rewards = draw(st.lists(reward, min_size=number, max_size=number))
    groups = draw(st.lists(st.integers(0, 2), min_size=number, max_size=number))
    if not steps:
        return Drawn(rewards, lengths, groups)
    flags = st.sampled_from([0.0, -1.0, -0.5])
    rows = []
    for length in lengths:
        starts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3))) if length > 1 else []
        rows.append([(start, draw(flags)) for start in ([0, *starts] if length else [])])
    return Drawn(rewards, lengths, groups, rows)
