"""The live path between trainer and orchestrator, over real sockets."""

import asyncio
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import msgspec
import pytest
import zmq

from rl.run_dir.access_token import run_token
from rl.run_dir.files import CorruptFileError, encode_record
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Phase, RoleStatus, write_status
from rl.system.errors import DAMAGED, RESTART, RunError
from rl.system.linux import bind
from rl.wire.batch_file import batch_head, encode_batch
from rl.wire.messages import (
    Acknowledged,
    GetBatch,
    NotReady,
    TrainBatch,
    WeightVersion,
)
from rl.wire.transport import OrchestratorClient, TrainerServer, Wait, curve_keys
from tests.raised import run_error
from tests.trainer.stub_orchestrator import TransportThread
from tests.waiting import until


class Server(TransportThread):
    """Notes the requests."""

    def __init__(self, status, replies, token):
        super().__init__(status, token)
        self.seen, self.replies = [], replies

    def answer(self, request):
        self.seen.append(request)
        return self.replies(request)


def connect(socket, server):
    """Connects as a client with the token."""
    socket.curve_publickey, socket.curve_secretkey = curve_keys(server.token, "client")
    socket.curve_serverkey, _ = curve_keys(server.token, "server")
    socket.connect(server.server.address.replace("curve://", "tcp://"))


@pytest.fixture
def serve(tmp_path):
    with ExitStack() as stack:

        def start(replies, token=None):
            status = tmp_path / "status" / "orchestrator.json"
            return stack.enter_context(Server(status, replies, token))

        yield start


class Client(OrchestratorClient):
    """A client that blocks from its first request on, and records the waits it reports: (phase,
    step, detail)."""

    def __init__(self, status, timeout_s, enough):
        super().__init__(RunDir(status.parent.parent, status.parent.parent / "weights"))
        self.timeout_s, self.waits, self.enough = timeout_s, [], enough

    def get_batch(self, step):
        with Wait(self.timeout_s, lambda *what: self.waits.append(what)) as wait:
            if self.enough:
                wait.left_s = lambda _=0.0: 0.0 if self.enough(self.waits) else 60.0
            return super().get_batch(step, wait)


def client(tmp_path, timeout_s=60.0, enough=None):
    """`enough`: whether it has waited until the deadline, given its waits; by default by the
    clock."""
    trainer = Client(tmp_path / "status" / "orchestrator.json", timeout_s, enough)
    return trainer, trainer.waits


def said(text):
    """Whether the client has said that as what it waits for."""
    return lambda waits: any(text in detail for _, _, detail in waits)


