"""Client of the inference servers over HTTP: generates, loads versions, asks for the version held.
Repeats requests, never rollouts.

The addresses are fixed (`orchestrator.inference_urls`) or come from the run's status files. The
orchestrator polls all servers and decides which of them may answer (`follow`). If a server fails a
request or goes away, the request is sent to another one at once; exactly one answer counts.

`Balancer` chooses the server for a request by how many requests this process has in flight at each,
and by the session's last server. A slow server keeps its requests for longer, and so gets fewer;
one that has just joined gets the most. A session (the turns of rollouts that begin with the same
prompt) stays where its prefix is cached, unless that server has STAY times as many requests as the
one with the fewest.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rl.run_dir.access_token import authorization
from rl.run_dir.files import UNREADABLE
from rl.run_dir.status import last_seen, read_status, server_files
from rl.system import faults
from rl.system.errors import GIVE_UP, RESTART, RunError
from rl.wire.http import CONNECT_S, RETRY_S, AwayError, HttpClient, RefusedError
from rl.wire.messages import VersionSpan, WeightVersion
from rl.wire.turns import Turn, pack_ids
from rl.wire.worker_messages import ServerSet

STAY = 2.0
BATCHED = 16
"""Up to this many requests in flight, one more slows none of them down, because the server
batches them."""
DOWN_S = 0.5
"""A server that failed a request gets no further ones for this long."""
MAX_SESSIONS = 1 << 16
"""Number of sessions whose server is remembered; beyond it the oldest are forgotten, and lose
their cached prefix."""


class Server:
    """One server. `flights` are this process's requests in flight there."""

    def __init__(self, url: str):
        self.url = url
        self.open = True
        """Whether it takes new requests; else it only finishes those it has."""
        self.flights: set[asyncio.Task[tuple[int, bytes]]] = set()
        self.down_until = 0.0
        """When it may be used again, monotonic time."""

    def failed(self) -> None:
        """Records that a request failed."""
        self.down_until = time.monotonic() + DOWN_S


class Balancer:
    """The servers by address."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self.gone: dict[str, Server] = {}
        """Servers that went away while there was no other one to take over their requests."""
        self.last_server: dict[int, str] = {}
        """Session -> address of its server; the most recently used session is last."""

    def update(self, urls: Iterable[str], closed: Iterable[str] = ()) -> None:
        """Makes `urls` the servers that take requests, and `closed` those that only finish the
        requests they have.

        Requests at any other server are cancelled (their callers get AwayError) once there is a
        server to take them over.
        """
        known = self.servers | self.gone
        states = dict.fromkeys(closed, False) | dict.fromkeys(urls, True)
        self.servers = {url: known.pop(url, None) or Server(url) for url in states}
        for url, server in self.servers.items():
            server.open = states[url]
        self.gone = {url: server for url, server in known.items() if server.flights}
        if any(states.values()):
            for server in self.gone.values():
                for flight in server.flights:
                    flight.cancel()
            self.gone = {}

    def usable(self) -> list[Server]:
        """Returns the servers to which a request may be sent now."""
        now = time.monotonic()
        return [
            server for server in self.servers.values() if server.open and server.down_until <= now
        ]

    def choose(self, session: int) -> Server | None:
        """Returns the server for a session's next request; None if there is none."""
        if not (usable := self.usable()):
            return None
        least = min(usable, key=lambda server: len(server.flights))
        last = self.servers.get(self.last_server.pop(session, ""))
        most = STAY * max(BATCHED, len(least.flights) + 1)
        chosen = last if last in usable and len(last.flights) < most else least
        self.last_server[session] = chosen.url
        if len(self.last_server) > MAX_SESSIONS:
            del self.last_server[next(iter(self.last_server))]
        return chosen


# The client ---------------------------------------------------------------------------------------


PROTOCOL = 7
"""Incremented when the meaning of a request or an answer changes."""
STATUS_S = 5.0
"""A server that does not report its version within this time gets no new requests; after the
second time in a row it counts as away."""
OTHER_HISTORY = -1
"""Stands for a server's version if this run has a different one with the same number, because it
was trained again."""
LOOK_S = 1.0
"""Longest wait for the versions of all servers, so that a slow one does not hold up the others."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class PromptTooLongError(Exception):
    """The prompt leaves no room for an answer in the model's context. Caught by rollouts, which
    it truncates."""


class InferenceLostError(RunError):
    """No server answered within the deadline. Caught by rollouts, which it fails with the cause
    `inference`."""

    exit_code = RESTART


class Fault(msgspec.Struct):
    """The reason why a request was refused."""

    type: str = ""
    message: str = ""


class Refusal(msgspec.Struct):
    """The server's answer to a bad request."""

    error: Fault = msgspec.field(default_factory=Fault)


