"""An OpenAI-compatible endpoint that commands are tried against."""

import asyncio
import json

from aiohttp import web

from tests.web import WebServer

KEY = "secret"


class Endpoint(WebServer):
    """An OpenAI-compatible server with one or several models. The models say the digit they are
    asked for, but `bad` always says x."""

    def __init__(self, *models: str, key: str = "", delay_s: float = 0.0):
        routes = (
            web.get("/v1/models", self.list_models),
            web.post("/v1/chat/completions", self.complete),
        )
        super().__init__(*routes, path="/v1")
        self.models, self.key, self.delay_s = models, key, delay_s
        self.asked: list[dict] = []

    def allowed(self, request: web.Request) -> bool:
        return not self.key or request.headers.get("Authorization") == f"Bearer {self.key}"

    async def list_models(self, request: web.Request) -> web.Response:
        if not self.allowed(request):
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        return web.json_response(
            {"object": "list", "data": [{"id": model, "object": "model"} for model in self.models]}
        )

    async def complete(self, request: web.Request) -> web.Response:
        if not self.allowed(request):
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        body = await request.json()
        self.asked.append(body)
        await asyncio.sleep(self.delay_s)
        text = body["messages"][-1]["content"]
        said = (
            "x" if body["model"] == "bad" else text if isinstance(text, str) else json.dumps(text)
        )
        message = {"role": "assistant", "content": said.removeprefix("say ")}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        fields = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response({**fields, "choices": [choice], "usage": usage})
