"""Harness of verifiers that never ends after one turn of the policy. It imports no module of Rheostat."""

import asyncio
import json
import urllib.request

import verifiers.v1 as vf

__all__ = ["HangingHarness"]


class HangingConfig(vf.HarnessConfig):
    seconds: str = "3600"


class HangingHarness(vf.Harness[HangingConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        body = json.dumps({"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}).encode()
        headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{endpoint}/chat/completions", body, headers)
        await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).read())
        return await runtime.run(["sleep", self.config.seconds], {})
