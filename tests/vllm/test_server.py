"""vLLM's server process: its start, its key, and its end with the process that owns it."""

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest

import rheostat.models.engines.vllm
from rheostat.infra.environments.find import find_python
from rheostat.infra.errors import WorkerFailed
from rheostat.infra.store.bundles import CONTENTS, describe_bundle
from rheostat.models.config.engines import VllmEngine
from rheostat.models.engines.vllm.server import Address, command, start_server
from tests.support.jobs import is_alive, wait_for
from tests.support.policies import CONTEXT, write_policy

pytestmark = pytest.mark.vllm

ENGINE = VllmEngine(cache_gib=0.1, max_batch_rows=8, start_seconds=240)
MOST_QUIET_SECONDS = 20.0
"""Longest time without progress during a start; a worker is killed after 300 s."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "model"
    write_policy(path, changes={"head_dim": 32})
    return path


@pytest.fixture(scope="module")
def started(directory):
    """Server with room for adapters, and the times at which its start reported progress."""
    beats = [time.monotonic()]
    server = start_server(ENGINE, directory, adapter_rank=3, on_progress=lambda: beats.append(time.monotonic()))
    yield server, beats
    server.stop()


def tree(pid):
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def wait_until_gone(processes):
    return wait_for(lambda: not any(is_alive(process.pid) for process in processes), seconds=60)


def about(server, *, key=None):
    headers = {"Authorization": f"Bearer {server.key if key is None else key}"}
    return httpx.get(f"{server.url}/rheostat/about", headers=headers, timeout=10)


def test_a_server_reports_its_settings_to_callers_with_the_key(started):
    server, _ = started
    assert server.is_alive()
    expected = {"platform": "cpu", "dtype": "float32", "logprobs": "processed"}
    expected |= {"max_model_len": CONTEXT, "lora_rank": 8, "tensor_parallel": 1}
    answer = about(server).json()
    assert {name: answer[name] for name in expected} == expected
    assert answer["vllm"].startswith("0.32.0")
    assert about(server, key="another").status_code == 401


def test_a_start_reports_progress_throughout(started):
    _, beats = started
    assert max(later - earlier for earlier, later in pairwise(beats)) < MOST_QUIET_SECONDS


def test_an_idle_server_makes_no_progress(started):
    server, _ = started
    quiet = []
    for _ in range(8):
        time.sleep(0.5)
        quiet.append(not server.process.was_active())
    assert sum(quiet) >= 6


def test_the_processes_of_a_server_listen_only_on_loopback(started):
    server, _ = started
    places = {
        connection.laddr.ip
        for process in tree(server.process.pid)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert places <= {"127.0.0.1", "::1"}


def test_the_key_is_on_no_command_line_and_in_no_log(started):
    server, _ = started
    words = [word for process in tree(server.process.pid) for word in process.cmdline()]
    assert not [word for word in words if server.key in word]
    assert server.key not in server.process.log_path.read_text()


def test_a_server_that_is_killed_is_noticed_and_leaves_nothing(started):
    """Kill the shared server: this test must stay the last one that uses it."""
    server, _ = started
    root, *others = tree(server.process.pid)
    assert any("EngineCore" in " ".join(process.cmdline()) for process in others)
    root.kill()
    assert wait_until_gone([root, *others])
    assert not server.is_alive()
    assert server.process.exit_code() == -signal.SIGKILL
    assert server.log_tail(1)
    with pytest.raises(httpx.HTTPError):
        about(server)


def test_a_model_that_vllm_does_not_know_is_refused_in_one_line(directory, tmp_path):
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["StrangeForCausalLM"], "model_type": "strange"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WorkerFailed) as caught:
        start_server(ENGINE, tmp_path, adapter_rank=0, on_progress=lambda: None)
    text = str(caught.value)
    assert text.startswith(f"vLLM for {tmp_path} ended with exit code 1 before it was ready: ")
    assert "`strange` but Transformers does not recognize this architecture" in text
    assert "\n" not in text


def test_a_server_that_is_not_ready_in_time_is_ended(directory):
    with pytest.raises(WorkerFailed, match=r"was not ready within 2 s\. The log ends with: ") as caught:
        start_server(
            ENGINE.model_copy(update={"start_seconds": 2}), directory, adapter_rank=0, on_progress=lambda: None
        )
    assert not [process for process in psutil.process_iter() if str(directory) in " ".join(_words(process))]
    assert "\n" not in str(caught.value)


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_no_process_survives_the_sigkill_of_a_server_that_serves_a_model_of_the_hub_in_the_foreground(directory, hub):
    hub.add("team/tiny", directory)
    words = ["engine", "serve", "vllm", "team/tiny", "cache_gib=0.1", "max_batch_rows=8"]
    program = f"import sys; from rheostat.flows.cli.app import main; sys.exit(main({words!r}))"
    serving = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        lines = [serving.stdout.readline() for _ in range(3)]
        assert lines[0].startswith("vLLM server running at http://127.0.0.1:")
        log = Path(lines[0].split("log file ")[1].strip())
        assert lines[1].startswith("export RHEOSTAT_ENGINE_KEY=")
        assert "base_urls" in lines[2]
        [root] = [process for process in psutil.process_iter() if _serves(process, log.parent)]
        members = tree(root.pid)
        assert len(members) >= 3
        serving.kill()
        assert wait_until_gone(members)
        assert wait_for(lambda: not log.parent.exists(), seconds=60)
    finally:
        serving.kill()
        serving.wait()


def _serves(process, directory):
    try:
        return process.cwd() == str(directory) and "vllm.entrypoints.openai.api_server" in process.cmdline()
    except psutil.Error:
        return False


def test_vllm_accepts_every_option_of_a_server_on_gpus(directory):
    """No GPU is needed to read a command line."""
    engine = VllmEngine(cache_gib=2, tensor_parallel=2, max_model_len=128)
    python = find_python("vllm", None)
    words = command(engine, directory, python=python, platform="cuda", at=Address(port=8000), lora_rank=16)
    program = """
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
found = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
print(found.enable_sleep_mode, found.gpu_memory_utilization, found.tensor_parallel_size, found.max_lora_rank)
"""
    done = subprocess.run([python, "-c", program, *words[3:]], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True 0.85 2 16"


SLEEP = """
import asyncio, sys
from pathlib import Path
from unittest.mock import MagicMock
sys.path.insert(0, sys.argv[1])
from rheostat_serving import Serving
weights, adapter = map(Path, sys.argv[2:4])

