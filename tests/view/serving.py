"""A server of the page in a thread, as the command has it in its process."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from rl.run_dir.access_token import link
from rl.view.library import Library
from rl.view.server import serve

SECRET = "a-secret-for-tests"


@contextmanager
def serving(place: Path) -> Iterator[list[str]]:
    """The links that the command would print for a folder with runs; the last one lets a browser
    in."""
    found, up, servers, run = (
        list[str](),
        threading.Event(),
        list[uvicorn.Server](),
        uvicorn.Server.run,
    )

    def running(server: uvicorn.Server, **more: object) -> None:
        servers.append(server)
        run(server, **more)

    def new_link(address: str, number: str) -> None:
        found.append(link(SECRET, address, number))
        up.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.Server, "run", running)
        thread = threading.Thread(
            target=serve, args=(Library([place]), SECRET, "127.0.0.1", 0, new_link)
        )
        thread.start()
        assert up.wait(30)
        yield found
        servers[0].should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def enter(browser: httpx.Client, link: str) -> httpx.Response:
    """Has a client let in by a link; what it asks for then is meant within the folder of the
    page."""
    answer = browser.get(link)
    assert answer.status_code == 200, answer.text
    browser.base_url = answer.url.join(re.search(r"url=(/\w+/)", answer.text)[1])
    return answer
