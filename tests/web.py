"""HTTP servers beside a test, each on a free port of 127.0.0.1."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from aiohttp import web


class WebServer:
    """Serves some routes while its context lasts; `url` is its address followed by `path`."""

    def __init__(self, *routes: web.RouteDef, path: str = "", port: int = 0):
        self.routes, self.path, self.port = routes, path, port

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes(self.routes)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}{self.path}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    """Runs a server in a thread."""
    loop, up, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def until_stopped() -> None:
        async with server:
            up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(until_stopped(),))
    thread.start()
    assert up.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
