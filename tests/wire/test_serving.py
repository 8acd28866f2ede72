"""A process must not end with exit code 0 because its HTTP server has died: its keeper would
take it for done."""

import asyncio
import os
import signal
import socket

import httpx
import pytest

from rl.run_dir.status import Status, read_status
from rl.system.errors import RESTART, RunError, exit_code_of
from rl.wire.serving import serve_app


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def served(tmp_path, *work):
    sock = socket.create_server(("127.0.0.1", 0))

    async def run():
        tasks = [asyncio.create_task(one()) for one in work]
        async with asyncio.timeout(20):
            await serve_app(
                app, "127.0.0.1", sock, Status(tmp_path / "status.json", "tinker"), *tasks
            )

    return sock, run


def test_it_answers_until_a_signal_and_then_ends_well(tmp_path):
    answers = []

    async def ask():
        while not (told := read_status(tmp_path / "status.json")) or not told.address:
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient() as client:
            answers.append((await client.get(told.address)).status_code)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    before = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(served(tmp_path, ask)[1]())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert answers == [204]


async def broken(*_):
    raise ValueError("broken")


async def ended(*_):
    pass


@pytest.mark.parametrize("at", ["server", "work"])
@pytest.mark.parametrize(
    ("death", "error", "says"),
    [(broken, ValueError, "broken"), (ended, RunError, "ended by itself")],
)
def test_a_server_or_its_work_that_ends_is_an_error_worth_a_restart(
    tmp_path, monkeypatch, at, death, error, says
):
    if at == "server":
        monkeypatch.setattr("uvicorn.Server.main_loop", death)
    with pytest.raises(error, match=says) as raised:
        asyncio.run(served(tmp_path, *([death] if at == "work" else []))[1]())
    assert exit_code_of(raised.value) == RESTART
