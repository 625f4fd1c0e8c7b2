"""Handling of untrusted text from policies, rewards, servers and files: escaping control characters, and removing
secrets."""

import base64
import html
import logging
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Final, NamedTuple

_HIDDEN: Final = "***"
_SHORTEST: Final = 6
"""Minimum length of a base64 or hexadecimal text that is recognized as a secret. Shorter texts would match by
chance."""
_NESTED: Final = 5
"""Maximum depth to which escapes inside escapes are decoded."""
_BASE64: Final = str.maketrans("-_", "+/")
"""Translation of the characters that are specific to URL-safe base64 to those of standard base64."""
_ESCAPE: Final = re.compile(
    r"""(?<!\\)\\++(?:u\{(?P<braces>[0-9a-fA-F]{1,6})\}|U(?P<long>[0-9a-fA-F]{8})|u(?P<short>[0-9a-fA-F]{4})
    |x(?P<byte>[0-9a-fA-F]{2})|(?P<plain>[^\\\w\s]))|%(?P<url>[0-9a-fA-F]{2})|&\#[xX](?P<entity>[0-9a-fA-F]{1,8});?
    |&\#(?P<decimal>[0-9]{1,8});?|(?P<named>&[A-Za-z]{2,24};)""",
    re.VERBOSE,
)
"""Pattern that matches one escape sequence of JSON, Python, URLs or HTML."""
_HEX_DIGITS: Final = str.maketrans("ABCDEF", "abcdef")
_Span = tuple[int, int]


class _Decoded(NamedTuple):
    """Text with decoded escapes, and the position in the original text of each of its characters."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]


def make_visible(text: str) -> str:
    r"""Escape control characters in a text, so that a terminal does not execute them.

    Marks of writing direction and other invisible characters are also escaped, but line breaks, tabs and spaces are
    not. The escapes are those of JSON, so that a JSON document stays valid.

    >>> make_visible("\x1b[2J\u202e\n")
    '\\u001b[2J\\u202e\n'
    """
    return text if text.isprintable() else "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character.isprintable() or character in "\n\t\u00a0\u3000":
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2))


def log_visibly(*packages: str) -> None:
    """Escape control characters in all log records of these packages, including tracebacks. Repeated calls add
    packages."""
    before = logging.getLogRecordFactory()
    if isinstance(before, _VisibleRecords) and {*packages} <= before.packages:
        return
    logging.setLogRecordFactory(_VisibleRecords(before, frozenset(packages)))


class _VisibleRecords:
    """Factory of log records that escapes control characters in the records of some packages."""

    def __init__(self, make: Callable[..., logging.LogRecord], packages: frozenset[str]) -> None:
        self._make, self.packages = make, packages

    def __call__(self, name: str, *arguments: object, **named: object) -> logging.LogRecord:
        record = self._make(name, *arguments, **named)
        if name.partition(".")[0] in self.packages:
            message = record.getMessage()
            if (shown := make_visible(message)) != message:
                record.msg, record.args = shown, ()
            if record.exc_info:
                record.exc_text = make_visible(logging.Formatter().formatException(record.exc_info))
        return record


def redact(text: str, *secrets: str) -> str:
    """Replace each occurrence of a secret in a text by `***`, and return the text.

    A secret is found as plain text, in escapes of JSON, Python, URLs and HTML (also nested), in hexadecimal, and in
    base64 with both alphabets, even inside a longer base64 text.
    """
    spans = sorted({span for secret in filter(None, secrets) for span in _spans(text, secret)})
    parts, end = [], 0
    for first, last in spans:
        if last > end:
            parts += [text[end:first], _HIDDEN] if first >= end else []
            end = last
    return "".join([*parts, text[end:]])


def _spans(text: str, secret: str) -> Iterator[_Span]:
    """Yield the (first, last) position of each part of a text that contains the secret, in plain or encoded form.
    Escapes inside escapes are decoded level by level."""
    data = secret.encode("utf-8", "replace")
    dense = [_base64_core(data, before) for before in range(3)]
    dense = [core for core in dense if len(core) >= _SHORTEST]
    digits = [data.hex()] if len(data.hex()) >= _SHORTEST else []
    decoded = _Decoded(text, range(len(text)), range(1, len(text) + 1))
    for _ in range(_NESTED):
        yield from _find_spans(decoded, decoded.text, [secret])
        # base64 may be wrapped into lines, and hexadecimal may contain colons
        packed = "".join(decoded.text.split()).translate(_BASE64)
        yield from _find_spans(decoded, packed, dense)
        yield from _find_spans(decoded, packed.replace(":", "").translate(_HEX_DIGITS), digits, skipped=":")
        following = _decode_escapes(decoded)
        if following is None:
            return
        decoded = following


def _find_spans(decoded: _Decoded, haystack: str, needles: Sequence[str], *, skipped: str = "") -> Iterator[_Span]:
    """Yield the position in the original text of each needle that occurs in `haystack`. `haystack` is the decoded text,
    or the decoded text without white space and without the character `skipped`."""
    starts, ends = decoded.starts, decoded.ends
    for needle in needles:
        place = haystack.find(needle)
        if place >= 0 and len(haystack) < len(starts):
            kept = [at for at, each in enumerate(decoded.text) if not each.isspace() and each != skipped]
            starts, ends = [decoded.starts[at] for at in kept], [decoded.ends[at] for at in kept]
        while place >= 0:
            yield starts[place], ends[place + len(needle) - 1]
            place = haystack.find(needle, place + 1)


def _decode_escapes(decoded: _Decoded) -> _Decoded | None:
    """Decode the outermost escapes of a text. Each decoded character gets the position of its escape. Return None if
    the text has no escapes."""
    texts, starts, ends, end = list[str](), array("q"), array("q"), 0
    for match in _ESCAPE.finditer(decoded.text):
        character = _character_of(match)
        texts += [decoded.text[end : match.start()], character]
        starts.extend(decoded.starts[end : match.start()])
        ends.extend(decoded.ends[end : match.start()])
        starts.extend(repeat(decoded.starts[match.start()], len(character)))
        ends.extend(repeat(decoded.ends[match.end() - 1], len(character)))
        end = match.end()
    if not end:
        return None
    starts.extend(decoded.starts[end:])
    ends.extend(decoded.ends[end:])
    return _Decoded("".join([*texts, decoded.text[end:]]), starts, ends)


def _character_of(match: re.Match[str]) -> str:
    if match["named"]:
        return html.unescape(match["named"])
    if match["plain"]:
        return match["plain"]
    point = (
        int(match["decimal"])
        if match["decimal"]
        else int(next(filter(None, match.group("braces", "long", "short", "byte", "url", "entity"))), 16)
    )
    return chr(point) if point <= sys.maxunicode else ""


def _base64_core(data: bytes, before: int) -> str:
    """Return the part of the base64 encoding that depends only on `data`, if `data` is encoded after `before` other
    bytes."""
    encoded = base64.b64encode(bytes(before) + data).decode()
    return encoded[-(-8 * before // 6) : 8 * (before + len(data)) // 6]
