"""Weights inside vLLM's workers: loading in place, and a fingerprint that shows whether they are unchanged."""

from collections.abc import Iterator
from pathlib import Path

import torch
from blake3 import blake3
from rheostat_experts import ExpertRecorder
from rheostat_internals import expert_layers, forget_packed_experts, reload_weights, repack_copies, served_tensors
from safetensors import safe_open
from torch import Tensor
from vllm.platforms import current_platform

SAMPLED = 64
"""Approximate number of values of each parameter that enter the fingerprint of the weights."""


class Weights:
    """Methods of vLLM's workers that load weights in place and verify them. vLLM mixes this class into its worker
    class, and the gateway calls the methods on every rank."""

    rheostat_noted: ExpertRecorder | None = None
    rheostat_banned: Tensor | None = None

    def rheostat_load(self, files: list[str]) -> None:
        """Replace the values of all parameters by tensors from safetensors files. The layout and storage of the
        parameters in vLLM stay the same. Raises ValueError if a parameter has no tensor in the files."""
        model = self.get_model()  # type: ignore[attr-defined]
        if current_platform.is_cpu():
            forget_packed_experts(model)
        if missing := reload_weights(self, _tensors(files)):
            raise ValueError(
                f"{files[0]}: the file does not contain the tensors of {', '.join(sorted(missing))}, which the model "
                "needs"
            )
        repack_copies(model)

    @torch.inference_mode()
    def rheostat_fingerprint(self) -> str:
        """Return a hash of a sample of the values of every parameter and adapter, which shows whether the weights have
        changed. For a matrix packed for a CPU, the sample is its product with a fixed vector instead of its values."""
        samples = [_sample(tensor) for tensor in served_tensors(self.get_model())]  # type: ignore[attr-defined]
        return blake3(torch.cat(samples).cpu().numpy().tobytes()).hexdigest()

    def rheostat_ban(self, tokens: list[int]) -> None:
        """Give tokens probability 0 in all log-probs that the model computes from now on. The bias of a request does
        the same for sampled tokens, but not for log-probs of prompts."""
        model = self.get_model()  # type: ignore[attr-defined]
        if self.rheostat_banned is None:
            compute_logits = model.compute_logits

            def compute_allowed_logits(*inputs: object) -> Tensor | None:
                logits: Tensor | None = compute_logits(*inputs)
                if logits is not None and self.rheostat_banned is not None:
                    logits[:, self.rheostat_banned.to(logits.device)] = -torch.inf
                return logits

            model.compute_logits = compute_allowed_logits
        self.rheostat_banned = torch.tensor(tokens, dtype=torch.long)

    def rheostat_expert_layers(self) -> list[int]:
        """Return the layer numbers of the model's mixture-of-experts layers."""
        return [layer.layer_id for layer in expert_layers(self.get_model())]  # type: ignore[attr-defined]

    def rheostat_note_experts(self) -> None:
        """Start recording the experts chosen for requests whose extra arguments contain the key `RECORDED_AS`."""
        self.rheostat_noted = self.rheostat_noted or ExpertRecorder(self)

    def rheostat_take_experts(self, wanted: dict[str, int]) -> list[bytes]:
        """Return the recorded experts of each request's first tokens, and free them. `wanted` maps the names under
        which requests are recorded to numbers of tokens."""
        return [] if self.rheostat_noted is None else self.rheostat_noted.pop(wanted)


def _tensors(files: list[str]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(Path(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                yield name, tensors.get_tensor(name)


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, len(flat) // SAMPLED)].float()
