"""Canonical forms of prompts and columns, so that the same problem read from files of different formats is equal.

File formats write the same value in different ways. Parquet gives every struct of a column the same fields, with null
in the absent fields. Data frames store integers as floats if a value of the column is missing. CSV stores only text.
"""

import re
import unicodedata
from collections.abc import Callable, Mapping
from decimal import Decimal
from math import isfinite
from typing import Final

from pydantic import JsonValue

MAX_DIGITS: Final = 400
"""Largest absolute decimal exponent for which `write_number` writes a number without an exponent. No float exceeds
it."""
_BOOLEANS: Final = {"True": True, "true": True, "False": False, "false": False}


_INVISIBLE: Final = re.compile("[\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufe0e\ufe0f\ufeff]")
"""Characters without a width, such as byte order marks, soft hyphens and direction marks."""
_OUTER: Final = re.compile(rf"^(?:\s|{_INVISIBLE.pattern})+|(?:\s|{_INVISIBLE.pattern})+$")


def canonicalize_text(text: str) -> str:
    """Return a text in Unicode normalization form C. White space and invisible characters are removed at both ends."""
    return _OUTER.sub("", unicodedata.normalize("NFC", text))


def fold_text(text: str) -> str:
    """Return a text in a form that is equal for texts that differ only in letter case, white space, Unicode
    normalization or invisible characters.

    Example: two texts that differ only in a line break or in "Café" and "CAFÉ" are folded to the same text. Full-width
    letters and ligatures are folded to plain letters.
    """
    folded = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)).casefold()
    return unicodedata.normalize("NFKC", " ".join(folded.split()))


def drop_absent(columns: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return columns without null values and null fields, at every depth. Floats with an integral value become
    integers."""
    return {name: _drop_nulls(value) for name, value in columns.items() if value is not None}


def _drop_nulls(value: JsonValue) -> JsonValue:
    match value:
        case dict():
            return drop_absent(value)
        case list():
            return [_drop_nulls(each) for each in value]
        case float() if value.is_integer():
            return int(value)
        case _:
            return value


def canonicalize_columns(columns: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the columns of a row with the values that they would have if they came from a JSON file.

    Because CSV stores only text, a text that looks like a number or a truth value becomes that value. Empty texts and
    nulls are removed.
    """
    read = {name: _read_scalar(value) if isinstance(value, str) else value for name, value in columns.items()}
    return {name: value for name, value in drop_absent(read).items() if value != ""}


def _read_scalar(text: str) -> JsonValue:
    """Return the number or truth value that a text contains, if Python would write the value in exactly this way.
    Return the text itself otherwise."""
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if str(number) == text and isfinite(number):
            return number
    return text


def map_texts(value: JsonValue, convert: Callable[[str], str]) -> JsonValue:
    """Return a part of a chat or of a row's columns with `convert` applied to every text in it. A list of content parts
    of type "text" is joined to one text."""
    match value:
        case str():
            return convert(value)
        case [{"type": "text", "text": str()}, *_] if all(_is_text_part(part) for part in value):
            return convert("".join(str(part["text"]) for part in value if isinstance(part, dict)))
        case list():
            return [map_texts(each, convert) for each in value]
        case dict():
            return {name: map_texts(each, convert) for name, each in value.items() if each is not None}
        case _:
            return value


def _is_text_part(part: JsonValue) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def write_number(value: bool | int | float | Decimal) -> str:
    """Return a finite number as people write it, without an exponent: 1e16 is 10000000000000000.

    Truth values are written as in JSON. Floats keep their decimal point. Trailing zeros of a Decimal are dropped,
    because decimal columns of tables pad all values to the same number of digits.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and "e" not in repr(value):
        return repr(value)
    exact = value if isinstance(value, Decimal) else Decimal(repr(value))
    if abs(exact.adjusted()) > MAX_DIGITS:
        return str(exact)
    text = format(exact, "f")
    return (text.rstrip("0").rstrip(".") or "0") if "." in text else text
