"""Final answers in texts: where they are, and one common spelling for notations that people write in several ways."""

import re
import unicodedata
from dataclasses import dataclass
from typing import Final, Literal

Source = Literal["marked", "boxed", "stated", "whole"]
r"""Kind of place at which a final answer was found. "marked": after `####` or in <answer> tags. "boxed": in a LaTeX
\boxed command. "stated": after "the answer is". "whole": the text is a single line, which is the answer."""

MAX_ANSWER: Final = 2000
"""Maximum number of characters of a final answer. A longer answer is not extracted from its text."""

MAX_STATED: Final = 200
"""Maximum number of characters of an answer that is stated in a sentence or is the whole text."""

MAX_COMPLETION: Final = 100_000
"""Maximum number of characters of a completion that are read. Of a longer completion, only the end is read."""

_TAG: Final = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_HASHES: Final = re.compile(r"####(?!#)((?:(?!####)[^\n])*)")
_BRACE: Final = re.compile(r"\\f?box(?:ed)?\s*\{|(?<!\\)[{}]")
_STATEMENT: Final = re.compile(
    r"\b(?:answer(?:\s+to\b[^.\n:]{0,80}?)?|(?:correct|right|best)\s+(?:option|choice))\s*(?:\bis\b\s*:?|:)",
    re.IGNORECASE,
)
_TAGS: Final = re.compile(r"</?[A-Za-z][\w-]*>|<\|\w+\|>")
_PREFIX: Final = re.compile(r"^(?:####|(?:the\s+)?(?:final\s+)?answer\s*(?:\bis\b\s*:?|:))\s*(?=\S)", re.IGNORECASE)
_FINAL: Final = re.compile(r"\bfinal answer is\b\s*:?", re.IGNORECASE)
_SENTENCE: Final = re.compile(r"(\S.*?)\s*(?:[.!?](?=\s)|(?<!\d),(?=\s+[a-z])|$)")
_JOINED: Final = re.compile(r"(?:\s|[$,.;&]|\\quad|\\qquad|\\text\{[^{}]*\}|\\[()\[\]]|\band\b|\bor\b)*", re.IGNORECASE)
_AFTER: Final = re.compile(r"\s*\$*\s*(?:\\?%|(?:percent|pct)\b)", re.IGNORECASE)

_FONTS: Final = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|normal)|mbox|operatorname|textnormal)\s*"
_WRAPS: Final = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$((?:(?!\$\$).)+)\$\$",
        r"\$((?:\\\$|[^$])+)(?<!\\)\$",
        r"\\\(((?:(?!\\\)).)+)\\\)",
        r"\\\[((?:(?!\\\]).)+)\\\]",
        r"\*\*((?:(?!\*\*).)+)\*\*",
        r"__((?:(?!__).)+)__",
        r"\*([^*]+)\*",
        r"_([^_]+)_",
        r"`([^`]+)`",
        r'"([^"]+)"',
        r"“([^”]+)”",
        r"'([^']+)'",
        rf"{_FONTS}\{{([^{{}}]*)\}}",
        r"<answer>(.*)</answer>",
    )
]

_SYMBOLS: Final = {
    "−": "-", "‒": "-", "﹣": "-", "－": "-", "×": r"\times ", "✕": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ",
    "∙": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ",
    "≠": r"\ne ", "≈": r"\approx ", "∞": r"\infty ", "π": r"\pi ", "𝜋": r"\pi ", "°": r"^{\circ}", "±": r"\pm ",
    "→": r"\to ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "\u200b": "", "\u2060": "", "\ufeff": "",
    "（": "(", "）": ")", "，": ",", "．": ".", "％": "%", "＝": "=", "＋": "+",
}  # fmt: skip
_SYMBOL: Final = re.compile("|".join(map(re.escape, _SYMBOLS)))
_SPACE: Final = re.compile(
    r"[^\S\n\r\t ]|&nbsp;|&thinsp;|(?<!\\)\{(?:\\[,;:! ]|\s)\}"
    r"|\{\s*\\(?:thin|med|thick|en|neg)s(?:pace|kip)\s*\}|\\(?:thin|med|thick|en)s(?:pace|kip)(?![A-Za-z])(?:\{\})? ?"
    r"|\\[hm]s(?:pace\*?\s*\{[^{}]*\}|kip\s*[-+]?[\d.]+\s*[a-z]{2}(?![a-z]) ?)"
)
_SEPARATOR: Final = re.compile(r"(?<=\d)(?:\\(?:text|mathord)\s*\{([,:])\}|\{:\}|([٬˙ʹ′]))(?=\d)")
_REPEATING: Final = re.compile(
    r"(?<![\d.,])(\d{0,30})\.(\d{0,30})\s*(?:\\(?:overline|bar|dot)\s*(?:\{(\d{1,30})\}|(\d))|\((\d{1,30})\))(?!\d)"
)
_SUPERSCRIPTS: Final = {**dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))}
_RAISED: Final = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOWERED: Final = re.compile("[₀-₉]+")
_VULGAR: Final = re.compile("[¼-¾⅐-⅞]")
_ROOT: Final = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
_POWER: Final = re.compile(r"(?<=[\w)}\]])(?:\*\*| \*\* )(-?\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z])|\([^()]*\))")
_EXPONENT: Final = re.compile(r"(?<![A-Za-z\d.\\_])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?!\w|\.\d)")
_THIN_SPACED: Final = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,;:! ]|~)\d{3})+(?!\d)")
_SPACED: Final = re.compile(r"(?<!\d )(?<![\w.,])[1-9]\d{0,2}(?: \d{3})+(?![\d/]| [\d\\])")
_SPACED_DECIMALS: Final = re.compile(
    r"(?<!\d)\d+\.\d{3}(?:(?: |\\[,;:! ]|~)\d{3})*(?: |\\[,;:! ]|~)\d{1,3}(?![\d/]| \d)"
)
_FUNCTION: Final = re.compile(r"(?<![\\A-Za-z])((?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp)(?![A-Za-z])")
_NAMED: Final = re.compile(r"(?<![\\A-Za-z])(pi|infinity|inf|oo)(?![A-Za-z])", re.IGNORECASE)
_SQRT: Final = re.compile(r"(?<![\\A-Za-z])sqrt\s*(?:\(([^()]*)\)|(\d+))")


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """Final answer extracted from a text, with the kind of place at which it was found."""

    text: str
    source: Source
    line: str = ""
    """Answer up to the end of its line, for the case that the answer contains a full stop or a comma. Empty if the
    answer is not stated in a sentence."""


