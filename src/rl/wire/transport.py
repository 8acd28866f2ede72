"""The live path between trainer and orchestrator: ZeroMQ DEALER to ROUTER, typed msgpack. The only file that knows the wire.

The orchestrator's address is in its status file and is read again before every attempt, so either side may die and come back.
It answers only processes that have the run's token (see run_dir/token.py), and all is encrypted: its address begins with `curve://`.
What arrives is typed and bounded in size; bytes that are no message are counted and dropped, by either side. What is large does not cross
it: a batch is read from its file in the run directory, and comes in parts only where that is not seen.
"""

import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq
import zmq.asyncio
import zmq.auth.asyncio
import zmq.utils.z85

from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Phase, describe, last_seen, reachable, read_address
from rl.run_dir.token import read_token
from rl.system import faults
from rl.system.errors import RESTART, RunError
from rl.wire.batch_file import is_batch
from rl.wire.messages import (
    UNREADABLE,
    Acknowledged,
    BatchPart,
    BatchReady,
    Coming,
    GetBatch,
    GetBatchPart,
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

ATTEMPT_S = 20.0
"""One request waits this long for an answer before it is sent again; the orchestrator answers NotReady well before."""
ADDRESS_CHECK_S = 0.5
"""So often the client checks, while it waits, whether the orchestrator has another address now."""
COMING_S = 1.0
ANSWER_WITHIN_S = 5.0
"""The orchestrator answers within this time, if only by NotReady."""
MAX_REQUEST_BYTES = 1 << 16
MAX_REPLY_BYTES = 1 << 26
"""The largest are a probe's, four contexts, and parts of a batch. ZeroMQ closes the connection of a larger message."""
MAX_REPLIES_QUEUED = 8
"""For one client, which asks again when a reply is dropped."""
SEEN_WITHIN_S = 5.0
"""A file on a shared disk that another node wrote may come into view later than the word of it: NFS keeps what it knew of a directory."""
WARN_EVERY_S = 60.0
"""Rejected messages are logged at most this often."""
PLAIN, ENCRYPTED = "tcp://", "curve://"
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
SAME_TOKEN = "set RL_TOKEN to the same value everywhere, or nowhere and share the run directory"

log = logging.getLogger(__name__)

ENCODER = msgspec.msgpack.Encoder()
REQUESTS = msgspec.msgpack.Decoder(Request)
REPLIES = msgspec.msgpack.Decoder(Reply)


class NoAnswerError(Exception):
    """One attempt to ask failed; the message says why. Another one follows."""


class Rejected:
    """Counts what arrived and was no message, and logs a warning at most every WARN_EVERY_S seconds."""

    def __init__(self, what: str):
        self.what = what
        self.count = self.num_logged = 0
        self.logged_at = -math.inf

    def note(self, peer: str, why: object) -> None:
        self.count += 1
        if time.monotonic() - self.logged_at >= WARN_EVERY_S:
            new = self.count - self.num_logged
            log.warning("%s: dropped %d (%d in all); the last from %s: %s", self.what, new, self.count, peer, str(why)[:200])
            self.logged_at, self.num_logged = time.monotonic(), self.count


def curve_keys(token: str, role: str) -> tuple[bytes, bytes]:
    """(public, secret) key of the `server` or the `client`, the same for everyone who has the token."""
    seed = hashlib.blake2b(token.encode(), digest_size=32, person=f"rl {role}".encode()).digest()
    secret = zmq.utils.z85.encode(seed)
    return zmq.curve_public(secret), secret


class Wait:
    """A wait for answers, with a deadline and a text for the status, both only inside `with wait:`.

    A thread asks ahead for what is not needed yet, for as long as it takes; once its owner is held up, the deadline of `timeout_s` counts
    and `on_wait` (as `Status.enter`) is called with the phase, its step and a detail for people.
    """

    def __init__(self, timeout_s: float, on_wait: Callable[[Phase, int, str], None]):
        self.timeout_s, self.on_wait = timeout_s, on_wait
        self.since: float | None = None
        self.what: tuple[Phase, int, str] | None = None

    def __enter__(self) -> "Wait":
        self.since = time.monotonic()
        self._report()
        return self

    def __exit__(self, *_: object) -> None:
        self.since = None

    def about(self, phase: Phase, step: int, detail: str = "") -> None:
        """Sets what is waited for."""
        self.what = phase, step, detail
        self._report()

    def over(self) -> None:
        """Nothing is waited for at the moment."""
        self.what = None

    def _report(self) -> None:
        if self.since is not None and self.what:
            self.on_wait(*self.what)

    def renew(self) -> None:
        """Begins the deadline anew: something has come."""
        if self.since is not None:
            self.since = time.monotonic()

    def left_s(self) -> float:
        """Seconds until the deadline."""
        since = self.since  # the owner may stop waiting at any time
        return math.inf if since is None else self.timeout_s - (time.monotonic() - since)


class OrchestratorClient:
    """The trainer's side; used by rank 0 alone. Blocking; several threads may call it at once."""

    def __init__(self, run_dir: RunDir):
        self.run_dir, self.status_path = run_dir, run_dir.status("orchestrator")
        self.sees_files = True
        """Whether the last batch was read from its file: if not, it is not waited for the next one to come into view."""
        self.rejected = Rejected("answers of the orchestrator")

    def get_batch(self, step: int, wait: Wait) -> bytes | RunEnded:
        """Waits for the batch of `step`: the bytes of its file, or why the run is over.

        Raises CorruptFileError when the orchestrator's own file is not what was written, RunError at the deadline.
        """
        damaged = None
        while True:
            reply = self._ask_until(GetBatch(step), (BatchReady, RunEnded), f"batch {step}", Phase.WAITING_FOR_BATCH, step, wait)
            if isinstance(reply, RunEnded):
                return reply
            data = self._read_batch(step, reply, wait)
            if data is None:
                data = self._receive_batch(step, reply, wait)
                if not is_batch(data, reply):
                    if reply == damaged:
                        raise CorruptFileError(f"{self.run_dir.batch(step)}: damaged, its checksum does not fit")
                    damaged = reply  # or another one by now, after a repair
                    continue
            wait.over()
            return data

    def _read_batch(self, step: int, ready: BatchReady, wait: Wait) -> bytes | None:
        """The bytes of the file in the run directory; None if what is seen there is not what the orchestrator wrote."""
        path, deadline = self.run_dir.batch(step), time.monotonic() + SEEN_WITHIN_S
        while True:
            with contextlib.suppress(OSError):
                if path.stat().st_size == ready.size and is_batch(data := path.read_bytes(), ready):
                    self.sees_files = True
                    return data
            if not (self.sees_files and path.parent.is_dir()) or time.monotonic() >= deadline:
                break
            wait.about(Phase.WAITING_FOR_BATCH, step, f"{path} to come into view")
            time.sleep(0.2)
        if self.sees_files:
            log.warning("%s is not what the orchestrator wrote, as seen from here: batches come through the network", path)
        self.sees_files = False
        return None

    def _receive_batch(self, step: int, ready: BatchReady, wait: Wait) -> bytes:
        """The bytes of the file in parts, as many as come. The deadline counts from part to part."""
        data = bytearray()
        while len(data) < ready.size:
            what = f"batch {step} in parts, {len(data) >> 20} of {ready.size >> 20} MiB received"
            part = self._ask_until(GetBatchPart(step, len(data)), (BatchPart,), what, Phase.WAITING_FOR_BATCH, step, wait).data
            if not part:
                break
            data += part
            wait.renew()
        return bytes(data)

    def published(self, version: WeightVersion, wait: Wait) -> Acknowledged:
        """Announces a version. Returns which versions something still waits for."""
        number = version.policy_version
        what = f"the acknowledgement of version {number}"
        return self._ask_until(Published(version), (Acknowledged,), what, Phase.ANNOUNCING_VERSION, number, wait)

    def coming(self, version: WeightVersion) -> None:
        """Tells of a version that servers may prepare while it is hashed. Nothing depends on it: one attempt, of a second at most."""
        with contextlib.suppress(NoAnswerError):
            if address := read_address(self.status_path):
                self._ask(address, Coming(version), COMING_S)

    def probe(self, policy_version: int, timeout_s: float) -> list[TrainingSample]:
        """A few completions by exactly this version; none when inference holds a later one, or does not load it within `timeout_s`."""
        since = time.monotonic()
        while (left := timeout_s - (time.monotonic() - since)) > 0:
            address = read_address(self.status_path)
            with contextlib.suppress(NoAnswerError):
                reply = self._ask(address, GetProbe(policy_version), left) if address else None
                if isinstance(reply, Probe):
                    return reply.samples
            time.sleep(0.05)
        return []

    def _ask_until(self, request: Request, accepted: tuple[type, ...], what: str, phase: Phase, step: int, wait: Wait) -> Any:
        """Asks until an answer of an accepted kind comes. The error at the deadline names `what`, the status meanwhile phase and step."""
        detail = "the orchestrator to come up" if not isinstance(request, GetBatchPart) else what
        since = time.strftime("%H:%M:%S")
        while (left := wait.left_s()) > 0:
            wait.about(phase, step, detail)
            address = read_address(self.status_path)
            try:
                reply = self._ask(address, request, min(ATTEMPT_S, left)) if address else None
                if reply and not isinstance(reply, (NotReady, *accepted)):
                    raise self._reject(address, f"a {type(reply).__name__} to a {type(request).__name__}")
            except NoAnswerError as error:
                reply, detail = None, str(error)
            if isinstance(reply, NotReady):
                detail = describe(reply.status)
            elif reply is not None:
                wait.over()
                return reply
            else:
                time.sleep(0.2)
        raise RunError(
            f"waited {wait.timeout_s:.0f} s for {what} ({detail}), asked first at {since}. "
            f"The orchestrator: {last_seen(self.status_path)}\n"
            "See logs/orchestrator*.log; if the environment is just slow, raise trainer.batch_timeout_s",
            RESTART,
        )

    def _ask(self, address: str, request: Request, timeout_s: float) -> Reply | None:
        """One attempt on a fresh socket, so that an answer to an older request is never taken for this one's. Raises NoAnswerError."""
        with zmq.Context.instance().socket(zmq.DEALER) as socket, contextlib.ExitStack() as on_exit:
            socket.linger = 0
            socket.ipv6 = True
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            self._authenticate(socket, address)
            on_exit.callback(socket.disable_monitor)
            poller.register(socket.get_monitor_socket(HANDSHAKE_FAILED), zmq.POLLIN)
            try:
                socket.connect(address.replace(ENCRYPTED, PLAIN, 1))
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
        """The sockets that are ready; none after `timeout_s`, or soon after the orchestrator came back at another address."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if ready := dict(poller.poll(min(left, ADDRESS_CHECK_S) * 1000)):
                return ready
            if read_address(self.status_path) not in (None, address):
                break
        return {}

    def _authenticate(self, socket: zmq.Socket, address: str) -> None:
        try:
            token = read_token(self.status_path.parent)
        except (RunError, OSError) as error:
            raise NoAnswerError(str(error)) from None
        if token is None:
            raise NoAnswerError(f"{address} wants the run's token and this process has none: {SAME_TOKEN}")
        socket.curve_publickey, socket.curve_secretkey = curve_keys(token, "client")
        socket.curve_serverkey, _ = curve_keys(token, "server")

    def _reject(self, address: str, why: object) -> NoAnswerError:
        self.rejected.note(address, why)
        return NoAnswerError(f"{address} answers what is no answer ({why}): is it this run's orchestrator, of the same version of rl?")


class TrainerServer:
    """The orchestrator's side. A message that is no request is counted and dropped.

    It answers only clients that have the token, too. Constructed inside a running event loop.
    """

    def __init__(self, host: str, port: int, token: str):
        self.context = zmq.asyncio.Context()  # of its own: an authenticator is its context's
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.ipv6 = ":" in host
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self.socket.setsockopt(zmq.SNDHWM, MAX_REPLIES_QUEUED)
        self.rejected = Rejected("requests of the trainer")
        self.authenticator = self._authenticator(token)
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
        self.address = f"{ENCRYPTED}{f'[{name}]' if ':' in name else name}:{bound_port}"

    def _authenticator(self, token: str) -> zmq.auth.asyncio.AsyncioAuthenticator:
        """Admits clients that have the keys derived from the token. The server's public key alone admits nobody."""
        known, _ = curve_keys(token, "client")
        self.socket.curve_server = True
        _, self.socket.curve_secretkey = curve_keys(token, "server")
        self.socket.zap_domain = b"rl"
        provider = SimpleNamespace(callback=lambda _domain, key: key == known)
        authenticator = zmq.auth.asyncio.AsyncioAuthenticator(self.context)
        authenticator.start()
        authenticator.configure_curve_callback(domain="rl", credentials_provider=provider)
        return authenticator

    async def receive(self) -> tuple[bytes, Request]:
        """Waits for the next request. Returns it behind its sender, to whom `reply` goes."""
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
        self.authenticator.stop()
        self.context.term()
