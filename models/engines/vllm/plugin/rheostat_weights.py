"""Weights inside vLLM's workers: loading in place, and a fingerprint that shows whether they are unchanged."""

from collections.abc import Iterator
from pathlib import Path

import torch
from blake3 import blake3
from rheostat_experts import ExpertRecorder, expert_layers
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

SAMPLED = 64
"""Approximate number of values of each parameter that enter the fingerprint of the weights."""


class Weights:
    """Methods of vLLM's workers that load weights in place and verify them. vLLM mixes this class into its worker
    class, and the gateway calls the methods on every rank."""

    rheostat_noted: ExpertRecorder | None = None

    def rheostat_load(self, files: list[str]) -> None:
        """Replace the values of all parameters by tensors from safetensors files. The layout and storage of the
        parameters in vLLM stay the same. Raises ValueError if a parameter has no tensor in the files."""
        model = self.get_model()  # type: ignore[attr-defined]
        runner = self.model_runner  # type: ignore[attr-defined]
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            if current_platform.is_cpu():
                _forget_packing(model)
            initialize_layerwise_reload(model)
            loaded = model.load_weights(_tensors(files))
            finalize_layerwise_reload(model, self.model_config)  # type: ignore[attr-defined]
        if missing := {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()} - loaded:
            raise ValueError(
                f"{files[0]}: the file does not contain the tensors of {', '.join(sorted(missing))}, which the model "
                "needs"
            )
        for module in model.modules():
            if _keeps_packed_copy(module):  # layer-wise loading leaves the copy of the old weights in use
                module.quant_method.process_weights_after_loading(module)
        runner.reset_lora_state()

    @torch.inference_mode()
    def rheostat_fingerprint(self) -> str:
        """Return a hash of a sample of the values of every parameter and adapter, which shows whether the weights have
        changed. For a matrix packed for a CPU, the sample is its product with a fixed vector instead of its values."""
        samples = [_sample(tensor) for tensor in _served_tensors(self.get_model())]  # type: ignore[attr-defined]
        return blake3(torch.cat(samples).cpu().numpy().tobytes()).hexdigest()

    def rheostat_expert_layers(self) -> list[int]:
        """Return the layer numbers of the model's mixture-of-experts layers."""
        return [layer.layer_id for layer in expert_layers(self.get_model())]  # type: ignore[attr-defined]

    def rheostat_note_experts(self) -> None:
        """Start recording the experts chosen for requests whose extra arguments contain the key `NOTED`."""
        self.rheostat_noted = self.rheostat_noted or ExpertRecorder(self.model_runner)  # type: ignore[attr-defined]

    def rheostat_take_experts(self, wanted: dict[str, int]) -> list[bytes]:
        """Return the recorded experts of each request's first tokens, and free them. `wanted` maps request IDs to
        numbers of tokens."""
        return [] if self.rheostat_noted is None else self.rheostat_noted.pop(wanted)


def _forget_packing(model: nn.Module) -> None:
    """Discard the copies of expert weights that vLLM has packed for the CPU, so that they are packed again on loading.
    vLLM packs experts only once and would otherwise use the old values."""
    for layer in expert_layers(model):
        layer.routed_experts.quant_method.moe_kernel = None


def _tensors(files: list[str]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(Path(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                yield name, tensors.get_tensor(name)


def _keeps_packed_copy(module: nn.Module) -> bool:
    """Return whether a layer on a CPU has both its weights and a packed copy of them, like embeddings and heads tied to
    them."""
    return hasattr(module, "cpu_linear") and len(module.weight) > 0  # type: ignore[arg-type]


def _served_tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    for module in model.modules():
        for stack in ("lora_a_stacked", "lora_b_stacked"):
            yield from getattr(module, stack, ())
        if isinstance(module, LinearBase) and hasattr(module, "cpu_linear") and not _keeps_packed_copy(module):
            inputs = getattr(module, "input_size_per_partition", module.input_size)
            probe = torch.linspace(-1, 1, inputs, dtype=module.params_dtype)
            yield module.cpu_linear(probe[None], module.weight, None)


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, len(flat) // SAMPLED)].float()
