"""Whole messages over a Unix socket: a length of four bytes, then that many bytes.

The memory that a peer can make this process use is bounded: one message and a socket's buffer,
however often it connects. ZeroMQ, by contrast, bounds the size of a message's parts but not their
number.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from msgspec import DecodeError

from rl.run_dir.files import UNREADABLE

Take = Callable[[str, bytes], Awaitable[None]]
MAX_MESSAGE_BYTES = 1 << 26
"""The largest message. A group of rollouts that needs more is sent in several messages."""
MAX_NAME_BYTES = 1000
BUFFER_BYTES = 1 << 20
"""About half of the memory for received data that has not been read yet."""
CLOSE_S = 5.0
"""Longest time to send the last messages when a connection is closed."""


class MessageStream:
    """One connection. Several tasks may send concurrently; only one may receive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, path: str) -> "MessageStream":
        return cls(*await asyncio.open_unix_connection(path, limit=BUFFER_BYTES))

    async def receive(self, most: int = MAX_MESSAGE_BYTES) -> bytes | None:
        """Returns the next message, or None if the peer has closed. Raises DecodeError, before
        reading it, if it exceeds `most` bytes."""
        try:
            size = int.from_bytes(await self.reader.readexactly(4))
            if size <= most:
                return await self.reader.readexactly(size)
        except (EOFError, ConnectionError):
            return None
        raise DecodeError(f"a message of {size} bytes, {most} are allowed")

    def post(self, message: bytes) -> None:
        """Sends a message without waiting for the peer to receive it."""
        self.writer.writelines([len(message).to_bytes(4), message])

    async def send(self, message: bytes) -> None:
        """Sends a message, and waits while the peer's buffers are full. Raises ConnectionError."""
        self.post(message)
        await self.writer.drain()

    async def close(self) -> None:
        """Closes the connection once everything is sent, or after CLOSE_S."""
        self.writer.close()
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.writer.wait_closed()


class MessageServer:
    """A Unix socket for peers that send their name in their first message."""

    def __init__(
        self,
        path: str,
        watch: Callable[[Coroutine[Any, Any, None]], None],
        is_peer: Callable[[str], bool],
        take: Take,
        refuse: Callable[[str, Exception], None],
    ):
        """`watch` runs coroutines in the background. `is_peer` tells the names of peers; nothing
        is read from others. `take` gets a peer's name and each of its messages; for an invalid
        message it raises one of UNREADABLE, which is passed to `refuse`, and the connection is
        closed."""
        self.watch, self.is_peer, self.take, self.refuse = watch, is_peer, take, refuse
        self.streams: dict[str, MessageStream] = {}
        """By the peer's name; the newer of two connections, as the older is closed."""
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(path)
        self.socket.listen()
        self.server: asyncio.Server | None = None
        watch(self._listen())

    async def _listen(self) -> None:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.watch(self._receive(MessageStream(reader, writer)))

        self.server = await asyncio.start_unix_server(accept, sock=self.socket, limit=BUFFER_BYTES)

    async def _receive(self, stream: MessageStream) -> None:
        """Loop. Consumes the messages of one peer. Ends with the connection."""
        name = ""
        try:
            name = (await stream.receive(MAX_NAME_BYTES) or b"").decode(errors="replace")
            if not self.is_peer(name):
                raise DecodeError("from an unknown peer")
            if before := self.streams.get(name):
                before.writer.close()
            self.streams[name] = stream
            while (message := await stream.receive()) is not None:
                await self.take(name, message)
        except UNREADABLE as error:
            self.refuse(name, error)
        finally:
            stream.writer.close()
            if self.streams.get(name) is stream:
                del self.streams[name]

    def post(self, name: str, message: bytes) -> None:
        """Sends a message to a peer, if it is connected."""
        if stream := self.streams.get(name):
            stream.post(message)

    def close(self) -> None:
        if self.server:
            self.server.close()
        self.socket.close()
