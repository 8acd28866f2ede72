"""Chooses the inference server for a request by how many requests this process has in flight at
each, and by the session's last server.

A slow server keeps its requests for longer, and so gets fewer; one that has just joined gets the
most. A session (the turns of rollouts that begin with the same prompt) stays where its prefix is
cached, unless that server has STAY times as many requests as the one with the fewest.
"""

import asyncio
import time
from collections.abc import Iterable

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
