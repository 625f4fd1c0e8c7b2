"""A server for people: it stands at one address, whatever policy it is given and however often it dies."""

import logging
from pathlib import Path

from infra.errors import EndpointDown, WorkerFailed
from models.config.engines import VllmEngine
from models.engines.vllm.client import ServerClient
from models.engines.vllm.server import Address, Server, start_server

logger = logging.getLogger(__name__)


class StandingServer:
    """One server of this process at a time. Nothing is started before the first policy."""

    def __init__(self, config: VllmEngine, at: Address) -> None:
        self._config, self._at = config, at
        self._server: Server | None = None
        self._digest = ""

    def serve(self, directory: Path, digest: str) -> bool:
        """Serve the bundle in `directory`; return whether it was another before, or none.

        A running server is loaded in place, once it has answered what it was asked; it is started again where it died
        or refuses, as it does a policy of another shape. Raises WorkerFailed where it serves another digest then.
        """
        is_alive = self._server is not None and self._server.alive()
        if is_alive and digest == self._digest:
            return False
        if self._server is not None and not is_alive:
            logger.warning("the server ended and is started again: %s", self._server.cause() or "it does not say why")
        try:
            self._digest = self._load(self._server if is_alive else self._start(directory), directory)
        except (WorkerFailed, EndpointDown) as error:
            if not is_alive:
                raise
            logger.warning("the server is started again: %s", error)
            self._digest = self._load(self._start(directory), directory)
        if self._digest != digest:
            raise WorkerFailed(f"vLLM: expected it to serve {digest}, it says {self._digest!r}")
        return True

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _start(self, directory: Path) -> Server:
        self.close()
        self._server = start_server(self._config, directory, adapter_rank=0, on_progress=lambda: None, at=self._at)
        return self._server

    def _load(self, server: Server | None, directory: Path) -> str:
        assert server is not None, "it is alive or was started"
        return ServerClient(server.url, server.key).load(directory, None, drain=True).digest
