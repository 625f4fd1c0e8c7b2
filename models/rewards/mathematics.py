"""Mathematics reward: the final answers of reference and completion are compared, mostly by math-verify.

A completion may contain expressions that no machine can evaluate, such as 9^(9^9). The size of a parsed expression is
therefore estimated before anything is evaluated. An expression that is too large is a wrong answer.
"""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import ceil, lgamma, log
from typing import Final

import sympy
from math_verify import parse, verify
from sympy.logic.boolalg import Boolean

from rheostat.models.config.reward_terms import MathReward
from rheostat.models.rewards.answers import (
    MAX_COMPLETION,
    FinalAnswer,
    find_answer,
    has_several_boxes,
    to_formula,
    to_latex,
    to_plain,
    unwrap,
)
from rheostat.models.rewards.expression_size import Expression, can_evaluate
from rheostat.models.rewards.formulas import (
    Formula,
    can_parse,
    find_formulas,
    has_multiple_on_left,
    read_formula,
    spelling_of,
)
from rheostat.models.rewards.numerals import Numeral, agree, is_same_unit, read_numeral, rounds_to
from rheostat.models.rewards.rules import Reward
from rheostat.models.rewards.words import choice_of, date_of, is_same_text, is_wordy, time_of, words_in

FEW_ZEROS: Final = 6
"""Number of zeros directly after the decimal point up to which math-verify's default precision is sufficient."""

MAX_ZEROS: Final = 10_000
"""Maximum number of zeros directly after the decimal point that increase the precision of a comparison."""

_DELIMITER: Final = re.compile(r"(?<!\\)(?:\$|\\\(|\\\[)|\\boxed|\n")
"""Pattern of math delimiters in a text, such as `$`. A reference without delimiters is parsed as one formula."""

# Escaped dollar signs, pound, yen and baht signs, and Unicode's block of currency symbols.
_CURRENCY: Final = re.compile(r"\\\$|[£¥฿\u20a0-\u20cf]")

_SPACED: Final = re.compile(r"(-?[0-9]{1,3})((?:(?: |\\,|\\ |~)[0-9]{3})+)((?:\.[0-9]+)?)")
"""Pattern of a number with spaces between thousands. The formula parser would wrongly read the spaces as
multiplication."""

_BOUND: Final = re.compile(r"[<>]|\\(?:[lg]eq?|[lg]t|neq?|not)(?![A-Za-z])")
"""Pattern of a relation without a left side, such as "≤ 5". math-verify would wrongly read it as 5."""

_BASE: Final = re.compile(r"\d_\{?(\d+)\}?")


def math_reward(config: MathReward) -> Reward:
    """Return the reward function for mathematical answers, in the configured version."""
    return mathematics if config.version == 1 else compare_answers


