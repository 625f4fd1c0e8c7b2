"""Servers that an engine uses: either one that it starts itself, or servers that already run."""

import json
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol, TypeVar

from blake3 import blake3
from transformers import AutoConfig

from rheostat.infra.errors import BadInput, EndpointDown
from rheostat.models.config.engines import VllmEngine
from rheostat.models.engines.vllm.client import ServerClient, ServerInfo, StaleWeights
from rheostat.models.engines.vllm.server import Server, start_server
from rheostat.models.vision.processor import SETTINGS

R = TypeVar("R")
T = TypeVar("T")

logger = logging.getLogger(__name__)

_IGNORED_KEYS: Final = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Keys of config.json that are ignored when a running server decides whether it can load another policy in place."""


class Servers(Protocol):
    """Servers of one vLLM engine, which the engine has started or which already run."""

    def start_clients(self, directory: Path, *, report_experts: bool) -> tuple[ServerClient, ...]:
        """Return clients of servers that can serve a model with the shape of the one in `directory`. Start servers if
        needed. With `report_experts`, the servers can report the experts that a mixture of experts chooses."""

    def running_clients(self) -> tuple[ServerClient, ...]:
        """Return clients of the servers that run now, without starting any."""

    def prepare_restart(self, error: EndpointDown) -> None:
        """Let the next `start_clients` start a new server, after a server did not answer. Raises EndpointDown if these
        servers are not started by this process."""

    def find_cause(self) -> str:
        """Return the log line that explains why the server ended, or an empty string if there is none."""

    def sleep(self) -> None:
        """Release the memory of the servers."""

    def close(self) -> None:
        """Stop every server that this process has started."""


class OwnServer:
    """Single vLLM server that this process starts when it is first needed, and starts again after it has died."""

    def __init__(self, config: VllmEngine, *, adapter_rank: int, on_progress: Callable[[], None]) -> None:
        self._config, self._adapter_rank, self._on_progress = config, adapter_rank, on_progress
        self._server: Server | None = None
        self._shape, self._reports_experts = "", False

    def start_clients(self, directory: Path, *, report_experts: bool) -> tuple[ServerClient, ...]:
        shape, server = _shape(directory), self._server
        fits = shape == self._shape and self._reports_experts >= report_experts
        if server is not None and not (fits and server.is_alive()):
            self.close()
        if self._server is None:
            self._server = start_server(
                self._config,
                directory,
                adapter_rank=self._adapter_rank,
                report_experts=report_experts,
                on_progress=self._on_progress,
            )
            self._shape, self._reports_experts = shape, report_experts
        return self.running_clients()

    def running_clients(self) -> tuple[ServerClient, ...]:
        if self._server is None or not self._server.is_alive():
            return ()
        return (ServerClient(self._server.url, self._server.key),)

    def prepare_restart(self, error: EndpointDown) -> None:
        logger.warning("The vLLM server is restarted, because of this error: %s %s", error, self.find_cause())
        self.close()

    def find_cause(self) -> str:
        return "" if self._server is None else self._server.find_cause()

    def sleep(self) -> None:
        for client in self.running_clients():
            try:
                client.sleep()
            except EndpointDown as error:
                logger.warning("The vLLM server does not respond to the request to release its GPU memory: %s", error)

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


class RunningServers:
    """vLLM servers that were started outside the run. Policies are loaded into them, but they are not started, put to
    sleep or stopped."""

    def __init__(self, config: VllmEngine) -> None:
        key = ""
        if config.api_key_variable is not None:
            key = os.environ.get(config.api_key_variable, "")
            if not key:
                raise BadInput(
                    f"engine.api_key_variable names the environment variable {config.api_key_variable}, but this "
                    "variable is not set. Set it to the key of the servers"
                )
        self._clients = tuple(ServerClient(url, key) for url in config.base_urls)

    def start_clients(self, directory: Path, *, report_experts: bool) -> tuple[ServerClient, ...]:
        return self._clients

    def running_clients(self) -> tuple[ServerClient, ...]:
        return self._clients

    def prepare_restart(self, error: EndpointDown) -> None:
        raise EndpointDown(
            f"{error}. Start the server with `rheostat engine serve vllm`, or correct engine.base_urls"
        ) from error

    def find_cause(self) -> str:
        return ""

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


def find_servers(config: VllmEngine, *, adapter_rank: int, on_progress: Callable[[], None]) -> Servers:
    """Return the vLLM servers that the configuration selects. No server is started yet."""
    if config.base_urls:
        return RunningServers(config)
    return OwnServer(config, adapter_rank=adapter_rank, on_progress=on_progress)


def require_fit(
    client: ServerClient, about: ServerInfo, config: VllmEngine, *, adapter_rank: int, report_experts: bool
) -> None:
    """Raise BadInput if the settings that a server reports (`about`) differ from the configuration, or if the server
    cannot report the experts of a mixture of experts although `report_experts` is set."""
    for name, expected, actual in (
        ("dtype", config.dtype, about.dtype),
        ("logprobs", config.logprobs, about.logprobs),
    ):
        if expected != actual:
            raise BadInput(
                f"engine.{name} is {expected!r}, but {client} was started with {actual!r}. Change the setting, or "
                f"restart the server with {name}={expected}"
            )
    if about.lora_rank < adapter_rank:
        raise BadInput(
            f"update.lora.rank is {adapter_rank}, but {client} serves adapters up to rank {about.lora_rank}. Lower it, "
            "or start the server for this rank"
        )
    if report_experts and not about.tells_experts:
        raise BadInput(
            f"update.router_replay needs the chosen experts, but {client} does not report them. Serve a "
            "mixture-of-experts model, and start the server with --experts"
        )


def call_servers(
    query: Callable[[ServerClient, Sequence[T]], R], clients: Sequence[ServerClient], items: Sequence[T]
) -> list[R]:
    """Distribute the items over the servers, call all servers in parallel, and wait for every call to end.

    If calls failed, one of their errors is raised after all calls have ended. Errors that a retry may fix
    (EndpointDown, StaleWeights) are raised only if there is no other error.
    """
    shares = [(client, items[index :: len(clients)]) for index, client in enumerate(clients)]
    shares = [(client, share) for client, share in shares if share]
    if len(shares) <= 1:
        return [query(client, share) for client, share in shares]
    with ThreadPoolExecutor(len(shares)) as pool:
        futures = [pool.submit(query, client, share) for client, share in shares]
    errors = [error for future in futures if (error := future.exception()) is not None]
    # Errors that a retry cannot fix come first.
    errors.sort(key=lambda error: isinstance(error, EndpointDown | StaleWeights))
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def _shape(directory: Path) -> str:
    """Return a digest of everything about a policy that a running server cannot change: architecture, tokenizer and
    image preprocessing."""
    # Loaded by transformers, because a trained policy is saved with all default settings written out, while a directory
    # from elsewhere may omit them.
    settings = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False).to_dict()
    lasting = {name: value for name, value in settings.items() if name not in _IGNORED_KEYS}
    paths = [directory / name for name in ("tokenizer.json", *SETTINGS)]
    files = b"".join(path.read_bytes() for path in paths if path.is_file())
    return blake3(json.dumps(lasting, sort_keys=True, default=str).encode() + files).hexdigest()
