"""The server's components, with routes that change parameters without notice, make steps longer, and count recorded
experts."""

import time

import torch
from rheostat_vllm import Gateway, Weights


class MeddlingGateway(Gateway):
    def __init__(self, app):
        super().__init__(app)
        self._routes[("POST", "/rheostat/meddle")] = self._meddle
        self._routes[("POST", "/rheostat/slow")] = self._slow
        self._routes[("GET", "/rheostat/noted")] = self._noted

    async def _meddle(self, request, send):
        which = (await request.json())["which"]
        await self._call(send, "rheostat_meddle", which)

    async def _slow(self, request, send):
        await self._call(send, "rheostat_slow", (await request.json())["seconds"])

    async def _noted(self, request, send):
        await self._call(send, "rheostat_count_noted")

    async def _call(self, send, method, *arguments):
        [result] = await self._served.engine.collective_rpc(method, args=arguments)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(result).encode()})


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

    def rheostat_slow(self, seconds):
        """Let each step take this number of seconds longer; 0 ends it."""
        runner = self.model_runner
        runner.__dict__.pop("execute_model", None)
        original = runner.execute_model

        def execute(*arguments, **options):
            time.sleep(seconds)
            return original(*arguments, **options)

        if seconds:
            runner.execute_model = execute

    def rheostat_count_noted(self):
        return len(self.rheostat_noted._rows_TF)