def find_answer(text: str) -> FinalAnswer | None:
    r"""Extract the final answer of a text. Returns None if the text marks no answer, if the answer is too long, or if
    the answer consists of several \boxed commands in a row.

    The last of `####`, <answer> and \boxed contains the answer. Without any of these, the answer is the end of the last
    sentence with "answer is" or "answer:", or the whole text if it is one short line.
    """
    boxes, plain = _boxes(text), re.sub(r"\*\*|__", "", text)
    marked = [(match.start(), match[1]) for pattern in (_TAG, _HASHES) for match in pattern.finditer(text)]
    in_last_box = range(*boxes[-1][:2]) if boxes else range(0)
    last = max((each for each in marked if each[0] not in in_last_box), default=None)
    if boxes and last is None and (final := _find_statement(_FINAL, text[boxes[-1][1] :])) is not None:
        return final
    if boxes and (last is None or last[0] < boxes[-1][0]):
        start, end, inner = boxes[-1]
        if len(boxes) > 1 and _JOINED.fullmatch(text[boxes[-2][1] : start]):
            return None
        if len(inner) > MAX_ANSWER:
            return None
        if "####" in inner:
            inner = inner.rpartition("####")[2]
        percent = "%" if _AFTER.match(text[end:]) and not inner.rstrip().endswith("%") else ""
        return FinalAnswer(unwrap(inner) + percent, "boxed")
    if last is not None and len(last[1]) > MAX_ANSWER:
        return None
    if last is not None:
        inside = find_answer(last[1]) if r"\boxed" in last[1] and not has_several_boxes(last[1]) else None
        return FinalAnswer(unwrap(last[1]) if inside is None else inside.text, "marked")
    if (stated := _find_statement(_STATEMENT, plain)) is not None:
        return stated
    line = text.strip()
    return FinalAnswer(unwrap(line), "whole") if line and "\n" not in line and len(line) <= MAX_STATED else None


def _find_statement(pattern: re.Pattern[str], text: str) -> FinalAnswer | None:
    """Return the answer that the last match of `pattern` (such as "the answer is") introduces, up to the end of its
    sentence. Return None if there is no match or the answer is too long."""
    starts = [match.end() for match in pattern.finditer(text)]
    line = text[starts[-1] :].lstrip().partition("\n")[0] if starts else ""
    stated = _SENTENCE.match(line[: 2 * MAX_STATED])
    if stated is None or len(stated[1]) > MAX_STATED:
        return None
    return FinalAnswer(unwrap(stated[1]), "stated", unwrap(line) if len(line) <= MAX_ANSWER else "")


def has_several_boxes(text: str) -> bool:
    r"""Return whether a text has several \boxed commands with different contents, and no `####` after the last one."""
    boxes = _boxes(text)
    after = text[boxes[-1][1] :] if boxes else ""
    return len({inner.strip() for _, _, inner in boxes}) > 1 and not _HASHES.search(after)


