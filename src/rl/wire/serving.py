"""An HTTP server on a bound socket, until a signal ends the process."""

import asyncio
import contextlib
import signal
import socket
from typing import Any

import uvicorn

from rl.run_dir.access_token import is_loopback
from rl.run_dir.status import Phase, Status, reachable
from rl.system.errors import RESTART, RunError

LISTEN = 1024
KEEP_ALIVE_S = 600
"""Idle connections stay open longer than any client keeps them."""


class QuietServer(uvicorn.Server):
    """A server that leaves the signals of the process alone."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


async def serve(
    app: Any, host: str, sock: socket.socket, status: Status, *work: asyncio.Task[None]
) -> None:
    """Serves until SIGTERM or SIGINT. Raises the error of the server or of a task that it needs,
    and RunError if either just ends."""
    # Clients elsewhere get the slower parser, because the other one does not limit lines and
    # headers.
    parser = "auto" if is_loopback(host) else "h11"
    settings = uvicorn.Config(
        app,
        http=parser,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server, stop = QuietServer(settings), asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    sock.listen(LISTEN)
    needed = [asyncio.create_task(server.serve(sockets=[sock])), *work]
    name, port = reachable(host), sock.getsockname()[1]
    status.enter(Phase.SERVING, address=f"http://{f'[{name}]' if ':' in name else name}:{port}")
    await asyncio.wait(
        [*needed, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED
    )
    server.should_exit = server.force_exit = True
    for task in needed:
        if task.done():
            task.result()
    if not stop.is_set():
        raise RunError("the HTTP server has ended by itself", RESTART)
