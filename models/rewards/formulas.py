"""Formulas in LaTeX: parsing a whole text as one formula, and separating its unit.

math-verify searches a text for mathematics and ignores what it cannot parse: units and other words, single letters such
as the t of 5t, the case of letters, and everything but a number if the text is not a formula. Here a final answer is
parsed as a whole or not at all. The grammar is that of latex2sympy, which math-verify uses too.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq

from rheostat.models.rewards.answers import join_thousands, to_plain
from rheostat.models.rewards.expression_size import MAX_DIGITS, Expression, can_evaluate
from rheostat.models.rewards.numerals import read_unit

MAX_NESTING: Final = 100
"""Maximum nesting depth of brackets in a text that is searched for formulas."""

MAX_FORMULA_NESTING: Final = 30
"""Maximum nesting depth of brackets in a text that is parsed as one formula."""

MAX_FORMULA: Final = 1000
"""Maximum number of characters of a text that is parsed as one formula."""

MAX_SEARCHED: Final = 20_000
"""Maximum number of characters that are searched for formulas. Of a longer text, only the end is searched, because the
time grows with the square of the length."""

_NORMALIZATION: Final = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
)
_CONVERSION: Final = ConversionConfig(lowercase_symbols=False)

_UNIT: Final = re.compile(
    r"(?P<formula>.*?[\w)}\]!|])(?P<unit>(?:(?:\\[,;:! ]|~|\s)*\\(?:text|mathrm|mbox|textrm|textnormal)\s*\{[^{}]*\}"
    r"(?:\^\s*\{?\s*[23]\s*\}?)?(?:\s*/(?=\s*\\))?)+|\s+[A-Za-z]{2,}(?:(?:\s+|/)[A-Za-z]+)*(?:\^\s*\{?[23]\}?)?)",
    re.DOTALL,
)
_ROW: Final = re.compile(r"\d\s+\.?\d|\d\.\d+\.\d|\.\d+\.\d")
"""Pattern of several numbers in a row, such as 2 3 or 192.168.0.1. The formula parser would wrongly read them as a
product."""

_ARGUMENTS: Final = re.compile(r"\\(?:[dtc]?frac|t?binom)\s*\d\s*\d|[_^]\s*\d")
_DEGREES: Final = re.compile(
    r"\\(sin|cos|tan|cot|sec|csc)\s*(?:\(\s*(-?\d+(?:\.\d+)?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*\)"
    r"|\{?\s*(-?\d+(?:\.\d+)?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*\}?)"
)
_BINOMIAL: Final = re.compile(r"binom\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")

_DIVISORS: Final = re.compile(r"(?:gcd|lcm)\b[^\n]{0,200}?(?:\^\s*\{?\s*[0-9]{5}|\^[^\n]{0,50}\^|[0-9]{5}\s*\)?\s*!)")

_DECIMAL_POWER: Final = re.compile(r"\^\s*\{\s*(-?)(\d{0,9})\.(\d{1,9})\s*\}")
_GREATER: Final = re.compile(r"(>|\\g(?:t|eq?(?:slant)?)(?![A-Za-z]))")
_COLON: Final = re.compile(r"\d(?=\s*:\s*\d)")
_IMAGINARY: Final = re.compile(r"(?<![A-Za-z\\_{,])i(?![A-Za-z]|\s*=)")
_MULTIPLE: Final = re.compile(r"\d+(?:\.\d+)?\s*(?:\\cdot\s*|\*\s*)?\\?[a-zA-Z]|[a-z]\s*\^\s*\{?\s*\d+\s*\}?")


@dataclass(frozen=True, slots=True)
class Formula:
    """Parsed formula, with its LaTeX text and the words of its unit."""

    text: str
    expression: Expression
    unit: frozenset[str] = frozenset()


def read_formula(text: str) -> list[Formula]:
    """Parse a whole text as one formula with an optional unit. Returns a list with this formula, or an empty list if
    the text is not a formula."""
    bare, unit = split_unit(text)
    expression = parse_formula(bare)
    return [] if expression is None else [Formula(bare, expression, unit)]


def find_formulas(text: str, *, in_latex: bool = False) -> list[Formula]:
    """Find the last formula in a text with math-verify. If `in_latex` is set, only text between LaTeX delimiters is
    searched.

    The list may contain several parsed forms of the formula. It is empty if no formula is found.
    """
    text = text[-MAX_SEARCHED:]
    if not can_parse(text):
        return []
    kinds = [LatexExtractionConfig(normalization_config=_NORMALIZATION), ExprExtractionConfig()]
    try:
        found = parse(text, kinds[: 1 if in_latex else 2], parsing_timeout=None, raise_on_error=True)
    except (ValueError, RecursionError):  # sympy rejects numbers of more than 4300 digits
        return []
    source = next((each for each in found if isinstance(each, str)), "")
    if re.search(r"[A-Za-z]", source):
        return read_formula(source)
    return [Formula(source, each) for each in found if not isinstance(each, str)]


def spelling_of(text: str) -> str:
    """Return the text of a formula without spaces and without commands for the size of brackets, so that formulas can
    be compared as text."""
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,;:! ]|~", " ", text)
    text = re.sub(r"\{(\w)\}", r" \1 ", text)
    return re.sub(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", "", re.sub(r"\s+", " ", text))


@lru_cache(maxsize=64)
def parse_formula(text: str) -> Expression | None:
    """Parse a whole text as one formula in LaTeX. Returns None if the text is not a formula, or contains words or
    unknown symbols.

    Lower-case and upper-case letters are different variables.
    """
    text = _flip_chain(_DECIMAL_POWER.sub(_use_fraction, _DEGREES.sub(_use_radians, join_thousands(text))))
    if (
        not text.strip()
        or len(text) > MAX_FORMULA
        or not can_parse(text, MAX_FORMULA_NESTING)
        or _ROW.search(_ARGUMENTS.sub("", text))
    ):
        return None
    if len(_COLON.findall(text)) > 1:
        return None  # several times or ratios, which the grammar would divide
    normal = normalize_latex(re.sub(r"(?<![A-Za-z\\])I(?![A-Za-z])", r"\\iota ", text), config=_NORMALIZATION)
    for part in dict.fromkeys((normal, get_last_eq(normal))):
        try:
            is_real = not should_treat_as_complex(part)
            parsed = latex2sympy(part, is_real=is_real, normalization_config=None, conversion_config=_CONVERSION)
            return _with_imaginary_unit(part, parsed)
        except (RecursionError, MemoryError):
            return None
        except Exception:
            continue
    return None


def split_unit(text: str) -> tuple[str, frozenset[str]]:
    r"""Split a LaTeX formula with a unit, such as 2\sqrt{3} \text{ cm}, into the formula and the words of its unit.
    Without a unit, the set of words is empty."""
    match = _UNIT.fullmatch(text.strip()) if len(text) <= MAX_FORMULA else None
    if match is None:
        return text, frozenset()
    unit = read_unit(to_plain(match["unit"]))
    return (text, frozenset()) if unit is None or not unit else (match["formula"], unit)


def has_multiple_on_left(text: str) -> bool:
    """Return whether a text is an equation with a multiple or a power of a variable on its left side, such as 2x =
    10."""
    left, equals, _ = text.partition("=")
    return bool(equals) and _MULTIPLE.fullmatch(left.strip(" $")) is not None


def _with_imaginary_unit(text: str, expression: Expression) -> Expression:
    """Replace the variable i in an expression by the imaginary unit, unless i is an index of a sum, product or
    integral. `text` is the text of the expression."""
    is_index = re.search(r"\\(?:sum|prod|int)", text) is not None
    if (
        is_index
        or not _IMAGINARY.search(text)
        or not isinstance(expression, sympy.Expr)
        or not can_evaluate(expression)
    ):
        return expression
    return expression.xreplace({each: sympy.I for each in expression.free_symbols if each.name == "i"})


def _flip_chain(text: str) -> str:
    """Rewrite a chain of two "greater than" relations, such as 2 > x > -1, as -1 < x < 2. Other texts are returned
    unchanged."""
    parts = _GREATER.split(text)
    if len(parts) != 5 or re.search(r"<|\\l(?:t|eq?)(?![A-Za-z])|,", text):
        return text
    smaller = ["<" if sign in (">", r"\gt") else r"\le " for sign in (parts[3], parts[1])]
    return f"{parts[4]} {smaller[0]}{parts[2]} {smaller[1]}{parts[0]}"


def _use_fraction(match: re.Match[str]) -> str:
    """Return a matched decimal exponent, such as ^{0.5}, written as a fraction."""
    return rf"^{{{match[1]}\frac{{{int(match[2] + match[3])}}}{{{10 ** len(match[3])}}}}}"


def _use_radians(match: re.Match[str]) -> str:
    """Return a matched trigonometric function of an angle in degrees, with the angle converted to radians."""
    return rf"\{match[1]}{{\left(\frac{{{match[2] or match[3]} \pi}}{{180}}\right)}}"


def can_parse(completion: str, max_nesting: int = MAX_NESTING) -> bool:
    r"""Return whether a completion can be parsed for formulas in reasonable time: brackets are not nested too deeply,
    and numbers are not too large.

    Only the text from the last LaTeX \boxed command on is checked, or the whole text if there is no such command.
    """
    text = completion[max(0, completion.rfind(r"\boxed")) :]
    if any(_nesting(text, *pair) > max_nesting for pair in ("{}", "()", "[]")) or _DIVISORS.search(text):
        return False
    return all(
        max(len(n), len(k)) < 16 and min(int(k), abs(int(n) - int(k))) * len(n) <= MAX_DIGITS
        for n, k in _BINOMIAL.findall(text)
    )


def _nesting(text: str, opening: str, closing: str) -> int:
    """Return the maximum nesting depth of the brackets `opening` and `closing` in a text."""
    depth = deepest = 0
    for mark in re.findall(f"[{re.escape(opening + closing)}]", text):
        depth = depth + 1 if mark == opening else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest
