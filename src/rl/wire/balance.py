"""Chooses the inference server for a request by how busy and how fast each server looks to this
process, and by the session's last server.

The cost of a request at a server is its pace (seconds per token) times its requests in flight. So a
server gets fewer requests in proportion to how slow it is, and one that has just joined gets the
most. A session (the turns of rollouts that begin with the same prompt) stays where its prefix is
cached as long as that costs at most STAY times the cheapest server.
"""

import asyncio
import math
import time
from collections.abc import Iterable

STAY = 2.0
BATCHED = 16
"""Up to this many requests in flight, one more slows none of them down, because the server
batches them."""
FORGET_S = 30.0
"""A pace not confirmed by an answer for this long is measured again, with one request."""
MEMORY = 0.9
"""Decay factor of a server's earlier answers in its pace, per new answer."""
FIXED_TOKENS = 16
"""The fixed cost of an answer (its prompt, the network), in tokens."""
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
        self.seconds = self.tokens = 0.0
        """Decayed sums over its answers."""
        self.confirmed = -math.inf
        """When the pace was last measured; `down_until` is when the server may be used again.
        Both in monotonic time."""
        self.down_until = -math.inf

    def answered(self, seconds: float, num_tokens: int) -> None:
        """Records the duration and the number of tokens of an answer."""
        self.seconds = MEMORY * self.seconds + seconds
        self.tokens = MEMORY * self.tokens + num_tokens + FIXED_TOKENS
        self.confirmed = time.monotonic()

    def failed(self) -> None:
        """Records that a request failed."""
        self.down_until = time.monotonic() + DOWN_S

    def pace(self, now: float) -> float | None:
        """Returns the pace, seconds per token; None if it has to be measured."""
        if not self.tokens or (now - self.confirmed > FORGET_S and not self.flights):
            return None
        return self.seconds / self.tokens


class Balancer:
    """The servers by address."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self.gone: dict[str, Server] = {}
        """Servers that went away while there was no other one to take over their requests."""
        self.homes: dict[int, str] = {}
        """Session -> address of its server; the most recently used session is last."""

    def update(self, urls: Iterable[str], closed: Iterable[str] = ()) -> None:
        """Makes `urls` the servers that take requests, and `closed` those that only finish the
        requests they have.

        Requests at any other server are cancelled (their callers get AwayError) once there is a
        server to take them over.
        """
        known = self.servers | self.gone
        states = dict.fromkeys(closed, False) | dict.fromkeys(urls, True)
        self.servers = {url: known.get(url) or Server(url) for url in states}
        for url, server in self.servers.items():
            server.open = states[url]
        self.gone = {
            url: server for url, server in known.items() if url not in states and server.flights
        }
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
        now = time.monotonic()
        paces = {server.url: server.pace(now) for server in usable}
        best = min((pace for pace in paces.values() if pace is not None), default=1.0)

        def cost(server: Server) -> float:
            pace = paces[server.url]
            return (best if pace is None else pace) * max(BATCHED, len(server.flights) + 1)

        cheapest = min(usable, key=lambda server: (cost(server), len(server.flights)))
        home = self.servers.get(self.homes.pop(session, ""))
        chosen = home if home in usable and cost(home) <= STAY * cost(cheapest) else cheapest
        self.homes[session] = chosen.url
        if len(self.homes) > MAX_SESSIONS:
            del self.homes[next(iter(self.homes))]
        return chosen
