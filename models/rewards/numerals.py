"""Numbers as people write them in answers: with thousands separators, currencies, percent signs, fractions, exponents
and units.

`read_numeral` parses a text that is one number, and `agree` compares two numbers. Mathematics is never evaluated here.
"""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor, log10
from typing import Final

from rheostat.models.rewards.words import is_word

MAX_LENGTH: Final = 1000
"""Maximum number of characters of a text that is read as a number."""

MAX_EXPONENT: Final = 3000
"""Largest power of ten in scientific notation. Texts with larger exponents are not read as numbers."""

DIGITS: Final = 6
"""Minimum number of significant digits to which a rounded number must agree with an exact one."""

_CURRENCIES: Final = {
    "$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee", "฿": "baht", "¢": "cent",
    "USD": "dollar", "EUR": "euro", "GBP": "pound", "JPY": "yen", "INR": "rupee", "Rs": "rupee", "Rs.": "rupee",
    "CNY": "yuan",
}  # fmt: skip
_CURRENCY: Final = r"(?:[A-Z]{0,2}\$|[£¥฿¢\u20a0-\u20cf]|(?:USD|EUR|GBP|JPY|INR|CNY|Rs\.?)(?=\s*\d))"

_PLAIN: Final = (
    r"(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?"  # 1,234,567.8
    r"|[1-9]\d?(?:,\d{2})+,\d{3}(?:\.\d+)?"  # 12,34,567.8, as in India
    r"|[1-9]\d{0,2}(?:[ '’_]\d{3})+(?:\.\d+)?"  # 1 234 567.8
    r"|[1-9]\d{0,2}(?:\.\d{3})+,\d+"  # 1.234.567,8
    r"|[1-9]\d{0,2}(?:\.\d{3}){2,}"  # 1.234.567
    r"|0,\d+"  # 0,8
    r"|\d+(?:\.\d*)?|\.\d+)"
)
_INTEGER: Final = r"(?:[1-9]\d{0,2}(?:[, ]\d{3})+|\d+)"
_POWER: Final = (
    r"(?:[eE](?P<exponent>[+-]?\d+)|\s*(?:\\times|\\cdot|[*x])\s*10\s*(?:\^|\*\*)"
    r"(?:\s*\{\s*(?P<power>[+-]?\d+)\s*\}|\s*(?P<bare>[+-]?\d+)))"
)
_NUMERAL: Final = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<before>{_CURRENCY}?)\s*(?P<inner>-?)\s*"
    rf"(?:(?:(?P<whole>{_INTEGER})\s*\+?\s*)?\\[dtc]?frac\s*(?:\{{\s*(?P<over>-?{_PLAIN})\s*\}}|(?P<short>\d))\s*"
    rf"(?:\{{\s*(?P<under>-?{_PLAIN})\s*\}}|(?P<below>\d))"
    rf"|(?:(?P<units>{_INTEGER})\s+)?(?P<top>{_PLAIN})\s*/\s*(?P<bottom>{_PLAIN})"
    rf"|10\s*(?:\^|\*\*)(?:\s*\{{\s*(?P<ten>[+-]?\d+)\s*\}}|\s*(?P<digits>[+-]?\d+))|(?P<number>{_PLAIN}){_POWER}?)"
)
_LITERAL: Final = re.compile(r"0[xX][0-9A-Fa-f]+|0[bB][01]+|0[oO][0-7]+")
_DECIMAL_COMMA: Final = re.compile(r"(?<![\d.,])(\d+),(\d{1,2}|\d{4,})(?![\d.,])")

