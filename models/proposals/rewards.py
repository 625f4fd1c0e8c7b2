"""Reward that fits the reference answers of a data file, with the reason for the proposal."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import JsonValue

from rheostat.models.config.reward_terms import MathReward, NumericReward
from rheostat.models.rewards.code import read_tests
from rheostat.models.rewards.ifeval import read_checks
from rheostat.models.rewards.rules import Reward, build_reward

NEARLY_ALL: Final = 0.95
"""Minimum share of answers that must be of a kind, so that a reward for this kind is proposed."""
MAX_LABELS: Final = 20
"""Maximum number of different answers up to which answers count as labels (classes)."""
ROWS_PER_LABEL: Final = 4
"""Minimum of the mean number of rows per different answer with which the answers count as labels (classes)."""
LABEL_WORDS: Final = 5
"""Maximum number of words in an answer that counts as a label or as a short answer."""
MAX_NUMBER: Final = 40
"""Maximum number of characters, including a unit, in an answer that counts as a number."""
_LATEX: Final = re.compile(r"\\[a-zA-Z]+|\$[^$]+\$|\^")
_SCHEMA_KEYS: Final = frozenset(("$schema", "type", "properties", "anyOf", "oneOf", "allOf", "enum", "items", "$ref"))
_JSON_TYPES: Final = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class RewardProposal:
    """Proposed reward of a job, with the reason why it fits the reference answers."""

    kind: str
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    """Keys of the reward other than `kind`."""
    reason: str = ""
    instruction: str = ""
    """Sentence that is added to the prompts and explains how the policy must write its answer. Empty if none is
    needed."""
    thinks: bool = False
    """Whether the policy may reason before its answer. If so, completions are longer than the reference answers."""


Rule = Callable[[Sequence[str]], RewardProposal | None]
"""Function that returns the proposed reward for reference answers of one kind, or None if they are of another kind."""


def propose_reward(answers: Sequence[str], *, judge: str | None, has_rubrics: bool) -> RewardProposal | None:
    """Return the proposed reward for the reference answers, which must not be blank. `judge` is the directory of a
    judge model. Return None if there are neither answers nor a judge."""
    if has_rubrics and judge is not None:
        reason = "every problem has a rubric, whose criteria the judge rates one by one"
        return RewardProposal("judge", {"verdict": {"kind": "rubric"}}, reason=reason)
    if answers:
        for rule in _RULES:
            if (proposal := rule(answers)) is not None:
                return proposal
    if judge is not None:
        reason = "the answers are free texts" if answers else "the data has no reference answers"
        return RewardProposal("judge", reason=f"{reason}, so the judge rates the completions")
    if not answers:
        return None
    reason = (
        "the answers are free texts, so the words shared with the answer count. A judge (--judge) rates such answers "
        "better"
    )
    return RewardProposal("f1", reason=reason)


def _propose_instructions(answers: Sequence[str]) -> RewardProposal | None:
    """Propose the IFEval reward if the answers list instructions that a program can check."""
    if not all("instruction_id" in answer or "func_name" in answer for answer in answers):
        return None
    if _share(answers, _lists_instructions) < 1:
        return None
    return RewardProposal("ifeval", reason=f"all {len(answers):,} rows list verifiable instructions", thinks=True)


def _lists_instructions(answer: str) -> bool:
    try:
        read_checks(answer)
    except ValueError:
        return False
    return True


def _propose_code(answers: Sequence[str]) -> RewardProposal | None:
    """Propose the unit-test reward if the answers are tests: Python code with assert, or JSON pairs of input and
    output."""

    def is_test(text: str) -> bool:
        try:
            tests = read_tests(text)
        except ValueError:
            return False
        return isinstance(tests, tuple) or (any(counts for _, counts in tests.sources) and "assert" in text)

    share = _share(answers, is_test)
    if share < 1:
        return None
    return RewardProposal(
        "code",
        reason=f"all {len(answers):,} answers are tests of programs",
        instruction="Write the solution as one Python code block.",
        thinks=True,
    )


def _propose_schema(answers: Sequence[str]) -> RewardProposal | None:
    """Propose the JSON schema reward if the answers are schemas, or JSON documents with common keys."""
    documents = [_parse_object(answer) for answer in answers]
    if any(document is None for document in documents):
        return None
    objects = [document for document in documents if document is not None]
    if all(_SCHEMA_KEYS & set(each) and isinstance(each.get("type", ""), str | list) for each in objects):
        reason = f"all {len(answers):,} answers are JSON schemas"
        return RewardProposal("json_schema", reason=reason, instruction="Answer with a JSON document.")
    common = {key: _find_type(objects, key) for key in objects[0] if all(key in each for each in objects)}
    if not common:
        return None
    schema: dict[str, JsonValue] = {
        "type": "object",
        "required": list(common),
        "properties": {key: {"type": kind} for key, kind in common.items() if kind},
    }
    keys = ", ".join(common)
    return RewardProposal(
        "json_schema",
        {"json_schema": schema},
        reason=f"all {len(answers):,} answers are JSON objects with {keys}. Only the form is scored, not the values",
        instruction=f"Answer with a JSON object that has the keys {keys}.",
    )


def _propose_numeric(answers: Sequence[str]) -> RewardProposal | None:
    """Propose the numeric reward if all answers are numbers or end in `####` and a number."""
    if _share(answers, _is_number) < 1:
        return None
    marked = sum("####" in answer for answer in answers)
    how = "end in #### and a number" if marked == len(answers) else "are numbers"
    return RewardProposal(
        "numeric",
        reason=f"all {len(answers):,} answers {how}",
        instruction="Think step by step. End with #### and the number.",
        thinks=True,
    )


def _propose_math(answers: Sequence[str]) -> RewardProposal | None:
    """Propose the math reward if most answers are numbers or many contain LaTeX, and the reward can compare all of
    them."""
    numbers, latex = _share(answers, _is_number), _share(answers, lambda text: bool(_LATEX.search(text)))
    check = build_reward(MathReward())
    if (numbers < 0.5 and latex < 0.2) or _share(answers, lambda text: _accepts(check, text)) < 1:
        return None
    reason = (
        f"{numbers:.0%} of {len(answers):,} answers are numbers, and math can compare the others too"
        if numbers >= latex
        else f"{latex:.0%} of {len(answers):,} answers contain mathematics in LaTeX"
    )
    return RewardProposal(
        "math",
        reason=reason,
        instruction="Think step by step. Write the final answer in \\boxed{}.",
        thinks=True,
    )


def _propose_labels(answers: Sequence[str]) -> RewardProposal | None:
    """Propose an exact match if the answers are labels: few different short answers that occur often."""
    labels = sorted({answer.strip() for answer in answers})
    if len(labels) > MAX_LABELS or len(answers) < ROWS_PER_LABEL * len(labels):
        return None
    if any(len(label.split()) > LABEL_WORDS for label in labels):
        return None
    names = ", ".join(labels)
    return RewardProposal(
        "exact_match",
        {"normalize": "squad"},
        reason=f"{len(answers):,} answers have only {len(labels)} different texts: {names}",
        instruction=f"Answer with one of these and nothing else: {names}.",
    )


def _propose_short(answers: Sequence[str]) -> RewardProposal | None:
    """Propose an exact match if nearly all answers consist of a few words."""
    share = _share(answers, lambda text: len(text.split()) <= LABEL_WORDS)
    if share < NEARLY_ALL:
        return None
    return RewardProposal(
        "exact_match",
        {"normalize": "squad"},
        reason=f"{share:.0%} of {len(answers):,} answers have at most {LABEL_WORDS} words",
        instruction="Answer with the answer alone, in a few words.",
    )


_RULES: Final[tuple[Rule, ...]] = (
    _propose_instructions,
    _propose_code,
    _propose_schema,
    _propose_numeric,
    _propose_math,
    _propose_labels,
    _propose_short,
)
"""Functions that propose a reward, in the order in which they are tried. The first proposal is used."""


def _share(answers: Sequence[str], predicate: Callable[[str], bool]) -> float:
    return sum(map(predicate, answers)) / len(answers)


def _is_number(text: str) -> bool:
    is_alone = "####" in text or (len(text) <= MAX_NUMBER and "\n" not in text.strip())
    is_plain = any(character.isdigit() for character in text) and not _LATEX.search(text.rpartition("####")[2])
    return is_alone and is_plain and _accepts(build_reward(NumericReward()), text)


def _accepts(reward: Reward, answer: str) -> bool:
    try:
        reward("", "", answer)
    except ValueError:
        return False
    return True


def _parse_object(text: str) -> dict[str, JsonValue] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _find_type(objects: Sequence[Mapping[str, JsonValue]], key: str) -> str:
    """Return the JSON type of the values of `key` in all objects, or an empty string if the types differ."""
    kinds = {_JSON_TYPES.get(type(each[key]), "") for each in objects}
    return kinds.pop() if len(kinds) == 1 else ""
