"""The inference proxy gives sandboxed workers, which have neither network nor the run's credential,
a Unix socket on which they may ask the run's inference servers for completions, and nothing else.

It adds the run's credential to requests, so no environment ever has it.
"""

import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rl.wire.http import AwayError
from rl.wire.inference_client import InferenceLostError, InferenceServers
from rl.wire.messages import MAX_BODY_BYTES

PATH = "/generate"
RELAYED = "http://inference"
"""Stands for any of the run's servers."""
CLOSE_S = 1.0


class InferenceProxy:
    """Forwards requests for completions to the servers at `urls`, or to those with status files
    next to `status`."""

    def __init__(
        self,
        path: Path,
        urls: list[str],
        status: Path,
        watch: Callable[[Coroutine[Any, Any, None]], None],
    ):
        """`watch` runs a coroutine in the background."""
        self.path = path
        self.servers = InferenceServers(urls, status, 0.0)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))  # now, because the sandbox that is made next shows the socket
        self.socket.listen()
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post(PATH, self._pass_on)
        self.runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S
        )
        watch(self._serve())

    async def _serve(self) -> None:
        await self.runner.setup()
        await web.SockSite(self.runner, self.socket).start()

    async def _pass_on(self, request: web.Request) -> web.Response:
        urls = self.servers.find()
        by_host = {url.partition("://")[2]: url for url in reversed(urls)}
        url = (
            next(iter(urls), None)
            if f"http://{request.host}" == RELAYED
            else by_host.get(request.host)
        )
        if url is None:
            return web.Response(
                status=502, text=f"{request.host} is not an inference server of this run"
            )
        try:
            status, content = await self.servers.send(
                "POST", url, PATH, msgspec.Raw(await request.read())
            )
        except (AwayError, InferenceLostError, OSError) as error:
            return web.Response(status=502, text=f"{url}: {error}")
        return web.Response(status=status, body=content, content_type="application/json")

    async def close(self) -> None:
        """Stops the inference proxy; requests in progress are not answered."""
        await self.runner.cleanup()
        await self.servers.close()
