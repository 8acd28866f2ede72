"""Inference servers over HTTP: generate, load a version, wait until one is up. Repeats the request, never the rollout."""

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rl.messages import VersionSpan, WeightVersion
from rl.status import read_status

RETRY_S = 0.5
CONNECT_S = 10.0
JSON = {"Content-Type": "application/json"}


class PromptTooLongError(Exception):
    """The prompt alone fills the model's context."""


class InferenceLostError(Exception):
    """No server answered within the deadline; the message says which, since when, and what to look at."""


class Generation(msgspec.Struct):
    """The server's answer to `/generate`."""

    token_ids: list[int]
    logprobs: list[float]
    policy_versions: list[VersionSpan]
    finish_reason: str


class LoadedVersion(msgspec.Struct):
    """The server's answer to `/load_weights`."""

    policy_version: int
    pause_s: float = 0.0
    stage_s: float = 0.0


class ServerStatus(msgspec.Struct):
    """The server's answer to `/status`."""

    policy_version: int
    max_model_len: int


class InferenceServers:
    """The servers of a run: fixed addresses, or the one in the status file, read again after every failure."""

    def __init__(self, urls: list[str], status_path: Path, timeout_s: float):
        self.fixed = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.status_path = status_path
        self.timeout_s = timeout_s
        self.address: str | None = None
        self.session: aiohttp.ClientSession | None = None

    @property
    def count(self) -> int:
        return max(1, len(self.fixed))

    def url(self, server: int) -> str | None:
        if self.fixed:
            return self.fixed[server % len(self.fixed)]
        if self.address is None:
            self.address = (read_status(self.status_path) or {}).get("address")
        return self.address

    async def generate(self, server: int, token_ids: list[int], sampling: dict[str, Any]) -> Generation:
        """Samples one completion. Raises PromptTooLongError, ValueError for a request the server refuses, InferenceLostError."""
        status, content = await self._call("POST", server, "/generate", {"token_ids": token_ids, "sampling": sampling})
        if status != 200:
            detail = msgspec.json.decode(content).get("error", {}) if status == 400 else {}
            kind = PromptTooLongError if detail.get("type") == "prompt_too_long" else ValueError
            raise kind(detail.get("message") or f"inference answered {status}: {content[:200]!r}")
        return msgspec.json.decode(content, type=Generation)

    async def load(self, version: WeightVersion) -> float:
        """Loads a version into every server. Returns the longest pause of generation, seconds. Raises InferenceLostError."""
        body = {"policy_version": version.policy_version, "path": str(Path(version.path).absolute())}
        try:
            async with asyncio.timeout(self.timeout_s + CONNECT_S):  # a server that is away is `_call`'s to report
                replies = await asyncio.gather(*(self._call("POST", server, "/load_weights", body) for server in range(self.count)))
        except TimeoutError:
            raise InferenceLostError(
                f"waited {self.timeout_s:.0f} s for inference to load version {version.policy_version}: it prepares the weights, or "
                "waits for requests of an older adapter to end. See logs/inference*.log; "
                "if it is just slow, raise orchestrator.inference_timeout_s"
            ) from None
        for status, content in replies:
            if status != 200:
                raise RuntimeError(f"inference refused version {version.policy_version} at {version.path}: {content.decode()}")
        return max(msgspec.json.decode(content, type=LoadedVersion).pause_s for _, content in replies)

    async def loaded_version(self) -> int:
        """The policy version of the servers, the oldest if they differ. Waits until all are up."""
        replies = await asyncio.gather(*(self._call("GET", server, "/status") for server in range(self.count)))
        return min(msgspec.json.decode(content, type=ServerStatus).policy_version for _, content in replies)

    async def _call(self, method: str, server: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and content of one request, repeated while its server is away; any answer below 500 is final."""
        if self.session is None:  # can only be made inside a running event loop
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        data = msgspec.json.encode(body) if body is not None else None
        since = time.monotonic()
        problem = "no address published yet"
        while time.monotonic() - since < self.timeout_s:
            url = self.url(server)
            if url is not None:
                try:
                    async with self.session.request(method, url + path, data=data, headers=JSON) as response:
                        content = await response.read()
                        if response.status < 500:
                            return response.status, content
                        problem = f"{url} answered {response.status}: {content[:200].decode(errors='replace')}"
                except (aiohttp.ClientError, TimeoutError) as error:
                    problem = f"{url}: {type(error).__name__} {error}"
            self.address = None  # its successor has another
            await asyncio.sleep(RETRY_S)
        raise InferenceLostError(
            f"waited {self.timeout_s:.0f} s for inference server {server} to answer {path} ({problem}). See logs/inference*.log; "
            "if it is just slow, raise orchestrator.inference_timeout_s"
        )

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()