def _boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Return the start, the end and the content of each \boxed command in a text. A command inside another one is part
    of the outer one, and commands with unbalanced braces are skipped."""
    opened, boxes = list[re.Match[str]](), list[tuple[int, int, str]]()
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and len((start := opened.pop())[0]) > 1:
            while boxes and boxes[-1][0] > start.start():
                boxes.pop()
            boxes.append((start.start(), brace.end(), text[start.end() : brace.start()]))
    return boxes


def unwrap(text: str) -> str:
    """Return an answer without what surrounds it: math delimiters, Markdown emphasis, quotes, LaTeX text commands, and
    a final full stop."""
    before = None
    text = _TAGS.sub("", text)
    while text != before:
        before, text = text, _strip(text)
        text = _PREFIX.sub("", text)
        if text.count("**") == 1:  # half of an emphasis that began before the marker
            text = text.removeprefix("**").removesuffix("**")
        boxes = _boxes(text)
        if len(boxes) == 1 and boxes[0][:2] == (0, len(text)):
            text = boxes[0][2]
        for pattern in _WRAPS:
            if (match := pattern.fullmatch(text)) is not None and match[1].strip():
                text = match[1].strip()
    return text


def _strip(text: str) -> str:
    """Return a text without white space at its ends, and without LaTeX spacing commands and punctuation at its end."""
    before = None
    while text != before:
        before, text = text, text.strip()
        if re.search(r"(?<!\\)(?:\\\\)*\\[,;:!]?$", text[-20:]):
            text = text.rstrip(",;:!")[:-1]
        elif re.search(r"(?:(?<!\.)\.{1,2}|[;,~])$", text[-3:]):
            text = text[:-1]
    return text


def to_latex(text: str) -> str:
    """Return a text in which Unicode symbols, powers and exponents in Python notation, and numbers with spaces between
    thousands are rewritten in LaTeX."""
    text = _SPACE.sub(" ", text)
    if not text.isascii():
        text = re.sub(r"(?![0-9])\d", lambda digit: str(int(digit[0])), text)
    text = _SEPARATOR.sub(lambda match: match[1] or (":" if match[2] is None else " "), text)
    text = _REPEATING.sub(_repeating_decimal, text)
    text = text.replace(r"\colon", ":").replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    text = re.sub(r"\\(?:mathrm|mathit|text|operatorname)\s*\{([ei])\}", r"\1", text)  # math-verify drops them as units
    text = _VULGAR.sub(_vulgar_fraction, text)
    text = _ROOT.sub(_root, text)
    text = _RAISED.sub(lambda match: "^{" + "".join(_SUPERSCRIPTS[each] for each in match[0]) + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + unicodedata.normalize("NFKC", match[0]) + "}", text)
    text = _SYMBOL.sub(lambda match: _SYMBOLS[match[0]], text)
    text = re.sub(r"(?<![\w\d])[–](?=\d)", "-", text)
    text = _POWER.sub(lambda match: "^{" + match[1].strip("()") + "}", text)
    text = _EXPONENT.sub(r"\1 \\times 10^{\2}", text)
    return _THIN_SPACED.sub(lambda match: re.sub(r"\\.|~", "", match[0]), text)


def join_thousands(text: str) -> str:
    """Return an answer in which numbers have no spaces between groups of three digits.

    >>> join_thousands("(10 000, 0.123 456)")
    '(10000, 0.123456)'
    """
    for pattern in (_SPACED, _SPACED_DECIMALS):
        text = pattern.sub(lambda match: re.sub(r" |\\.|~", "", match[0]), text)
    return text


def to_formula(text: str) -> str:
    """Convert an answer in plain notation, such as `2*pi` or `sqrt(3)`, to a LaTeX formula."""
    text = _SQRT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    text = _FUNCTION.sub(r"\\\1 ", text)
    return _NAMED.sub(lambda match: "\\pi " if match[1].casefold() == "pi" else r"\infty ", text)


def to_plain(text: str) -> str:
    """Return an answer without LaTeX text commands, spaces and styling, so that it can be compared as a number or as
    words."""
    before = None
    while text != before:
        before = text
        text = re.sub(rf"{_FONTS}\{{([^{{}}]*)\}}", r" \1 ", text)
    text = re.sub(r"(?<!\\)\$([^$]*)(?<!\\)\$", r"\1", text)
    text = re.sub(r",\\!\s*|\{,\}", ",", text).replace(r"\!", "")
    text = re.sub(r"\\(?:[,;:]|quad|qquad|left|right|displaystyle|bf|rm|it)(?![A-Za-z])|\\ |~", " ", text)
    text = text.replace("{}", "")
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", " degrees ", text)
    text = text.replace(r"\%", "%").replace(r"\$", "$").replace(r"\#", "#").replace(r"\&", "&").replace(r"\_", "_")
    return unwrap(re.sub(r"\s+", " ", text))


def _vulgar_fraction(match: re.Match[str]) -> str:
    """Return the LaTeX notation of a matched character that is a fraction, such as ½."""
    top, bottom = unicodedata.normalize("NFKC", match[0]).split("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _repeating_decimal(match: re.Match[str]) -> str:
    """Return a matched decimal with repeating digits, such as 0.1(6), as a LaTeX fraction."""
    whole, fixed, repeated = match[1] or "0", match[2], match[3] or match[4] or match[5]
    top = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"\frac{{{top}}}{{{(10 ** len(repeated) - 1) * 10 ** len(fixed)}}}"


def _root(match: re.Match[str]) -> str:
    """Return the LaTeX notation of a matched root, such as √2."""
    degree = {"√": "", "∛": "[3]", "∜": "[4]"}[match[1]]
    return rf"\sqrt{degree}{{{match[2] or match[3] or match[4]}}}"
