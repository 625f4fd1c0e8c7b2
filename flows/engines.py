"""Engines with an environment of their own: install one, see that it imports, serve it."""

import argparse
from collections.abc import Callable, Mapping
from typing import Final

from flows.terminal import write
from infra.environments.find import check_environment, find_python
from infra.environments.install import install


def _install(options: argparse.Namespace) -> int:
    made = install(options.engine, interpreter=options.python, into=options.into, platform=options.platform)
    place = f"\nset rollout.engine.python={str(made.python)!r}" if options.into else ""
    write(made.model_dump_json(indent=2) if options.json else f"{made.text()}{place}")
    return 0


def _check(options: argparse.Namespace) -> int:
    found = check_environment(options.engine, find_python(options.engine, options.python))
    write(found.model_dump_json(indent=2) if options.json else found.text())
    return 0


def _serve(options: argparse.Namespace) -> int:
    from flows.serving import serve_engine

    return serve_engine(options)


ACTIONS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "install": _install,
    "check": _check,
    "serve": _serve,
}
