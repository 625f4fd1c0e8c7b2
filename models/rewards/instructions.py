"""Verifiable instructions of IFEval (Zhou et al. 2023, arXiv 2311.07911, table 1): each checks one property of a text.

The names of instructions and arguments are those of the data set google/IFEval. A relation is "less than" or "at
least", and also "at most", "exactly" or "around" (10% off, but at least 1), which RLVR-IFeval uses (arXiv 2411.15124).
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from pydantic import JsonValue

from rheostat.infra.validation_errors import nearest
from rheostat.models.rewards.packages import require_package

OPTIONS: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""Sentences of the instruction `constrained_response`. A text must contain one of them."""
MIN_TOLERANCE: Final = 1
TOLERANCE: Final = 0.1
"""Relative difference from the requested count that is allowed if the relation is "around"."""

Check = Callable[..., bool]
"""Function that returns whether a text follows an instruction. The arguments of the instruction are passed as keyword
arguments."""

_RELATIONS: Final[dict[str, Callable[[int, int], bool]]] = {
    "less than": lambda count, wanted: count < wanted,
    "at least": lambda count, wanted: count >= wanted,
    "at most": lambda count, wanted: count <= wanted,
    "exactly": lambda count, wanted: count == wanted,
    "around": lambda count, wanted: abs(count - wanted) <= max(round(TOLERANCE * wanted), MIN_TOLERANCE),
}
_ABBREVIATIONS: Final = frozenset(
    (
        "mr",
        "mrs",
        "ms",
        "dr",
        "prof",
        "st",
        "jr",
        "sr",
        "inc",
        "ltd",
        "co",
        "vs",
        "etc",
        "e.g",
        "i.e",
        "cf",
        "no",
        "fig",
    )
)
_SENTENCE_END: Final = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|$)|[。！？]+[」』”]?")
_TOKEN: Final = re.compile(r"[^\W_]+(?:[-'’.][^\W_]+)*")


@dataclass(frozen=True, slots=True)
class Instruction:
    """Kind of instruction, such as "contain these keywords": the function that checks a text, and the types of the
    instruction's arguments by name."""

    check: Check
    arguments: Mapping[str, type] = field(default_factory=dict)


def _compare(count: int, wanted: int, relation: str) -> bool:
    return _RELATIONS[relation](count, wanted)


# ---- keywords
def _has_keywords(text: str, *, keywords: Sequence[str]) -> bool:
    folded = text.casefold()
    return all(keyword.casefold() in folded for keyword in keywords)


def _has_keyword_often(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(text.casefold().count(keyword.strip().casefold()), frequency, relation)


def _has_no_forbidden_word(text: str, *, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _has_letter_often(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.strip().lower()), let_frequency, let_relation)


# ---- language
def _is_in_language(text: str, *, language: str) -> bool:
    if not any(character.isalpha() for character in text):
        return False
    return identify_language(text) == language.lower().partition("-")[0]


def _is_upper_english(text: str) -> bool:
    return text.isupper() and identify_language(text) == "en"


def _is_lower_english(text: str) -> bool:
    return text.islower() and identify_language(text) == "en"


def identify_language(text: str) -> str:
    """Return the ISO 639-1 code of the language in which a text is written. The text is converted to lower case for the
    identification."""
    return str(load_identifier().classify(text.lower())[0])


@cache
def load_identifier() -> Any:  # noqa: ANN401 -- py3langid has no types
    """Return py3langid's language identifier. Raises BadInput if py3langid is not installed."""
    require_package("py3langid", "py3langid", "reward 'ifeval' with an instruction about the language")
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)


# ---- length
def count_sentences(text: str) -> int:
    """Return the number of sentences in a text. Full stops after abbreviations, after initials and in numbers do not
    end a sentence.

    >>> count_sentences("Dr. A. Smith paid 3.50 dollars. Why? Nobody knows")
    3
    """
    ends = [match.end() for match in _SENTENCE_END.finditer(text) if not _is_abbreviated(text, match)]
    rest = text[ends[-1] :] if ends else text
    starts = [0, *ends]
    full = sum(any(map(str.isalnum, text[start:end])) for start, end in zip(starts, ends, strict=False))
    return full + any(map(str.isalnum, rest))


