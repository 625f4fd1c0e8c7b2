"""Interface of all judges, and the conversion of their answers into rewards. Does not import torch.

An answer is converted into a reward, a critique of steps, or an error. An invalid answer never silently becomes 0.
Steps are judged with CAPO's method (arXiv 2508.02298). Decisions that the paper leaves open are documented where they
are made. Shapes: S steps.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from string import digits
from typing import Final, Literal, Protocol, assert_never

from rheostat.models.config.verdicts import ChoiceVerdict, LogprobVerdict, ScoreVerdict, StepsVerdict, VerdictConfig
from rheostat.models.records.media import ImageSource
from rheostat.models.text.steps import aggregate


@dataclass(frozen=True, slots=True)
class Question:
    """Question to a judge: the text, the images and the seed for sampling the answer."""

    text: str
    seed: int
    """Seed with which the answer is sampled. Endpoints may ignore it."""
    images: tuple[str, ...] = ()
    """Digests of the images that precede the question's text, in order."""

    @property
    def read(self) -> tuple[str, tuple[str, ...]]:
        """Text and image digests of the question. They are equal for questions that differ only in the seed."""
        return self.text, self.images


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a judge: a text, or a probability for each choice, or an error."""

    text: str | None
    probabilities: dict[str, float] | None
    """Probability of each choice, or None for a text answer. For a logprob verdict, the choices are `yes` and `no`. The
    probabilities need not sum to 1."""
    tokens: int
    """Number of tokens that the judge generated, if known."""
    error: str | None
    """One-line reason why there is no valid answer, or None if the answer is valid."""
    tokens_read: int = 0
    """Number of prompt tokens that the judge processed, if the endpoint reports it."""


class Judge(Protocol):
    """Model that answers questions about completions, in this process or behind an endpoint."""

    @property
    def progress(self) -> int:
        """Counter that grows while questions are answered, so that a stuck worker can be detected. Another thread may
        read it."""

    def show(self, images: ImageSource) -> None:
        """Set the source from which the images of subsequent questions are read."""

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Return one answer for each question, in order. The failure of one question does not affect the others."""


# The text of a pair contains no tag of this kind, so the last match is the innermost pair.
_PAIR: Final = re.compile(r"<incorrect_steps>((?:(?!</?incorrect_steps>).)*)</incorrect_steps>", re.S | re.I)

_INDEX: Final = re.compile(r"(?:<step_)?(-?[0-9]+)>?|step_([0-9]+)", re.I)

_EMPTY_TAGS: Final = re.compile(r"<step_([0-9]+)>\s*</step_\1>", re.I)

_AND: Final = re.compile(r"(?<=\s)and(?=\s)", re.I)

_SPELT: Final = re.compile(r"step[ \t]+([0-9]+)", re.I)

_NONE: Final = {"none", "n/a", "[]"}

_DIGITS: Final = 9  # maximum number of digits of a step number


@dataclass(frozen=True, slots=True)
class Critique:
    """Steps of a completion that one answer of a judge lists as wrong."""

    steps: tuple[int, ...]
    """Indices of the steps listed as wrong, ascending."""
    dropped: int
    """Number of listed step numbers that were ignored, because the completion has no such step."""


