"""The inference proxy gives sandboxed workers, which have neither network nor the run's credential, a Unix socket on which they may ask
the run's inference servers for completions, and nothing else.

It adds the run's credential to requests, so no environment ever has it. It runs in a thread with its own event loop, because its work grows
with the number of tokens, and that must not load the orchestrator's loop.
"""

import asyncio
import threading
import time
from pathlib import Path

import aiohttp
from aiohttp import web

from rl.run_dir.access_token import authorization
from rl.system.errors import RunError
from rl.wire.http import CONNECT_S, read_answer
from rl.wire.inference_client import InferenceServers

PATH = "/generate"
RELAYED = "http://inference"
"""Stands for any of the run's servers."""
MAX_REQUEST_BYTES = 1 << 24
"""The limit that inference has for bodies."""
LOOK_S = 0.5
"""How long the servers' addresses are cached."""
START_S = 10.0


class InferenceProxy:
    """Forwards requests for completions to the servers at `urls`, or to those with status files next to `status`."""

    def __init__(self, socket: Path, urls: list[str], status: Path):
        self.socket = socket
        self.servers = InferenceServers(urls, status, 0.0)
        self.status = status
        self.found: list[str] = []
        self.looked = -LOOK_S
        self.loop = asyncio.new_event_loop()
        self.up = threading.Event()
        self.thread = threading.Thread(target=self._run, name="inference-proxy", daemon=True)
        self.thread.start()
        if not self.up.wait(START_S):
            raise RunError(f"the inference proxy of sandboxed workers did not come up at {socket} within {START_S:.0f} s")

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.ended = asyncio.Event()
        self.loop.run_until_complete(self._serve())
        self.loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post(PATH, self._pass_on)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            self.session = session
            await web.UnixSite(runner, str(self.socket)).start()
            self.up.set()
            await self.ended.wait()
            await runner.cleanup()

    def urls(self) -> list[str]:
        """Returns the addresses of the run's servers."""
        if time.monotonic() - self.looked >= LOOK_S:
            self.found, self.looked = self.servers.find(), time.monotonic()
        return self.found

    async def _pass_on(self, request: web.Request) -> web.Response:
        wanted = f"http://{request.host}"
        by_host = {url.partition("://")[2]: url for url in reversed(self.urls())}
        url = next(iter(self.urls()), None) if wanted == RELAYED else by_host.get(request.host)
        if url is None:
            return web.Response(status=502, text=f"{request.host} is not an inference server of this run")
        try:
            headers = {"Content-Type": "application/json"} | authorization(self.status)
            async with self.session.post(url + PATH, data=await request.read(), headers=headers) as answer:
                return web.Response(status=answer.status, body=await read_answer(answer), content_type="application/json")
        except (aiohttp.ClientError, TimeoutError, OSError, RunError) as error:
            return web.Response(status=502, text=f"{url}: {type(error).__name__} {error}")

    def close(self) -> None:
        """Stops the inference proxy; requests in progress are not answered."""
        self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join(START_S)
