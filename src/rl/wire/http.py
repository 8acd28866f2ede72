"""One request to an HTTP server that may be away, busy or starting; whoever sends it repeats it until a deadline of its own."""

import asyncio
import resource
from typing import Any

import aiohttp
import msgspec

from rl.system.errors import RunError

RETRY_S = 0.5
"""Between two requests to a server that was away."""
CONNECT_S = 10.0
MAX_ANSWER_BYTES = 1 << 28
"""A million tokens with their log-probabilities are a sixth of it."""


class AwayError(Exception):
    """A server gave no answer that counts; the message says what came instead. Caught by those that ask again."""


class RefusedError(RunError):
    """A server refused a request for good, with the HTTP status `status`. Caught where the run can go on without an answer."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class HttpClient:
    """Sends any number of requests at once, each as long as it takes; only connecting has a deadline.

    Requests beyond half of the files that this process may open wait for a connection.
    """

    def __init__(self, socket: str = "") -> None:
        self.socket = socket
        """Unix socket to which all requests go, whatever their address; empty: none."""
        self.session: aiohttp.ClientSession | None = None

    async def request(
        self, method: str, url: str, body: Any, headers: dict[str, str], *, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        """Status and content of the answer to `body` as JSON (None: no body). Raises AwayError where there is none within `timeout_s`,
        one larger than any answer, or one that says that the server itself failed (a status from 500 on)."""
        if self.session is None:  # can only be made inside a running event loop
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            most = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
            connector = aiohttp.UnixConnector(self.socket, limit=most) if self.socket else aiohttp.TCPConnector(limit=most)
            self.session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        data = msgspec.json.encode(body) if body is not None else None
        headers = {"Content-Type": "application/json"} | headers
        try:
            async with asyncio.timeout(timeout_s), self.session.request(method, url, data=data, headers=headers) as response:
                content = await read_answer(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AwayError(f"{type(error).__name__} {error}") from None
        if response.status >= 500:
            raise AwayError(refusal(response.status, content))
        return response.status, content

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


async def read_answer(response: aiohttp.ClientResponse) -> bytes:
    """The whole content of a response. Raises aiohttp.ClientError for one that is larger than any answer."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(content)


def refusal(status: int, content: bytes) -> str:
    """An answer that is none, in words."""
    return f"answered {status}: {content[:300].decode(errors='replace')}"
