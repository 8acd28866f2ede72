"""Inference servers over HTTP: generate, load a version, ask for the version held. Repeats the request, never the rollout.

The addresses are fixed (`orchestrator.inference_urls`) or those in the status files of the run. Of these the orchestrator says which
answer, for it looks at all of them (`follow`). A request that a server fails, or whose server is gone, is sent to another one at once; the
answer of exactly one of them counts.
"""

import asyncio
import logging
import math
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rl.run_dir.status import last_seen, read_address, server_files
from rl.run_dir.token import authorization
from rl.system import faults
from rl.system.errors import GIVE_UP, RESTART, RunError
from rl.wire.balance import Balancer, Server
from rl.wire.http import CONNECT_S, RETRY_S, AwayError, HttpClient, RefusedError
from rl.wire.messages import UNREADABLE, VersionSpan, WeightVersion
from rl.wire.worker_messages import Fleet

PROTOCOL = 3
"""Counts up when what servers are asked, or what they answer, changes its meaning."""
STATUS_S = 5.0
"""A server that does not give its version within this time gets no new requests, and after a second time in a row counts as away."""
LOOK_S = 1.0
"""Longest wait for the versions of all servers: whoever needs longer holds up no other."""
TOKEN_REMEDY = (
    "inference at {url} answers {status}: it wants its run's token. Set RL_TOKEN to the one in its run directory (status/token), or to the "
    "same value everywhere"
)

log = logging.getLogger(__name__)
T = TypeVar("T")


class PromptTooLongError(Exception):
    """The prompt leaves no room for an answer in the model's context. Caught by rollouts, which it truncates."""


class InferenceLostError(RunError):
    """No server answered within the deadline. Caught by rollouts, which it fails with the cause `inference`."""

    exit_code = RESTART


class Generation(msgspec.Struct):
    """The server's answer to `/generate`."""

    token_ids: list[int]
    logprobs: list[float | None]
    """Nan where one is not finite, which in JSON is null."""
    policy_versions: list[VersionSpan]
    finish_reason: str

    def __post_init__(self) -> None:
        self.logprobs = [math.nan if logprob is None else logprob for logprob in self.logprobs]


class Fault(msgspec.Struct):
    """Why a request is refused."""

    type: str = ""
    message: str = ""


class Refusal(msgspec.Struct):
    """The server's answer to a bad request."""

    error: Fault = msgspec.field(default_factory=Fault)


class LoadedVersion(msgspec.Struct):
    """The server's answer to `/load_weights`: the version that it holds now, and the seconds of loading it."""

    policy_version: int
    verify_s: float = 0.0
    """Checking that the files are what was written."""
    stage_s: float = 0.0
    """Reading and packing the new weights beside the old, at the same time; generation goes on."""
    drain_s: float = 0.0
    """From the order to stop until the step that ran was done; its tokens count."""
    pause_s: float = 0.0
    """From that end until the scheduler may start the next step."""


class HeldVersion(LoadedVersion):
    """The server's answer to `/status`: what it serves."""

    served_model: str = ""
    max_model_len: int = 0
    protocol: int = 0


class Expected(msgspec.Struct, frozen=True):
    """The model that a run's servers have to serve."""

    model: str
    max_model_len: int

    def fault(self, found: HeldVersion) -> str:
        """Why a server is none of the run's; empty if it may be. Of a model's place only the last part counts: nodes keep it anywhere."""
        if Path(found.served_model).name != Path(self.model).name:
            return f"serves {found.served_model}, and this run trains {self.model}: start it with this run's configuration"
        if found.max_model_len < self.max_model_len:
            longest = f"takes {found.max_model_len} tokens, and model.max_model_len = {self.max_model_len}"
            return f"{longest}: start it with this run's configuration"
        return ""


