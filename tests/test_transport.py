"""The live path between trainer and orchestrator, over real sockets."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from rl.messages import Acknowledged, BatchBytes, GetBatch, NotReady, Published, Reply, Request, RunEnded, WeightVersion
from rl.status import write_status
from rl.transport import OrchestratorClient, OrchestratorLostError, TrainerServer, Wait


class Server:
    """An orchestrator's end in a thread; `answer` makes the replies, None is silence."""

    def __init__(self, status: Path, answer: Callable[[Request], Reply | None]):
        self.status, self.answer, self.seen = status, answer, []
        self.up = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()))
        self.thread.start()
        assert self.up.wait(10)

    async def serve(self) -> None:
        self.server = server = TrainerServer("127.0.0.1", 0)
        self.address, self.loop, self.stopping = server.address, asyncio.get_running_loop(), asyncio.Event()
        write_status(self.status, {"address": server.address, "heartbeat": time.time(), "doing": "filling batch 1"})
        self.up.set()

        async def answer_all() -> None:
            while True:
                peer, request = await server.receive()
                self.seen.append(request)
                reply = self.answer(request)
                if reply is not None:
                    await server.reply(peer, reply)

        task = asyncio.create_task(answer_all())
        await self.stopping.wait()
        task.cancel()
        server.close()

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.stopping.set)
            self.thread.join()


@pytest.fixture
def serve(tmp_path):
    servers: list[Server] = []

    def start(answer: Callable[[Request], Reply | None]) -> Server:
        servers.append(Server(tmp_path / "orchestrator.json", answer))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def client(tmp_path, timeout_s: float = 10.0) -> tuple[OrchestratorClient, list[str]]:
    said: list[str] = []
    return OrchestratorClient(tmp_path / "orchestrator.json", timeout_s, said.append), said


def test_not_ready_then_the_batch(serve, tmp_path):
    replies = iter([NotReady("3 of 64 rollouts"), NotReady("9 of 64 rollouts"), BatchBytes(b"\x00batch")])
    server = serve(lambda _request: next(replies))
    trainer, said = client(tmp_path)
    assert trainer.get_batch(5) == b"\x00batch"
    assert server.seen == [GetBatch(5)] * 3
    assert said == [f"waiting for batch 5: {what}" for what in ("the orchestrator to come up", "3 of 64 rollouts", "9 of 64 rollouts")]


def test_published_and_the_end_of_the_run(serve, tmp_path):
    server = serve(lambda request: Acknowledged(2, [1]) if isinstance(request, Published) else RunEnded("solved"))
    trainer, _ = client(tmp_path)
    assert trainer.published(WeightVersion(4, "/w/000004")) == Acknowledged(2, [1])
    assert server.seen == [Published(WeightVersion(4, "/w/000004"))]
    assert trainer.get_batch(5) == RunEnded("solved")


def test_a_server_that_comes_back_on_another_port(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("rl.transport.ATTEMPT_S", 0.3)
    first = serve(lambda _request: None)  # takes the question and dies with it
    trainer, _ = client(tmp_path)
    result: list[bytes] = []
    asking = threading.Thread(target=lambda: result.append(trainer.get_batch(1)))
    asking.start()
    while not first.seen:
        time.sleep(0.01)
    first.stop()
    second = serve(lambda _request: BatchBytes(b"later"))
    asking.join(10)
    assert second.address != first.address and result == [b"later"]


def test_the_deadline_says_who_waited_for_what(serve, tmp_path):
    serve(lambda _request: NotReady("12 of 64 rollouts"))
    trainer, _ = client(tmp_path, timeout_s=0.5)
    with pytest.raises(OrchestratorLostError) as error:
        trainer.get_batch(7)
    said = str(error.value)
    assert said.startswith(
        "waited 0 s for batch 7 (12 of 64 rollouts). Last heartbeat of the orchestrator: 0 s ago, filling batch 1."
    ) or said.startswith("waited 0 s for batch 7 (12 of 64 rollouts). Last heartbeat of the orchestrator: 1 s ago")
    assert "See logs/orchestrator*.log" in said


def test_asked_ahead_a_question_has_no_deadline_until_somebody_waits(serve, tmp_path, monkeypatch):
    def answer(_request: Request) -> Reply:
        time.sleep(0.05)
        return NotReady("12 of 64 rollouts")

    server = serve(answer)
    trainer, _ = client(tmp_path, timeout_s=0.1)
    said: list[str] = []
    wait, failed = Wait(0.3, said.append), threading.Event()

    def ask() -> None:
        with pytest.raises(OrchestratorLostError, match=r"waited 0 s for batch 7 \(12 of 64 rollouts\)"):
            trainer.get_batch(7, wait)
        failed.set()

    threading.Thread(target=ask).start()
    assert not failed.wait(1.0) and said == [] and len(server.seen) > 1
    with wait:
        assert said[0] == "waiting for batch 7: 12 of 64 rollouts"
        began = time.monotonic()
        assert failed.wait(10) and time.monotonic() - began > 0.2


def test_an_orchestrator_that_never_was(tmp_path):
    trainer, said = client(tmp_path, timeout_s=0.3)
    with pytest.raises(
        OrchestratorLostError, match=r"waited 0 s for batch 1 \(the orchestrator to come up\). Last heartbeat of the orchestrator: never"
    ):
        trainer.get_batch(1)
    assert set(said) == {"waiting for batch 1: the orchestrator to come up"}


def test_garbage_is_dropped_and_counted(serve, tmp_path):
    server = serve(lambda _request: BatchBytes(b"ok"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.connect(server.address)
        for frames in ([b"garbage"], [b""], [b"\x93\x01\x02"], [b"a", b"b"], [b"\x82\xa4type\xa8GetBatch\xa4step\xa1x"]):
            socket.send_multipart(frames)
        trainer, _ = client(tmp_path)
        assert trainer.get_batch(1) == b"ok"
        socket.send(b"more")
        deadline = time.monotonic() + 10
        while server.server.rejected < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
    server.stop()
    assert server.server.rejected == 6 and server.seen == [GetBatch(1)]


def test_a_message_that_is_too_large_does_not_reach_the_server(serve, tmp_path):
    server = serve(lambda _request: BatchBytes(b"ok"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.address)
        socket.send(b"x" * (1 << 20))
        time.sleep(0.3)
    trainer, _ = client(tmp_path)
    assert trainer.get_batch(1) == b"ok"
    server.stop()
    assert server.server.rejected == 0


def test_a_taken_port_names_the_setting():
    async def bind_twice() -> None:
        server = TrainerServer("127.0.0.1", 0)
        port = int(server.address.rsplit(":", 1)[1])
        with pytest.raises(
            OSError, match=f"orchestrator.port = {port} on 127.0.0.1: Address already in use.*; choose another, or 0 for a free one"
        ):
            TrainerServer("127.0.0.1", port)
        server.close()

    asyncio.run(bind_twice())
