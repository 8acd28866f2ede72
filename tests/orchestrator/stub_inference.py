"""An inference server for tests: our HTTP protocol, no model. It samples digits, and newer versions sample the right one more often."""

import random
import time
from collections import Counter
from pathlib import Path

from aiohttp import web
from transformers import AutoTokenizer

from rl.config.run import RLConfig
from rl.run_dir.status import RoleStatus, write_status
from rl.wire.inference_client import PROTOCOL
from tests.web import WebServer


class StubInference(WebServer):
    """Answers /generate, /load_weights and /status. `log` holds (route, body)."""

    def __init__(self, model_path: Path, status_path: Path, *, skill: float = 0.3):
        super().__init__(
            web.post("/generate", self.generate), web.post("/load_weights", self.load_weights), web.get("/status", self.status)
        )
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.status_path = status_path
        self.policy_version = 0
        self.served_model, self.max_model_len = RLConfig().model.name, 256
        self.skill = skill
        self.random = random.Random(0)
        self.log: list[tuple[str, dict]] = []
        self.deaths: dict[tuple[str, int], int] = {}
        """(route, index of the request): the server dies at this request, and comes back with this version."""
        self.counts: Counter[str] = Counter()
        self.down_until = 0.0

    def dies(self, request: web.Request) -> bool:
        """Whether the server is down. The client then sees broken connections."""
        self.counts[request.path] += 1
        if (version := self.deaths.get((request.path, self.counts[request.path]))) is not None:
            self.policy_version, self.down_until = version, time.monotonic() + 0.3
        down = time.monotonic() < self.down_until
        if down:
            request.transport.abort()
        return down

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.log.append(("generate", body))
        if self.dies(request):
            return web.Response()
        prompt = self.tokenizer.decode(body["token_ids"])
        digit = prompt.split("say ")[1][0]
        said = digit if self.random.random() < self.skill else str((int(digit) + 1) % 10)
        ids = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
        ids = ids[: body["sampling"]["max_tokens"]]
        answer = {
            "token_ids": ids,
            "logprobs": [-0.5] * len(ids),
            "policy_versions": [[self.policy_version, len(ids)]],
            "finish_reason": "stop",
        }
        return web.json_response(answer)

    async def load_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.log.append(("load_weights", body))
        if self.dies(request):
            return web.Response()
        self.policy_version = body["policy_version"]
        return web.json_response({"policy_version": self.policy_version, "pause_s": 0.01, "stage_s": 0.02})

    async def status(self, request: web.Request) -> web.Response:
        if self.dies(request):
            return web.Response()
        about = {"protocol": PROTOCOL, "served_model": self.served_model, "max_model_len": self.max_model_len}
        return web.json_response({"policy_version": self.policy_version, **about})

    async def __aenter__(self) -> "StubInference":
        await super().__aenter__()
        write_status(self.status_path, RoleStatus(address=self.url))
        return self
