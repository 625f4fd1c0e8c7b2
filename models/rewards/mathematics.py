"""Mathematics reward: reference and completion are parsed by math-verify and compared.

A completion may contain expressions that no machine can evaluate, such as 9^(9^9). The size of a parsed expression is
therefore bounded without evaluating it. An expression that is too large is a wrong answer.
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
"""Maximum number of digits of a number that is evaluated, including intermediate results. 20000! has 77,338 digits."""

MAX_ROOT_DIGITS: Final = 1000
"""Maximum number of digits of a number whose roots are simplified, because this factorizes the number."""

MAX_TERMS: Final = 200
"""Maximum number of terms of a sum after powers and products are expanded."""

MAX_NESTING: Final = 100
"""Maximum nesting depth of brackets that are parsed."""

_DELIMITER: Final = re.compile(r"(?<!\\)(?:\$|\\\(|\\\[)|\\boxed|\n")
"""Pattern of the delimiters of mathematics in text. A reference without any of them is parsed as a formula."""

# Escaped dollar signs, pound, yen and baht signs, and Unicode's block of currency symbols.
_CURRENCY: Final = re.compile(r"\\\$|[£¥฿\u20a0-\u20cf]")

_SPACED: Final = re.compile(r"(-?[0-9]{1,3})((?:(?: |\\,|\\ |~)[0-9]{3})+)((?:\.[0-9]+)?)")
"""Pattern of a number with spaces between thousands, which a formula would read as multiplication."""

_BINOMIAL: Final = re.compile(r"binom\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")

_DIVISORS: Final = re.compile(r"(?:gcd|lcm)\b[^\n]{0,200}?(?:\^\s*\{?\s*[0-9]{5}|\^[^\n]{0,50}\^|[0-9]{5}\s*\)?\s*!)")

_MOST: Final = 6.0  # digits of an exponent above which an expression is rejected
_SUMMAND: Final = 20.0  # assumed cost, in digits, of each term of a sum or product with limits

Expression = Any  # sympy's classes, including matrices, or a text; sympy has no types


def math_reward(config: MathReward) -> Reward:
    """Return the mathematics reward, which has no settings."""
    return mathematics


def mathematics(prompt: str, completion: str, answer: str) -> float:
    """Compare the reference and the completion as mathematics, in LaTeX or plain text. Returns 1 or 0.

    A completion without mathematics is a wrong answer. Raises ValueError if the reference contains no mathematics.
    """
    # math-verify warns once that its own timeouts are off. We kill the process instead, because SIGALRM requires the
    # main thread.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expected, expressions = _parse_reference(answer), _parse_completion(completion)
    if any(one == other and not can_evaluate(one) for one, other in product(expected, expressions)):
        return 1.0  # equal as written, so nothing has to be evaluated
    gold, target = ([one for one in side if can_evaluate(one)] for side in (expected, expressions))
    return float(verify(gold, target, timeout_seconds=None, raise_on_error=True))


def _parse_reference(answer: str) -> list[Expression]:
    """Parse a reference. If the result is only text, parse it again without currency signs.

    Raises ValueError if the reference contains no mathematics.
    """
    text = answer.strip()
    if spaced := _SPACED.fullmatch(text):
        text = "".join((spaced[1], re.sub(r"[^0-9]", "", spaced[2]), spaced[3]))
    expected = _parse_text(text)
    if all(isinstance(one, str) for one in expected) and _CURRENCY.search(text):
        expected += _parse_text(_CURRENCY.sub("", text).strip())
    if not expected:
        raise ValueError(f"no mathematics in the reference {answer[-60:]!r}")
    return expected


def _parse_text(reference: str) -> list[Expression]:
    """Parse a reference. A reference without delimiters is parsed as one formula."""
    text = reference if _DELIMITER.search(reference) else f"${reference}$"
    expressions: list[Expression] = parse(text, parsing_timeout=None, raise_on_error=True)
    return expressions


def _parse_completion(completion: str) -> list[Expression]:
    """Parse a completion. Returns an empty list if it cannot be parsed, or not in reasonable time."""
    if not _can_parse(completion):
        return []
    try:
        expressions: list[Expression] = parse(completion, parsing_timeout=None, raise_on_error=True)
    except (ValueError, RecursionError):  # sympy rejects numbers of more than 4300 digits
        return []
    return expressions


def _can_parse(completion: str) -> bool:
    """Return whether the parser can handle a completion. Checks the last box, or the whole text if there is no box."""
    text = completion[max(0, completion.rfind(r"\boxed")) :]
    if any(_nesting(text, *pair) > MAX_NESTING for pair in ("{}", "()", "[]")) or _DIVISORS.search(text):
        return False
    return all(
        max(len(n), len(k)) < 16 and min(int(k), abs(int(n) - int(k))) * len(n) <= MAX_DIGITS
        for n, k in _BINOMIAL.findall(text)
    )


def _nesting(text: str, opening: str, closing: str) -> int:
    """Return the maximum nesting depth of one kind of brackets."""
    depth = deepest = 0
    for mark in re.findall(f"[{re.escape(opening + closing)}]", text):
        depth = depth + 1 if mark == opening else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


class _TooLarge(Exception):
    """Raised when evaluating an expression would need too much time or memory."""


def can_evaluate(expression: Expression) -> bool:
    """Return whether evaluating and expanding an expression stays within the limits. Nothing is evaluated for this."""
    if isinstance(expression, str):
        return True
    try:
        _digits(expression)
        return _terms(expression) <= MAX_TERMS
    except (_TooLarge, RecursionError):
        return False


def _parts(expression: Expression) -> list[Expression]:
    """Return the elements of a matrix or the arguments of an expression."""
    return list(expression.flat()) if isinstance(expression, sympy.MatrixBase) else list(expression.args)


def _digits(expression: Expression) -> float:
    """Return an upper bound on the digits of a value and of all intermediate values. A symbol counts as one digit.

    Raises _TooLarge if the bound exceeds `MAX_DIGITS`.
    """
    parts = _parts(expression)
    digits = _of_parts(expression, [_digits(part) for part in parts]) if parts else _of_atom(expression)
    if digits > MAX_DIGITS:
        raise _TooLarge
    return digits


def _of_atom(atom: Expression) -> float:
    """Return log10 of the size of a number, or 1 for a symbol. Raises _TooLarge if the number is not finite."""
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
    """Combine the bounds of an expression's parts into a bound for the expression.

    Raises _TooLarge if it is too large.
    """
    match expression:
        case sympy.Pow() | sympy.MatPow():
            base, power = digits
            if _is_root(expression.exp) and base > MAX_ROOT_DIGITS:
                raise _TooLarge
            min_value = 0.3 if expression.base.is_Matrix else 0.0  # powers of a matrix of ones contain sums
            base = max(base, min_value)
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
    """Return whether an exponent contains a fraction."""
    return any(isinstance(part, sympy.Rational) and part.q > 1 for part in sympy.preorder_traversal(exponent))


def _size(digits: float) -> float:
    """Return 10 to the power of `digits`. Raises _TooLarge if `digits` exceeds `_MOST`."""
    if digits > _MOST:
        raise _TooLarge
    return float(10**digits)


def _terms(expression: Expression) -> int:
    """Return an upper bound on the terms of a sum after its powers and products are expanded.

    Raises _TooLarge if the bound exceeds `MAX_TERMS`.
    """
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
