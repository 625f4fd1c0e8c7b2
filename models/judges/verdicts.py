"""What every judge is: questions in, answers out; and what an answer is worth. Torch-free.

An answer becomes a reward, critiques of steps, or the reason why it is invalid; never a silent 0. The method for steps
is CAPO's (arXiv 2508.02298); what it leaves open is said where it is decided. Shapes: S steps.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from string import digits
from typing import Final, Literal, Protocol, assert_never

from models.config.judges import ChoiceVerdict, LogprobVerdict, ScoreVerdict, StepsVerdict, VerdictConfig
from models.records.media import ImageSource
from models.text.steps import aggregate


@dataclass(frozen=True, slots=True)
class Question:
    """What a judge is asked once."""

    text: str
    seed: int
    """Of everything that is drawn for the answer, where whoever answers takes seeds."""
    images: tuple[str, ...] = ()
    """Digests of the images that are shown before the text, in order."""

    @property
    def read(self) -> tuple[str, tuple[str, ...]]:
        """What the judge reads: questions that differ in their seeds alone have the same."""
        return self.text, self.images


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: a text, or how likely each choice is, or why there is neither."""

    text: str | None
    probabilities: dict[str, float] | None
    """By the verdict's choices (`yes` and `no` of a logprob verdict), from 0 to 1, not necessarily summing to 1."""
    tokens: int
    """Written by the judge, as far as is known."""
    error: str | None
    """Why there is no answer, in one line; such an answer is invalid."""
    tokens_read: int = 0
    """Read by the judge, as far as an endpoint tells."""


class Judge(Protocol):
    """Answers about completions."""

    @property
    def progress(self) -> int:
        """A count that moves while questions are answered; another thread may read it."""

    def show(self, images: ImageSource) -> None:
        """Say where the images of the questions that follow are."""

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Return one answer per question, in order. What one question does is its own error, never another's."""


# The text of a pair holds no tag of its kind, so that the last pair is the innermost of its tags.
_PAIR: Final = re.compile(r"<incorrect_steps>((?:(?!</?incorrect_steps>).)*)</incorrect_steps>", re.S | re.I)

_INDEX: Final = re.compile(r"(?:<step_)?(-?[0-9]+)>?|step_([0-9]+)", re.I)

_EMPTY_TAGS: Final = re.compile(r"<step_([0-9]+)>\s*</step_\1>", re.I)

_AND: Final = re.compile(r"(?<=\s)and(?=\s)", re.I)

_SPELT: Final = re.compile(r"step[ \t]+([0-9]+)", re.I)

_NONE: Final = {"none", "n/a", "[]"}

_DIGITS: Final = 9  # no completion has steps that take more


@dataclass(frozen=True, slots=True)
class Critique:
    """What one answer says."""

    steps: tuple[int, ...]
    """Steps found wrong, in order."""
    dropped: int
    """Numbers in the list that are no step of the completion."""


def read_critique(text: str, *, num_steps: int) -> Critique | str:
    """Read the last `<incorrect_steps>` pair of an answer, or say why it cannot be read.

    Nothing between the tags, or `none`, means that no step is wrong; a list that is no list of numbers means nothing.
    A list may be in one pair of brackets, end with a full stop, and name all of its steps as `step 2, step 4`. Commas,
    semicolons, white space or `and` separate steps. A step may also be an empty pair of tags.
    """
    pairs = list(_PAIR.finditer(text))
    if not pairs:
        return "expected a pair of <incorrect_steps> tags, found none"
    listed = pairs[-1][1].strip()
    if listed.casefold().rstrip(".") in _NONE:
        return Critique((), 0)
    if listed[-1:] == "." and listed[:-1].rstrip()[-1:] in {*digits, ">", "]"}:
        listed = listed[:-1].rstrip()
    if listed[:1] == "[" and listed[-1:] == "]":
        listed = listed[1:-1].strip()
    numbers = _listed(_AND.sub(",", _EMPTY_TAGS.sub(r"<step_\1>", listed)))
    if isinstance(numbers, str):
        return numbers
    indices = [int(number) for number in numbers if len(number) <= _DIGITS]
    steps = {index for index in indices if 0 <= index < num_steps}
    return Critique(tuple(sorted(steps)), len(numbers) - sum(index in steps for index in indices))


