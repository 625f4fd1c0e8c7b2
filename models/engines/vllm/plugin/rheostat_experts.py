"""Experts that the routers of a mixture-of-experts model choose for each token, recorded and reported to callers.

On GPUs vLLM records them itself (`--enable-return-routed-experts`) with a model runner that requires Triton. On a CPU,
where Triton is not available, vLLM's worker records them with `ExpertRecorder`. The gateway reports them.

Shapes: L tokens of a forward pass, T tokens of a sequence, F experts of a token in all layers, layer after layer.
"""

import base64
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from rheostat_internals import ComputedTokens, capture_experts, expert_layers, observe_forward_passes
from rheostat_requests import Refused
from torch import Tensor
from vllm import AsyncLLMEngine, CompletionOutput
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase

RECORDED_AS = "rheostat_experts"
"""Key in the extra arguments of a vLLM request. If it is set, the worker records the experts chosen for the request's
tokens under the value of this key."""
MAX_EXPERTS_IN_8_BITS = 256


class ExpertRecorder:
    """Recorder, in a vLLM worker on a CPU, of the experts chosen for all tokens of the open requests. vLLM's prefix
    cache is off, so every token of a request is computed, and computed again after a preemption."""

    def __init__(self, worker: "WorkerBase") -> None:
        config = worker.vllm_config.model_config
        self._dtype, self._max_tokens = _dtype_of(config.get_num_experts()), config.max_model_len
        self._rows_TF: dict[object, np.ndarray] = {}
        self._chosen_LK: dict[int, Tensor] = {}
        for number, layer in enumerate(expert_layers(worker.get_model())):
            capture_experts(layer, partial(self._chosen_LK.__setitem__, number))
        observe_forward_passes(worker, self._record)

    def pop(self, num_tokens_by_name: dict[str, int]) -> list[bytes]:
        """Return the experts of the first tokens of each request, and free everything recorded for the request.
        `num_tokens_by_name` maps the names under which requests are recorded to numbers of tokens."""
        rows = [(self._rows_TF.pop(name, None), tokens) for name, tokens in num_tokens_by_name.items()]
        return [b"" if rows_TF is None else rows_TF[:tokens].tobytes() for rows_TF, tokens in rows]

    def _record(self, computed: list[ComputedTokens]) -> None:
        """Record the experts of a forward pass."""
        if not any(RECORDED_AS in each.extra_args for each in computed):
            return
        chosen_LF = torch.cat([each for _, each in sorted(self._chosen_LK.items())], dim=1).numpy()
        start = 0
        for each in computed:
            end, name = start + each.num_tokens, each.extra_args.get(RECORDED_AS)
            if name is not None:
                if name not in self._rows_TF:  # the system allocates memory only where it is written
                    self._rows_TF[name] = np.empty((self._max_tokens, chosen_LF.shape[1]), self._dtype)
                self._rows_TF[name][each.begin : each.begin + each.num_tokens] = chosen_LF[start:end]
            start = end


class RecordedExperts:
    """Reader of the experts recorded for finished requests, used by the server's HTTP middleware."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine = engine
        config = engine.vllm_config
        self._by_vllm = config.aux_output_config.enabled
        self._by_worker = current_platform.is_cpu() and not config.cache_config.enable_prefix_caching
        self._layers: list[int] | None = None
        self._dtype = _dtype_of(config.model_config.get_num_experts())
        self._experts = config.model_config.get_num_experts_per_tok()

    async def find_layers(self) -> list[int]:
        """Return the numbers of the mixture-of-experts layers, or an empty list if the server cannot report experts."""
        if self._layers is None:
            can = self._by_vllm or self._by_worker
            [self._layers, *_] = await self._engine.collective_rpc("rheostat_expert_layers") if can else [[]]
        return self._layers

    async def begin(self) -> None:
        """Start recording the experts of later requests. Raises Refused if the server cannot report experts."""
        if not await self.find_layers():
            raise Refused(
                "the request asks for the chosen experts, but the server was started without --experts, or its model "
                "has no experts"
            )
        if self._by_worker:
            await self._engine.collective_rpc("rheostat_note_experts")

    async def read(self, name: str, completion: CompletionOutput, num_tokens: int) -> dict[str, object]:
        """Return the experts of the first `num_tokens` tokens of a finished request, as fields for the JSON
        response."""
        layers = await self.find_layers()
        if self._by_vllm:
            data = completion.routed_experts[:num_tokens, layers].astype(self._dtype).tobytes()
        else:
            [[data], *_] = await self._engine.collective_rpc("rheostat_take_experts", args=({name: num_tokens},))
        width = len(layers) * self._experts
        return {"rows": base64.b64encode(data).decode(), "width": width, "dtype": self._dtype}

    async def forget(self, names: list[str]) -> None:
        """Free the recorded experts of requests that are finished or were aborted."""
        if self._by_worker:
            await self._engine.collective_rpc("rheostat_take_experts", args=(dict.fromkeys(names, 0),))


def _dtype_of(num_experts: int) -> str:
    return "<u1" if num_experts <= MAX_EXPERTS_IN_8_BITS else "<u2"
