"""Engines with an environment of their own: install one, see that it imports, serve it in the foreground."""

import argparse
import contextlib
import os
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pydantic import ValidationError

from flows.cli.output import write
from infra.environments.find import check_environment, find_python
from infra.environments.install import install
from infra.errors import BadInput, WorkerFailed
from infra.validation_errors import explain
from models.config.engines import VllmEngine
from models.engines.vllm.server import Server, start_server
from tasks.config.run import overridden


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

    return serve_engine(options)


ACTIONS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "install": _install,
    "check": _check,
    "serve": _serve,
}

POLL_SECONDS = 0.5


def serve_engine(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C, or until the server ends by itself, which is an error."""
    config = _engine(options.overrides)
    given = os.environ.get(options.key_variable)
    key = given or secrets.token_urlsafe(32)
    with contextlib.suppress(KeyboardInterrupt):
        server = start_server(
            config,
            options.directory,
            adapter_rank=options.adapter_rank,
            beat=lambda: None,
            port=options.port,
            key=key,
        )
        try:
            write("\n".join(_advice(server, config, variable=options.key_variable, told=given is None)))
            while server.alive():
                time.sleep(POLL_SECONDS)
            raise WorkerFailed(f"the server at {server.url} ended: {server.cause() or server.log_tail(1)}")
        finally:
            server.stop()
    return 0


def _engine(overrides: Sequence[str]) -> VllmEngine:
    try:
        return VllmEngine.model_validate(overridden({}, overrides))
    except ValidationError as error:
        raise BadInput(explain(error, VllmEngine)) from None


def _advice(server: Server, config: VllmEngine, *, variable: str, told: bool) -> list[str]:
    """What to type so that a run asks this server."""
    keys = {"kind": "vllm", "base_urls": f'["{server.url}"]', "api_key_variable": variable}
    keys |= {name: getattr(config, name) for name in ("dtype", "logprobs") if name in config.model_fields_set}
    overrides = [f"rollout.engine.{name}={value}" for name, value in keys.items()]
    return [
        f"vLLM serves at {server.url} (stop with Ctrl-C); its log is {server.process.log_path}",
        *([f"export {variable}={server.key}"] if told else [f"its key is in {variable}"]),
        shlex.join(["rheostat", "train", "CONFIG", *overrides]),
    ]