def compare_answers(prompt: str, completion: str, answer: str) -> float:
    """Return 1 if the final answers of completion and reference are equal, else 0. This is the mathematics reward since
    version 2.

    The reference determines how answers are compared: numbers and texts in words are compared here, all other
    mathematics by math-verify. A completion that equals the reference gets 1. Raises ValueError if the reference
    contains no answer.
    """
    reference = read_reference(answer)
    if completion.strip() == answer.strip():
        return 1.0
    text = to_latex(completion[-MAX_COMPLETION:])
    claim = find_answer(text)
    if claim is not None and reference.text in (claim.text, claim.line):
        return 1.0
    verdict = None if claim is None else reference.judge(claim)
    return float(reference.equals(text, claim) if verdict is None else verdict)


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference answer, parsed as each kind of answer that it can be: number, words or formulas."""

    text: str
    """Final answer in LaTeX notation, without delimiters."""
    plain: str
    """Final answer without LaTeX text commands and spaces, for comparison as a number or as words."""
    numeral: Numeral | None
    is_wordy: bool
    """Whether the answer consists of words, such as a choice, a name or a date."""
    formulas: tuple[Formula, ...] = ()
    """Answer parsed as mathematics. Empty for words, and for other texts that can only be compared as text."""
    unit: frozenset[str] = frozenset()
    """Words of the answer's unit, in the singular. Empty if the answer has no unit."""

    def judge(self, claim: FinalAnswer) -> bool | None:
        """Return whether a completion's final answer equals the reference, or None if the answers must be compared as
        formulas (`equals`)."""
        plain = to_plain(claim.text)
        is_text = self.is_wordy or self.plain == plain or choice_of(self.plain) is not None
        if is_text and is_same_text(self.plain, plain):
            return True
        if self.is_wordy:
            return False
        numeral, has_comma = self.numeral, _may_have_comma(claim, plain)
        given = read_numeral(plain, decimal_comma=has_comma, glued_units=numeral is not None)
        if numeral is None and given is not None and given.unit:
            numeral = read_numeral(self.plain, glued_units=True)
        if numeral is not None and given is not None:
            return agree(numeral, given)
        in_words = is_wordy(plain) and not re.search(r"\d", plain) and any(len(word) > 2 for word in words_in(plain))
        return False if in_words or _contradict(self.plain, plain) else None

    def equals(self, completion: str, claim: FinalAnswer | None) -> bool:
        """Return whether the completion's answer equals the reference mathematically.

        `claim` is the completion's final answer, or None if none was found. In that case the completion is searched for
        mathematics.
        """
        if self.is_wordy:
            return claim is None and is_same_text(self.plain, to_plain(completion.strip().rpartition("\n")[2]))
        if claim is not None and spelling_of(self.text) == spelling_of(claim.text):
            return True
        decimal = None if claim is None else read_numeral(to_plain(claim.text))
        given = _read_claim(completion, claim) if decimal is None else _read_numeral_formula(decimal)
        if not any("=" in formula.text for formula in self.formulas):
            given = [formula for formula in given if not has_multiple_on_left(formula.text)]
        pairs = [(one.expression, other.expression) for one in self.formulas for other in given if self.fits(other)]
        if any(verify_formulas([one], [other]) for one, other in pairs):
            return True
        return any(_is_rounded(decimal, one) or _is_rounded(self.numeral, other) for one, other in pairs)

    def fits(self, formula: Formula) -> bool:
        """Return whether a formula's unit does not contradict the unit of the reference."""
        return is_same_unit(self.unit, formula.unit)


@lru_cache(maxsize=64)
def read_reference(answer: str) -> Reference:
    """Parse a reference answer. Raises ValueError if the text contains no answer."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    whole = to_latex(answer.strip())
    found = None if has_several_boxes(whole) else find_answer(whole)
    text = unwrap(whole) if found is None else found.text
    plain = to_plain(text)
    numeral = None if found is None else read_numeral(plain)
    if numeral is not None:
        return Reference(text, plain, numeral, False, (*_read_numeral_formula(numeral),), numeral.unit)
    if found is not None and (is_wordy(plain) or date_of(plain) is not None or time_of(plain) is not None):
        return Reference(text, plain, None, True)
    formulas = find_formulas(whole) if found is None else _read_answer(found)
    if not formulas and r"\boxed" in text:  # a box without its end
        formulas = find_formulas(text, in_latex=True)
    if not formulas and (found is None or not text.strip(" $\\")):
        raise ValueError(
            f"the reference answer contains no number or formula that can be compared. Its end is {answer[-60:]!r}"
        )
    return Reference(text, plain, None, False, (*formulas,), formulas[0].unit if formulas else frozenset())


def _read_answer(found: FinalAnswer) -> list[Formula]:
    """Return the formulas in a reference's final answer, even if they are between words."""
    if found.source != "boxed" and _DELIMITER.search(found.text):
        return find_formulas(found.text, in_latex=True)
    return read_formula(to_formula(found.text))


def _read_claim(completion: str, claim: FinalAnswer | None) -> list[Formula]:
    """Return the formulas in a completion's final answer (`claim`). If there is no such answer, or if it is a sentence
    with words, the whole completion is searched."""
    if claim is None or (
        claim.source in ("stated", "whole") and (_DELIMITER.search(claim.text) or words_in(claim.text))
    ):
        return find_formulas(completion)
    joined = find_formulas(completion) if claim.source == "boxed" and has_several_boxes(completion) else []
    return [*_read_answer(claim), *joined]


def _read_numeral_formula(numeral: Numeral) -> list[Formula]:
    """Convert a number to a list with one formula, which math-verify can compare."""
    return [replace(formula, unit=numeral.unit) for formula in read_formula(numeral.latex)]


