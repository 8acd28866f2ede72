"""Inference servers over HTTP: generate, load a version, ask for the version held. Repeats the request, never the rollout."""

import asyncio
import math
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rl.run_dir.status import last_seen, read_address
from rl.run_dir.token import authorization
from rl.system import faults
from rl.system.errors import GIVE_UP, RESTART, RunError
from rl.wire.http import CONNECT_S, RETRY_S, AwayError, HttpClient, RefusedError
from rl.wire.messages import UNREADABLE, VersionSpan, WeightVersion

ATTEMPT_S = 20.0
"""A server answers a GET at once, unless it is stopped: after this time it is asked again."""
STATUS_S = 5.0
"""A server that does not give its version within this time counts as away."""
TOKEN_REMEDY = (
    "inference at {url} answers {status}: it wants its run's token. Set RL_TOKEN to the one in its run directory (status/token), or to the "
    "same value everywhere"
)

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


class HeldVersion(msgspec.Struct):
    """The server's answer to `/load_weights` and `/status`: the version that it holds, and the seconds of loading it."""

    policy_version: int
    verify_s: float = 0.0
    """Checking that the files are what was written, and fit."""
    stage_s: float = 0.0
    """Reading and packing the new weights beside the old; generation goes on."""
    drain_s: float = 0.0
    """From the order to stop until the step that ran was done; its tokens count."""
    pause_s: float = 0.0
    """From that end until the scheduler may start the next step."""


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
    """The servers of a run: fixed addresses, or the one in the status file, read again after every failure."""

    def __init__(self, urls: list[str], status_path: Path, timeout_s: float):
        self.fixed = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.status_path = status_path
        self.timeout_s = timeout_s
        self.address: str | None = None
        self.http = HttpClient()
        self.authorization: dict[str, str] = {}
        """The headers with the token, read once: a request must not depend on the disk."""

    @property
    def count(self) -> int:
        return max(1, len(self.fixed))

    def url(self, server: int) -> str | None:
        if self.fixed:
            return self.fixed[server % len(self.fixed)]
        if self.address is None:
            self.address = read_address(self.status_path)
        return self.address

    async def generate(self, server: int, token_ids: list[int], sampling: dict[str, Any]) -> Generation:
        """Samples one completion. Raises PromptTooLongError, ValueError for a request the server refuses, InferenceLostError."""
        status, content = await self._call("POST", server, "/generate", {"token_ids": token_ids, "sampling": sampling})
        if status != 200:
            fault = read(content, Refusal).error if status == 400 else Fault()
            kind = PromptTooLongError if fault.type == "prompt_too_long" else ValueError
            raise kind(fault.message or f"inference answered {status}: {content[:200]!r}")
        return read(content, Generation)

    async def load(self, version: WeightVersion) -> float:
        """Loads a version into every server. Returns the longest pause of generation, seconds.

        Servers that die meanwhile are asked again when they are back. Raises InferenceLostError, RefusedError.
        """
        body = {"policy_version": version.policy_version, "path": str(Path(version.path).absolute())}
        try:
            async with asyncio.timeout(self.timeout_s + CONNECT_S):  # a server that is away is `_call`'s to report
                replies = await asyncio.gather(*(self._call("POST", server, "/load_weights", body) for server in range(self.count)))
        except TimeoutError:
            raise InferenceLostError(
                f"waited {self.timeout_s:.0f} s for inference to load version {version.policy_version}: it prepares the weights, or "
                "waits for requests of an older adapter to end; if it is just slow, raise orchestrator.inference_timeout_s. "
                + self.last_seen()
            ) from None
        for status, content in replies:
            if status != 200:
                raise RefusedError(status, content[:2000].decode(errors="replace"))
        return max(read(content, HeldVersion).pause_s for _, content in replies)

    async def loaded_version(self) -> int:
        """The policy version of the servers, the oldest if they differ. Waits until all are up."""
        replies = await asyncio.gather(*(self._call("GET", server, "/status") for server in range(self.count)))
        return min(read(content, HeldVersion).policy_version for _, content in replies)

    async def held(self) -> list[int | None]:
        """The policy version of each server, None for one that does not answer at once."""
        return list(await asyncio.gather(*(self._held_by(server) for server in range(self.count))))

    async def _held_by(self, server: int) -> int | None:
        try:
            async with asyncio.timeout(STATUS_S):
                status, content = await self._call("GET", server, "/status")
            return read(content, HeldVersion).policy_version if status == 200 else None
        except (TimeoutError, InferenceLostError):
            return None

    def last_seen(self) -> str:
        """What our own server last reported; of others only their addresses are known."""
        return f"Servers: {', '.join(self.fixed)}" if self.fixed else f"Inference: {last_seen(self.status_path)}"

    async def _call(self, method: str, server: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and content of one request, repeated while its server is away; any answer below 500 is final.

        A GET has a deadline of its own; for other requests the caller sets one.
        """
        since = time.monotonic()
        problem = "no address published yet"
        while time.monotonic() - since < self.timeout_s:
            url = self.url(server)
            if url is not None:
                faults.point(f"http{path}")
                try:
                    shown = self.authorization = self.authorization or authorization(self.status_path)
                    attempt_s = ATTEMPT_S if method == "GET" else None
                    status, content = await self.http.request(method, url + path, body, shown, timeout_s=attempt_s)
                    faults.point(f"http{path}.answered")
                    if status not in (401, 403):
                        return status, content
                    self.authorization = authorization(self.status_path)
                    if shown == self.authorization:
                        raise InferenceLostError(TOKEN_REMEDY.format(url=url, status=status), GIVE_UP)
                except (AwayError, OSError) as error:  # no descriptor left, a stale handle: it may pass
                    problem = f"{url}: {error}"
                except InferenceLostError:
                    raise
                except RunError as error:  # a token that cannot be used
                    raise InferenceLostError(str(error), GIVE_UP) from None
            self.address = None  # its successor has another
            await asyncio.sleep(RETRY_S)
        raise InferenceLostError(
            f"waited {self.timeout_s:.0f} s for inference server {server} to answer {path} ({problem}); "
            f"if it is just slow, raise orchestrator.inference_timeout_s. {self.last_seen()}"
        )

    async def close(self) -> None:
        await self.http.close()
