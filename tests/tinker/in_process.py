"""A server of the Tinker API in a thread, with a trainer and an inference that only count: what
the SDK meets is real."""

import asyncio
import threading
from pathlib import Path

import uvicorn

from rl.tinker.requests import KEY_PREFIX
from tests.ports import free_ports
from tests.tinker.test_app import KEY, CountingLearner, Servers, service_of
from tests.waiting import until

NAME = "meta/x"


class Service:
    """Serves in a folder within `with`; another one at the same folder and port goes on with
    what is there."""

    def __init__(self, root: Path, port: int = 0):
        self.root, self.port = root, port or free_ports(1)[0]
        self.learner, self.servers = CountingLearner(), Servers()
        self.url, self.key = f"http://127.0.0.1:{self.port}", f"{KEY_PREFIX}{KEY}"
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.server: uvicorn.Server | None = None

    def __enter__(self) -> "Service":
        self.thread.start()
        until(lambda: self.server and self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        if not (self.server and self.thread.is_alive()):
            return
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()

    async def _serve(self) -> None:
        training, sampling, app = service_of(self.root, self.learner, self.servers)
        sampling.begin()
        work = asyncio.create_task(training.run())
        self.server = uvicorn.Server(
            uvicorn.Config(app, port=self.port, log_level="warning", lifespan="off")
        )
        await self.server.serve()
        work.cancel()
