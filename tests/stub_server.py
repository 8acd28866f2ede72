"""A small inference server by our protocol, for tests of many: it answers after a while, dies,
hangs, lies, and can be one of several."""

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
from aiohttp import web

from rl.run_dir.status import RoleStatus, write_status
from rl.wire.inference_client import PROTOCOL
from rl.wire.turns import pack_ids, pack_logprobs
from tests.web import WebServer


def turn_bytes(token_ids: list[int], logprobs: list[float], spans: list[list[int]]) -> bytes:
    """What a server answers to `/generate`."""
    columns = {"packed_ids": pack_ids(token_ids), "packed_logprobs": pack_logprobs(logprobs)}
    return msgspec.msgpack.encode(columns | {"policy_versions": spans, "finish_reason": "stop"})


class StubServer(WebServer):
    """Answers every prompt with its first token, `slots` of them at once, each after `delay_s`."""

    def __init__(
        self,
        version: int = 0,
        *,
        delay_s: float = 0.0,
        load_s: float = 0.0,
        slots: int = 1000,
        status: Path | None = None,
        **about,
    ):
        routes = [
            web.post("/generate", self.generate),
            web.post("/load_weights", self.load),
            web.get("/status", self.get_status),
        ]
        super().__init__(*routes)
        self.version, self.delay_s, self.load_s, self.status = version, delay_s, load_s, status
        self.slots = asyncio.Semaphore(slots)
        self.about = {"protocol": PROTOCOL, "served_model": "m", "max_model_len": 100} | about
        self.hangs = asyncio.Event()
        """Set: nothing is answered any more."""
        self.stamp: int | None = None
        """The version that its answers claim, if it is another one."""
        self.garbage = False
        self.status_s = 0.0
        """Seconds until it says what it holds."""
        self.counts: Counter[str] = Counter()
        self.sessions: list[int] = []
        """Of the requests that it was sent, and of those that it has answered."""
        self.answered: list[int] = []
        self.loads: list[int] = []

    async def alive(self) -> None:
        if self.hangs.is_set():
            await asyncio.Event().wait()

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.sessions.append(body["session"])
        async with self.slots:
            await asyncio.sleep(self.delay_s)
        await self.alive()
        self.answered.append(body["session"])
        if self.garbage:
            return web.Response(body=b"<html>")
        spans = [[self.version if self.stamp is None else self.stamp, 1]]
        return web.Response(body=turn_bytes(body["token_ids"][:1], [-0.5], spans))

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        version = body["policy_version"]
        self.loads.append(version)
        await asyncio.sleep(self.load_s)
        await self.alive()
        self.version, self.about["content"] = version, body.get("content", "")
        return web.json_response({"policy_version": version, "pause_s": 0.01})

    async def get_status(self, _: web.Request) -> web.Response:
        await self.alive()
        await asyncio.sleep(self.status_s)
        return web.json_response({"policy_version": self.version, **self.about})

    async def __aenter__(self) -> "StubServer":
        await super().__aenter__()
        if self.status:
            write_status(self.status, RoleStatus(address=self.url))
        return self

    async def die(self) -> None:
        """Its connections break, and nobody answers at its address any more."""
        self.hangs.set()
        for connection in list(self.runner.server.connections):
            if connection.transport:
                connection.transport.abort()
        await self.runner.cleanup()