def _listed(listed: str) -> list[str] | str:
    """Return the digits of a list's numbers, or why it is no list of numbers."""
    items = [item.strip() for item in re.split(r"[,;\n]", listed) if item.strip()]
    spelt = [_SPELT.fullmatch(item) for item in items]
    if all(spelt):
        return [match[1] for match in spelt if match is not None]
    words = [word for word in re.split(r"[,;\s]+", listed) if word]
    found = [_INDEX.fullmatch(word) for word in words]
    if None in found:
        return f"expected numbers of steps between the tags, found {words[found.index(None)]!r}"
    return [match[1] or match[2] for match in found if match is not None]


def flag_weights(critiques: Sequence[Sequence[int]], verdict: StepsVerdict, *, num_steps: int) -> list[float]:
    """Return how wrong each step is by the votes, 0 to 1; without a usable critique no step is.

    `critiques` are the usable ones alone: one that cannot be read counts neither for a step nor against it.
    """
    counts, k = Counter(step for critique in critiques for step in critique), len(critiques)
    if not k:
        return [0.0] * num_steps
    return [_weight(counts[step], k, verdict) for step in range(num_steps)]


def _weight(count: int, k: int, verdict: StepsVerdict) -> float:
    match verdict.flags:
        case "intersection":
            return float(count == k)
        case "majority":
            return float(2 * count >= k if verdict.ties == "flag" else 2 * count > k)
        case "union":
            return float(count > 0)
        case "average":
            return count / k
        case _:
            assert_never(verdict.flags)


LONGEST: Final = 100_000
"""Characters of an answer that is still read; no verdict needs more, and patterns may take quadratic time."""

FLAGGED: Final = -1.0
"""Value of a step that is wrong; others have 0."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one answer is worth: a finite reward, or none and why."""

    value: float | None
    error: str | None
    steps: tuple[int, ...] | None = None
    """Steps found wrong, where steps are judged."""
    dropped: int = 0
    """Numbers among them that are no step."""


def read_verdict(answer: Answer, verdict: VerdictConfig, *, num_steps: int = 0) -> Judgement:
    """Find the one verdict in an answer, whatever it contains; about as many steps, where steps are judged.

    An answer that repeats what the judge was shown has no tags, since quoted text has none, and two scores or choices
    where the judge adds its own. What nobody can know is whether a lone score or choice is the judge's own or repeated.
    """
    if answer.error is not None:
        return _invalid(answer.error)
    if isinstance(verdict, LogprobVerdict):
        return _read_probabilities(answer.probabilities, verdict)
    text = answer.text or ""
    if not text.strip():
        return _invalid("expected a verdict, found an empty answer")
    if len(text) > LONGEST:
        return _invalid(f"expected at most {LONGEST} characters, found {len(text)}")
    if isinstance(verdict, StepsVerdict):
        return _read_steps(text, verdict, num_steps)
    if "\N{REPLACEMENT CHARACTER}" in text:
        return _invalid("expected text in UTF-8, found bytes that are none")
    if isinstance(verdict, ScoreVerdict):
        return _read_score(text, verdict)
    return _read_choice(text, verdict)


def worst(verdict: VerdictConfig) -> float:
    """Return the lowest reward that a verdict can earn; a completion that says nothing has it without being judged."""
    match verdict:
        case ChoiceVerdict():
            return min(verdict.choices.values())
        case ScoreVerdict() | LogprobVerdict():
            return 0.0
        case StepsVerdict():
            return FLAGGED
        case _:
            assert_never(verdict)


