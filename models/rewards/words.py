"""Answers in words: choices, names, dates and times. They are compared as text and never as products of variables."""

import re
import unicodedata
from typing import Final

_NAMES: Final = re.compile(
    "sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|arcsin|arccos|arctan|log|ln|exp|lim|max|min|sup|gcd|lcm|mod|det|sqrt|abs|"
    "theta|alpha|beta|gamma|delta|epsilon|lambda|mu|sigma|phi|omega|tau|rho|eta|zeta|pi|inf|infinity|oo",
    re.IGNORECASE,
)
"""Pattern of names of mathematical functions and Greek letters, which are not treated as words in an answer."""

_CONSTANTS: Final = re.compile("pi|inf|infinity|oo", re.IGNORECASE)

_CONNECTORS: Final = re.compile("and|or|if|for|in|the|an?|is|of|to")

_VOWELLESS: Final = frozenset({"by", "my", "hmm", "shh", "psst", "tsk", "nth", "mr", "mrs", "dr", "vs", "ly", "brr"})
"""English words without a, e, i, o or u, which would otherwise be read as products of variables."""

_CODE: Final = re.compile(
    rf"(?!(?:{_NAMES.pattern})\d)[A-Za-z]+\d[A-Za-z\d]*(?:\.\d+)*|(?:[A-Z][a-z]?(?:_?\d+)?)+[+-]?"
)
"""Pattern of codes made of letters and digits, such as a chemical formula (H2O), a square of a chess board or a part
number."""

_MONTHS: Final = "janfebmaraprmayjunjulaugsepoctnovdec"
_OPTION: Final = r"\s+(?!(?:or|and)\b|\(?[A-Z][).])\S.*"
_CHOICE: Final = re.compile(
    rf"(?:[Oo]ption\s+|[Cc]hoice\s+)?[(\[{{]?([A-Za-z])[)\]}}]?[.:]?|\(([A-Za-z])\)[.:]?{_OPTION}|([A-Z])(?:\)|[.:]){_OPTION}",
    re.DOTALL,
)
_DAY: Final = r"(?P<day>[0-3]?\d)(?:st|nd|rd|th)?"
_MONTH: Final = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|"
    r"oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_YEAR: Final = r"(?:,?\s+(?P<year>\d{4}))?"
_DATES: Final = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<year>\d{4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})",
        rf"{_MONTH}\s+(?:the\s+)?{_DAY}{_YEAR}",
        rf"(?:the\s+)?{_DAY}\s+(?:of\s+)?{_MONTH}{_YEAR}",
    )
]
_NUMERIC_DATE: Final = re.compile(r"(\d{1,2})([/.])(\d{1,2})\2(\d{4})")
_TIME: Final = re.compile(
    r"(?P<hour>[012]?\d)(?:\s*:\s*(?P<minute>[0-5]\d))?(?:\s*:\s*(?P<second>[0-5]\d))?\s*(?P<half>[ap]\.?\s?m\b\.?)?",
    re.IGNORECASE,
)


def is_word(token: str) -> bool:
    """Return whether letters form a word, as opposed to a product of variables or the name of a function.

    A word has two letters or more, at least one of them a vowel. Lower-case letters in alphabetical order, all of them
    from a to d or x to z, such as `abc` or `xy`, are a product. Letters of other scripts are words, except Greek
    letters.
    """
    if len(token) < 2 or not token.isalpha() or _NAMES.fullmatch(token):
        return False
    if not token.isascii():
        return not re.fullmatch("[α-ωΑ-Ω]+", token)
    vowels = "aeiouy" if len(token) > 2 and not {*token} & {*"xz"} else "aeiou"
    is_product = token.islower() and {*token} <= {*"abcdxyz"} and [*token] == sorted({*token})
    return bool({*token.casefold()} & {*vowels}) and not is_product


def words_in(text: str) -> list[str]:
    """Return the words in a text in order and in lower case, without connecting words such as "and"."""
    tokens = re.findall(r"[^\W\d_]+", re.sub(r"\\(?:begin|end)\{[^{}]*\}|\\[A-Za-z]+", " ", text))
    return [token.casefold() for token in tokens if is_word(token) and not _CONNECTORS.fullmatch(token.casefold())]


def is_wordy(text: str) -> bool:
    """Return whether an answer is a text in words and not mathematics. Codes such as H2O, words followed by a number,
    and single letters that are choices are such texts."""
    letter = choice_of(text)
    if letter is not None and (letter.isupper() or text.startswith("(")):
        return True
    if _NAMES.fullmatch(text):
        return not _CONSTANTS.fullmatch(text)
    if is_code(text):
        return True
    tokens = re.findall(r"[^\W\d_]+", text)
    plain = re.fullmatch(r"[^\W\d_]+(?:[ '’.,;:!?/&-]+[^\W\d_]+)*[.!?]?", text) is not None
    has_number = re.fullmatch(r"[^\W\d_]+(?: [^\W\d_]+)* #?\d+", text) is not None and bool(words_in(text))
    return (
        (plain or has_number)
        and any(is_word(each) or is_acronym(each) for each in tokens)
        and not any(map(_NAMES.fullmatch, tokens))
    )