def _is_rounded(decimal: Numeral | None, expression: Expression) -> bool:
    """Return whether a decimal is the rounded value of a constant expression. For example, 1414.21 is the rounded value
    of 1000 times the square root of 2."""
    if decimal is None or decimal.place is None or decimal.is_percent:
        return False
    value = _value_of(expression)
    return value is not None and rounds_to(decimal, value)


def _value_of(expression: Expression) -> Fraction | None:
    """Return the value of a real constant expression to 30 digits, or None for any other expression."""
    if not isinstance(expression, sympy.Expr) or not expression.is_number or not can_evaluate(expression):
        return None
    value = expression.evalf(30)
    return Fraction(str(value)) if isinstance(value, sympy.Float) and value.is_finite else None


def _may_have_comma(claim: FinalAnswer, plain: str) -> bool:
    """Return whether a comma in an answer may be a decimal comma. This is possible only if the answer is plain text, as
    in "The answer is 3,5"."""
    return claim.source != "boxed" and claim.text == plain


def _contradict(expected: str, given: str) -> bool:
    """Return whether two answers differ in a part that math-verify would ignore or read as a product of letters.

    Such parts are the letters of choices, the kind of brackets, words, a relation without a left side (≤ 5), the base
    of a number, and the left side of an equation such as x + y = 5.
    """
    if choice_of(expected) is not None and choice_of(given) is not None:
        return True
    brackets = [re.match(r"\\\{|[(\[]", text) for text in (expected, given)]
    if brackets[0] and brackets[1] and ("{" in brackets[0][0]) != ("{" in brackets[1][0]):
        return True
    bounds = [_BOUND.match(text) for text in (expected, given)]
    if [bound and bound[0][:3] for bound in bounds] != [bounds[0] and bounds[0][0][:3]] * 2:
        return True
    bases = [_BASE.findall(text) for text in (expected, given)]
    if (bases[1] and bases[0] != bases[1]) or ("=" not in given and _has_sum_on_left(expected)):
        return True
    words = Counter(words_in(expected)), Counter(words_in(given))
    if not words[0] or not words[1]:
        return False
    return bool(words[0] - words[1]) or (words[0] == words[1] and _tokens_of(expected) != _tokens_of(given))


def _has_sum_on_left(text: str) -> bool:
    """Return whether a text is an equation with a sum on its left side. Sums in brackets do not count."""
    left, equals, _ = text.partition("=")
    return bool(equals) and re.search(r"[\w)}]\s*[-+]", re.sub(r"\([^()]*\)|\{[^{}]*\}", "", left)) is not None


def _tokens_of(text: str) -> list[str]:
    """Return the numbers and the words in a text, in order and in lower case."""
    return re.findall(r"\d+(?:\.\d+)?|[^\W\d_]{2,}", text.casefold())


def verify_formulas(expected: Sequence[Expression], given: Sequence[Expression]) -> bool:
    """Return whether math-verify finds that one of the `expected` expressions equals one of the `given` ones. Numbers
    are compared to 6 significant digits of the smallest constant.

    Texts that math-verify could not parse are ignored, because math-verify has removed parts of them. A comparison that
    math-verify cannot do, such as with 1/0, counts as unequal.
    """
    sides = [[each for each in side if not isinstance(each, str) and _has_value(each)] for side in (expected, given)]
    if any(one == other and not (can_evaluate(one) and _keeps_symbols(one)) for one, other in product(*sides)):
        return True
    gold, target = ([one for one in side if can_evaluate(one) and _keeps_symbols(one)] for side in sides)
    if any(map(_is_statement, gold)):
        if any(one in (other, getattr(other, "reversed", other)) for one, other in product(gold, target)):
            return True
        target = [each for each in target if not _is_statement(each)]
    if not verify(gold, target, timeout_seconds=None):
        return False
    extra = max(map(_leading_zeros, (*gold, *target)), default=0)
    precision = 15 + (extra if extra > FEW_ZEROS else 0)
    return bool(verify(gold, target, float_rounding=6 + extra, numeric_precision=precision, timeout_seconds=None))


def _has_value(expression: Expression) -> bool:
    """Return whether an expression contains no undefined number, such as 1/0."""
    return not expression.has(sympy.zoo, sympy.nan)


