"""The reward of mathematics: references and completions as math-verify reads them, compared if they can be evaluated.

A completion may spell what no machine can evaluate, such as 9^(9^9). Sizes are bounded on the parsed expression, which
is not evaluated for it: what is too large is a wrong answer at once.
"""

import logging
import re
from itertools import product
from math import comb, isfinite, log10
from typing import Any, Final

import sympy
from math_verify import parse, verify

from models.config.reward_terms import MathReward
from models.rewards.rules import Reward

MAX_DIGITS: Final = 100_000
"""Digits of the largest number that is evaluated, on the way to a value too; 20000! has 77,338."""

MAX_ROOT_DIGITS: Final = 1000
"""Digits of the largest number whose roots are simplified, for which it is factorised."""

MAX_TERMS: Final = 200
"""Terms of the longest sum that powers and products are expanded to."""

MAX_NESTING: Final = 100
"""Brackets in brackets that are still parsed."""

_DELIMITER: Final = re.compile(r"(?<!\\)(?:\$|\\\(|\\\[)|\\boxed|\n")
"""A reference with one of these is text that contains mathematics; any other is a formula itself."""

# Escaped dollars, pounds, yen, baht, and Unicode's block of currency symbols.
_CURRENCY: Final = re.compile(r"\\\$|[£¥฿\u20a0-\u20cf]")

_SPACED: Final = re.compile(r"(-?[0-9]{1,3})((?:(?: |\\,|\\ |~)[0-9]{3})+)((?:\.[0-9]+)?)")
"""A number whose thousands are set apart by spaces, which in a formula would multiply."""

_BINOMIAL: Final = re.compile(r"binom\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")

_DIVISORS: Final = re.compile(r"(?:gcd|lcm)\b[^\n]{0,200}?(?:\^\s*\{?\s*[0-9]{5}|\^[^\n]{0,50}\^|[0-9]{5}\s*\)?\s*!)")

_MOST: Final = 6.0  # digits of a number that is too large for an exponent
_SUMMAND: Final = 20.0  # digits that a term of a sum with limits costs as much as

Expression = Any  # sympy's classes, matrices included, or a text; sympy has no types


def math_reward(config: MathReward) -> Reward:
    """Return the one that there is; nothing can be set."""
    return mathematics


def mathematics(prompt: str, completion: str, answer: str) -> float:
    """Parse the reference as LaTeX or plain text and compare; a completion without mathematics is a wrong answer."""
    # It warns once that its own alarms are off; ours is the process that is killed (SIGALRM needs a main thread).
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expected, found = _reference(answer), _found(completion)
    if any(one == other and not can_evaluate(one) for one, other in product(expected, found)):
        return 1.0  # spelt alike: nothing has to be evaluated
    gold, target = ([one for one in side if can_evaluate(one)] for side in (expected, found))
    return float(verify(gold, target, timeout_seconds=None, raise_on_error=True))


def _reference(answer: str) -> list[Expression]:
    """Parse a reference; where that gives text alone, again without its currency signs."""
    text = answer.strip()
    if spaced := _SPACED.fullmatch(text):
        text = "".join((spaced[1], re.sub(r"[^0-9]", "", spaced[2]), spaced[3]))
    expected = _parsed(text)
    if all(isinstance(one, str) for one in expected) and _CURRENCY.search(text):
        expected += _parsed(_CURRENCY.sub("", text).strip())
    if not expected:
        raise ValueError(f"no mathematics in the reference {answer[-60:]!r}")
    return expected


def _parsed(reference: str) -> list[Expression]:
    text = reference if _DELIMITER.search(reference) else f"${reference}$"
    found: list[Expression] = parse(text, parsing_timeout=None, raise_on_error=True)
    return found


def _found(completion: str) -> list[Expression]:
    """Parse a completion; what cannot be parsed, or not in any time, is no mathematics."""
    if not _can_parse(completion):
        return []
    try:
        found: list[Expression] = parse(completion, parsing_timeout=None, raise_on_error=True)
    except (ValueError, RecursionError):  # sympy takes no number of more than 4300 digits
        return []
    return found