def _is_abbreviated(text: str, end: re.Match[str]) -> bool:
    if end[0] != ".":
        return False
    word = re.search(r"[\w.]*$", text[max(0, end.start() - 20) : end.start()])
    last = word[0] if word else ""
    is_initial = len(last) == 1 and last.isalpha() and last.isupper() and last != "I"
    return is_initial or last.lower() in _ABBREVIATIONS


def _has_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return _compare(count_sentences(text), num_sentences, relation)


def _has_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Return whether `***` separates the text into exactly this number of paragraphs without an empty one."""
    paragraphs = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = paragraphs[1:-1] if len(paragraphs) > 1 else []
    return all(inner) and sum(map(bool, paragraphs)) == num_paragraphs


def _has_words(text: str, *, num_words: int, relation: str) -> bool:
    return _compare(len(re.findall(r"\w+", text)), num_words, relation)


def _starts_paragraph(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return whether blank lines separate the text into exactly `num_paragraphs` paragraphs, and the paragraph number
    `nth_paragraph` begins with `first_word`."""
    paragraphs = [part.strip() for part in text.split("\n\n")]
    if sum(map(bool, paragraphs)) != num_paragraphs or not 0 < nth_paragraph <= num_paragraphs:
        return False
    words = paragraphs[nth_paragraph - 1].split()
    return bool(words) and re.split(r"[.,?!'\"]", words[0].lstrip("'\""))[0].lower() == first_word.lower()


# ---- content
def _has_placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _has_postscript(text: str, *, postscript_marker: str) -> bool:
    patterns = {"p.p.s": r"p\.\s?p\.\s?s", "p.s.": r"p\.\s?s\."}
    marker = postscript_marker.strip().lower()
    return re.search(patterns.get(marker, re.escape(marker)), text.lower()) is not None


# ---- format
def _has_bullets(text: str, *, num_bullets: int) -> bool:
    bullets = [line for line in map(str.lstrip, text.split("\n")) if re.match(r"\*[^*]|-", line)]
    return len(bullets) == num_bullets


def _has_option(text: str, *, options: Sequence[str] = OPTIONS) -> bool:
    return any(option in text for option in options)


def _has_highlights(text: str, *, num_highlights: int) -> bool:
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(part.strip()) for part in (*single, *double)) >= num_highlights


def _has_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def _is_json(text: str) -> bool:
    """Return whether the whole text is a JSON document, which may be in a code block."""
    bare = re.sub(r"^```(?:json)?", "", text.strip(), flags=re.IGNORECASE).removesuffix("```").strip()
    try:
        json.loads(bare)
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text))


# ---- combination, start and end, case, punctuation
def _has_two_responses(text: str) -> bool:
    """Return whether `******` separates the text into two different responses."""
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def _repeats_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _is_quoted(text: str) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


