"""Right or wrong by mathematical equality, as math-verify finds it. Importing this loads sympy, about a second."""

import logging

from math_verify import parse, verify

from models.protocols import Reward

_DELIMITERS = ("$", r"\boxed", r"\(", r"\[", "\n")
"""A reference with one of these is text that contains mathematics; any other is a formula itself."""


def mathematics_reward() -> Reward:
    """Parse the reference as LaTeX or plain text and compare; a completion without mathematics is a wrong answer."""
    # It warns once that its own alarms are off; ours is the process that is killed (SIGALRM needs a main thread).
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return _reward


def _reward(prompt: str, completion: str, answer: str) -> float:
    is_text = any(mark in answer for mark in _DELIMITERS)
    expected = parse(answer if is_text else f"${answer}$", parsing_timeout=None, raise_on_error=True)
    if not expected:
        raise ValueError(f"no mathematics in the reference {answer[-60:]!r}")
    found = parse(completion, parsing_timeout=None, raise_on_error=True)
    return float(verify(expected, found, timeout_seconds=None, raise_on_error=True))
