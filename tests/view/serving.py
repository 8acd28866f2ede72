"""A server of the page in a thread, as the command has it in its process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

from rl.view.library import Library
from rl.view.server import serve


@contextmanager
def serving(place: Path) -> Iterator[str]:
    """The address that the command would print for a folder with runs."""
    found, up, servers, run = list[str](), threading.Event(), list[uvicorn.Server](), uvicorn.Server.run

    def running(server: uvicorn.Server, **more: object) -> None:
        servers.append(server)
        run(server, **more)

    def ready(address: str) -> None:
        found.append(address)
        up.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.Server, "run", running)
        thread = threading.Thread(target=serve, args=(Library([place]), "a-token-for-tests", "127.0.0.1", 0, ready))
        thread.start()
        assert up.wait(30)
        yield found[0]
        servers[0].should_exit = True
        thread.join(30)
        assert not thread.is_alive()
