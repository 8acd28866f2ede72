"""The live path between trainer and orchestrator: ZeroMQ DEALER to ROUTER, typed msgpack. Only this
file knows the wire protocol.

The orchestrator's address is in its status file and is read again before every attempt, so either
side may die and come back. It answers only processes that have the run's token (see
run_dir/access_token.py), and all traffic is encrypted: its address begins with `curve://`. Messages
are typed and bounded in size; each side counts and drops invalid ones. Large data is not sent: a
batch is read from its file in the run directory, which all nodes share.
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

from rl.run_dir.access_token import read_token
from rl.run_dir.files import UNREADABLE, CorruptFileError
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Phase, describe, last_seen, reachable, read_address
from rl.system import faults
from rl.system.errors import RESTART, RunError
from rl.system.linux import bind
from rl.wire.batch_file import is_batch
from rl.wire.messages import (
    Acknowledged,
    BatchReady,
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

ATTEMPT_S = 20.0
"""One request waits this long for an answer before it is sent again; the orchestrator answers
NotReady well before that."""
ADDRESS_CHECK_S = 0.5
"""Interval at which a waiting client checks whether the orchestrator has a new address."""
ANSWER_WITHIN_S = 5.0
"""The orchestrator answers within this time, even if only with NotReady."""
MAX_REQUEST_BYTES = 1 << 16
MAX_REPLY_BYTES = 1 << 26
"""The largest replies are probes, up to four contexts. ZeroMQ closes the connection if a message
is larger."""
MAX_REPLIES_QUEUED = 8
"""Per client; a client whose reply is dropped asks again."""
SEEN_WITHIN_S = 5.0
"""A file that another node wrote may become visible later than the message about it, because NFS
caches directories. After this time the batch is asked for again; a file of the right size with
another checksum is damaged."""
WARN_EVERY_S = 60.0
"""Shortest interval between log lines about rejected messages."""
PLAIN, ENCRYPTED = "tcp://", "curve://"
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
SAME_TOKEN = "set RL_TOKEN to the same value everywhere, or nowhere and share the run directory"

log = logging.getLogger(__name__)

ENCODER = msgspec.msgpack.Encoder()
REQUESTS = msgspec.msgpack.Decoder(Request)
REPLIES = msgspec.msgpack.Decoder(Reply)


class NoAnswerError(Exception):
    """One attempt at a request failed; the message says why. The caller retries."""


class Rejected:
    """Counts invalid messages, and logs a warning at most every WARN_EVERY_S seconds."""

    def __init__(self, what: str):
        self.what, self.count, self.logged_at = what, 0, -math.inf

    def note(self, peer: str, why: object) -> None:
        self.count += 1
        if time.monotonic() - self.logged_at >= WARN_EVERY_S:
            text = "%s: dropped %d in all; the last from %s: %s"
            log.warning(text, self.what, self.count, peer, str(why)[:200])
            self.logged_at = time.monotonic()


def curve_keys(token: str, role: str) -> tuple[bytes, bytes]:
    """Returns the (public, secret) key of the role `server` or `client`, derived from the token."""
    seed = hashlib.blake2b(token.encode(), digest_size=32, person=f"rl {role}".encode()).digest()
    secret = zmq.utils.z85.encode(seed)
    return zmq.curve_public(secret), secret


class Wait:
    """A wait for answers, with a deadline and a status text that apply only inside `with wait:`.

    A prefetching thread may take as long as it needs; once its owner blocks on the result, the
    deadline of `timeout_s` starts, and `on_wait` (such as `Status.enter`) is called with the phase,
    its step and a detail for people.
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
        """Sets and reports what is waited for."""
        self.what = phase, step, detail
        self._report()

    def over(self) -> None:
        """Marks that nothing is waited for at the moment."""
        self.what = None

    def _report(self) -> None:
        if self.since is not None and self.what:
            self.on_wait(*self.what)

    def left_s(self, asked: float = -math.inf) -> float:
        """Returns the seconds until the deadline; inf outside of `with wait:`. `asked`: when the
        question was asked (time.monotonic): the owner may have waited for something else before."""
        since = self.since  # the owner may stop waiting at any time
        return (
            math.inf if since is None else self.timeout_s - (time.monotonic() - max(since, asked))
        )


