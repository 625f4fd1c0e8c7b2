"""Commands for engines with a separate environment: install an engine, check its imports, serve it in the
foreground."""

import contextlib
import os
import secrets
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from cyclopts import Parameter

from rheostat.flows.cli.options import log_progress
from rheostat.infra.errors import BadInput, WorkerFailed
from rheostat.infra.terminal import Json, parse_port, parse_whole_number, write

if TYPE_CHECKING:
    from rheostat.infra.config import Settings
    from rheostat.models.config.engines import VllmEngine
    from rheostat.models.engines.vllm.server import Server

Engine = Annotated[Literal["vllm"], Parameter(name="ENGINE", help="kind of the engine")]
Package = Annotated[
    Literal["vllm", "verifiers", "lm_eval", "inspect"],
    Parameter(name="ENGINE", help="engine, or package for environments and evaluations"),
]
ModelName = Annotated[
    str,
    Parameter(name="MODEL", help="model directory in Hugging Face format, or the name of a model on the Hub"),
]
EngineOverrides = Annotated[
    str,
    Parameter(
        name="KEY=VALUE",
        help="override keys of the engine's configuration, such as dtype=bfloat16 or tensor_parallel=2",
    ),
]
ServerOverrides = Annotated[
    str,
    Parameter(
        name="KEY=VALUE",
        help="override settings of the server, such as sampling.temperature=0.7 or engine.dtype=bfloat16",
    ),
]
Interpreter = Annotated[
    Path | None, Parameter(show_default="the running one", help="Python interpreter for the new environment")
]
NewEnvironment = Annotated[
    Path | None, Parameter(metavar="DIR", show_default="the folder that runs search", help="folder to create")
]
Platform = Annotated[
    Literal["cpu", "cuda"] | None,
    Parameter(
        show_default="RHEOSTAT_TORCH, or cuda if there is an NVIDIA driver, else cpu", help="build of the engine"
    ),
]
InstalledInterpreter = Annotated[
    Path | None, Parameter(show_default="the installed environment", help="Python interpreter of the environment")
]
Port = Annotated[
    int | None, Parameter(converter=parse_port, show_default="any free port", help="local port to listen on")
]
Rank = Annotated[int, Parameter(converter=parse_whole_number, metavar="N", help="maximum rank of adapters; 0 for none")]
Experts = Annotated[
    bool, Parameter(negative="", help="report the experts that routers choose, for update.router_replay")
]
KeyVariable = Annotated[
    str,
    Parameter(metavar="NAME", help="environment variable with the API key; if it is not set, a random key is created"),
]

POLL_SECONDS = 0.5
S = TypeVar("S", bound="Settings")


def install(
    engine: Package,
    /,
    *,
    python: Interpreter = None,
    into: NewEnvironment = None,
    platform: Platform = None,
    as_json: Json = False,
) -> None:
    """Create the Python environment of an inference engine or of another package, or find the existing one."""
    from rheostat.infra.environments import install as environments

    log_progress(quiet=True)
    environment = environments.install(engine, interpreter=python, into=into, platform=platform)
    where = "rollout.engine.python" if engine == "vllm" else "python of the data and of the environment"
    usage = f"\nto use it in a run, set {where} to {str(environment.python)!r}" if into else ""
    write(environment.model_dump_json(indent=2) if as_json else f"{environment.text()}{usage}")


def check(engine: Package, /, *, python: InstalledInterpreter = None, as_json: Json = False) -> None:
    """Import an inference engine or another package in its Python environment, and print the versions of its packages.

    For a CUDA build, check the version of the NVIDIA driver too.
    """
    from rheostat.infra.environments.find import check_environment, check_environment_driver, find_python
    from rheostat.infra.environments.gpus import has_driver

    environment = check_environment(engine, find_python(engine, python))
    check_environment_driver(environment)
    note = "" if environment.platform == "cpu" or has_driver() else ". This machine has no NVIDIA driver"
    write(environment.model_dump_json(indent=2) if as_json else f"{environment.text()}{note}")