class GpuMemory:
    \"\"\"Engine whose weights cannot be read while they are asleep. Level 2 discards the weights, as vLLM does.\"\"\"

    def __init__(self, lora):
        self.engine_core, self.vllm_config = MagicMock(), MagicMock(lora_config=lora)
        self.vllm_config.model_config.model = str(weights)
        self.vllm_config.model_config.get_num_experts.return_value = 0
        self.weights, self.asleep, self.loads, self.adapters = (), set(), 0, 0

    async def collective_rpc(self, method, args=()):
        assert "weights" not in self.asleep, method
        if method == "rheostat_load":
            self.weights, self.loads = args, self.loads + 1
        return [repr(self.weights)]

    async def sleep(self, level, mode):
        self.asleep = {"weights", "kv_cache"}
        self.weights = self.weights if level == 1 else ()

    async def wake_up(self, tags):
        self.asleep -= set(tags)
        return not self.asleep

    async def add_lora(self, request):
        self.adapters += 1

    async def nothing(self, *args, **options):
        pass

    pause_generation = resume_generation = reset_prefix_cache = update_weight_version = remove_lora = nothing

async def main():
    for lora in (None, object()):
        engine = GpuMemory(lora)
        serving = Serving(engine)
        for repeat in range(3):
            await serving.load(weights, adapter=adapter if lora else None, drain=False)
            assert await serving.verify_digest(), "nothing is served"
            assert await serving.sleep() and not serving.digest
        print(engine.loads, engine.adapters)

asyncio.run(main())
"""
"""Program that lets a server sleep and load its policy again three times, without and with adapters."""


def test_a_sleeping_server_reads_its_base_weights_again_only_if_it_serves_no_adapters(directory, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    for bundle in (directory, adapter):
        (bundle / CONTENTS).unlink(missing_ok=True)
        (bundle / CONTENTS).write_bytes(describe_bundle(bundle).encode())
    paths = (Path(rheostat.models.engines.vllm.__file__).parent / "plugin", directory, adapter)
    words = [find_python("vllm", None), "-c", SLEEP, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["3 0", "1 3"]
