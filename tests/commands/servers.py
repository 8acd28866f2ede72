"""Servers that commands are tried against, each in a thread of its own: an OpenAI-compatible endpoint, and the stub of our protocol."""

import asyncio
import json
import threading
from contextlib import contextmanager

from aiohttp import web

from tests.orchestrator.stub_inference import StubInference

KEY = "secret"


class Endpoint:
    """An OpenAI-compatible server with one or several models. The models say the digit they are asked for, but `bad` always says x."""

    def __init__(self, *models: str, key: str = ""):
        self.models, self.key = models, key
        self.asked: list[dict] = []
        self.url = ""

    def allowed(self, request: web.Request) -> bool:
        return not self.key or request.headers.get("Authorization") == f"Bearer {self.key}"

    async def list_models(self, request: web.Request) -> web.Response:
        if not self.allowed(request):
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": model, "object": "model"} for model in self.models]})

    async def complete(self, request: web.Request) -> web.Response:
        if not self.allowed(request):
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        body = await request.json()
        self.asked.append(body)
        text = body["messages"][-1]["content"]
        said = "x" if body["model"] == "bad" else text if isinstance(text, str) else json.dumps(text)
        message = {"role": "assistant", "content": said.removeprefix("say ")}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        fields = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response({**fields, "choices": [choice], "usage": usage})

    async def __aenter__(self) -> "Endpoint":
        app = web.Application()
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_post("/v1/chat/completions", self.complete)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()


@contextmanager
def serving(server: Endpoint | StubInference):
    """Runs a server beside the test."""
    loop, up = asyncio.new_event_loop(), threading.Event()

    async def until_stopped() -> None:
        async with server:
            up.set()
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(until_stopped(),))
    thread.start()
    assert up.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
