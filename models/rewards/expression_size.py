"""Limits on the size of parsed mathematics, so that expressions such as 9^(9^9) are never evaluated."""

from math import comb, isfinite, log10
from typing import Any, Final

import sympy

MAX_DIGITS: Final = 100_000
"""Maximum number of digits of any number in an evaluation, including intermediate results. For comparison, 20000! has
77,338 digits."""

MAX_ROOT_DIGITS: Final = 1000
"""Maximum number of digits of a number whose roots are simplified. Simplifying a root factorizes the number, which is
slow."""

MAX_TERMS: Final = 200
"""Maximum number of terms of a sum after powers and products are expanded."""

_MOST: Final = 6.0  # digits of an exponent above which an expression is rejected
_SUMMAND: Final = 20.0  # assumed cost, in digits, of each term of a sum or product with limits

Expression = Any  # sympy's classes, including matrices, or a text; sympy has no types


class _TooLarge(Exception):
    """Raised when the evaluation of an expression would need too much time or memory."""


def can_evaluate(expression: Expression, *, bounds_roots: bool = True) -> bool:
    """Return whether an expression can be evaluated and expanded within the limits of this module. The check itself
    evaluates nothing.

    If `bounds_roots` is false, the value of a constant exponent is not used, so more expressions are rejected. Version
    1 of the mathematics reward uses this.
    """
    if isinstance(expression, str):
        return True
    try:
        _digits(expression, bounds_roots=bounds_roots)
        return _terms(expression) <= MAX_TERMS
    except (_TooLarge, RecursionError):
        return False


def _parts(expression: Expression) -> list[Expression]:
    """Return the direct sub-expressions: the elements of a matrix, or the arguments of a function or operator."""
    return list(expression.flat()) if isinstance(expression, sympy.MatrixBase) else list(expression.args)


def _digits(expression: Expression, *, bounds_roots: bool = False) -> float:
    """Return an upper bound of the number of digits of an expression's value and of all intermediate values. A symbol
    counts as one digit.

    Raises _TooLarge if the bound exceeds `MAX_DIGITS`.
    """
    parts = _parts(expression)
    if not parts:
        digits = _of_atom(expression)
    else:
        of_parts = [_digits(part, bounds_roots=bounds_roots) for part in parts]
        is_root = bounds_roots and isinstance(expression, sympy.Pow) and isinstance(expression.exp, sympy.Rational)
        digits = _of_root(expression, of_parts[0]) if is_root else _of_parts(expression, of_parts)
    if digits > MAX_DIGITS:
        raise _TooLarge
    return digits


def _of_atom(atom: Expression) -> float:
    """Return the number of digits of a number (log10 of the larger of numerator and denominator), or 1 for a symbol.
    Raises _TooLarge if the number is not finite."""
    if isinstance(atom, sympy.Rational):
        largest = max(abs(atom.p), atom.q)
        return 0.0 if largest == 1 else largest.bit_length() * log10(2)
    if isinstance(atom, sympy.Float):
        size = abs(float(atom))
        if not isfinite(size):
            raise _TooLarge
        return abs(log10(size)) if size else 0.0
    return 0.0 if atom is sympy.I else 1.0


def _of_root(power: Expression, base: float) -> float:
    """Return an upper bound of the number of digits of a power with a constant rational exponent. `base` is the bound
    of the power's base.

    Raises _TooLarge if the base has too many digits for its roots to be simplified.
    """
    if power.exp.q > 1 and base > MAX_ROOT_DIGITS:
        raise _TooLarge
    return base * max(1.0, float(abs(power.exp.p) / power.exp.q))


def _of_parts(expression: Expression, digits: list[float]) -> float:
    """Return an upper bound of the number of digits of an expression, given the bounds of its sub-expressions
    (`digits`).

    Raises _TooLarge if the bound is too large.
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
    """Return whether a power with this exponent is a root, because the exponent contains a fraction."""
    return any(isinstance(part, sympy.Rational) and part.q > 1 for part in sympy.preorder_traversal(exponent))


def _size(digits: float) -> float:
    """Return 10 to the power of `digits`. Raises _TooLarge if `digits` exceeds the constant `_MOST`."""
    if digits > _MOST:
        raise _TooLarge
    return float(10**digits)


def _terms(expression: Expression) -> int:
    """Return an upper bound of the number of terms of an expression after its powers and products are expanded.

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