def _can_parse(completion: str) -> bool:
    """Look for what the parser itself would choke on, in the last box, or where there is none in the whole text."""
    text = completion[max(0, completion.rfind(r"\boxed")) :]
    if any(_nesting(text, *pair) > MAX_NESTING for pair in ("{}", "()", "[]")) or _DIVISORS.search(text):
        return False
    return all(
        max(len(n), len(k)) < 16 and min(int(k), abs(int(n) - int(k))) * len(n) <= MAX_DIGITS
        for n, k in _BINOMIAL.findall(text)
    )


def _nesting(text: str, opening: str, closing: str) -> int:
    depth = deepest = 0
    for mark in re.findall(f"[{re.escape(opening + closing)}]", text):
        depth = depth + 1 if mark == opening else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


class _TooLarge(Exception):
    """An expression takes more than a machine has."""


def can_evaluate(expression: Expression) -> bool:
    """Whether evaluating and expanding an expression stays within the bounds; nothing is evaluated to find out."""
    if isinstance(expression, str):
        return True
    try:
        _digits(expression)
        return _terms(expression) <= MAX_TERMS
    except (_TooLarge, RecursionError):
        return False


def _parts(expression: Expression) -> list[Expression]:
    return list(expression.flat()) if isinstance(expression, sympy.MatrixBase) else list(expression.args)


def _digits(expression: Expression) -> float:
    """Bound the digits of a value from above, and so those of all values on the way; a symbol counts as one digit."""
    parts = _parts(expression)
    digits = _of_parts(expression, [_digits(part) for part in parts]) if parts else _of_atom(expression)
    if digits > MAX_DIGITS:
        raise _TooLarge
    return digits


def _of_atom(atom: Expression) -> float:
    if isinstance(atom, sympy.Rational):
        largest = max(abs(atom.p), atom.q)
        return 0.0 if largest == 1 else largest.bit_length() * log10(2)
    if isinstance(atom, sympy.Float):
        size = abs(float(atom))
        if not isfinite(size):
            raise _TooLarge
        return abs(log10(size)) if size else 0.0
    return 0.0 if atom is sympy.I else 1.0


def _of_parts(expression: Expression, digits: list[float]) -> float:
    match expression:
        case sympy.Pow() | sympy.MatPow():
            base, power = digits
            if _is_root(expression.exp) and base > MAX_ROOT_DIGITS:
                raise _TooLarge
            least = 0.3 if expression.base.is_Matrix else 0.0  # of entries of 1 sums are made
            base = max(base, least)
            return base * _size(power) if base else 0.0
        case sympy.exp():
            return _size(digits[0]) * log10(2.7182818285)
        case sympy.binomial():
            return min(_size(min(digits[0], _MOST)) * log10(2), _size(digits[1]) * digits[0])
        case sympy.factorial() | sympy.factorial2() | sympy.subfactorial() | sympy.gamma() | sympy.RisingFactorial():
            return _size(max(digits)) * max(1.0, max(digits))
        case sympy.Sum() | sympy.Product():
            return max(1.0, digits[0]) * _size(max(digits[1:])) * _SUMMAND
        case sympy.Add() | sympy.MatAdd():
            return max(digits) + log10(len(digits))
        case sympy.Mul() | sympy.MatMul():
            return sum(digits)
        case _:
            return max(digits)


def _is_root(exponent: Expression) -> bool:
    return any(isinstance(part, sympy.Rational) and part.q > 1 for part in sympy.preorder_traversal(exponent))


def _size(digits: float) -> float:
    """The largest number of so many digits."""
    if digits > _MOST:
        raise _TooLarge
    return float(10**digits)


def _terms(expression: Expression) -> int:
    """Bound the terms that a sum has once its powers and products are expanded."""
    parts = _parts(expression)
    terms = [_terms(part) for part in parts]
    match expression:
        case sympy.Add():
            numbers = sum(part.is_Number for part in parts)
            count: int = sum(terms) - max(0, numbers - 1)
        case sympy.Mul():
            count = 1
            for factor in terms:
                count *= factor
        case sympy.Pow() if terms[0] > 1 and not expression.exp.free_symbols:
            power = int(_size(_digits(expression.exp)))
            count = comb(terms[0] + power - 1, power) if power <= 10 * MAX_TERMS else MAX_TERMS + 1
        case _:
            count = max(terms, default=1)
    if count > MAX_TERMS:
        raise _TooLarge
    return count
