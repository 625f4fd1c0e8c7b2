"""Reward for verifiable instructions: the reference answer lists the instructions of a problem, in one of two forms.

- google/IFEval: `{"instruction_id_list": [...], "kwargs": [{...}, ...]}`, or `instruction_id` instead. A list with one
  such object is accepted too, as in allenai/IF_multi_constraints_upto5.
- allenai/RLVR-IFeval: `{"func_name": "...", "N": 3, ...}`.
"""

import ast
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Final

from pydantic import JsonValue

from rheostat.infra.validation_errors import nearest
from rheostat.models.config.text_rewards import IfevalReward
from rheostat.models.rewards.instructions import INSTRUCTIONS, read_arguments
from rheostat.models.rewards.rules import Reward

_CACHED: Final = 256
"""Maximum number of reference answers whose parsed checks a process caches."""

Checks = tuple[Callable[[str], bool], ...]
"""Functions that check whether a completion follows an instruction, one for each instruction of a prompt."""

RLVR_FUNCTIONS: Final[Mapping[str, tuple[str, Mapping[str, str], Mapping[str, JsonValue]]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}, {}),
    "verify_keyword_frequency": (
        "keywords:frequency",
        {"word": "keyword", "keyword": "keyword", "N": "frequency", "quantifier": "relation"},
        {"relation": "exactly"},
    ),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}, {}),
    "verify_letter_frequency": (
        "keywords:letter_frequency",
        {"letter": "letter", "N": "let_frequency", "quantifier": "let_relation"},
        {"let_relation": "exactly"},
    ),
    "validate_response_language": ("language:response_language", {"language": "language"}, {}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}, {}),
    "validate_word_constraint": (
        "length_constraints:number_words",
        {"N": "num_words", "quantifier": "relation"},
        {"relation": "at least"},
    ),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences",
        {"N": "num_sentences", "quantifier": "relation"},
        {"relation": "at least"},
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"N": "num_paragraphs", "i": "nth_paragraph", "first_word": "first_word"},
        {},
    ),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}, {}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}, {}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}, {}),
    "validate_title": ("detectable_format:title", {}, {}),
    "validate_choice": ("detectable_format:constrained_response", {"options": "options"}, {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"N": "num_highlights"}, {}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"N": "num_sections", "section_splitter": "section_spliter"},
        {},
    ),
    "validate_json_format": ("detectable_format:json_format", {}, {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"}, {}),
    "validate_two_responses": ("combination:two_responses", {}, {}),
    "validate_uppercase": ("change_case:english_capital", {}, {}),
    "validate_lowercase": ("change_case:english_lowercase", {}, {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency",
        {"N": "capital_frequency", "quantifier": "capital_relation"},
        {"capital_relation": "at least"},
    ),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}, {}),
    "validate_quotation": ("startend:quotation", {}, {}),
    "validate_no_commas": ("punctuation:no_comma", {}, {}),
}
"""For each function name of the data set RLVR-IFeval: the name of the corresponding IFEval instruction, the names of
its arguments, and their default values."""


def ifeval_reward(config: IfevalReward) -> Reward:
    """Return a reward function whose score is the share of a prompt's instructions that the completion follows or, as
    configured, 1 only if it follows all of them."""
    read = lru_cache(_CACHED)(read_checks)

    def reward(prompt: str, completion: str, answer: str) -> float:
        """Return a number from 0 to 1. Raises ValueError if the reference answer lists no valid instructions."""
        checks = read(answer)
        texts = _loosen(completion) if config.responses == "loose" else [completion]
        texts = [text for text in texts if text.strip()]
        followed = sum(any(map(check, texts)) for check in checks)
        return followed / len(checks) if config.score == "fraction" else float(followed == len(checks))

    return reward


def read_checks(answer: str) -> Checks:
    """Parse the instructions in a reference answer, and return one check for each. Raises ValueError if the answer has
    neither the format of IFEval nor that of RLVR-IFeval."""
    try:
        document = json.loads(answer)
    except ValueError:
        document = None
    if isinstance(document, list) and len(document) == 1:
        document = document[0]
    if not isinstance(document, dict):
        raise ValueError(
            'the reference answer of the reward ifeval must be a JSON object with "instruction_id_list" and "kwargs", '
            f'or with "func_name", found {answer!r:.60}. If these are columns, list both in data.answer_columns'
        )
    if "func_name" in document:
        return (_read_function(document),)
    names = document.get("instruction_id_list", document.get("instruction_id"))
    arguments = document.get("kwargs")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f'"instruction_id_list" must be a list of instructions, found {names!r:.60}')
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise ValueError(
            f'"kwargs" must be a list with one object of arguments for each of the {len(names)} instructions'
        )
    return tuple(_build_check(str(name), values) for name, values in zip(names, arguments, strict=True))


def _build_check(name: str, values: JsonValue) -> Callable[[str], bool]:
    """Return the check of one IFEval instruction. Raises ValueError if the instruction or one of its arguments is
    invalid."""
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"the arguments of the instruction {name} must be an object, found {values!r:.40}")
    arguments = read_arguments(name, values or {})
    return partial(INSTRUCTIONS[name].check, **arguments)


def _read_function(document: Mapping[str, JsonValue]) -> Callable[[str], bool]:
    """Return the check of one instruction in the format of RLVR-IFeval. Raises ValueError if the instruction is unknown
    or an argument is invalid."""
    function = document["func_name"]
    if not isinstance(function, str) or function not in RLVR_FUNCTIONS:
        raise ValueError(
            f'"func_name" is {function!r:.60}, which is not a function of '
            f"RLVR-IFeval{nearest(str(function), [*RLVR_FUNCTIONS])}"
        )
    name, renamed, defaults = RLVR_FUNCTIONS[function]
    present = {key: value for key, value in document.items() if key in renamed and value is not None}
    arguments = {**defaults, **{renamed[key]: value for key, value in present.items()}}
    if isinstance(options := arguments.get("options"), str):
        arguments["options"] = _read_options(options)
    return _build_check(name, arguments)


def _read_options(text: str) -> list[JsonValue]:
    """Parse the options in a text, which may be a Python list, a JSON list, or separated by slashes."""
    with suppress(ValueError, SyntaxError):
        options = ast.literal_eval(text)
        if isinstance(options, list | tuple):
            return [str(option) for option in options]
    return [option.strip() for option in text.split("/") if option.strip()]


def _loosen(completion: str) -> list[str]:
    """Return the variants of a completion that IFEval's loose accuracy accepts: the whole completion, and the
    completion without its first line, without its last line, and without both. Each variant is also included without
    asterisks."""
    lines = completion.split("\n")
    cut = [completion, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(text.replace("*", "") for text in cut)]
