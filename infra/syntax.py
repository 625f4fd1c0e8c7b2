"""Syntax trees of Python source code, for several threads."""

import ast
import threading

_LOCK = threading.Lock()


def parse_source(source: str | bytes) -> ast.Module:
    """Return the syntax tree of a module. Raises SyntaxError or ValueError if the source is invalid.

    Only one thread at a time builds a tree. CPython 3.11 counts the depth of the trees of all threads together, and
    raises SystemError if another thread continues in between.
    """
    with _LOCK:
        return ast.parse(source)