@contextmanager
def impostor(tmp_path, answers):
    """Something with the run's token answers in place of the orchestrator, each request with the
    next of `answers`, a list of frames."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger, socket.curve_server = 0, True
        _, socket.curve_secretkey = curve_keys(run_token(tmp_path / "status"), "server")
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        write_status(
            tmp_path / "status" / "orchestrator.json",
            RoleStatus(address=f"curve://127.0.0.1:{port}"),
        )

        over = threading.Event()

        def answer():
            left = iter(answers)
            while not over.is_set():
                if socket.poll(50):
                    peer, _request = socket.recv_multipart()
                    socket.send_multipart([peer, *next(left)])

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            yield
        finally:
            over.set()
            answering.join()


BATCH = encode_record(b"a batch")


def ready(tmp_path, step=1, data=BATCH):
    """The orchestrator announces a batch that the trainer can see."""
    path = tmp_path / "batches" / f"{step:06d}.batch"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return batch_head(path)


def filling(step):
    return NotReady(RoleStatus(phase=Phase.FILLING_BATCH, step=step))


@pytest.fixture
def written(tmp_path):
    """A batch file that the orchestrator sees but the trainer does not."""
    path = tmp_path / "elsewhere" / "000001.batch"
    path.parent.mkdir()
    path.write_bytes(encode_record(bytes(range(250)) * 20))
    return path


def test_a_batch_is_read_from_its_file_and_does_not_cross_the_wire(serve, tmp_path):
    """100 MiB: more than a message may have, and than one attempt could transfer."""
    data = encode_batch(TrainBatch(step=1, samples=[]), "x" * (100 << 20))
    server = serve(lambda _request: ready(tmp_path, 1, data))
    trainer, _ = client(tmp_path)
    assert trainer.get_batch(1) == data and server.seen == [GetBatch(1)]


@pytest.mark.parametrize("there", [None, b"", BATCH])
def test_a_file_that_is_not_seen_is_a_deadline_that_names_the_remedy(
    serve, tmp_path, written, monkeypatch, there
):
    """No file, half of it, or an old one. It is requested again: a repair may have replaced the
    batch meanwhile."""
    monkeypatch.setattr("rl.wire.transport.SEEN_WITHIN_S", 0.3)
    (tmp_path / "batches").mkdir()
    if there is not None:
        (tmp_path / "batches" / "000001.batch").write_bytes(there)
    server = serve(lambda _request: batch_head(written))
    trainer, waits = client(
        tmp_path, 1.0, lambda waits: len(server.seen) >= 2 and waits[-1][2].endswith("visible")
    )
    with run_error(
        r"waited 1 s for .*000001\.batch, .* become visible: output_dir must be on .* all "
        r"nodes share"
    ):
        trainer.get_batch(1)
    assert waits[-1][2] == f"{tmp_path}/batches/000001.batch to become visible"


def test_a_file_that_comes_into_view_later_is_read(serve, tmp_path, written):
    (tmp_path / "batches").mkdir()
    serve(lambda _request: batch_head(written))
    trainer, waits = client(tmp_path)

    def write_late():
        until(lambda: waits and waits[-1][2].endswith("000001.batch to become visible"))
        (tmp_path / "batches" / "000001.batch").write_bytes(written.read_bytes())

    writing = threading.Thread(target=write_late)
    writing.start()
    assert trainer.get_batch(1) == written.read_bytes()
    writing.join()


def test_a_batch_that_is_damaged_is_named(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("rl.wire.transport.SEEN_WITHIN_S", 0.3)
    reply = ready(tmp_path)
    path = tmp_path / "batches" / "000001.batch"
    path.write_bytes(BATCH[:-1] + b"?")
    serve(lambda _request: reply)
    trainer, _ = client(tmp_path)
    with pytest.raises(
        CorruptFileError, match=r"000001\.batch: damaged, its checksum does not match"
    ) as error:
        trainer.get_batch(1)
    assert error.value.exit_code == DAMAGED  # `rl` repairs the run
    path.write_bytes(BATCH[:-1])
    with pytest.raises(
        CorruptFileError,
        match=rf"000001\.batch: has {len(BATCH) - 1} bytes, its header says {len(BATCH)}",
    ):
        batch_head(path)


def test_a_server_that_comes_back_on_another_port(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("rl.wire.transport.ATTEMPT_S", 0.3)
    first = serve(lambda _request: None)  # receives the request and dies
    trainer, _ = client(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(trainer.get_batch, 1)
        until(lambda: first.seen)
        first.__exit__()
        second = serve(lambda _request: ready(tmp_path))
        assert asked.result(60) == BATCH
    assert second.server.address != first.server.address


def test_the_deadline_says_who_waited_for_what(serve, tmp_path):
    serve(lambda _request: filling(7))
    (tmp_path / "logs").mkdir()
    for attempt in (9, 10):
        (tmp_path / "logs" / f"orchestrator-{attempt}.log").write_text(
            f"attempt {attempt}\nits last line\n"
        )
    trainer, _ = client(tmp_path, 0.5, said("filling batch 7"))
    with pytest.raises(RunError) as error:
        trainer.get_batch(7)
    assert error.value.exit_code == RESTART
    text = re.sub(r"\d+ s ago", "0 s ago", re.sub(r"\d\d:\d\d:\d\d", "TIME", str(error.value)))
    assert text.splitlines() == [
        "waited 0 s for batch 7 (filling batch 7), first asked at TIME. The orchestrator: "
        "last heartbeat 0 s ago: filling batch 1; "
        f"the end of {tmp_path}/logs/orchestrator-10.log:",
        "  | attempt 10",
        "  | its last line",
        "See logs/orchestrator*.log; if the environment is just slow, raise "
        "trainer.batch_timeout_s",
    ]


def test_asked_ahead_a_question_has_no_deadline_until_somebody_waits(serve, run_dir):
    def answer(_request):
        time.sleep(0.05)
        return filling(7)

    server = serve(answer)
    trainer = OrchestratorClient(run_dir)
    waits = []
    wait, failed = Wait(0.3, lambda *what: waits.append(what)), threading.Event()

    def ask():
        with run_error(r"waited 0 s for batch 7 \(filling batch 7\)"):
            trainer.get_batch(7, wait)
        failed.set()

    threading.Thread(target=ask).start()
    until(lambda: len(server.seen) > 1)
    assert not failed.wait(0.6) and waits == []
    with wait:
        assert waits[0] == (Phase.WAITING_FOR_BATCH, 7, "filling batch 7")
        began = time.monotonic()
        assert failed.wait(30) and time.monotonic() - began > 0.2


def test_the_time_that_a_disk_has_taken_is_not_the_orchestrators(serve, run_dir):
    """Its owner has waited longer for a version to be written than it waits for answers: it was
    not asked even once."""
    serve(lambda _request: Acknowledged(3))
    trainer = OrchestratorClient(run_dir)
    with Wait(60, lambda *_: None) as wait:
        wait.since -= 3000
        assert wait.left_s() < -2900 and 50 < wait.left_s(time.monotonic()) <= 60
        assert trainer.published(WeightVersion(3, "/weights/000003"), wait) == Acknowledged(3)


def test_who_gives_up_waits_for_no_answer(serve, run_dir):
    server = serve(lambda _request: None)  # never answers
    leaves = threading.Event()
    trainer = OrchestratorClient(run_dir, leaves.is_set)
    wait, given_up = Wait(60, lambda *_: None), []
    version = WeightVersion(3, "/weights/000003")
    for ask in (
        lambda: trainer.get_batch(7, wait),
        lambda: trainer.published(version, wait),
        lambda: trainer.probe(3, 60) or None,
    ):
        threading.Thread(target=lambda ask=ask: given_up.append(ask())).start()
    while len(server.seen) < 3:
        time.sleep(0.01)
    assert not given_up
    leaves.set()
    began = time.monotonic()
    while len(given_up) < 3:
        assert time.monotonic() - began < 30, "0.7 s, or more on a machine that is busy"
        time.sleep(0.01)
    assert given_up == [None, None, None]


def test_an_orchestrator_that_never_was(tmp_path):
    trainer, waits = client(tmp_path, timeout_s=0.3)
    with run_error(
        r"waited 0 s for batch 1 \(the orchestrator to come up\), .*The orchestrator: it has "
        r"no status file"
    ):
        trainer.get_batch(1)
    assert set(waits) == {(Phase.WAITING_FOR_BATCH, 1, "the orchestrator to come up")}


def test_garbage_is_dropped_and_counted(serve, tmp_path, caplog):
    server = serve(lambda _request: ready(tmp_path))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        connect(socket, server)
        request = msgspec.msgpack.encode(GetBatch(1))
        garbage = [
            [b"garbage"],
            [b""],
            [b"\x93\x01\x02"],
            [b"a", b"b"],
            [b"", request],
            [request] * 999,
            [b"\x91" * 60_000],
        ]
        garbage += [
            [b"\xdd\xff\xff\xff\xff"],
            [request + b"x"],
            [msgspec.msgpack.encode(GetBatch(0))],
            [request.replace(b"\x01", b"\xa1x")],
        ]
        for frames in garbage:
            socket.send_multipart(frames)
        trainer, _ = client(tmp_path)
        assert trainer.get_batch(1) == BATCH
        socket.send(b"more")
        until(lambda: server.server.rejected.count > len(garbage))
    server.__exit__()
    assert server.server.rejected.count == len(garbage) + 1 and server.seen == [GetBatch(1)]
    # the next is due in a minute
    (told,) = [
        record.getMessage() for record in caplog.records if record.name == "rl.wire.transport"
    ]
    assert told.startswith("requests of the trainer: dropped 1 in all; the last from 127.0.0.1: ")


def test_answers_that_are_none_are_asked_for_again(tmp_path, monkeypatch):
    """Whatever answers in place of the orchestrator, the trainer keeps asking."""
    acknowledged = msgspec.msgpack.encode(Acknowledged(1))
    answers = [
        [b"garbage"],
        [b""],
        [b"a", b"b"],
        [b"\x91" * 100_000],
        [acknowledged],
        [acknowledged, b""],
        [b"x" * 2000],
    ]
    answers.append([msgspec.msgpack.encode(ready(tmp_path))])
    # the last reply but one closes the connection
    monkeypatch.setattr("rl.wire.transport.MAX_REPLY_BYTES", 1000)
    trainer, waits = client(tmp_path)

    def one_by_one():
        """Only those that do not arrive are not waited for. What is set before an answer is sent
        applies to the next request."""
        for answer, following in zip(answers, [*answers[1:], [b""]], strict=True):
            monkeypatch.setattr(
                "rl.wire.transport.ATTEMPT_S", 0.5 if len(following[0]) > 1000 else 60.0
            )
            yield answer

    with impostor(tmp_path, one_by_one()):
        assert trainer.get_batch(1) == BATCH
    assert all(
        any(text in detail for _, _, detail in waits)
        for text in ("a Acknowledged in reply to a GetBatch", "2 frames")
    )


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nonsense", "is invalid: Invalid argument"),
        ("curve://nowhere:x", "is invalid: Invalid argument"),
        (["x"], "to come up"),
    ],
)
def test_a_status_file_with_an_address_that_is_none(tmp_path, address, why):
    write_status(tmp_path / "status" / "orchestrator.json", RoleStatus(address=address))
    run_token(tmp_path / "status")
    trainer, _ = client(tmp_path, enough=said(why))
    with run_error(why):
        trainer.get_batch(1)


TOKEN = "a-token-of-the-test-0123456789"


def test_with_a_token_only_who_has_it_is_answered(serve, tmp_path, monkeypatch):
    monkeypatch.delenv("RL_TOKEN", raising=False)
    server = serve(lambda _request: ready(tmp_path), TOKEN)
    assert server.server.address.startswith("curve://127.0.0.1:")
    trainer, waits = client(tmp_path, enough=said("RL_TOKEN"))
    with run_error(
        r"curve://\S+ requires the run's token, but this process has none: set RL_TOKEN to "
        r"the same"
    ):
        trainer.get_batch(1)
    waits.clear()
    monkeypatch.setenv("RL_TOKEN", TOKEN.upper())
    with run_error(r"curve://\S+ rejects this process's token: set RL_TOKEN to the same value"):
        trainer.get_batch(1)
    waits.clear()
    monkeypatch.setenv("RL_TOKEN", "too short")
    with run_error("RL_TOKEN must be 16 to 256 printable characters"):
        trainer.get_batch(1)
    monkeypatch.delenv("RL_TOKEN")
    (tmp_path / "status" / "token").write_text(TOKEN)
    patient, _ = client(tmp_path)
    assert patient.get_batch(1) == BATCH and server.seen == [GetBatch(1)]


def test_the_servers_key_alone_opens_nothing(serve, tmp_path):
    """Clients that know the address and the server's public key, but not the token: with another
    key, or without one."""
    server = serve(lambda _request: ready(tmp_path), TOKEN)
    address = server.server.address.replace("curve://", "tcp://")
    with zmq.Context() as context:
        for keys in (zmq.curve_keypair(), None):
            with context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                if keys:
                    socket.curve_publickey, socket.curve_secretkey = keys
                    socket.curve_serverkey = curve_keys(TOKEN, "server")[0]
                socket.connect(address)
                socket.send(msgspec.msgpack.encode(GetBatch(1)))
                assert not socket.poll(400)
    assert server.seen == []
    assert TOKEN.encode() not in b"".join(curve_keys(TOKEN, "server") + curve_keys(TOKEN, "client"))


def test_a_message_that_is_too_large_does_not_reach_the_server(serve, tmp_path):
    server = serve(lambda _request: ready(tmp_path))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        connect(socket, server)
        socket.send(b"x" * (1 << 20))
        time.sleep(0.3)
    trainer, _ = client(tmp_path)
    assert trainer.get_batch(1) == BATCH
    server.__exit__()
    assert server.server.rejected.count == 0


def test_a_taken_port_names_the_setting(monkeypatch):
    monkeypatch.setattr("rl.wire.transport.bind", partial(bind, wait_s=0.0))

    async def bind_twice():
        server = TrainerServer("127.0.0.1", 0, TOKEN)
        port = int(server.address.rsplit(":", 1)[1])
        with run_error(
            f"orchestrator.port = {port} on 127.0.0.1: Address already in use; choose another, or 0"
        ):
            TrainerServer("127.0.0.1", port, TOKEN)
        server.close()

    asyncio.run(bind_twice())
