"""Parts of vLLM that are missing in this Python environment.

Runs with the Python of vLLM's environment. Reads a JSON list of parts `module:name` or `module:Class.name` from
standard input, and writes a JSON object with the reason for each missing part.
"""

import importlib
import inspect
import json
import sys


def has_member(owner, name):
    """Return whether a class or module has a member. Attributes that only instances have are found in the source."""
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", {}):
        return True
    classes = [each for each in getattr(owner, "__mro__", ()) if each is not object]
    return any(name in getattr(each, "__annotations__", {}) for each in classes) or any(
        f"self.{name} = " in source or f"self.{name}: " in source for source in map(read_source, classes)
    )


def read_source(owner):
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):  # written in C
        return ""


def find_fault(part):
    """Return why a part is missing, or None."""
    module, _, path = part.partition(":")
    try:
        owner = importlib.import_module(module)
    except ImportError as error:
        return str(error)
    *owners, name = path.split(".")
    for each in owners:
        owner = getattr(owner, each, None)
    return None if owner is not None and has_member(owner, name) else f"{module} has no {path}"


if __name__ == "__main__":
    faults = {part: find_fault(part) for part in json.load(sys.stdin)}
    sys.stdout.write(f"\n{json.dumps({part: fault for part, fault in faults.items() if fault})}\n")
