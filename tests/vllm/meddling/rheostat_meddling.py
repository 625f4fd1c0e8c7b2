"""The server's components, with routes that change parameters without notice and that count recorded experts."""

import torch
from rheostat_vllm import Gateway, Weights


class MeddlingGateway(Gateway):
    def __init__(self, app):
        super().__init__(app)
        self._routes[("POST", "/rheostat/meddle")] = self._meddle
        self._routes[("GET", "/rheostat/noted")] = self._noted

    async def _meddle(self, request, send):
        which = (await request.json())["which"]
        await self._served.engine.collective_rpc("rheostat_meddle", args=(which,))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def _noted(self, request, send):
        [noted] = await self._served.engine.collective_rpc("rheostat_count_noted")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % noted})


class MeddlingWeights(Weights):
    @torch.inference_mode()
    def rheostat_meddle(self, which):
        model = self.get_model()
        if which == "norm":
            model.model.norm.weight[5] += 1e-3
            return
        layer = model.model.layers[0].mlp.down_proj  # on a CPU packed, its weight is gone
        weight = torch.randn(layer.output_size, layer.input_size_per_partition)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.quant_method.process_weights_after_loading(layer)

    def rheostat_count_noted(self):
        return len(self.rheostat_noted._rows_TF)
