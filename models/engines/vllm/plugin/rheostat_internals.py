"""Functions that use undocumented parts of vLLM. The other files of the plugin use only vLLM's public interface.

Another version of vLLM may rename or drop such a part. `tests/vllm/test_internals.py` lists the parts that each
function needs, and fails if one is missing.

Shapes: L tokens of a forward pass, K experts of a token in one layer.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from vllm import AsyncLLMEngine
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.worker_base import WorkerBase


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """Tokens of one request that a forward pass has computed."""

    extra_args: dict[str, object]
    """Extra arguments of the request."""
    begin: int
    """Position of the first token in its sequence."""
    num_tokens: int


def get_engine(scope: MutableMapping[str, object]) -> AsyncLLMEngine:
    """Return the engine of the server that received an HTTP request. Middleware has no documented access to it."""
    return scope["app"].state.engine_client  # type: ignore[attr-defined]


def observe_steps(engine: AsyncLLMEngine, observe: Callable[["EngineCoreOutputs"], Awaitable[None]]) -> None:
    """Await `observe` whenever outputs of a step arrive from the engine.

    vLLM's statistics contain the same numbers, but gathering them for every token costs more than everything else
    around the engine.
    """
    core = engine.engine_core
    receive = core.get_output_async

    async def receive_and_observe() -> "EngineCoreOutputs":
        outputs: EngineCoreOutputs = await receive()
        await observe(outputs)
        return outputs

    core.get_output_async = receive_and_observe


def count_sequences(outputs: "EngineCoreOutputs") -> int:
    """Return the number of sequences that received tokens in a step, or 0 if the step processed a prompt whose
    completion continues after the step."""
    if any(output.prefill_stats is not None and output.finish_reason is None for output in outputs.outputs):
        return 0
    return sum(1 for output in outputs.outputs if output.new_token_ids)


def expert_layers(model: nn.Module) -> list[MoERunner]:
    """Return the mixture-of-experts layers of a model, in order. Each has the number `layer_id`."""
    return [module for module in model.modules() if isinstance(module, MoERunner)]


def capture_experts(layer: MoERunner, store: Callable[[Tensor], None]) -> None:
    """Call `store` with the experts that the layer chooses in each forward pass, with shape (L, K)."""
    layer.router.set_capture_fn(store)


def observe_forward_passes(worker: "WorkerBase", observe: Callable[[list[ComputedTokens]], None]) -> None:
    """Call `observe` after each forward pass of a worker on a CPU, with the tokens of every request in the order in
    which the forward pass contains them."""
    runner = worker.model_runner
    execute = runner.execute_model

    def execute_and_observe(step: "SchedulerOutput", *rest: object) -> "ModelRunnerOutput | None":
        output = execute(step, *rest)
        batch = runner.input_batch
        observe(
            [
                ComputedTokens(
                    extra_args=runner.requests[request].sampling_params.extra_args or {},
                    begin=begin,
                    num_tokens=step.num_scheduled_tokens[request],
                )
                for request, begin in zip(batch.req_ids, batch.num_computed_tokens_cpu.tolist(), strict=False)
                if request in step.num_scheduled_tokens
            ]
        )
        return output

    runner.execute_model = execute_and_observe


def reload_weights(worker: "WorkerBase", tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Replace the values of a worker's parameters, and return the names of parameters that have no tensor. vLLM only
    logs these names, so the model's method for loading is observed."""
    model = worker.get_model()
    load, loaded = model.load_weights, set[str]()

    def load_and_note(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded.update(load(weights))
        return loaded

    model.load_weights = load_and_note
    try:
        worker.reload_weights(weights_iterator=tensors)
    finally:
        del model.load_weights
    return {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()} - loaded


def forget_packed_experts(model: nn.Module) -> None:
    """Discard the copies of expert weights that vLLM has packed for the CPU, so that they are packed again on loading.
    vLLM packs experts only once and would otherwise use the old values."""
    for layer in expert_layers(model):
        layer.routed_experts.quant_method.moe_kernel = None


def repack_copies(model: nn.Module) -> None:
    """Pack weights for the CPU again in layers that have both their weights and a packed copy. Layer-wise loading
    leaves the copy of the old weights in use."""
    for module in model.modules():
        if _keeps_packed_copy(module):
            module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]


def served_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield tensors that determine the outputs of a model: parameters, adapters, and for each matrix packed for a CPU
    its product with a fixed vector."""
    yield from model.parameters()
    for module in model.modules():
        for stack in ("lora_a_stacked", "lora_b_stacked"):
            yield from getattr(module, stack, ())
        if isinstance(module, LinearBase) and hasattr(module, "cpu_linear") and not _keeps_packed_copy(module):
            inputs = getattr(module, "input_size_per_partition", module.input_size)
            probe = torch.linspace(-1, 1, inputs, dtype=module.params_dtype)
            yield module.cpu_linear(probe[None], module.weight, None)


def _keeps_packed_copy(module: nn.Module) -> bool:
    """Return whether a layer on a CPU has both its weights and a packed copy of them, like embeddings and heads tied to
    them."""
    return hasattr(module, "cpu_linear") and len(module.weight) > 0  # type: ignore[arg-type]
