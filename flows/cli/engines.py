"""Engines with an environment of their own: install one, see that it imports, serve it in the foreground."""

import contextlib
import os
import secrets
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from flows.cli.options import log_progress
from infra.errors import BadInput, WorkerFailed
from infra.terminal import Json, parse_port, parse_whole_number, write

if TYPE_CHECKING:
    from models.config.engines import VllmEngine
    from models.engines.vllm.server import Server

Engine = Annotated[Literal["vllm"], Parameter(name="ENGINE")]
Shape = Annotated[Path, Parameter(name="DIRECTORY", help="model directory in Hugging Face format")]
EngineOverrides = Annotated[
    str,
    Parameter(
        name="KEY=VALUE",
        help="keys of the engine's configuration, such as dtype=bfloat16 or tensor_parallel=2",
    ),
]
Interpreter = Annotated[Path | None, Parameter(show_default="this one", help="interpreter to make it with")]
Into = Annotated[Path | None, Parameter(metavar="DIR", show_default="where configurations look", help="folder to make")]
Build = Annotated[
    Literal["cpu", "cuda"] | None,
    Parameter(show_default="cuda where there is an NVIDIA driver, else cpu", help="build"),
]
Asked = Annotated[Path | None, Parameter(show_default="the installed one's", help="Python to ask")]
Port = Annotated[int | None, Parameter(converter=parse_port, show_default="a free one", help="port on loopback")]
Rank = Annotated[int, Parameter(converter=parse_whole_number, metavar="N", help="largest rank of adapters")]
Experts = Annotated[bool, Parameter(negative="", help="tell what routers choose, as update.router_replay asks")]
KeyVariable = Annotated[
    str,
    Parameter(metavar="NAME", help="environment variable with the key; a key is made where it is not set"),
]

POLL_SECONDS = 0.5


def install(
    engine: Engine,
    /,
    *,
    python: Interpreter = None,
    into: Into = None,
    platform: Build = None,
    as_json: Json = False,
) -> None:
    """Make the environment of an engine, or find the one that was made."""
    from infra.environments import install as environments

    log_progress(quiet=True)
    made = environments.install(engine, interpreter=python, into=into, platform=platform)
    place = f"\nset rollout.engine.python={str(made.python)!r}" if into else ""
    write(made.model_dump_json(indent=2) if as_json else f"{made.text()}{place}")


def check(engine: Engine, /, *, python: Asked = None, as_json: Json = False) -> None:
    """Import an engine in its environment, and print the versions."""
    from infra.environments.find import check_environment, find_python

    found = check_environment(engine, find_python(engine, python))
    write(found.model_dump_json(indent=2) if as_json else found.text())


def serve(
    engine: Engine,
    directory: Shape,
    /,
    *overrides: EngineOverrides,
    port: Port = None,
    adapter_rank: Rank = 0,
    experts: Experts = False,
    key_variable: KeyVariable = "RHEOSTAT_ENGINE_KEY",
) -> None:
    """Serve a policy's shape here until Ctrl-C, for workers that own no server."""
    from models.engines.vllm.server import Address, start_server

    log_progress(quiet=True)

    config = engine_config(overrides)
    given = os.environ.get(key_variable)
    key = given or secrets.token_urlsafe(32)
    with contextlib.suppress(KeyboardInterrupt):
        server = start_server(
            config,
            directory,
            adapter_rank=adapter_rank,
            tell_experts=experts,
            on_progress=lambda: None,
            at=Address(port=port, key=key),
        )
        try:
            write("\n".join(_advice(server, config, variable=key_variable, told=given is None)))
            while server.alive():
                time.sleep(POLL_SECONDS)
            raise WorkerFailed(f"the server at {server.url} ended: {server.cause() or server.log_tail(1)}")
        finally:
            server.stop()


def engine_config(overrides: Sequence[str]) -> "VllmEngine":
    from pydantic import ValidationError

    from infra.validation_errors import explain
    from models.config.engines import VllmEngine
    from tasks.config.documents import overridden

    try:
        return VllmEngine.model_validate(overridden({}, overrides))
    except ValidationError as error:
        raise BadInput(explain(error, VllmEngine)) from None


def _advice(server: "Server", config: "VllmEngine", *, variable: str, told: bool) -> list[str]:
    """What to type so that a run asks this server."""
    keys = {"kind": "vllm", "base_urls": f'["{server.url}"]', "api_key_variable": variable}
    keys |= {name: getattr(config, name) for name in ("dtype", "logprobs") if name in config.model_fields_set}
    overrides = [f"rollout.engine.{name}={value}" for name, value in keys.items()]
    return [
        f"vLLM serves at {server.url} (stop with Ctrl-C); its log is {server.process.log_path}",
        *([f"export {variable}={server.key}"] if told else [f"its key is in {variable}"]),
        shlex.join(["rheostat", "train", "CONFIG", *overrides]),
    ]