def _keeps_symbols(expression: Expression) -> bool:
    """Return whether evaluation does not change the meaning of an expression. It changes the derivative dy/dx: sympy
    does not know that y depends on x, and returns 0."""
    return all(each.expr.has(*each.variables) for each in expression.atoms(sympy.Derivative))


def _is_statement(expression: Expression) -> bool:
    """Return whether an expression is a relation without variables, such as 3 > 2.

    All true statements have the same value, so they can only be compared as text.
    """
    return isinstance(expression, Boolean) and not expression.free_symbols


def _leading_zeros(expression: Expression) -> int:
    """Return the number of zeros directly after the decimal point of the smallest constant in an expression, at most
    `MAX_ZEROS`."""
    if isinstance(expression, str):
        return 0
    parts = expression.flat() if isinstance(expression, sympy.MatrixBase) else [expression]
    sizes = [_log10(each) for part in parts for each in sympy.preorder_traversal(part)]
    return min(MAX_ZEROS, max((max(0, ceil(-size) - 1) for size in sizes if size is not None), default=0))


def _log10(expression: Expression) -> float | None:
    """Return log10 of the absolute value of a constant expression, or None for other expressions.

    Numbers, and powers, products and factorials of numbers are supported.
    """
    match expression:
        case sympy.Rational() | sympy.Float() if expression.is_finite and expression:
            number = sympy.Rational(expression)
            return (log(abs(number.p)) - log(number.q)) / log(10)
        case sympy.Pow() if isinstance(expression.exp, sympy.Integer) and abs(expression.exp) < 10**6:
            size = _log10(expression.base)
            return None if size is None else size * int(expression.exp)
        case sympy.Mul():
            sizes = [_log10(part) for part in expression.args]
            return None if None in sizes else sum(size for size in sizes if size is not None)
        case sympy.factorial() if isinstance(expression.args[0], sympy.Integer) and 0 <= expression.args[0] < 10**6:
            return lgamma(int(expression.args[0]) + 1) / log(10)
        case _:
            return None


def mathematics(prompt: str, completion: str, answer: str) -> float:
    """Return 1 if the completion and the reference contain equal mathematics, in LaTeX or plain text, else 0. This is
    version 1 of the mathematics reward.

    A completion without mathematics is wrong. Raises ValueError if the reference contains no mathematics.
    """
    # math-verify warns once that its own timeouts are off. We kill the process instead, because SIGALRM requires the
    # main thread.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expected, expressions = _parse_reference(answer), _parse_completion(completion)
    if any(one == other and not can_evaluate(one, bounds_roots=False) for one, other in product(expected, expressions)):
        return 1.0  # equal as written, so nothing has to be evaluated
    gold, target = ([one for one in side if can_evaluate(one, bounds_roots=False)] for side in (expected, expressions))
    return float(verify(gold, target, timeout_seconds=None, raise_on_error=True))


def _parse_reference(answer: str) -> list[Expression]:
    """Parse a reference answer as mathematics. If math-verify finds only text, the reference is parsed again without
    currency signs.

    Raises ValueError if the reference contains no mathematics.
    """
    text = answer.strip()
    if spaced := _SPACED.fullmatch(text):
        text = "".join((spaced[1], re.sub(r"[^0-9]", "", spaced[2]), spaced[3]))
    expected = _parse_text(text)
    if all(isinstance(one, str) for one in expected) and _CURRENCY.search(text):
        expected += _parse_text(_CURRENCY.sub("", text).strip())
    if not expected:
        raise ValueError(
            f"the reference answer contains no number or formula that can be compared. Its end is {answer[-60:]!r}"
        )
    return expected


def _parse_text(reference: str) -> list[Expression]:
    """Parse a reference answer with math-verify. A reference without math delimiters, such as `$`, is parsed as one
    formula."""
    text = reference if _DELIMITER.search(reference) else f"${reference}$"
    expressions: list[Expression] = parse(text, parsing_timeout=None, raise_on_error=True)
    return expressions


def _parse_completion(completion: str) -> list[Expression]:
    """Parse a completion with math-verify. Returns an empty list if the completion cannot be parsed in reasonable time
    or at all."""
    if not can_parse(completion):
        return []
    try:
        expressions: list[Expression] = parse(completion, parsing_timeout=None, raise_on_error=True)
    except (ValueError, RecursionError):  # sympy rejects numbers of more than 4300 digits
        return []
    return expressions