def count_votes(values: Sequence[float | None], vote: Literal["mean", "median", "majority"]) -> float | None:
    """Make one reward of the valid votes; none where none is valid. Of values named equally often the lowest wins."""
    valid = sorted(value for value in values if value is not None)
    if not valid:
        return None
    match vote:
        case "mean":
            return fmean(valid)
        case "median":
            return median(valid)
        case "majority":
            counts = Counter(valid)
            return max(counts, key=lambda value: (counts[value], -value))
        case _:
            assert_never(vote)


def choice_of(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice that a text is, capitals and surrounding punctuation aside; none where it is no choice."""
    bare = text.strip().strip(".,;:!\"'`*()[] \t\n")
    exact = [choice for choice in choices if choice.strip() in (text.strip(), bare)]
    alike = exact or [choice for choice in choices if choice.strip().casefold() == bare.casefold()]
    return alike[0] if len(alike) == 1 else None


def _read_score(text: str, verdict: ScoreVerdict) -> Judgement:
    found = [match[1] for match in re.finditer(verdict.pattern, text)]
    if len(found) != 1:
        return _invalid(f"expected one score, found {len(found) or 'none'}")
    try:
        score = float(found[0])
    except (TypeError, ValueError):
        return _invalid("expected a number as score, found something else")
    if not verdict.low <= score <= verdict.high:
        return _invalid(f"expected a score from {verdict.low:g} to {verdict.high:g}, found {score:g}")
    return Judgement((score - verdict.low) / (verdict.high - verdict.low), None)


def _read_choice(text: str, verdict: ChoiceVerdict) -> Judgement:
    choices = list(verdict.choices)
    chosen = choice_of(text, choices)
    if chosen is not None:
        return Judgement(verdict.choices[chosen], None)
    if verdict.constrained:
        return _invalid("expected nothing but one of the choices, found something else")
    named = _named(text, choices)
    if len(named) != 1:
        return _invalid(f"expected one choice, found {len(named) or 'none'}")
    return Judgement(verdict.choices[named.pop()], None)


def _read_steps(text: str, verdict: StepsVerdict, num_steps: int) -> Judgement:
    critique = read_critique(text, num_steps=num_steps)
    if isinstance(critique, str):
        return _invalid(critique)
    values = [FLAGGED if step in critique.steps else 0.0 for step in range(num_steps)]
    return Judgement(aggregate(values, verdict.aggregate), None, critique.steps, critique.dropped)


def _named(text: str, choices: Sequence[str]) -> set[str]:
    """Collect the choices that stand as words in a text; of two that begin alike, the longer is named.

    Capitals matter only where a single letter is a choice: "a" is a word, "A" is an answer.
    """
    longest_first = sorted(choices, key=len, reverse=True)
    words = "|".join(f"(?{'-i' if len(choice) == 1 else 'i'}:{re.escape(choice)})" for choice in longest_first)
    found = {match[0] for match in re.finditer(rf"(?<!\w)(?:{words})(?!\w)", text)}
    folded = {choice.casefold(): choice for choice in choices}
    return {word if word in choices else folded[word.casefold()] for word in found}


def _read_probabilities(probabilities: dict[str, float] | None, verdict: LogprobVerdict) -> Judgement:
    if probabilities is None:
        return _invalid("expected probabilities of the answers, found none")
    yes, no = probabilities.get(verdict.yes), probabilities.get(verdict.no)
    if yes is None or no is None:
        return _invalid(f"expected probabilities of {verdict.yes!r} and {verdict.no!r}, found less")
    if not all(math.isfinite(p) and 0 <= p <= 1 for p in (yes, no)) or yes + no == 0:
        return _invalid(f"expected probabilities from 0 to 1 that are not both 0, found {yes:g} and {no:g}")
    return Judgement(yes / (yes + no), None)


def _invalid(reason: str) -> Judgement:
    """Keep a reason short, in one line of valid text: it is part of a shard."""
    line = " ".join(reason.split())[:200]
    return Judgement(None, line.encode("utf-8", "replace").decode() or "no reason given")