def read(content: bytes, kind: type[T]) -> T:
    """An answer's content as a `kind`. Raises InferenceLostError for any other content."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE as error:
        raise InferenceLostError(
            f"inference answers what is no answer ({error}): {content[:100]!r}. Is orchestrator.inference_urls (or what stands in "
            "status/inference.json) the address of a server of this version of rl?"
        ) from None


class InferenceServers:
    """The servers of a run. `fixed` are their addresses if they are set; `status_path` is the status file of the run's own server, beside
    which others have theirs."""

    def __init__(self, urls: list[str], status_path: Path, timeout_s: float, expected: Expected | None = None, relay: str = ""):
        self.fixed = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.status_path = status_path
        self.timeout_s = timeout_s
        self.expected = expected
        """What `held` compares servers with."""
        self.http = HttpClient(relay)
        self.authorization: dict[str, str] = {}
        """The headers with the token, read once: a request must not depend on the disk."""
        self.balancer = Balancer()
        self.fleet: Fleet | None = None
        """What the orchestrator said last; None: nothing, so this process looks for the servers by itself."""
        self.oldest = 0
        """The oldest version that may answer a new request."""
        self.known: dict[str, int] = {}
        """Sound server -> the version that it holds."""
        self.silent: set[str] = set()
        """Servers that were sound, and did not say so in time now: they keep the requests that they have."""
        self.faults: dict[str, InferenceLostError] = {}
        """Server -> why it is none of this run's."""
        self.away: dict[str, str] = {}
        """Server -> why it did not answer."""
        self.asking: dict[str, asyncio.Task[None]] = {}

    # Who is there -------------------------------------------------------------------------------------------------------

    def find(self) -> list[str]:
        """The addresses of the servers: those that are set, or those in the status files, sound or not."""
        if self.fixed:
            return self.fixed
        addresses = map(read_address, server_files(self.status_path.parent)) if self.status_path.name else ()
        return list(dict.fromkeys(url for url in addresses if url))

    def follow(self, fleet: Fleet) -> None:
        """Takes over what the orchestrator says about the servers: from now on no other one is asked for tokens."""
        self.fleet, self.oldest = fleet, fleet.oldest
        self.balancer.update(fleet.urls, fleet.closed)

    async def held(self) -> dict[str, int]:
        """The policy version of each sound server. One that is slow to answer keeps its last one until it counts as away."""
        urls = self.find()
        for url in [*self.known]:
            if url not in urls:
                del self.known[url]
        self.silent &= {*urls}
        for url in urls:
            if url not in self.asking:
                self.asking[url] = asyncio.create_task(self._ask(url))
        if self.asking:
            await asyncio.wait(self.asking.values(), timeout=LOOK_S)
        return {url: version for url, version in self.known.items() if url in urls}

    async def _ask(self, url: str) -> None:
        """Notes what a server holds, or what is wrong with it. A fault is logged once."""
        try:
            async with asyncio.timeout(STATUS_S):
                status, content = await self._send("GET", url, "/status")
            if status != 200:
                raise InferenceLostError(f"{url} is no inference server of rl: its /status answers {status}")
            found = read(content, HeldVersion)
            if found.protocol != PROTOCOL:
                other = f"{url} is a server of another version of rl (protocol {found.protocol}, here {PROTOCOL})"
                raise InferenceLostError(f"{other}: start it from the same installation as the orchestrator")
            if self.expected and (fault := self.expected.fault(found)):
                raise InferenceLostError(f"inference at {url} {fault}")
            self._note_sound(url, found.policy_version)
            self.faults.pop(url, None)
            self.away.pop(url, None)
        except InferenceLostError as error:
            if str(error) != str(self.faults.get(url)):
                log.warning("%s", error)
            self.faults[url] = error
            self._note_gone(url)
        except TimeoutError:
            self.away[url] = f"no answer within {STATUS_S:.0f} s"
            if self.known.pop(url, None) is None:
                self._note_gone(url)
            else:
                self.silent.add(url)
        except (AwayError, OSError) as error:
            self.away[url] = str(error)
            self._note_gone(url)
        finally:
            if self.asking.get(url) is asyncio.current_task():
                del self.asking[url]

    def _note_sound(self, url: str, version: int) -> None:
        self.known[url] = version
        self.silent.discard(url)

    def _note_gone(self, url: str) -> None:
        self.known.pop(url, None)
        self.silent.discard(url)

    async def wait_for_any(self, urls: Collection[str] = ()) -> dict[str, int]:
        """What the servers hold, or those at `urls`, as soon as there is a sound one. Raises InferenceLostError, at once where only wrong
        ones are set."""
        since = time.monotonic()
        while not (held := {url: version for url, version in (await self.held()).items() if not urls or url in urls}):
            faults = [self.faults[url] for url in self.find() if url in self.faults]
            lasting = [fault for fault in faults if fault.exit_code == GIVE_UP]
            if lasting or (faults and len(faults) == len(self.fixed)) or time.monotonic() - since > self.timeout_s:
                raise next(iter([*lasting, *faults]), None) or self._lost("/status", self._problems())
            await asyncio.sleep(RETRY_S)
        return held

    async def loaded_version(self, urls: Collection[str] = ()) -> int:
        """The oldest version that a server holds, or one of those at `urls`. Waits for the first of them; raises InferenceLostError."""
        return min((await self.wait_for_any(urls)).values())

    def last_seen(self) -> str:
        """What our own server last reported; of others only their addresses are known."""
        if self.fixed:
            return f"Servers: {', '.join(self.fixed)}"
        return "\n".join(f"{path.stem}: {last_seen(path)}" for path in server_files(self.status_path.parent) or [self.status_path])

    # What they are asked ------------------------------------------------------------------------------------------------

    async def generate(self, session: int, token_ids: list[int], sampling: dict[str, Any]) -> Generation:
        """Samples one completion; requests of one session go to one server as long as that is good.

        Raises PromptTooLongError, ValueError for a request the server refuses, InferenceLostError.
        """
        body = {"token_ids": token_ids, "sampling": sampling, "session": session}
        since, problem = time.monotonic(), ""
        while True:
            if not self.balancer.usable() and self.fleet is None:
                self.balancer.update(self.find())
            server, oldest = self.balancer.choose(session), self.oldest
            if (server is None or problem) and time.monotonic() - since > self.timeout_s:
                raise self._lost("/generate", problem or self._problems())
            if server is None:
                await asyncio.sleep(RETRY_S)
                continue
            began, first = time.monotonic(), not problem
            try:
                status, content = await self._fly(server, "/generate", body)
                if status == 200:
                    return self._accepted(server, read(content, Generation), oldest, began)
                fault = read(content, Refusal).error if status == 400 else Fault()
            except (AwayError, OSError) as error:  # no descriptor left, a stale handle: it may pass
                problem = f"{server.url}: {error}"
            except InferenceLostError as error:  # what it says is wrong: another one may be right
                server.failed()
                if not self.balancer.usable():
                    raise
                log.warning("inference at %s: %s", server.url, error)
                problem = str(error)
            else:
                kind = PromptTooLongError if fault.type == "prompt_too_long" else ValueError
                raise kind(fault.message or f"inference answered {status}: {content[:200]!r}")
            if first or time.monotonic() - began > self.timeout_s:
                since = time.monotonic()  # until then a server was at work
            server.failed()

    def _accepted(self, server: Server, answer: Generation, oldest: int, began: float) -> Generation:
        """The answer, if no version sampled it that is older than the server was said to hold, or that nobody has published. Raises
        AwayError."""
        versions = {span.policy_version for span in answer.policy_versions}
        if wrong := {version for version in versions if version < oldest or (self.fleet and version > self.fleet.newest)}:
            newest = f" (the newest is {self.fleet.newest})" if self.fleet else ""
            raise AwayError(f"its tokens are of version {min(wrong)}, and it was to hold {oldest} or a newer one{newest}")
        server.answered(time.monotonic() - began, len(answer.token_ids))
        return answer

    async def prepare(self, url: str, version: WeightVersion) -> None:
        """Has a server read a version that it must not use yet. Whether it can shows when it is loaded. Raises AwayError, OSError and
        InferenceLostError."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_s):
                await self._send("POST", url, "/prepare_weights", msgspec.to_builtins(version))

    async def load(self, url: str, version: WeightVersion) -> float:
        """Loads a version into one server. Returns for how long that paused generation, seconds.

        Raises AwayError if it dies meanwhile, RefusedError, and InferenceLostError for one that takes too long.
        """
        body = msgspec.to_builtins(msgspec.structs.replace(version, path=str(Path(version.path).absolute())))
        try:
            async with asyncio.timeout(self.timeout_s + CONNECT_S):
                status, content = await self._send("POST", url, "/load_weights", body)
        except TimeoutError:
            raise InferenceLostError(
                f"waited {self.timeout_s:.0f} s for inference at {url} to load version {version.policy_version}: it prepares the weights, "
                f"or waits for requests of an older adapter to end; if it is just slow, raise orchestrator.inference_timeout_s. "
                f"{self.last_seen()}"
            ) from None
        if status != 200:
            raise RefusedError(status, content[:2000].decode(errors="replace"))
        held = read(content, LoadedVersion)
        if held.policy_version != version.policy_version:
            raise InferenceLostError(f"inference at {url} was to load version {version.policy_version}, and says {held.policy_version}")
        if asked := self.asking.pop(url, None):  # before the load, perhaps
            asked.cancel()
        self._note_sound(url, held.policy_version)
        return held.pause_s

    async def _fly(self, server: Server, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """A request that is given up (AwayError) when its server is gone."""
        flight = asyncio.ensure_future(self._send("POST", server.url, path, body))
        server.flights.add(flight)
        try:
            return await flight
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise AwayError("it is gone") from None
        finally:
            server.flights.discard(flight)

    async def _send(self, method: str, url: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and content of one answer below 500. Raises AwayError or OSError where there is none, InferenceLostError for a token that
        the server does not take."""
        faults.point(f"http{path}")
        for _ in range(2):
            try:
                shown = self.authorization = self.authorization or authorization(self.status_path)
            except RunError as error:  # a token that cannot be used
                raise InferenceLostError(str(error), GIVE_UP) from None
            status, content = await self.http.request(method, url + path, body, shown)
            faults.point(f"http{path}.answered")
            if status == 403:  # not for want of a token: the server says why
                raise InferenceLostError(f"{url} refuses: {content[:500].decode(errors='replace')}", GIVE_UP)
            if status != 401:
                return status, content
            with suppress(RunError):
                self.authorization = authorization(self.status_path)
            if shown == self.authorization:
                break
        raise InferenceLostError(TOKEN_REMEDY.format(url=url, status=status), GIVE_UP)

    def _problems(self) -> str:
        """Why no server takes a request."""
        problems = [f"{url}: {problem}" for url, problem in self.away.items()] or ["no address published yet"]
        return "; ".join(problems) if self.fleet is None else "the orchestrator knows none that holds a version that may answer"

    def _lost(self, path: str, problem: str) -> InferenceLostError:
        return InferenceLostError(
            f"waited {self.timeout_s:.0f} s for inference to answer {path} ({problem}); "
            f"if it is just slow, raise orchestrator.inference_timeout_s. {self.last_seen()}"
        )

    async def close(self) -> None:
        for task in self.asking.values():
            task.cancel()
        await self.http.close()
