"""A stand-in for any OpenAI-like server."""

from contextlib import asynccontextmanager

from aiohttp import web

from tests.web import WebServer


@asynccontextmanager
async def openai_server(answer):
    """An OpenAI-like server: `answer(body)` is a text, a message, a whole response, or (status,
    message)."""

    async def handle(request):
        body = await request.json()
        assert request.headers["Authorization"]
        said = answer(body)
        if isinstance(said, tuple):
            return web.json_response({"error": {"message": said[1]}}, status=said[0])
        if isinstance(said, web.Response):
            return said
        message = said if isinstance(said, dict) else {"content": said}
        kind = "chat.completion" if "messages" in body else "text_completion"
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant"} | message,
            "text": said,
        }
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        return web.json_response(
            {
                "id": "x",
                "created": 0,
                "model": body["model"],
                "object": kind,
                "choices": [choice],
                "usage": usage,
            }
        )

    async with WebServer(
        web.post("/v1/chat/completions", handle), web.post("/v1/completions", handle), path="/v1"
    ) as server:
        yield server.url
