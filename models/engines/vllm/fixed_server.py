"""vLLM server that keeps its address when it loads another policy or is restarted."""

import logging
from pathlib import Path

from rheostat.infra.errors import EndpointDown, WorkerFailed
from rheostat.models.config.engines import VllmEngine
from rheostat.models.engines.vllm.client import ServerClient
from rheostat.models.engines.vllm.server import Address, Server, start_server

logger = logging.getLogger(__name__)


class FixedAddressServer:
    """vLLM server whose address stays the same. It runs at most one vLLM process, which is started when the first
    policy is served."""

    def __init__(self, config: VllmEngine, at: Address) -> None:
        self._config, self._at = config, at
        self._server: Server | None = None
        self._digest = ""

    def serve(self, directory: Path, digest: str) -> bool:
        """Serve the policy in `directory`. Returns whether another policy or none was served before. Raises
        WorkerFailed if the restarted server does not serve `digest`.

        A running server finishes its open requests and then loads the policy in place. If the server has died or
        refuses the policy, for example because its shape differs, vLLM is restarted.
        """
        is_alive = self._server is not None and self._server.is_alive()
        if is_alive and digest == self._digest:
            return False
        if self._server is not None and not is_alive:
            logger.warning(
                "The vLLM server has ended and is restarted. Cause: %s", self._server.find_cause() or "unknown"
            )
        try:
            self._digest = self._load(self._server if is_alive else self._start(directory), directory)
        except (WorkerFailed, EndpointDown) as error:
            if not is_alive:
                raise
            logger.warning("The vLLM server is restarted, because of this error: %s", error)
            self._digest = self._load(self._start(directory), directory)
        if self._digest != digest:
            raise WorkerFailed(f"the vLLM server must serve policy {digest}, but it reports {self._digest!r}")
        return True

    def close(self) -> None:
        """Stop the vLLM process, if one is running."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _start(self, directory: Path) -> Server:
        self.close()
        self._server = start_server(self._config, directory, adapter_rank=0, on_progress=lambda: None, at=self._at)
        return self._server

    def _load(self, server: Server | None, directory: Path) -> str:
        assert server is not None, "the server is alive or was just started"
        return ServerClient(server.url, server.key).load(directory, None, drain=True).digest
