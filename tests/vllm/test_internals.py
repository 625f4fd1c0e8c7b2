"""Parts of vLLM that the plugin needs. A version of vLLM without one of them fails here, under the part's name."""

import ast
from pathlib import Path

import pytest

from rheostat.infra.environments.find import find_python
from rheostat.models.engines.vllm.server import PLUGIN, environment, platform_of
from tests.support.cuda_build import run_json
from tests.vllm.servers import CONFIG

PROGRAM = Path(__file__).parent / "find_parts.py"
WORKER = "vllm.v1.worker.gpu_worker:Worker"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"
LAYERS = "vllm.model_executor.layers"
MIXTURE = f"{LAYERS}.fused_moe.runner.moe_runner:MoERunner"

UNDOCUMENTED = {
    "get_engine": ["vllm.entrypoints.rl.online.api_router:engine_client"],  # reads the same attribute of the app
    "observe_steps": [
        "vllm:AsyncLLMEngine.engine_core",
        "vllm.v1.engine.core_client:AsyncMPClient.get_output_async",
        "vllm.v1.engine:EngineCoreOutputs.outputs",
        "vllm.v1.engine:EngineCoreOutputs.timestamp",
    ],
    "count_sequences": [
        "vllm.v1.engine:EngineCoreOutput.finish_reason",
        "vllm.v1.engine:EngineCoreOutput.new_token_ids",
        "vllm.v1.engine:EngineCoreOutput.prefill_stats",
    ],
    "expert_layers": [f"{MIXTURE}.layer_id"],
    "capture_experts": [f"{MIXTURE}.router", f"{LAYERS}.fused_moe.router.base_router:BaseRouter.set_capture_fn"],
    "observe_forward_passes": [
        f"{WORKER}.model_runner",
        f"{RUNNER}.execute_model",
        f"{RUNNER}.input_batch",
        f"{RUNNER}.requests",
        f"{BATCH}.req_ids",
        f"{BATCH}.num_computed_tokens_cpu",
        "vllm.v1.worker.gpu_input_batch:CachedRequestState.sampling_params",
        "vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens",
    ],
    "reload_weights": [
        f"{WORKER}.reload_weights",
        f"{WORKER}.get_model",
        f"{RUNNER}.reload_weights",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.reload_weights",
        "vllm.model_executor.models.llama:LlamaForCausalLM.load_weights",
    ],
    "forget_packed_experts": [
        f"{MIXTURE}.routed_experts",
        f"{LAYERS}.fused_moe.routed_experts:RoutedExperts.quant_method",
        f"{LAYERS}.fused_moe.fused_moe_method_base:FusedMoEMethodBase.moe_kernel",
    ],
    "repack_copies": [
        f"{LAYERS}.utils:dispatch_cpu_unquantized_gemm",  # sets `cpu_linear`
        f"{LAYERS}.linear:UnquantizedLinearMethod.process_weights_after_loading",
        f"{LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod.process_weights_after_loading",
    ],
    "served_tensors": [
        f"{LAYERS}.linear:LinearBase.input_size",
        f"{LAYERS}.linear:LinearBase.params_dtype",
        f"{LAYERS}.linear:RowParallelLinear.input_size_per_partition",
        "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.lora_a_stacked",
        "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.lora_b_stacked",
    ],
}
"""Undocumented parts of vLLM that each function of rheostat_internals.py needs."""
DOCUMENTED = [
    *(
        f"vllm:AsyncLLMEngine.{name}"
        for name in (
            "add_lora",
            "collective_rpc",
            "generate",
            "pause_generation",
            "remove_lora",
            "renderer",
            "reset_mm_cache",
            "reset_prefix_cache",
            "resume_generation",
            "sleep",
            "update_weight_version",
            "vllm_config",
            "wake_up",
        )
    ),
    "vllm.renderers:BaseRenderer.render_cmpl_async",
    "vllm:CompletionOutput.routed_experts",
    "vllm:CompletionOutput.weight_versions",
    *(
        f"vllm:SamplingParams.{name}"
        for name in ("extra_args", "flat_logprobs", "logprob_token_ids", "skip_clone", "stream_interval")
    ),
]
"""Documented parts of vLLM that changed recently or that few users need."""
PARTS = [
    *((function, part) for function, parts in UNDOCUMENTED.items() for part in parts),
    *(("documented", part) for part in DOCUMENTED),
]
PUBLIC = {
    "vllm",
    "vllm.exceptions",
    "vllm.inputs",
    "vllm.lora.request",
    "vllm.platforms",
    "vllm.sampling_params",
}
"""Modules of vLLM that the other files of the plugin may import."""


@pytest.fixture(scope="module")
def faults() -> dict[str, str]:
    """Reason for each part that this version of vLLM does not have."""
    python = find_python("vllm", CONFIG.python)
    variables = environment("the-key", platform=platform_of(python))
    return run_json([python, PROGRAM], [part for _, part in PARTS], variables, seconds=300)


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("function", "part"), PARTS)
def test_vllm_has_every_part_that_the_plugin_needs(faults, function, part):
    assert part not in faults, f"rheostat_internals.{function} must be adapted: {faults.get(part)}"


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_missing_parts_are_found():
    python = find_python("vllm", CONFIG.python)
    missing = ["vllm.no_such_module:name", "vllm:AsyncLLMEngine.no_such_name", f"{RUNNER}.no_such_name", "vllm:None.a"]
    variables = environment("the-key", platform=platform_of(python))
    assert [*run_json([python, PROGRAM], missing, variables, seconds=300)] == missing


def test_every_function_with_undocumented_parts_is_listed():
    functions = ast.parse((PLUGIN / "rheostat_internals.py").read_text()).body
    names = {each.name for each in functions if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")}
    assert names == set(UNDOCUMENTED)


@pytest.mark.parametrize("path", sorted(PLUGIN.glob("*.py")), ids=lambda path: path.stem)
def test_only_one_file_of_the_plugin_imports_undocumented_modules_of_vllm(path):
    if path.stem == "rheostat_internals":
        return
    nodes = [node for node in ast.parse(path.read_text()).body if not isinstance(node, ast.If)]  # without TYPE_CHECKING
    tree = ast.Module(body=nodes, type_ignores=[])
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {module for module in imported if module.split(".")[0] == "vllm"} <= PUBLIC
