"""What the client does about a server that is there, and never answers."""

import asyncio

import pytest
from aiohttp import web

from rl.messages import WeightVersion
from rl.orchestrator import inference_client
from rl.orchestrator.inference_client import InferenceLostError, InferenceServers


def test_a_load_that_never_ends_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(inference_client, "CONNECT_S", 0.2)
    asked = []

    async def never(request: web.Request) -> web.Response:
        asked.append(await request.json())
        await asyncio.Event().wait()
        raise AssertionError

    async def load() -> None:
        app = web.Application()
        app.add_routes([web.post("/load_weights", never)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        servers = InferenceServers([f"http://127.0.0.1:{runner.addresses[0][1]}"], tmp_path / "none.json", 0.5)
        try:
            async with asyncio.timeout(20):
                await servers.load(WeightVersion(3, str(tmp_path)))
        finally:
            await servers.close()
            await runner.cleanup()

    with pytest.raises(InferenceLostError, match=r"for inference to load version 3: .*raise orchestrator.inference_timeout_s"):
        asyncio.run(load())
    assert [body["policy_version"] for body in asked] == [3]
