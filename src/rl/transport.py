"""The live path between trainer and orchestrator: ZeroMQ DEALER to ROUTER, typed msgpack. The only file that knows the wire.

The orchestrator's address stands in its status file and is read again before every attempt, so either side may die and come back.
`curve://` instead of `tcp://` says that it answers only who has the run's token (see access.py); then all of it is encrypted, too.
What arrives is typed and bounded in size; what is no message is counted and dropped, by either side.
"""

import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
import zmq.auth.asyncio
import zmq.utils.z85

from rl import faults
from rl.access import AccessError, read_token
from rl.diagnosis import peer_at
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
LOOK_S = 0.5
"""So often it is looked whether the one that was asked is still the one to ask."""
ANSWER_WITHIN_S = 5.0
"""The orchestrator answers within this time, if only by NotReady."""
MAX_REQUEST_BYTES = 1 << 16
MAX_REPLY_BYTES = 1 << 34
"""Of a batch: half a billion tokens. What claims to be larger is not taken in."""
MAX_REPLIES_QUEUED = 8
"""For one asker, who asks again when a reply is dropped. Each may hold a batch."""
SAY_EVERY_S = 60.0
"""So often at most the log tells of rejected messages."""
PLAIN, GUARDED = "tcp://", "curve://"
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
SAME_TOKEN = "set RL_TOKEN to the same value everywhere, or nowhere and share the run directory"
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are no message; the last for tables nested without end."""

log = logging.getLogger(__name__)

ENCODER = msgspec.msgpack.Encoder()
REQUESTS = msgspec.msgpack.Decoder(Request)
REPLIES = msgspec.msgpack.Decoder(Reply)


class OrchestratorLostError(Exception):
    """The deadline passed; the message says who waited for what, since when, and what the orchestrator last said of itself."""


class NoAnswerError(Exception):
    """One attempt to ask came to nothing; the message says why. It is made again."""


class Rejected:
    """Counts what arrived and was no message, and tells of it now and then."""

    def __init__(self, what: str):
        self.what = what
        self.count = 0
        self.told_at, self.untold = -math.inf, 0

    def note(self, peer: str, why: object) -> None:
        self.count += 1
        self.untold += 1
        if time.monotonic() - self.told_at >= SAY_EVERY_S:
            log.warning("%s: dropped %d (%d in all); the last from %s: %s", self.what, self.untold, self.count, peer, str(why)[:200])
            self.told_at, self.untold = time.monotonic(), 0


def curve_keys(token: str, role: str) -> tuple[bytes, bytes]:
    """(public, secret) key of the `server` or the `client`, the same for everyone who has the token."""
    seed = hashlib.blake2b(token.encode(), digest_size=32, person=f"rl {role}".encode()).digest()
    secret = zmq.utils.z85.encode(seed)
    return zmq.curve_public(secret), secret


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
        self.rejected = Rejected("answers of the orchestrator")

    def get_batch(self, step: int, wait: Wait | None = None) -> bytes | RunEnded:
        """Waits for the batch of `step`: the bytes of its file, or the word that the run is over."""
        reply = self._ask_until(GetBatch(step), (BatchBytes, RunEnded), f"batch {step}", wait)
        return reply.data if isinstance(reply, BatchBytes) else reply

    def published(self, version: WeightVersion, wait: Wait | None = None) -> Acknowledged:
        """Announces a version. Returns which versions something still waits for."""
        return self._ask_until(Published(version), (Acknowledged,), f"word that version {version.policy_version} was noted", wait)

    def probe(self, policy_version: int, timeout_s: float) -> list[TrainingSample]:
        """A few completions by exactly this version; none when inference has gone on, or does not get to it in time."""
        since = time.monotonic()
        while (left := timeout_s - (time.monotonic() - since)) > 0:
            address = (read_status(self.status_path) or {}).get("address")
            with contextlib.suppress(NoAnswerError):
                reply = self._ask(str(address), GetProbe(policy_version), left) if address else None
                if isinstance(reply, Probe):
                    return reply.samples
            time.sleep(0.05)
        return []

    def _ask_until(self, request: Request, accepted: tuple[type, ...], what: str, wait: Wait | None) -> Any:
        """Asks until an answer of an accepted kind comes."""
        if wait is None:
            with Wait(self.timeout_s, self.on_wait) as own:
                return self._ask_until(request, accepted, what, own)
        waiting_for, since = "the orchestrator to come up", time.strftime("%H:%M:%S")
        while (left := wait.left_s()) > 0:
            wait.about(f"waiting for {what}: {waiting_for}")
            address = (read_status(self.status_path) or {}).get("address")
            try:
                reply = self._ask(str(address), request, min(ATTEMPT_S, left)) if address else None
                if reply and not isinstance(reply, (NotReady, *accepted)):
                    raise self._reject(address, f"a {type(reply).__name__} to a {type(request).__name__}")
            except NoAnswerError as error:
                reply, waiting_for = None, str(error)
            if isinstance(reply, NotReady):
                waiting_for = reply.waiting_for
            elif reply is not None:
                wait.about("")
                return reply
            else:
                time.sleep(0.2)
        raise OrchestratorLostError(
            f"waited {self.timeout_s:.0f} s for {what} ({waiting_for}), asked first at {since}. "
            f"The orchestrator: {peer_at(self.status_path)}\n"
            "See logs/orchestrator*.log; if the environment is just slow, raise trainer.batch_timeout_s"
        )

    def _ask(self, address: str, request: Request, timeout_s: float) -> Reply | None:
        """One attempt on a fresh socket, so that an answer to an older question is never taken for this one's. Raises NoAnswerError."""
        with zmq.Context.instance().socket(zmq.DEALER) as socket, contextlib.ExitStack() as on_exit:
            socket.linger = 0
            socket.ipv6 = True
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            if address.startswith(GUARDED):
                self._show_token(socket, address)
                on_exit.callback(socket.disable_monitor)
                poller.register(socket.get_monitor_socket(HANDSHAKE_FAILED), zmq.POLLIN)
            try:
                socket.connect(address.replace(GUARDED, PLAIN, 1))
            except zmq.ZMQError as error:
                raise NoAnswerError(f"the address {address} in {self.status_path} is none: {error.strerror}") from None
            faults.point(f"ask.{type(request).__name__}")
            socket.send(ENCODER.encode(request))
            faults.point(f"asked.{type(request).__name__}")
            ready = self._poll(poller, address, timeout_s)
            frames = socket.recv_multipart() if socket in ready else []
        if ready and not frames:
            raise NoAnswerError(f"{address} refuses the token that this process has: {SAME_TOKEN}")
        if len(frames) > 1:
            raise self._reject(address, f"{len(frames)} frames")
        try:
            return REPLIES.decode(frames[0]) if frames else None
        except UNREADABLE as error:
            raise self._reject(address, error) from None

    def _poll(self, poller: zmq.Poller, address: str, timeout_s: float) -> dict[Any, int]:
        """What is ready; nothing, soon, when the orchestrator has a successor at another address."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if ready := dict(poller.poll(min(left, LOOK_S) * 1000)):
                return ready
            if (read_status(self.status_path) or {}).get("address", address) != address:
                break
        return {}

    def _show_token(self, socket: zmq.Socket, address: str) -> None:
        try:
            token = read_token(self.status_path.parent)
        except AccessError as error:
            raise NoAnswerError(str(error)) from None
        if token is None:
            raise NoAnswerError(f"{address} wants the run's token and this process has none: {SAME_TOKEN}")
        socket.curve_publickey, socket.curve_secretkey = curve_keys(token, "client")
        socket.curve_serverkey, _ = curve_keys(token, "server")

    def _reject(self, address: str, why: object) -> NoAnswerError:
        self.rejected.note(address, why)
        return NoAnswerError(f"{address} answers what is no answer ({why}): is it this run's orchestrator, of the same version of rl?")


class TrainerServer:
    """The orchestrator's side. `receive()` gives (peer, request); a message that is no request is counted and dropped.

    With a token it answers only who has it, too. Made inside of a running event loop.
    """

    def __init__(self, host: str, port: int, token: str | None = None):
        context = zmq.asyncio.Context.instance()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.ipv6 = ":" in host
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self.socket.setsockopt(zmq.SNDHWM, MAX_REPLIES_QUEUED)
        self.rejected = Rejected("requests of the trainer")
        self.guard = self._guard(context, token) if token else None
        brackets = f"[{host}]" if ":" in host else host
        try:
            self.socket.bind(f"{PLAIN}{brackets}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(
                error.errno, f"orchestrator.port = {port} on {host}: {error.strerror}; choose another, or 0 for a free one"
            ) from None
        bound_port = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        name = reachable(host)
        self.address = f"{GUARDED if token else PLAIN}{f'[{name}]' if ':' in name else name}:{bound_port}"

    def _guard(self, context: zmq.asyncio.Context, token: str) -> zmq.auth.asyncio.AsyncioAuthenticator:
        """Lets in whoever has the keys that follow from the token. Knowing ours is half of it: they never cross the wire."""
        known, _ = curve_keys(token, "client")
        self.socket.curve_server = True
        _, self.socket.curve_secretkey = curve_keys(token, "server")
        self.socket.zap_domain = b"rl"

        class Known:
            def callback(self, _domain: str, key: bytes) -> bool:
                return key == known

        guard = zmq.auth.asyncio.AsyncioAuthenticator(context)
        guard.start()
        guard.configure_curve_callback(domain="rl", credentials_provider=Known())
        return guard

    async def receive(self) -> tuple[bytes, Request]:
        """Waits for the next request."""
        while True:
            peer, *frames = await self.socket.recv_multipart(copy=False)
            try:
                if len(frames) == 1:
                    return peer.bytes, REQUESTS.decode(frames[0].buffer)
                why: object = f"{len(frames)} frames"
            except UNREADABLE as error:
                why = error
            self.rejected.note(peer.get("Peer-Address"), why)

    async def reply(self, peer: bytes, reply: Reply) -> None:
        faults.point(f"answer.{type(reply).__name__}")
        await self.socket.send_multipart([peer, ENCODER.encode(reply)])
        faults.point(f"answered.{type(reply).__name__}")

    def close(self) -> None:
        self.socket.close()
        if self.guard:
            self.guard.stop()