def read_critique(text: str, *, num_steps: int) -> Critique | str:
    """Parse the list of wrong steps in the last `<incorrect_steps>` pair of an answer. Returns the reason as text if
    the list cannot be parsed.

    An empty pair or `none` means that no step is wrong. Any other text that is not a list of numbers is invalid. The
    list may be enclosed in one pair of brackets, end with a full stop, and call all of its steps `step 2, step 4`.
    Steps are separated by commas, semicolons, white space or `and`. A step may also be an empty pair of tags.
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
    numbers = _parse_step_numbers(_AND.sub(",", _EMPTY_TAGS.sub(r"<step_\1>", listed)))
    if isinstance(numbers, str):
        return numbers
    indices = [int(number) for number in numbers if len(number) <= _DIGITS]
    steps = {index for index in indices if 0 <= index < num_steps}
    return Critique(tuple(sorted(steps)), len(numbers) - sum(index in steps for index in indices))


def _parse_step_numbers(listed: str) -> list[str] | str:
    """Return the step numbers in a list as strings of digits, or the reason why the text is not a list of numbers."""
    items = [item.strip() for item in re.split(r"[,;\n]", listed) if item.strip()]
    step_matches = [_SPELT.fullmatch(item) for item in items]
    if all(step_matches):
        return [match[1] for match in step_matches if match is not None]
    words = [word for word in re.split(r"[,;\s]+", listed) if word]
    matches = [_INDEX.fullmatch(word) for word in words]
    if None in matches:
        return f"expected numbers of steps between the tags, found {words[matches.index(None)]!r}"
    return [match[1] or match[2] for match in matches if match is not None]


def flag_weights(critiques: Sequence[Sequence[int]], verdict: StepsVerdict, *, num_steps: int) -> list[float]:
    """Return, for each step of a completion, a weight from 0 to 1 that says how strongly the judge's votes consider the
    step wrong.

    `critiques` contains the valid votes, each as a list of the indices of wrong steps. All weights are 0 if there are
    no valid votes.
    """
    counts, k = Counter(step for critique in critiques for step in critique), len(critiques)
    if not k:
        return [0.0] * num_steps
    return [_weight(counts[step], k, verdict) for step in range(num_steps)]


def _weight(count: int, k: int, verdict: StepsVerdict) -> float:
    """Return how strongly a step is considered wrong (0 to 1), if `count` of `k` critiques list the step as wrong."""
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
"""Maximum number of characters of an answer that is parsed. Longer answers are invalid, because patterns may take
quadratic time."""

FLAGGED: Final = -1.0
"""Reward of a step that the judge lists as wrong. The reward of other steps is 0."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result of parsing one answer of a judge: a finite reward, or None and the reason why the answer is invalid."""

    value: float | None
    error: str | None
    steps: tuple[int, ...] | None = None
    """Indices of the steps listed as wrong, or None if the verdict is not about steps."""
    dropped: int = 0
    """Number of listed step numbers that were ignored, because the completion has no such step."""
    feedback: str = ""
    """Text about the completion that a code reward returned with the score. Empty if there is none."""


def read_verdict(answer: Answer, verdict: VerdictConfig, *, num_steps: int = 0) -> Judgement:
    """Convert an answer of the judge to a judgement (a reward or an error). An answer without exactly one verdict is
    invalid.

    `num_steps` is the number of steps of the completion, for verdicts on steps. An answer that quotes the completion
    cannot contain a forged verdict on steps, because tags are escaped in the completion. If the judge quotes a score or
    choice from the completion and adds its own, the answer contains two verdicts and is invalid. If the judge only
    quotes one, this cannot be detected.
    """
    if answer.error is not None:
        return _invalid_judgement(answer.error)
    if isinstance(verdict, LogprobVerdict):
        return _read_probabilities(answer.probabilities, verdict)
    text = answer.text or ""
    if not text.strip():
        return _invalid_judgement("expected a verdict, found an empty answer")
    if len(text) > LONGEST:
        return _invalid_judgement(f"expected at most {LONGEST} characters, found {len(text)}")
    if isinstance(verdict, StepsVerdict):
        return _read_steps(text, verdict, num_steps)
    if "\N{REPLACEMENT CHARACTER}" in text:
        return _invalid_judgement("expected text in UTF-8, found bytes that are none")
    if isinstance(verdict, ScoreVerdict):
        return _read_score(text, verdict)
    return _read_choice(text, verdict)


def lowest_reward(verdict: VerdictConfig) -> float:
    """Return the lowest possible reward of a verdict. Empty completions get this reward without being judged."""
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
    """Combine the votes on one completion into one reward. Invalid votes are None and are ignored.

    Returns None if no vote is valid. In a majority vote, the lowest of several most frequent values is used.
    """
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