class LoadedVersion(msgspec.Struct):
    """The server's answer to `/load_weights`: the version it holds now, and what loading it
    cost, times in seconds."""

    policy_version: int
    pause_s: float = 0.0
    """From the end of a step until the scheduler may start the next one."""
    bytes_read: int = 0
    """What the worker that read most has read of the weights; with several workers, each reads
    its own part."""


class HeldVersion(LoadedVersion):
    """The server's answer to `/status`: what it serves."""

    content: str = ""
    """See WeightVersion."""
    served_model: str = ""
    max_model_len: int = 0
    protocol: int = 0


class Expected(msgspec.Struct, frozen=True):
    """The model that a run's servers must serve."""

    model: str
    max_model_len: int

    def fault(self, held: HeldVersion) -> str:
        """Returns why a server cannot be one of the run's, or "". Models are compared by their
        folder's name: its place differs by node."""
        fault = ""
        if Path(held.served_model).name != Path(self.model).name:
            fault = f"serves {held.served_model}, but this run trains {self.model}"
        elif held.max_model_len < self.max_model_len:
            fault = (
                f"takes {held.max_model_len} tokens, but model.max_model_len = {self.max_model_len}"
            )
        return fault and f"{fault}: start it with this run's configuration"


def read(content: bytes, kind: type[T]) -> T:
    """Decodes an answer's content as a `kind`: a Turn is msgpack, anything else JSON. Raises
    InferenceLostError for any other content."""
    try:
        decode = msgspec.msgpack.decode if kind is Turn else msgspec.json.decode
        return decode(content, type=kind)
    except UNREADABLE as error:
        raise InferenceLostError(
            f"inference sent an invalid answer ({error}): {content[:100]!r}. Is "
            "orchestrator.inference_urls (or the address in "
            "status/inference.json) that of a server of this version of rl?"
        ) from None


