"""`/v1/chat/completions` and `/v1/completions` of the base model or of a version that a client
has made, for OpenAI's clients."""

import asyncio
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rl.tinker.http import JSON
from rl.tinker.sampling import DEFAULT_TOKENS, SamplingSessions, Target
from rl.tinker.storage import MODEL_ID, SAMPLER
from rl.wire.http import RETRY_S, AwayError
from rl.wire.inference_client import HeldVersion, read
from rl.wire.training_calls import CallError


class OpenAi:
    """The endpoints. `model` of a request is the name of the base model, the path of something
    named, or the id of a model: its newest sampled version."""

    def __init__(self, sampling: SamplingSessions):
        self.sampling, self.model = sampling, sampling.config.model

    def _target(self, model: str) -> Target:
        """Returns what a request's `model` means. Raises KeyError and CallError."""
        sampling = self.sampling
        if model in (sampling.name, self.model.name):
            return sampling.base
        if not MODEL_ID.fullmatch(model):
            (model_id, *_), saved = sampling.storage.find(model, SAMPLER)
            return sampling.target(model_id, saved.policy_version)
        if model not in sampling.storage.model_ids():
            raise KeyError(f"model {model} does not exist on this server")
        newest = sampling.storage.model(model).newest_weights()
        if not newest:
            raise CallError(
                f"{model} has no sampled version yet: save_weights_for_sampler makes one"
            )
        return sampling.target(model, newest[0])

    async def models(self) -> Any:
        names = [self.sampling.name, *self.sampling.storage.model_ids()]
        models = [{"id": name, "object": "model", "owned_by": "rl"} for name in names]
        return {"object": "list", "data": models}

    async def complete(self, request: Request) -> Any:
        body: Any = msgspec.json.decode(await request.body())
        name = body.get("model") if isinstance(body, dict) else None
        if not isinstance(name, str):
            raise CallError("give the name of a model")
        if body.get("stream"):
            raise CallError("stream: this server answers in one piece")
        target, path = self._target(name), request.url.path
        limits = (body.get("max_tokens"), body.get("max_completion_tokens"))
        # a completion that is no chat has OpenAI's own default, 16
        if "chat" in path and limits == (None, None):
            body["max_tokens"] = min(DEFAULT_TOKENS, self.model.max_model_len)
        status, content = await self._ask(target, path, body | {"model": self.model.name})
        if status != 200:
            return Response(content, status, media_type=JSON)
        version = {"policy_version": target.policy_version}
        return msgspec.json.decode(content) | {"model": name} | version

    async def _ask(self, target: Target, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Returns the answer of inference by exactly the target. A server that is started again
        holds the base model, so one that holds the target afterwards has answered with it."""
        servers, turns, since = self.sampling.servers, self.sampling.turns, time.monotonic()
        while time.monotonic() - since < servers.timeout_s:
            async with turns.of(target):
                try:
                    url = next(iter(await servers.wait_for_any()))
                    answer = await servers.send("POST", url, path, body)
                    held = read((await servers.send("GET", url, "/status"))[1], HeldVersion)
                    if held.policy_version == target.policy_version:
                        return answer
                except (AwayError, OSError):
                    pass
                turns.lost(target)
            await asyncio.sleep(RETRY_S)
        return 503, b'{"detail": "inference does not answer"}'