def _has_capital_words(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(sum(word.isupper() for word in _TOKEN.findall(text)), capital_frequency, capital_relation)


def _has_no_comma(text: str) -> bool:
    return "," not in text


INSTRUCTIONS: Final[Mapping[str, Instruction]] = {
    "keywords:existence": Instruction(_has_keywords, {"keywords": list}),
    "keywords:frequency": Instruction(_has_keyword_often, {"keyword": str, "frequency": int, "relation": str}),
    "keywords:forbidden_words": Instruction(_has_no_forbidden_word, {"forbidden_words": list}),
    "keywords:letter_frequency": Instruction(
        _has_letter_often, {"letter": str, "let_frequency": int, "let_relation": str}
    ),
    "language:response_language": Instruction(_is_in_language, {"language": str}),
    "length_constraints:number_sentences": Instruction(_has_sentences, {"num_sentences": int, "relation": str}),
    "length_constraints:number_paragraphs": Instruction(_has_paragraphs, {"num_paragraphs": int}),
    "length_constraints:number_words": Instruction(_has_words, {"num_words": int, "relation": str}),
    "length_constraints:nth_paragraph_first_word": Instruction(
        _starts_paragraph, {"num_paragraphs": int, "nth_paragraph": int, "first_word": str}
    ),
    "detectable_content:number_placeholders": Instruction(_has_placeholders, {"num_placeholders": int}),
    "detectable_content:postscript": Instruction(_has_postscript, {"postscript_marker": str}),
    "detectable_format:number_bullet_lists": Instruction(_has_bullets, {"num_bullets": int}),
    "detectable_format:constrained_response": Instruction(_has_option),
    "detectable_format:number_highlighted_sections": Instruction(_has_highlights, {"num_highlights": int}),
    "detectable_format:multiple_sections": Instruction(_has_sections, {"section_spliter": str, "num_sections": int}),
    "detectable_format:json_format": Instruction(_is_json),
    "detectable_format:title": Instruction(_has_title),
    "combination:two_responses": Instruction(_has_two_responses),
    "combination:repeat_prompt": Instruction(_repeats_prompt, {"prompt_to_repeat": str}),
    "startend:end_checker": Instruction(_ends_with, {"end_phrase": str}),
    "startend:quotation": Instruction(_is_quoted),
    "change_case:capital_word_frequency": Instruction(
        _has_capital_words, {"capital_frequency": int, "capital_relation": str}
    ),
    "change_case:english_capital": Instruction(_is_upper_english),
    "change_case:english_lowercase": Instruction(_is_lower_english),
    "punctuation:no_comma": Instruction(_has_no_comma),
}
"""All 25 kinds of instructions, by their names in the data set google/IFEval."""

LANGUAGE_INSTRUCTIONS: Final = (
    "language:response_language",
    "change_case:english_capital",
    "change_case:english_lowercase",
)
"""Names of the instructions whose check must identify the language of a text."""


def read_arguments(name: str, values: Mapping[str, JsonValue]) -> dict[str, Any]:
    """Check the arguments of an instruction, and return them without those that are null. Whole numbers may be written
    as floats.

    Raises ValueError if the instruction or an argument is unknown, or if an argument is missing or has the wrong type.
    """
    if name not in INSTRUCTIONS:
        raise ValueError(f"{name!r:.60} is not an instruction of IFEval{nearest(name, [*INSTRUCTIONS])}")
    types = INSTRUCTIONS[name].arguments
    present = {key: value for key, value in values.items() if value is not None}
    if name == "detectable_format:constrained_response" and "options" in present:
        types = {"options": list}
    _require_keys(name, present, types)
    arguments: dict[str, Any] = {key: _convert(value) for key, value in present.items()}
    for key, kind in types.items():
        if not isinstance(arguments[key], kind) or isinstance(arguments[key], bool):
            raise ValueError(
                f"the argument {key} of the instruction {name} must be of type {kind.__name__}, found "
                f"{arguments[key]!r:.40}"
            )
        if key.endswith("relation") and arguments[key] not in _RELATIONS:
            raise ValueError(
                f"the argument {key} of the instruction {name} must be one of {', '.join(_RELATIONS)}, found "
                f"{arguments[key]!r:.40}"
            )
        if kind is list and not all(isinstance(each, str) and each.strip() for each in arguments[key]):
            raise ValueError(
                f"the argument {key} of the instruction {name} must be a list of texts, found {arguments[key]!r:.40}"
            )
    if name in LANGUAGE_INSTRUCTIONS:
        load_identifier()
    return arguments


def _require_keys(name: str, present: Collection[str], types: Collection[str]) -> None:
    """Raise ValueError if an argument of the instruction `name` is missing or unknown. `present` contains the given
    arguments, and `types` the required ones."""
    if missing := [key for key in types if key not in present]:
        raise ValueError(f"the instruction {name} needs the argument {missing[0]!r}, which is missing")
    if unknown := [key for key in present if key not in types]:
        raise ValueError(
            f"the instruction {name} has no argument {unknown[0]!r}. Its arguments are: {', '.join(types) or 'none'}"
        )


def _convert(value: JsonValue) -> JsonValue:
    return int(value) if isinstance(value, float) and value.is_integer() else value