class InferenceServers:
    """The servers of a run. `urls` are their addresses if these are fixed; `status_path` is the
    status file of the run's own server; those of other servers are in the same folder."""

    def __init__(
        self,
        urls: list[str],
        status_path: Path,
        timeout_s: float,
        expected: Expected | None = None,
        inference_proxy: str = "",
    ):
        self.fixed = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.status_path, self.timeout_s, self.expected = status_path, timeout_s, expected
        self.http = HttpClient(inference_proxy)
        self.authorization: dict[str, str] = {}
        """The headers with the token, read once so that requests do not depend on the disk."""
        self.balancer = Balancer()
        self.fleet: ServerSet | None = None
        """The servers as last announced by the orchestrator; None: not yet, so this process
        finds them itself."""
        self.contents: dict[int, str] = {}
        """Version -> the id of its content, if known."""
        self.known: dict[str, int] = {}
        """Healthy server -> the version it holds."""
        self.silent: set[str] = set()
        """Servers that were healthy but did not answer in time lately; they keep the requests
        they have."""
        self.problems: dict[str, Exception] = {}
        """Server -> why it did not answer, or (InferenceLostError) is not usable for this run."""
        self.asking: dict[str, asyncio.Task[None]] = {}

    # Who is there ---------------------------------------------------------------------------------

    def find(self) -> list[str]:
        """Returns the servers' addresses: the fixed ones, or those in the status files of
        processes not known to be dead."""
        if self.fixed or not self.status_path.name:
            return self.fixed
        statuses = map(read_status, server_files(self.status_path.parent))
        return list(
            dict.fromkeys(
                status.address
                for status in statuses
                if status and status.address and status.lives() is not False
            )
        )

    def follow(self, fleet: ServerSet) -> None:
        """Adopts the servers announced by the orchestrator: from now on no other server is asked
        for tokens."""
        self.fleet = fleet
        self.balancer.update(fleet.urls, fleet.closed)

    async def poll_versions(self) -> dict[str, int]:
        """Polls all servers. Returns the version of each healthy one; a slow one keeps its last
        version until it counts as away."""
        urls = self.find()
        for url in {*self.known, *self.silent} - {*urls}:
            self._note(url, None)
        for url in urls:
            if url not in self.asking:
                self.asking[url] = asyncio.create_task(self._ask(url))
        if self.asking:
            await asyncio.wait(self.asking.values(), timeout=LOOK_S)
        return {url: version for url, version in self.known.items() if url in urls}

    async def _ask(self, url: str) -> None:
        """Records which version a server holds, or what is wrong with it. A fault is logged
        once."""
        try:
            try:
                async with asyncio.timeout(STATUS_S):
                    status, content = await self.send("GET", url, "/status")
            except TimeoutError:
                self.problems[url] = AwayError(f"no answer within {STATUS_S:.0f} s")
                was_healthy = url in self.known
                self._note(url, None)
                if was_healthy:
                    self.silent.add(url)
                return
            if status != 200:
                raise InferenceLostError(
                    f"{url} is not an inference server of rl: its /status answers {status}"
                )
            held = read(content, HeldVersion)
            if held.protocol != PROTOCOL:
                raise InferenceLostError(
                    f"{url} is a server of another version of rl (protocol {held.protocol}, "
                    f"here {PROTOCOL}): start it from the same installation as the orchestrator"
                )
            if self.expected and (fault := self.expected.fault(held)):
                raise InferenceLostError(f"inference at {url} {fault}")
            known = self.contents.get(held.policy_version)
            is_other = known and held.content and known != held.content
            self._note(url, OTHER_HISTORY if is_other else held.policy_version)
            self.problems.pop(url, None)
        except (InferenceLostError, AwayError, OSError) as error:
            is_fault = isinstance(error, InferenceLostError)
            if is_fault and str(error) != str(self.problems.get(url)):
                log.warning("%s", error)
            self.problems[url] = error
            self._note(url, None)
        finally:
            if self.asking.get(url) is asyncio.current_task():
                del self.asking[url]

    def _note(self, url: str, version: int | None) -> None:
        """Records the version of a healthy server; None: it is not one any more."""
        self.silent.discard(url)
        if version is None:
            self.known.pop(url, None)
        else:
            self.known[url] = version

    async def wait_for_any(self, urls: Collection[str] = ()) -> dict[str, int]:
        """Returns what the servers (or those at `urls`) hold, as soon as one is healthy. Raises
        InferenceLostError at the deadline, or at once if all fixed servers are unusable or a
        fault is permanent."""
        since = time.monotonic()
        while True:
            versions = await self.poll_versions()
            if held := {url: versions[url] for url in versions if not urls or url in urls}:
                return held
            problems = [self.problems[url] for url in self.find() if url in self.problems]
            faults = [fault for fault in problems if isinstance(fault, InferenceLostError)]
            faults.sort(key=lambda fault: fault.exit_code != GIVE_UP)
            is_late = time.monotonic() - since > self.timeout_s
            if faults and (
                is_late or faults[0].exit_code == GIVE_UP or len(faults) == len(self.fixed)
            ):
                raise faults[0]
            if is_late:
                raise self._lost("/status", self._problems())
            await asyncio.sleep(RETRY_S)

    async def loaded_version(self, urls: Collection[str] = ()) -> int:
        """Returns the oldest version that a server (or one of those at `urls`) holds. Waits for
        the first; raises InferenceLostError."""
        return min((await self.wait_for_any(urls)).values())

    def last_seen(self) -> str:
        """Describes what the run's own servers last reported; of fixed ones only the addresses
        are known."""
        if self.fixed:
            return f"Servers: {', '.join(self.fixed)}"
        files = server_files(self.status_path.parent) or [self.status_path]
        return "\n".join(f"{path.stem}: {last_seen(path)}" for path in files)

    # What they are asked --------------------------------------------------------------------------

    async def generate(self, session: int, token_ids: list[int], sampling: dict[str, Any]) -> Turn:
        """Samples one completion; requests of one session go to the same server as long as that is
        efficient.

        Raises PromptTooLongError, ValueError if the server refuses the request, and
        InferenceLostError.
        """
        body = {"token_ids": token_ids, "sampling": sampling, "session": session}
        since, problem = time.monotonic(), ""
        while True:
            if not self.balancer.usable() and self.fleet is None:
                self.balancer.update(self.find())
            server = self.balancer.choose(session)
            if (server is None or problem) and time.monotonic() - since > self.timeout_s:
                raise self._lost("/generate", problem or self._problems())
            if server is None:
                await asyncio.sleep(RETRY_S)
                continue
            began = time.monotonic()
            try:
                turn = await self._sampled(server, body)
                return msgspec.structs.replace(turn, packed_prompt=pack_ids(token_ids))
            # an OSError may be temporary: no descriptor left, a stale handle
            except (AwayError, OSError, InferenceLostError) as error:
                server.failed()
                if isinstance(error, InferenceLostError):  # another server may be fine
                    if not self.balancer.usable():
                        raise
                    log.warning("inference at %s: %s", server.url, error)
                if not problem or time.monotonic() - began > self.timeout_s:
                    since = time.monotonic()  # until now a server was working on it
                problem = f"{server.url}: {error}"

    async def _sampled(self, server: Server, body: dict[str, Any]) -> Turn:
        """Returns a server's answer. Raises AwayError if the balancer cancels the request because
        the server is gone, or a version older than was promised, or one that was not published,
        sampled any of it; PromptTooLongError, ValueError and InferenceLostError."""
        oldest = self.fleet.oldest if self.fleet else 0
        flight = asyncio.ensure_future(self.send("POST", server.url, "/generate", body))
        server.flights.add(flight)
        try:
            status, content = await flight
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise AwayError("it is gone") from None
        finally:
            server.flights.discard(flight)
        if status != 200:
            fault = read(content, Refusal).error if status == 400 else Fault()
            kind = PromptTooLongError if fault.type == "prompt_too_long" else ValueError
            raise kind(fault.message or f"inference answered {status}: {content[:200]!r}")
        turn = read(content, Turn)
        versions = [span.policy_version for span in turn.policy_versions]
        newest = self.fleet.newest if self.fleet else max(versions, default=0)
        if versions and not oldest <= min(versions) <= max(versions) <= newest:
            raise AwayError(
                f"its tokens are of versions {min(versions)} to {max(versions)}, but it should "
                f"hold {oldest} or a newer one (the newest is {newest})"
            )
        return turn

    async def versions(
        self, digests: list[str], urls: Collection[str] = ()
    ) -> dict[str, list[VersionSpan]]:
        """Returns the versions of answers to chats, by answer_digest, as far as the servers know
        them. Raises InferenceLostError."""
        known: dict[str, list[VersionSpan]] = {}
        for url in urls or self.find():
            if left := [digest for digest in digests if digest not in known]:
                with suppress(AwayError, OSError):
                    status, content = await self.send("POST", url, "/versions", {"answers": left})
                    if status == 200:
                        answers = read(content, list[list[VersionSpan] | None])
                        pairs = zip(left, answers, strict=False)
                        known |= {digest: spans for digest, spans in pairs if spans}
        return known

    async def load(self, url: str, version: WeightVersion) -> float:
        """Loads a version into one server. Returns how long this paused generation, seconds.

        Raises AwayError if the server dies meanwhile, RefusedError if it refuses, and
        InferenceLostError if it takes too long.
        """
        path = str(Path(version.path).absolute())
        body = msgspec.to_builtins(msgspec.structs.replace(version, path=path))
        try:
            async with asyncio.timeout(self.timeout_s + CONNECT_S):
                status, content = await self.send("POST", url, "/load_weights", body)
        except TimeoutError:
            raise InferenceLostError(
                f"waited {self.timeout_s:.0f} s for inference at {url} to load version "
                f"{version.policy_version}: it is preparing weights, or waiting for requests of "
                "an older adapter to end; if it is just slow, raise "
                f"orchestrator.inference_timeout_s. {self.last_seen()}"
            ) from None
        if status != 200:
            raise RefusedError(status, content[:2000].decode(errors="replace"))
        held = read(content, LoadedVersion)
        if held.policy_version != version.policy_version:
            raise InferenceLostError(
                f"inference at {url} was to load version {version.policy_version}, but has "
                f"{held.policy_version}"
            )
        if asked := self.asking.pop(url, None):  # its answer may predate the load
            asked.cancel()
        self._note(url, held.policy_version)
        return held.pause_s

    async def send(self, method: str, url: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Returns status and content of one answer below 500. Raises AwayError or OSError if
        there is none, InferenceLostError if the server rejects the token or refuses (403)."""
        faults.point(f"http{path}")
        shown: dict[str, str] | None = None
        while True:
            try:
                self.authorization = self.authorization or authorization(self.status_path)
            except RunError as error:  # a token that cannot be used
                raise InferenceLostError(str(error), GIVE_UP) from None
            if shown == self.authorization:
                raise InferenceLostError(
                    f"inference at {url} answers 401: it requires its run's token. Set RL_TOKEN "
                    "to the one in its run directory (status/token), or to the same value "
                    "everywhere",
                    GIVE_UP,
                )
            shown = self.authorization
            status, content = await self.http.request(method, url + path, body, shown)
            faults.point(f"http{path}.answered")
            if status == 403:  # not because of the token: the server gives the reason
                reason = content[:500].decode(errors="replace")
                raise InferenceLostError(f"{url} refuses: {reason}", GIVE_UP)
            if status != 401:
                return status, content
            self.authorization = {}  # it may have been replaced

    def _problems(self) -> str:
        """Describes why no server takes a request."""
        if self.fleet is not None:
            return "the orchestrator knows no server whose version may answer"
        problems = [f"{url}: {problem}" for url, problem in self.problems.items()]
        return "; ".join(problems) or "no address published yet"

    def _lost(self, path: str, problem: str) -> InferenceLostError:
        return InferenceLostError(
            f"waited {self.timeout_s:.0f} s for inference to answer {path} ({problem}); "
            f"if it is just slow, raise orchestrator.inference_timeout_s. {self.last_seen()}"
        )

    async def close(self) -> None:
        for task in self.asking.values():
            task.cancel()
        await self.http.close()