_SCALES: Final = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_WORDS: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_TENS: Final = "thirty forty fifty sixty seventy eighty ninety"
_CARDINALS: Final = {
    **{word: value for value, word in enumerate(_WORDS.split())},
    **{
        word: 10 * value
        for value, word in enumerate(["thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 3)
    },
}

_UNITS: Final = {
    **dict.fromkeys(("dollar", "usd", "buck"), "dollar"), **dict.fromkeys(("euro", "eur"), "euro"),
    **dict.fromkeys(("pound", "gbp"), "pound"), **dict.fromkeys(("percent", "percentage", "pct", "%"), "%"),
    **dict.fromkeys(("degree", "deg"), "degree"), **dict.fromkeys(("meter", "metre", "m"), "meter"),
    **dict.fromkeys(("centimeter", "centimetre", "cm"), "centimeter"),
    **dict.fromkeys(("millimeter", "millimetre", "mm"), "millimeter"),
    **dict.fromkeys(("kilometer", "kilometre", "km"), "kilometer"),
    **dict.fromkeys(("inch", "inche", "in", '"', "″"), "inch"),
    **dict.fromkeys(("foot", "feet", "ft", "'", "′"), "foot"), **dict.fromkeys(("yard", "yd"), "yard"),
    **dict.fromkeys(("mile", "mi"), "mile"), **dict.fromkeys(("kilogram", "kg"), "kilogram"),
    **dict.fromkeys(("gram", "g"), "gram"), **dict.fromkeys(("milligram", "mg"), "milligram"),
    **dict.fromkeys(("liter", "litre", "l"), "liter"), **dict.fromkeys(("milliliter", "ml"), "milliliter"),
    **dict.fromkeys(("second", "sec", "s"), "second"), **dict.fromkeys(("minute", "min"), "minute"),
    **dict.fromkeys(("hour", "hr", "h"), "hour"), **dict.fromkeys(("ounce", "oz"), "ounce"),
    **dict.fromkeys(("lb",), "pound"), **dict.fromkeys(("cent",), "cent"), **dict.fromkeys(("mph",), "mph"),
    **dict.fromkeys(("kph", "kmh"), "kph"), **dict.fromkeys(("sq", "square"), "square"),
    **dict.fromkeys(("cubic", "cu"), "cubic"), **dict.fromkeys(("per", "/"), "per"),
    **dict.fromkeys(("rd", "th", "st", "nd"), ""), **dict.fromkeys(("ha", "kw", "kwh", "hz", "khz", "mhz", "kj"), "si"),
}  # fmt: skip
_SI: Final = frozenset({"N", "J", "W", "V", "K", "Pa", "A", "F", "C"})
_NO_UNIT: Final = re.compile("and|or|to|by|from|of|for|if|is|in|when|with|mod|than|then")


@dataclass(frozen=True, slots=True)
class Numeral:
    """Number read from a text, with the precision and the unit in which it was written."""

    value: Fraction
    place: int | None
    """Power of ten of the last written digit, such as -2 for 1.25. None for an integer or a fraction, which is
    exact."""
    is_percent: bool = False
    unit: frozenset[str] = frozenset()
    """Words that follow the number, in the singular, such as `apple` or `km`. Empty if there are none."""

    @property
    def latex(self) -> str:
        """LaTeX text of the number without its unit, for math-verify."""
        sign, size = "-" if self.value < 0 else "", abs(self.value)
        if self.place is None:
            text = f"{size.numerator}" if size.denominator == 1 else rf"\frac{{{size.numerator}}}{{{size.denominator}}}"
        else:
            digits = str(int(size / Fraction(10) ** self.place))
            text = f"{digits[:1]}.{digits[1:] or 0}" + rf" \times 10^{{{len(digits) - 1 + self.place}}}"
            if -20 < self.place <= 0:
                padded = digits.rjust(1 - self.place, "0")
                text = f"{padded[: len(padded) + self.place]}.{padded[len(padded) + self.place :] or 0}"
        return sign + text + (r"\%" if self.is_percent else "")


def read_numeral(text: str, *, decimal_comma: bool = False, glued_units: bool = False) -> Numeral | None:
    """Read a text that consists of one number with an optional currency, percent sign or unit. Returns None for other
    texts.

    A letter directly after the number, as in 5m, is a variable, so the text is not a number. If `glued_units` is set,
    the letter is read as a unit.

    A comma is a thousands separator if it separates groups of three digits. Any other single comma is read as a decimal
    comma after 0, or everywhere if `decimal_comma` is set. Otherwise such a text is not a number.
    """
    if len(text) > MAX_LENGTH:
        return None
    if decimal_comma:
        text = _DECIMAL_COMMA.sub(r"\1.\2", text)
    bracketed = re.fullmatch(r"(-?)\s*\(([^(),]*)\)", text.strip())
    text = f"{bracketed[1]}{bracketed[2]}" if bracketed else text.strip()
    if _LITERAL.fullmatch(text):
        return Numeral(Fraction(int(text, 0)), None)
    if (cardinal := _read_cardinal(text)) is not None:
        return Numeral(Fraction(cardinal), None)
    match = _NUMERAL.match(text)
    if match is None or (match["sign"] and match["inner"]):
        return None
    number, rest = _number_of(match), text[match.end() :]
    if number is None or re.match(r"[.,]?\d", rest):
        return None
    if glued_units and re.match(r"[A-Za-z](?![A-Za-z])", rest):
        rest = f" {rest}"
    return _with_unit(number, match["before"], rest)


def read_unit(text: str) -> frozenset[str] | None:
    """Return the names in a unit, such as "cm^2". Returns None if the text is not a unit."""
    number = _with_unit(Numeral(Fraction(1), None), "", f" {text}")
    return None if number is None or number.is_percent or number.value != 1 else number.unit


def is_same_unit(expected: frozenset[str], given: frozenset[str]) -> bool:
    """Return whether the units of a reference (`expected`) and of a completion (`given`) do not contradict each other.
    A missing unit contradicts no unit."""
    return not expected or not given or _is_same_unit(expected, given)


def _read_cardinal(text: str) -> int | None:
    """Read a whole number in English words, such as "two hundred and five". Returns None for other texts."""
    total = part = 0
    last = 10**15
    words = re.split(r"[\s-]+", re.sub(r"\band\b", " ", text.casefold()).strip())
    for word in words:
        if (scale := _SCALES.get(word)) is not None and part:
            if scale == 2:
                part, last = part * 100, 100
            else:
                total, part, last = total + part * 10**scale, 0, 1000
        elif (value := _CARDINALS.get(word)) is not None and value < last and (last != 100 or part % 100 == 0):
            part, last = part + value, 10 if value >= 20 else 1
        else:
            return None
    return total + part if len(text) < MAX_LENGTH else None


def read_leading_numeral(text: str) -> Numeral | None:
    """Read the number at the start of a text, such as "18 apples in all". Returns None if the text does not start with
    a number.

    Also returns None if the number is followed by an operator, a comma or another number, because the text then
    contains more than one number.
    """
    text = _DECIMAL_COMMA.sub(r"\1.\2", text[:MAX_LENGTH].strip())
    match = _NUMERAL.match(text)
    if match is None or (match["sign"] and match["inner"]):
        return None
    number, rest = _number_of(match), text[match.end() :]
    if number is None or re.match(
        r"\s*(?:(?:or|and)\s+[-$\d]|[-+*/^=<>]|\\times|\\cdot|\\div|,\s*-?\d|[.,]?\s*\d)", rest
    ):
        return None
    words = re.match(r"\s*(%|\\%|percent\b|pct\b|hundred\b|thousand\b|million\b|billion\b|trillion\b)?", rest)
    return _with_unit(number, match["before"], (words[1] or "") if words else "")


def agree(expected: Numeral, given: Numeral) -> bool:
    """Return whether two numbers are equal: exactly if both are exact, else to `DIGITS` or more significant digits.

    A percent sign may be omitted (28% equals 0.28 and, because it is above 1%, also 28). Units must not contradict each
    other.
    """
    if not is_same_unit(expected.unit, given.unit):
        return False
    if expected.is_percent == given.is_percent:
        return _is_equal(expected, given)
    percent, plain = (expected, given) if expected.is_percent else (given, expected)
    if plain.unit:
        return False
    share = replace(percent, value=percent.value / 100, place=None if percent.place is None else percent.place - 2)
    return _is_equal(share, plain) or (abs(percent.value) > 1 and _is_equal(percent, plain))


def is_same_value(expected: Numeral, given: Numeral) -> bool:
    """Return whether two numbers are exactly equal, without rounding. Units are ignored, and percent signs are treated
    as in `agree`."""
    exact = [replace(each, place=None, unit=frozenset()) for each in (expected, given)]
    return agree(*exact)


def rounds_to(given: Numeral, value: Fraction) -> bool:
    """Return whether a decimal is the constant `value`, rounded to at least `DIGITS` significant digits."""
    return given.place is not None and _is_equal(given, Numeral(value, None))


def _number_of(match: re.Match[str]) -> Numeral | None:
    """Return the number in a match of the number pattern, without its unit. Returns None if the number is too large or
    its denominator is 0."""
    sign = -1 if "-" in (match["sign"], match["inner"]) else 1
    place: int | None = None
    if match["over"] or match["short"] or match["top"]:
        top, bottom = (
            (match["over"] or match["short"] or match["top"]),
            (match["under"] or match["below"] or match["bottom"]),
        )
        over, under = _read_plain(top), _read_plain(bottom)
        if not under.value:
            return None
        value, whole = over.value / under.value, match["whole"] or match["units"]
        if whole:
            if not 0 <= value < 1:
                return None
            value += _read_plain(whole).value
    elif power := match["ten"] or match["digits"]:
        if abs(int(power)) > MAX_EXPONENT:
            return None
        value = Fraction(10) ** int(power)
    else:
        plain, exponent = _read_plain(match["number"]), int(match["exponent"] or match["power"] or match["bare"] or 0)
        if abs(exponent) > MAX_EXPONENT:
            return None
        value, place = plain.value * Fraction(10) ** exponent, plain.place
        if place is not None or exponent < 0:
            place = (place or 0) + exponent
    return Numeral(sign * value, place)


def _read_plain(text: str) -> Numeral:
    """Return the number that is written as digits, with optional thousands separators and a decimal point or comma."""
    sign, text = (-1, text[1:]) if text.startswith("-") else (1, text)
    if re.fullmatch(r"0,\d+|[1-9]\d{0,2}(?:\.\d{3})+,\d+", text):
        text = text.replace(".", "").replace(",", ".")
    elif text.count(".") > 1:
        text = text.replace(".", "")
    digits, _, decimals = re.sub(r"[, '’_]", "", text).partition(".")
    value = Fraction(int(digits + decimals or 0), 10 ** len(decimals))
    return Numeral(sign * value, -len(decimals) if decimals else None)


def _with_unit(number: Numeral, currency: str, rest: str) -> Numeral | None:
    """Add the percent sign, the scale word (such as "million") and the unit in `rest` to a number. Returns None if
    `rest` is not a unit."""
    rest = rest.replace("\\%", "%").replace("\\$", "$")
    tokens = re.findall(r"\\cdot|%|/|\^\s*\{?\s*[23]\s*\}?|[²³]|[^\W\d_]+\.?|\S", rest)
    names = (
        [_CURRENCIES.get(currency.removeprefix("US") or currency, _CURRENCIES.get(currency, currency))]
        if currency
        else []
    )
    if tokens and (scale := _SCALES.get(tokens[0].casefold())):
        place = None if number.place is None else number.place + scale
        number, tokens = Numeral(number.value * 10**scale, place), tokens[1:]
    for token in tokens:
        name = _name_unit(token, is_glued=not rest.startswith((" ", "\\")), is_first=not names)
        if name is None:
            return None
        names.append(name)
    return replace(number, is_percent="%" in names, unit=_normalize_unit(names))


def _name_unit(token: str, *, is_glued: bool, is_first: bool) -> str | None:
    """Return the name of one word or symbol of a unit, "" for punctuation, or None if a unit cannot contain it.

    `is_glued` tells whether the unit directly follows the number: a letter there is a variable, as in 5m. `is_first`
    tells whether no word precedes: a power such as ^2 needs one.
    """
    word = token.rstrip(".").casefold()
    if token in _CURRENCIES:
        return _CURRENCIES[token]
    if token[0] in "^²³":
        return None if is_first else ("square" if token == "²" or "2" in token else "cubic")
    if len(word) == 1 and word.isalpha() and is_glued:
        return None
    if token in _SI:
        return token
    if (known := _known_unit(word)) is not None:
        return known
    if is_word(word) and not _NO_UNIT.fullmatch(word):
        return _singular(word)
    return "" if token in {".", ",", "(", ")", "-", "?", "\\cdot"} else None


def _known_unit(word: str) -> str | None:
    """Return the standard name of a unit, or None if the unit is not in the table of units."""
    return _UNITS.get(word, _UNITS.get(_singular(word)))


def _singular(word: str) -> str:
    """Return a word without a final plural s, so that "apples" and "apple" are the same unit."""
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word


def _is_same_unit(expected: frozenset[str], given: frozenset[str]) -> bool:
    """Return whether two non-empty units do not contradict each other: they share a word, and they contain the same
    known units."""
    names = {*_UNITS.values(), *_CURRENCIES.values(), *_SI}
    return bool(expected & given) and expected & names == given & names


def _normalize_unit(names: list[str]) -> frozenset[str]:
    """Return the set of names in a unit, with "miles per hour" as mph and "kilometers per hour" as kph."""
    unit = frozenset(names) - {"%", ""}
    for name, distance in (("mph", "mile"), ("kph", "kilometer")):
        if unit == {distance, "per", "hour"}:
            return frozenset({name})
    return unit


def _is_equal(one: Numeral, other: Numeral) -> bool:
    """Compare two values: exactly if both are exact, else in the significant digits of the less precise value."""
    if one.value == other.value or not one.value or not other.value:
        return one.value == other.value
    places = [_rounding_place(each) for each in (one, other) if each.place is not None]
    if not places:
        return False
    difference = abs(one.value - other.value)
    absolute = Fraction(1, 2 * 10**DIGITS) * min(Fraction(1), abs(one.value))
    return difference <= absolute or 2 * difference <= Fraction(10) ** max(places)


def _rounding_place(number: Numeral) -> int:
    """Return the power of ten of the digit to which numbers are rounded for comparison.

    This is the last written digit, or the digit number `DIGITS` if fewer digits are written.
    """
    assert number.place is not None
    first = _magnitude(abs(number.value))
    return min(number.place, first - DIGITS + 1)


def _magnitude(value: Fraction) -> int:
    """Return the power of ten of the first digit of a positive number, such as 2 for 345."""
    guess = floor((value.numerator.bit_length() - value.denominator.bit_length()) * log10(2))
    while Fraction(10) ** (guess + 1) <= value:
        guess += 1
    while Fraction(10) ** guess > value:
        guess -= 1
    return guess
