"""The live path between trainer and orchestrator: ZeroMQ DEALER to ROUTER, typed msgpack. The only file that knows the wire.

The orchestrator's address stands in its status file and is read again before every attempt, so either side may die and come back.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from rl.messages import (
    Acknowledged,
    BatchBytes,
    GetBatch,
    GetProbe,
    NotReady,
    Probe,
    Published,
    Reply,
    Request,
    RunEnded,
    TrainingSample,
    WeightVersion,
)
from rl.status import reachable, read_status

ATTEMPT_S = 20.0
"""One question waits this long for an answer before it is asked anew; the orchestrator answers NotReady well before."""
ANSWER_WITHIN_S = 5.0
"""The orchestrator answers within this time, if only by NotReady."""
MAX_REQUEST_BYTES = 1 << 16

ENCODER = msgspec.msgpack.Encoder()
REQUESTS = msgspec.msgpack.Decoder(Request)
REPLIES = msgspec.msgpack.Decoder(Reply)


class OrchestratorLostError(Exception):
    """The deadline passed; the message says who waited for what, since when, and what the orchestrator last said of itself."""


class Wait:
    """Somebody's wait for answers: it lasts, and is told, only inside `with wait:`.

    A thread asks ahead for what nobody needs yet, for as long as it takes; once its owner is held up, the deadline of `timeout_s` counts
    and `on_wait` is told what for.
    """

    def __init__(self, timeout_s: float, on_wait: Callable[[str], None]):
        self.timeout_s, self.on_wait = timeout_s, on_wait
        self.since: float | None = None
        self.text = ""

    def __enter__(self) -> "Wait":
        self.since = time.monotonic()
        self.about(self.text)
        return self

    def __exit__(self, *_: object) -> None:
        self.since = None

    def about(self, text: str) -> None:
        """Sets what is waited for; empty: nothing at the moment."""
        self.text = text
        if self.since is not None and text:
            self.on_wait(text)

    def left_s(self) -> float:
        """Seconds until the deadline."""
        since = self.since  # the owner may stop waiting at any time
        return math.inf if since is None else self.timeout_s - (time.monotonic() - since)


class OrchestratorClient:
    """The trainer's side; used by rank 0 alone. Blocking; its questions may be asked from several threads.

    Each question takes the asker's wait; without one the caller itself waits.
    """

    def __init__(self, status_path: Path, timeout_s: float, on_wait: Callable[[str], None]):
        self.status_path = status_path
        self.timeout_s = timeout_s
        self.on_wait = on_wait

    def get_batch(self, step: int, wait: Wait | None = None) -> bytes | RunEnded:
        """Waits for the batch of `step`: the bytes of its file, or the word that the run is over."""
        reply = self._ask_until(GetBatch(step), f"batch {step}", wait)
        return reply.data if isinstance(reply, BatchBytes) else reply

    def published(self, version: WeightVersion, wait: Wait | None = None) -> Acknowledged:
        """Announces a version. Returns which versions something still waits for."""
        return self._ask_until(Published(version), f"word that version {version.policy_version} was noted", wait)

    def probe(self, policy_version: int, timeout_s: float) -> list[TrainingSample]:
        """A few completions by exactly this version; none when inference has gone on, or does not get to it in time."""
        since = time.monotonic()
        while (left := timeout_s - (time.monotonic() - since)) > 0:
            address = (read_status(self.status_path) or {}).get("address")
            reply = self._ask(address, GetProbe(policy_version), left) if address else None
            if isinstance(reply, Probe):
                return reply.samples
            time.sleep(0.05)
        return []

    def _ask_until(self, request: Request, what: str, wait: Wait | None) -> BatchBytes | RunEnded | Acknowledged:
        if wait is None:
            with Wait(self.timeout_s, self.on_wait) as own:
                return self._ask_until(request, what, own)
        waiting_for = "the orchestrator to come up"
        while (left := wait.left_s()) > 0:
            wait.about(f"waiting for {what}: {waiting_for}")
            status = read_status(self.status_path)
            address = (status or {}).get("address")
            reply = self._ask(address, request, min(ATTEMPT_S, left)) if address else None
            if isinstance(reply, NotReady):
                waiting_for = reply.waiting_for
            elif reply is not None:
                wait.about("")
                return reply
            else:
                time.sleep(0.2)
        seen = read_status(self.status_path)
        last = f"{time.time() - seen['heartbeat']:.0f} s ago, {seen['doing']}" if seen else "never"
        raise OrchestratorLostError(
            f"waited {self.timeout_s:.0f} s for {what} ({waiting_for}). Last heartbeat of the orchestrator: {last}. "
            "See logs/orchestrator*.log; if the environment is just slow, raise trainer.batch_timeout_s"
        )

    def _ask(self, address: str, request: Request, timeout_s: float) -> Reply | None:
        """One attempt on a fresh socket, so that an answer to an older question is never taken for this one's."""
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(address)
            socket.send(ENCODER.encode(request))
            return REPLIES.decode(socket.recv()) if socket.poll(timeout_s * 1000) else None


class TrainerServer:
    """The orchestrator's side. `requests()` yields (peer, request); a message that is no request is counted and dropped."""

    def __init__(self, host: str, port: int):
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        try:
            self.socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise OSError(f"orchestrator.port = {port} on {host}: {error.strerror}; choose another, or 0 for a free one") from None
        bound_port = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"tcp://{reachable(host)}:{bound_port}"
        self.rejected = 0

    async def receive(self) -> tuple[bytes, Request]:
        while True:
            frames = await self.socket.recv_multipart()
            try:
                return frames[0], REQUESTS.decode(frames[-1])
            except msgspec.DecodeError:
                self.rejected += 1

    async def reply(self, peer: bytes, reply: Reply) -> None:
        await self.socket.send_multipart([peer, ENCODER.encode(reply)])

    def close(self) -> None:
        self.socket.close()
