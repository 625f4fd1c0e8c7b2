"""Engine configurations that vLLM's build for CUDA derives from command lines on a machine with eight H100 GPUs.

Runs with the Python of vLLM's environment, on a machine without a GPU. Only the properties of the platform are
replaced. Reads JSON from standard input: for each name, the words of a command line and the environment variables
(`commands`), and a request for completions (`work`).
"""

import dataclasses
import json
import os
import sys
from unittest.mock import patch

import vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability

CHOSEN = {
    "model_config": (
        "dtype",
        "enable_cumem_allocator",
        "enable_sleep_mode",
        "logprobs_mode",
        "max_logprobs",
        "max_model_len",
    ),
    "cache_config": ("enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    "parallel_config": ("distributed_executor_backend", "tensor_parallel_size", "worker_cls", "worker_extension_cls"),
    "scheduler_config": ("async_scheduling", "enable_chunked_prefill", "max_num_seqs"),
    "compilation_config": ("cudagraph_mode", "max_cudagraph_capture_size"),
    "load_config": ("load_format",),
    "device_config": ("device_type",),
    "aux_output_config": ("enable_return_routed_experts",),
    "lora_config": ("max_lora_rank",),
}
"""Settings that are reported, by the part of vLLM's configuration."""


class H100(NonNvmlCudaPlatform):
    """Platform of a machine with eight H100 GPUs."""

    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id=0):
        return "NVIDIA H100 80GB HBM3"

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return 85_000_000_000

    @classmethod
    def device_count(cls):
        return 8

    def is_cumem_allocator_available(self):
        return True


vllm.platforms._current_platform = H100()

import vllm.config.vllm  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.v1.worker.gpu import buffer_utils  # noqa: E402
from vllm.v1.worker.gpu.sample.states import SamplingStates  # noqa: E402

vllm.config.vllm.HAS_TRITON = True  # Triton is installed, but finds no GPU
registry._run_in_subprocess = lambda inspect: inspect()  # another process would have another platform


def configure(words, variables):
    """Return the settings that vLLM derives from the words of a command line, or why vLLM refuses them."""
    parser = make_arg_parser(FlexibleArgumentParser())
    with patch.dict(os.environ, variables):
        arguments = parser.parse_args(words)
        validate_parsed_serve_args(arguments)
        try:
            config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
        except ValueError as error:
            return {"refusal": str(error)}
        found = {"use_v2_model_runner": config.use_v2_model_runner}
        for part, names in CHOSEN.items():
            settings = getattr(config, part)
            found |= {name: None if settings is None else read(settings, name) for name in names}
        return found


def read(settings, name):
    """Return the value of a setting as JSON can represent it."""
    value = getattr(settings, name)
    if dataclasses.is_dataclass(value) or not isinstance(value, bool | int | float | str | None):
        return getattr(value, "name", str(value))
    return value


def store_seeds(body):
    """Return the seeds that the V2 model runner stores for a request of Rheostat's client, or why it refuses them."""
    from rheostat_completions import _parameters
    from rheostat_requests import Work, read_request

    work, seeds = read_request(Work, body.encode()), []
    with (
        patch.object(buffer_utils, "is_uva_available", lambda: False),  # memory that CPU and GPU share
        patch.object(H100, "device_type", "cpu"),
    ):
        states = SamplingStates(max_num_reqs=len(work.requests), vocab_size=300)
        for row, one in enumerate(work.requests):
            try:
                states.add_request(row, _parameters("", one, work.sampling))
                seeds.append(int(states.seeds.np[row]))
            except OverflowError as error:
                seeds.append(str(error))
    return seeds


if __name__ == "__main__":
    query = json.load(sys.stdin)
    configs = {name: configure(**case) for name, case in query["commands"].items()}
    sys.stdout.write(f"\n{json.dumps({'configs': configs, 'seeds': store_seeds(query['work'])})}\n")