def parse_choice(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice that equals the whole text, ignoring case and surrounding punctuation, or None if no choice
    does."""
    bare = text.strip().strip(".,;:!\"'`*()[] \t\n")
    exact = [choice for choice in choices if choice.strip() in (text.strip(), bare)]
    alike = exact or [choice for choice in choices if choice.strip().casefold() == bare.casefold()]
    return alike[0] if len(alike) == 1 else None


def _read_score(text: str, verdict: ScoreVerdict) -> Judgement:
    """Parse the score in an answer, and scale it to the range from 0 to 1."""
    scores = [match[1] for match in re.finditer(verdict.pattern, text)]
    if len(scores) != 1:
        return _invalid_judgement(f"expected one score, found {len(scores) or 'none'}")
    try:
        score = float(scores[0])
    except (TypeError, ValueError):
        return _invalid_judgement("expected a number as score, found something else")
    if not verdict.low <= score <= verdict.high:
        return _invalid_judgement(f"expected a score from {verdict.low:g} to {verdict.high:g}, found {score:g}")
    return Judgement((score - verdict.low) / (verdict.high - verdict.low), None)


def _read_choice(text: str, verdict: ChoiceVerdict) -> Judgement:
    """Parse an answer that must contain exactly one of the verdict's choices, and return the choice's reward."""
    choices = list(verdict.choices)
    chosen = parse_choice(text, choices)
    if chosen is not None:
        return Judgement(verdict.choices[chosen], None)
    if verdict.constrained:
        return _invalid_judgement("expected nothing but one of the choices, found something else")
    named = _find_choices(text, choices)
    if len(named) != 1:
        return _invalid_judgement(f"expected one choice, found {len(named) or 'none'}")
    return Judgement(verdict.choices[named.pop()], None)


def _read_steps(text: str, verdict: StepsVerdict, num_steps: int) -> Judgement:
    """Parse the steps that an answer lists as wrong. The judgement's reward is the aggregate of the rewards of all
    steps."""
    critique = read_critique(text, num_steps=num_steps)
    if isinstance(critique, str):
        return _invalid_judgement(critique)
    values = [FLAGGED if step in critique.steps else 0.0 for step in range(num_steps)]
    return Judgement(aggregate(values, verdict.aggregate), None, critique.steps, critique.dropped)


def _find_choices(text: str, choices: Sequence[str]) -> set[str]:
    """Return the choices that occur as words in a text.

    If one choice is the beginning of another, the longer match counts. Case matters only for choices of a single
    letter, because "a" is a word and "A" is an answer.
    """
    longest_first = sorted(choices, key=len, reverse=True)
    words = "|".join(f"(?{'-i' if len(choice) == 1 else 'i'}:{re.escape(choice)})" for choice in longest_first)
    choices_found = {match[0] for match in re.finditer(rf"(?<!\w)(?:{words})(?!\w)", text)}
    folded = {choice.casefold(): choice for choice in choices}
    return {word if word in choices else folded[word.casefold()] for word in choices_found}


def _read_probabilities(probabilities: dict[str, float] | None, verdict: LogprobVerdict) -> Judgement:
    """Return a judgement with the reward P(yes) / (P(yes) + P(no)). The judgement is invalid if a probability is
    missing or out of range."""
    if probabilities is None:
        return _invalid_judgement("expected probabilities of the answers, found none")
    yes, no = probabilities.get(verdict.yes), probabilities.get(verdict.no)
    if yes is None or no is None:
        return _invalid_judgement(f"expected probabilities of {verdict.yes!r} and {verdict.no!r}, found less")
    if not all(math.isfinite(p) and 0 <= p <= 1 for p in (yes, no)) or yes + no == 0:
        return _invalid_judgement(f"expected probabilities from 0 to 1 that are not both 0, found {yes:g} and {no:g}")
    return Judgement(yes / (yes + no), None)


def _invalid_judgement(reason: str) -> Judgement:
    """Return a judgement without a reward, with the reason why the answer is invalid.

    The reason is shortened to one line of valid text, because it is stored in a shard.
    """
    line = " ".join(reason.split())[:200]
    return Judgement(None, line.encode("utf-8", "replace").decode() or "no reason given")
