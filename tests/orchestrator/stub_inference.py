"""An inference server for tests that samples digits; newer versions sample the right one more
often."""

import random
import time
from pathlib import Path

from aiohttp import web
from transformers import AutoTokenizer

from rl.config.run import RLConfig
from tests.stub_server import StubServer, turn_bytes


class StubInference(StubServer):
    """`log` holds (route, body) of the requests for tokens and loads."""

    def __init__(self, model_path: Path, status_path: Path, *, skill: float = 0.3):
        super().__init__(status=status_path, served_model=RLConfig().model.name, max_model_len=256)
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.skill = skill
        self.random = random.Random(0)
        self.log: list[tuple[str, dict]] = []
        self.deaths: dict[tuple[str, int], int] = {}
        """(route, index of the request): the server dies at this request, and comes back with
        this version."""
        self.down_until = 0.0

    def dies(self, request: web.Request) -> bool:
        """Whether the server is down. The client then sees broken connections."""
        self.counts[request.path] += 1
        if (version := self.deaths.get((request.path, self.counts[request.path]))) is not None:
            self.version, self.down_until = version, time.monotonic() + 0.3
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
        spans = [[self.version, len(ids)]]
        return web.Response(body=turn_bytes(ids, [-0.5] * len(ids), spans))

    async def load(self, request: web.Request) -> web.Response:
        self.log.append(("load_weights", await request.json()))
        return web.Response() if self.dies(request) else await super().load(request)

    async def get_status(self, request: web.Request) -> web.Response:
        return web.Response() if self.dies(request) else await super().get_status(request)
