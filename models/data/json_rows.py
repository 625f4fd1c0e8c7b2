"""Rows of JSON files, and the checks of keys and encodings that all file formats have in common."""

import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from math import isinf
from typing import Final

from rheostat.infra.errors import BadInput, InputErrors

FileRow = tuple[str, Mapping[str, object]]
"""Row of a data file: its place for messages, such as `train.jsonl:17`, and the values of its columns."""

FLOAT_CHARACTERS: Final = 15
"""Maximum length, in characters, of a decimal number that a float always represents so that it is printed the same
again."""
_SEPARATORS: Final = re.compile(r"[\s,]*")
_UTF16_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")


class RepeatedKey(ValueError):
    """Raised when an object in a JSON file contains the same key twice."""


class LongNumber(float):
    """Number in a JSON file that cannot be stored exactly as a float, such as 1e400 or a number with 30 digits."""

    literal: str
    """Text of the number as written in the file."""


def read_json_lines(lines: Iterable[bytes], name: str, input_errors: InputErrors, *, version: int) -> Iterator[FileRow]:
    """Yield the rows of a JSON Lines file. Blank lines are skipped. Errors in rows are added to `input_errors`. `name`
    names the file in messages, and `version` is the version of the rules for reading files."""
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.strip() == BOM_UTF8):
            continue
        place = f"{name}:{number}"
        with input_errors.collect(place):
            encoding = "utf-8-sig" if number == 1 else "utf-8"
            row = _require_object(place, _parse_json_line(place, line, encoding=encoding, version=version))
            yield place, _check_row(place, row, version=version)


def _parse_json_line(place: str, line: bytes, *, encoding: str, version: int) -> object:
    """Parse one line as JSON. Raises BadInput, which names the line as `place`, if it is not valid JSON in UTF-8 or if
    an object contains a key twice."""
    try:
        return _parse_json(line.decode(encoding).strip(), version=version)
    except UnicodeDecodeError as error:
        parts = _find_undecodable(line.strip())
        raise _refuse_encoding(f"{place}: {_join_path(parts)}" if parts else place, line, error) from error
    except RepeatedKey as error:
        raise BadInput(f"{place}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"{place}: the line is not valid JSON: {error}. Each line of the file must be one JSON object."
        ) from error


def _parse_json(text: str, *, version: int) -> object:
    """Parse a JSON document. Version 2 of the rules for reading files refuses repeated keys and keeps the text of
    numbers that cannot be stored exactly as floats."""
    if version == 1:
        return json.loads(text)
    return json.loads(text, object_pairs_hook=_build_object, parse_float=_read_float)


def _build_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the JSON object with these key-value pairs. Raises RepeatedKey if a key occurs twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        key, times = Counter(key for key, _ in pairs).most_common(1)[0]
        raise RepeatedKey(f"the key {key!r} occurs {times} times in one JSON object. Keep only one of them.")
    return row


def _read_float(text: str) -> float:
    number = float(text)
    if len(text) <= FLOAT_CHARACTERS and "e" not in text and "E" not in text:
        return number
    if not isinf(number) and Decimal(text) == Decimal(repr(number)):
        return number
    long_number = LongNumber(number)
    long_number.literal = text
    return long_number