class OrchestratorClient:
    """The trainer's side; used only by rank 0. Blocking and thread-safe."""

    def __init__(self, run_dir: RunDir, gives_up: Callable[[], bool] = lambda: False):
        """`gives_up`: whether to wait for answers no longer than for ADDRESS_CHECK_S, because
        this process is about to end."""
        self.run_dir, self.gives_up = run_dir, gives_up
        self.status_path = run_dir.status("orchestrator")

    def get_batch(self, step: int, wait: Wait) -> bytes | RunEnded | None:
        """Waits for the batch of `step`. Returns the bytes of its file, or RunEnded if the run is
        over, or None if it gives up.

        Raises CorruptFileError if the file is damaged, RunError at the deadline.
        """
        while True:
            what, accepted = f"batch {step}", (BatchReady, RunEnded)
            reply = self._ask_until(
                GetBatch(step), accepted, what, Phase.WAITING_FOR_BATCH, step, wait
            )
            if not isinstance(reply, BatchReady):
                return reply
            if data := self._read_batch(step, reply, wait):
                wait.over()
                return data

    def _read_batch(self, step: int, ready: BatchReady, wait: Wait) -> bytes:
        """Reads a batch's file; returns b"" if it does not become visible in time: a repair may
        have replaced it.

        Raises CorruptFileError if the file is damaged, RunError at the deadline.
        """
        path, seen_by = self.run_dir.batch(step), time.monotonic() + SEEN_WITHIN_S
        while True:
            data = b""
            with contextlib.suppress(OSError):
                if path.stat().st_size == ready.size and is_batch(data := path.read_bytes(), ready):
                    return data
            if time.monotonic() >= seen_by:
                if data:
                    raise CorruptFileError(f"{path}: damaged, its checksum does not match")
                return b""
            if wait.left_s() <= 0:
                raise RunError(
                    f"waited {wait.timeout_s:.0f} s for {path}, which the orchestrator wrote, to "
                    "become visible: output_dir must be on a file system that all nodes share, "
                    "under the same path",
                    RESTART,
                )
            wait.about(Phase.WAITING_FOR_BATCH, step, f"{path} to become visible")
            time.sleep(0.2)

    def published(self, version: WeightVersion, wait: Wait) -> Acknowledged | None:
        """Announces a version. Returns which versions are still needed, or None if it gives up."""
        number = version.policy_version
        what = f"the acknowledgement of version {number}"
        return self._ask_until(
            Published(version), (Acknowledged,), what, Phase.ANNOUNCING_VERSION, number, wait
        )

    def probe(self, policy_version: int, timeout_s: float) -> list[TrainingSample]:
        """Returns completions by exactly this version; none if inference holds a later one, or
        fails to load it within `timeout_s`, or if the client gives up."""
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0 and not self.gives_up():
            with contextlib.suppress(NoAnswerError):
                reply = self._ask(GetProbe(policy_version), left)
                if isinstance(reply, Probe):
                    return reply.samples
            time.sleep(0.05)
        return []

    def _ask_until(
        self,
        request: Request,
        accepted: tuple[type, ...],
        what: str,
        phase: Phase,
        step: int,
        wait: Wait,
    ) -> Any:
        """Asks until an answer of an accepted type comes, or gives up and returns None. The
        RunError at the deadline names `what`; the status shows phase and step."""
        detail = "the orchestrator to come up"
        asked, since = time.monotonic(), time.strftime("%H:%M:%S")
        while (left := wait.left_s(asked)) > 0:
            wait.about(phase, step, detail)
            try:
                reply = self._ask(request, min(ATTEMPT_S, left), accepted)
            except NoAnswerError as error:
                reply, detail = None, str(error)
            if isinstance(reply, accepted) or self.gives_up():
                wait.over()
                return reply if isinstance(reply, accepted) else None
            if isinstance(reply, NotReady):
                detail = describe(reply.status)
            else:
                time.sleep(0.2)
        raise RunError(
            f"waited {wait.timeout_s:.0f} s for {what} ({detail}), first asked at {since}. "
            f"The orchestrator: {last_seen(self.status_path)}\n"
            "See logs/orchestrator*.log; if the environment is just slow, raise "
            "trainer.batch_timeout_s",
            RESTART,
        )

    def _ask(
        self, request: Request, timeout_s: float, accepted: tuple[type, ...] = (Probe,)
    ) -> Reply | None:
        """Makes one attempt on a fresh socket, so that a late answer to an older request cannot
        be mistaken. Returns NotReady or an answer of an accepted type; None if there is none.
        Raises NoAnswerError."""
        if not (address := read_address(self.status_path)):
            return None
        name = type(request).__name__
        with zmq.Context.instance().socket(zmq.DEALER) as socket, contextlib.ExitStack() as on_exit:
            socket.linger = 0
            socket.ipv6 = True
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            self._authenticate(socket, address)
            on_exit.callback(socket.disable_monitor)
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(socket.get_monitor_socket(HANDSHAKE_FAILED), zmq.POLLIN)
            try:
                socket.connect(address.replace(ENCRYPTED, PLAIN, 1))
            except zmq.ZMQError as error:
                raise NoAnswerError(
                    f"the address {address} in {self.status_path} is invalid: {error.strerror}"
                ) from None
            faults.point(f"ask.{name}")
            socket.send(ENCODER.encode(request))
            faults.point(f"asked.{name}")
            ready = self._poll(poller, address, timeout_s)
            if not ready:
                return None
            if socket not in ready:
                raise NoAnswerError(f"{address} rejects this process's token: {SAME_TOKEN}")
            frames = socket.recv_multipart()
        why: object = f"{len(frames)} frames"
        try:
            if len(frames) == 1:
                reply = REPLIES.decode(frames[0])
                if isinstance(reply, (NotReady, *accepted)):
                    return reply
                why = f"a {type(reply).__name__} in reply to a {name}"
        except UNREADABLE as error:
            why = error
        raise NoAnswerError(
            f"{address} sent an invalid answer ({why}): is it this run's orchestrator, of "
            "the same version of rl?"
        )

    def _poll(self, poller: zmq.Poller, address: str, timeout_s: float) -> dict[Any, int]:
        """Returns the sockets that are ready; empty after `timeout_s`, or soon after the
        orchestrator came back at another address, or if the client gives up."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if ready := dict(poller.poll(int(min(left, ADDRESS_CHECK_S) * 1000))):
                return ready
            if self.gives_up() or read_address(self.status_path) not in (None, address):
                break
        return {}

    def _authenticate(self, socket: zmq.Socket, address: str) -> None:
        try:
            token = read_token(self.status_path.parent)
        except (RunError, OSError) as error:
            raise NoAnswerError(str(error)) from None
        if token is None:
            raise NoAnswerError(
                f"{address} requires the run's token, but this process has none: {SAME_TOKEN}"
            )
        socket.curve_publickey, socket.curve_secretkey = curve_keys(token, "client")
        socket.curve_serverkey, _ = curve_keys(token, "server")


class TrainerServer:
    """The orchestrator's side. Invalid requests are counted and dropped.

    It answers only clients that have the token. Must be constructed inside a running event loop.
    """

    def __init__(self, host: str, port: int, token: str):
        bind(host, port, "orchestrator.port").close()  # its faults have better words than zmq's
        # its own, because an authenticator applies to a whole context
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.ipv6 = ":" in host
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self.socket.setsockopt(zmq.SNDHWM, MAX_REPLIES_QUEUED)
        self.rejected = Rejected("requests of the trainer")
        self.authenticator = self._authenticator(token)
        brackets = f"[{host}]" if ":" in host else host
        self.socket.bind(f"{PLAIN}{brackets}:{port or '*'}")
        bound_port = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        name = reachable(host)
        self.address = f"{ENCRYPTED}{f'[{name}]' if ':' in name else name}:{bound_port}"

    def _authenticator(self, token: str) -> zmq.auth.asyncio.AsyncioAuthenticator:
        """Admits clients with the keys derived from the token. Knowing the server's public key
        is not enough."""
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
        """Waits for the next request. Returns (sender, request); pass the sender to `reply`."""
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