def is_acronym(token: str) -> bool:
    """Return whether letters are an acronym (two or more capital letters) or a word without vowels, such as "my"."""
    return (len(token) > 1 and token.isupper()) or token.casefold() in _VOWELLESS


def is_code(text: str) -> bool:
    """Return whether a text is a code made of letters and digits, such as H2O or CO_2, and not a product of
    variables."""
    code = _code_key(text)
    has_digits = any(map(str.isdigit, code))
    return has_digits and _CODE.fullmatch(code) is not None and ("_" not in text or code[:1].isupper())


def _code_key(text: str) -> str:
    """Return a code without index marks and spaces, so that CO_2 and CO2 are equal."""
    return re.sub(r"\s*_\s*\{?\s*(\d+)\s*\}?\s*", r"\1", text).strip()


def choice_of(text: str) -> str | None:
    """Return the letter of a multiple-choice answer, written as `C`, `(C)` or `C)`, or before the text of the choice as
    in `(C) 12 apples`. Returns None for other texts."""
    match = _CHOICE.fullmatch(text)
    return None if match is None else next(group for group in match.groups() if group)


def is_same_text(expected: str, given: str) -> bool:
    """Return whether two answers in words are equal. Dates and times are compared by their value. Case matters only for
    single letters that are not in brackets."""
    if date_of(expected) is not None or time_of(expected) is not None:
        return is_same_moment(expected, given)
    if is_code(expected):
        return _code_key(expected) == _code_key(given)
    letters = choice_of(expected), choice_of(given)
    if letters[0] is not None and letters[1] is not None and _is_short(expected, given):
        bracketed = expected[0] in "([{" and given[0] in "([{"
        return letters[0] == letters[1] or (bracketed and letters[0].casefold() == letters[1].casefold())
    return text_key(expected) == text_key(given)


def _is_short(*texts: str) -> bool:
    """Return whether at least one of these multiple-choice answers is only a letter, without the text of the choice."""
    return any(len(re.findall(r"\w+", text)) == 1 for text in texts)


def text_key(text: str) -> str:
    """Return a normalized text for comparisons: without differences in case (except of single letters), in the encoding
    of accents, in punctuation at the ends, and in a leading "the"."""
    text = unicodedata.normalize("NFKC", text.removeprefix("\\")).replace("’", "'")
    text = re.sub(r"[^\W\d_]{2,}", lambda word: word[0].casefold(), text)
    text = re.sub(r"\s*([-/,;:])\s*", r"\1", " ".join(text.split())).strip(" .,;:!?\"'")
    return text.removeprefix("the ")


def is_same_moment(expected: str, given: str) -> bool:
    """Return whether two dates, or two times of day, are equal. An expected time without am or pm also equals the same
    time with am or pm."""
    dates = date_of(expected), date_of(given)
    if dates[0] is not None:
        return dates[0] == dates[1]
    time, other = time_of(expected), time_of(given)
    if time is None or other is None:
        return False
    (hour, minute, half), (other_hour, other_minute, other_half) = time, other
    if half is None and other_half is not None and hour <= 12:
        return (hour % 12, minute) == (other_hour % 12, other_minute)
    return (hour % 24, minute) == (other_hour % 24, other_minute)


def date_of(text: str) -> tuple[str, int, int, int] | None:
    """Return the date in a text as (notation, year or 0, month, day), or None if the text is not a date.

    A date with slashes or dots only equals a date in the same notation, because the order of day and month differs
    between countries.
    """
    if match := _NUMERIC_DATE.fullmatch(text):
        return match[2], int(match[4]), int(match[1]), int(match[3])
    for pattern in _DATES:
        if match := pattern.fullmatch(text.strip(" .")):
            month = match["month"].casefold()
            number = int(month) if month.isdigit() else _MONTHS.index(month[:3]) // 3 + 1
            return "name", int(match["year"] or 0), number, int(match["day"])
    return None


def time_of(text: str) -> tuple[int, tuple[int, int], str | None] | None:
    """Return the time of day in a text as the hour (0 to 24), a pair of minute and second, and "a", "p" or None for am,
    pm or neither. Returns None if the text is not a time."""
    match = _TIME.fullmatch(text.strip())
    if match is None or not (match["minute"] or match["half"]):
        return None
    hour, half = int(match["hour"]), None if match["half"] is None else match["half"][0].casefold()
    if hour > (24 if half is None else 12):
        return None
    if half is not None:
        hour = hour % 12 + (12 if half == "p" else 0)
    return hour, (int(match["minute"] or 0), int(match["second"] or 0)), half