def read_json_array(content: bytes, name: str, input_errors: InputErrors, *, version: int) -> Iterator[FileRow]:
    """Yield the objects of a JSON array as rows. Errors in rows are added to `input_errors`. Raises BadInput if the
    file is not a JSON array in UTF-8."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        path = _find_undecodable(content)
        place = f"{name}[{path[0]}]" if path else name
        raise _refuse_encoding(f"{place}: {_join_path(path[1:])}" if path[1:] else place, content, error) from error
    repeated_keys: dict[int, str] = {}
    try:
        rows = _parse_json(text, version=version)
    except RepeatedKey:
        rows = json.loads(text)
        repeated_keys = _find_repeated_keys(text) if isinstance(rows, list) else {}
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"{name}: the file is not valid JSON: {error}. If the file has one object per line, name it .jsonl."
        ) from error
    if not isinstance(rows, list):
        raise BadInput(
            f"{name}: the file must contain a JSON array of objects, but it contains a {type(rows).__name__}. Write "
            "the problems as a list, or one object per line in a .jsonl file."
        )
    for number, row in enumerate(rows):
        place = f"{name}[{number}]"
        with input_errors.collect(place):
            if number in repeated_keys:
                raise BadInput(f"{place}: {repeated_keys[number]}")
            yield place, _check_row(place, _require_object(place, row), version=version)


def _check_row(place: str, row: Mapping[str, object], *, version: int) -> Mapping[str, object]:
    """Return a row after checking its keys.

    Version 2 of the rules raises BadInput if two keys differ only in outer white space.
    """
    if version > 1:
        check_unique_columns(place, list(row))
    return row


def _find_repeated_keys(text: str) -> dict[int, str]:
    """Return an error message for each row of a JSON array that contains a key twice, by the index of the row."""
    decoder, number, faults = json.JSONDecoder(), 0, dict[int, str]()
    at = _skip_separators(text, text.find("[") + 1)
    while text[at] != "]":
        _, end = decoder.raw_decode(text, at)
        try:
            _parse_json(text[at:end], version=2)
        except RepeatedKey as error:
            faults[number] = str(error)
        number, at = number + 1, _skip_separators(text, end)
    return faults


def _skip_separators(text: str, at: int) -> int:
    """Return the index in a JSON text at which the next element of an array begins, or at which the array ends,
    starting the search at index `at`."""
    match = _SEPARATORS.match(text, at)
    return match.end() if match else at


def _require_object(place: str, row: object) -> Mapping[str, object]:
    """Return a row if it is a JSON object. Raises BadInput, which names the row as `place`, for other values."""
    if not isinstance(row, dict):
        raise BadInput(
            f"{place}: each problem must be a JSON object with columns as keys, but this one is a "
            f'{type(row).__name__}. Write it as {{"column": value}}.'
        )
    return row


def check_unique_columns(place: str, names: Sequence[str]) -> None:
    """Raise BadInput if two columns have the same name, apart from white space at both ends. `place` names the file or
    the row in messages."""
    for column, times in Counter(name.strip() for name in names).items():
        if times > 1:
            named = {repr(name): None for name in names if name.strip() == column}
            raise BadInput(
                f"{place}: the file has {times} columns {' and '.join(named)}, so a value could be read from the wrong "
                "one. Rename or remove all but one."
            )


# ---- encodings
def decode_text(place: str, content: bytes) -> str:
    """Decode UTF-8. Raises BadInput, which names the text as `place`, if the bytes are not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _refuse_encoding(place, content, error) from error


def _refuse_encoding(place: str, content: bytes, error: UnicodeDecodeError) -> BadInput:
    """Return the error for bytes that are not UTF-8."""
    found = ", the file seems to be in UTF-16" if content.startswith(_UTF16_MARKS) else ""
    return BadInput(f"{place}: expected text in UTF-8, but {error}{found}. Save the file in UTF-8.")


def _find_undecodable(content: bytes) -> list[str | int]:
    """Return the path (keys and indices) to the first text in a JSON document that is not UTF-8. Empty if there is
    none."""
    try:
        document = json.loads(content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape"))
        return next(_iterate_undecodable(document, []), [])
    except (ValueError, RecursionError):
        return []


def _iterate_undecodable(value: object, path: list[str | int]) -> Iterator[list[str | int]]:
    if isinstance(value, str) and any("\udc80" <= character <= "\udcff" for character in value):
        yield path
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _iterate_undecodable(each, [*path, index])
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _iterate_undecodable(each, [*path, key])


def _join_path(parts: Sequence[str | int]) -> str:
    """Return a path of keys and indices in a row as text, such as `prompt[0].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
