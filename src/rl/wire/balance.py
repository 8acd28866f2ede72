"""Which inference server gets a request: as one process sees them, how busy and how fast each is, and which session has been where.

An answer at a server costs its pace (seconds a token) times its requests in flight. So a slow server gets less, by as much as it is slower,
and one that has just come gets the most. A session, the turns of rollouts that begin with one prompt, stays where its prefix is cached as
long as that costs at most STAY times the cheapest.
"""

import asyncio
import math
import time
from collections.abc import Iterable

STAY = 2.0
BATCHED = 16
"""Requests in flight up to which one more slows none of them down: a server answers them together."""
FORGET_S = 30.0
"""A pace that no answer has confirmed for so long is measured again, by one request."""
MEMORY = 0.9
"""Weight that a server's earlier answers keep in its pace with each new one."""
FIXED_TOKENS = 16
"""Tokens that an answer's fixed part (its prompt, the network) counts as."""
DOWN_S = 0.5
"""A server that failed a request gets no other for so long."""
MAX_SESSIONS = 1 << 16
"""Sessions whose server is remembered; of more the oldest are forgotten, which costs them their cached prefix."""


class Server:
    """One server. `flights` are the requests that it has from this process."""

    def __init__(self, url: str):
        self.url = url
        self.open = True
        """Whether it takes requests; else it only finishes those that it has."""
        self.flights: set[asyncio.Task[tuple[int, bytes]]] = set()
        self.seconds = self.tokens = 0.0
        """Of its answers, the newer the more."""
        self.confirmed = -math.inf
        """When the pace was last measured, and until when the server counts as down, by the monotonic clock."""
        self.down_until = -math.inf

    def answered(self, seconds: float, num_tokens: int) -> None:
        """Notes an answer of so many tokens, and how long it took."""
        self.seconds = MEMORY * self.seconds + seconds
        self.tokens = MEMORY * self.tokens + num_tokens + FIXED_TOKENS
        self.confirmed = time.monotonic()

    def failed(self) -> None:
        """Notes that a request came to nothing."""
        self.down_until = time.monotonic() + DOWN_S

    def pace(self, now: float) -> float | None:
        """Seconds a token; None while that is to be found out."""
        if not self.tokens or (now - self.confirmed > FORGET_S and not self.flights):
            return None
        return self.seconds / self.tokens


class Balancer:
    """The servers by address."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self.gone: dict[str, Server] = {}
        """Those that went while there was no other to take over their requests."""
        self.homes: dict[int, str] = {}
        """Session -> address of its server, the one that was last asked for at the end."""

    def update(self, urls: Iterable[str], closed: Iterable[str] = ()) -> None:
        """Makes `urls` the servers that take requests, and `closed` those that only finish what they have.

        Requests at any other server are given up (AwayError in whoever waits for them) once there is one that takes them over.
        """
        known = self.servers | self.gone
        states = dict.fromkeys(closed, False) | dict.fromkeys(urls, True)
        self.servers = {url: known.get(url) or Server(url) for url in states}
        for url, server in self.servers.items():
            server.open = states[url]
        self.gone = {url: server for url, server in known.items() if url not in states and server.flights}
        if any(states.values()):
            for server in self.gone.values():
                for flight in server.flights:
                    flight.cancel()
            self.gone = {}

    def usable(self) -> list[Server]:
        """The servers that a request may be sent to now."""
        now = time.monotonic()
        return [server for server in self.servers.values() if server.open and server.down_until <= now]

    def choose(self, session: int) -> Server | None:
        """The server for a session's next request; None if there is none."""
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