def serve(
    engine: Engine,
    model: ModelName,
    /,
    *overrides: EngineOverrides,
    port: Port = None,
    adapter_rank: Rank = 0,
    experts: Experts = False,
    key_variable: KeyVariable = "RHEOSTAT_ENGINE_KEY",
) -> None:
    """Serve a model with an inference engine until Ctrl-C, for runs that set rollout.engine.base_urls."""
    from rheostat.infra.store.inputs import fetch_path, read_model_path
    from rheostat.models.engines.vllm.server import Address, start_server

    log_progress(quiet=True)

    config = engine_config(overrides)
    configured_key = os.environ.get(key_variable)
    key = configured_key or secrets.token_urlsafe(32)
    with contextlib.suppress(KeyboardInterrupt):
        server = start_server(
            config,
            fetch_path(read_model_path(model)),
            adapter_rank=adapter_rank,
            report_experts=experts,
            on_progress=lambda: None,
            at=Address(port=port, key=key),
        )
        try:
            write("\n".join(_usage_lines(server, config, variable=key_variable, shows_key=configured_key is None)))
            while server.is_alive():
                time.sleep(POLL_SECONDS)
            raise WorkerFailed(
                f"The vLLM server at {server.url} has ended: {server.find_cause() or server.log_tail(1)}"
            )
        finally:
            server.stop()


def serve_policy(
    model: ModelName,
    /,
    *overrides: ServerOverrides,
    port: Port = None,
    key_variable: KeyVariable = "RHEOSTAT_SERVE_KEY",
) -> None:
    """Serve a policy to OpenAI clients with Rheostat's own engine until Ctrl-C: chats with tools, texts and tokens."""
    from rheostat.infra.store.inputs import fetch_path, read_model_path
    from rheostat.models.config.policy_server import PolicyServer, PolicyServerWork

    log_progress(quiet=True)
    server = _read_settings(overrides, PolicyServer)
    directory = fetch_path(read_model_path(model)).absolute()
    if not directory.is_dir():
        raise BadInput(f"policy {directory}: no such directory")
    work = PolicyServerWork(server=server, directory=directory, port=port or 0, key_variable=key_variable)
    command = [sys.executable, "-P", "-m", "rheostat.models.commands.serve_policy", work.model_dump_json()]
    os.execv(command[0], command)  # flows may not import code that loads models


def engine_config(overrides: Sequence[str]) -> "VllmEngine":
    from rheostat.models.config.engines import VllmEngine

    return _read_settings(overrides, VllmEngine)


def _read_settings(overrides: Sequence[str], kind: type[S]) -> S:
    """Build settings of a class from overrides of its defaults. Raises BadInput if they are invalid."""
    from pydantic import ValidationError

    from rheostat.infra.validation_errors import explain
    from rheostat.tasks.config.documents import apply_overrides

    try:
        return kind.model_validate(apply_overrides({}, overrides, kind))
    except ValidationError as error:
        raise BadInput(explain(error, kind)) from None


def _usage_lines(server: "Server", config: "VllmEngine", *, variable: str, shows_key: bool) -> list[str]:
    """Return the lines to print after the server has started: its address, its key, and the command of a run that uses
    the server."""
    keys = {"kind": "vllm", "base_urls": f'["{server.url}"]', "api_key_variable": variable}
    keys |= {name: getattr(config, name) for name in ("dtype", "logprobs") if name in config.model_fields_set}
    overrides = [f"rollout.engine.{name}={value}" for name, value in keys.items()]
    return [
        f"vLLM server running at {server.url} (stop with Ctrl-C), log file {server.process.log_path}",
        *([f"export {variable}={server.key}"] if shows_key else [f"the API key is the value of {variable}"]),
        shlex.join(["rheostat", "train", "CONFIG", *overrides]),
    ]
