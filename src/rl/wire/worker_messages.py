"""The messages between the orchestrator and environment workers, and the Unix socket over which
whole messages go: a length of four bytes, then that many bytes.

The memory that a peer can make this process use is bounded: one message and a socket's buffer,
however often it connects. ZeroMQ, by contrast, bounds the size of a message's parts but not their
number.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
from msgspec import DecodeError

from rl.run_dir.files import UNREADABLE
from rl.wire.rollouts import Rollout, Split


class EnvSpec(msgspec.Struct, kw_only=True):
    """An environment as configured: a package (`id`), rows with a reward function (`dataset`,
    `reward`), or a NeMo Gym server."""

    name: str
    id: str | None = None
    kind: Literal["classic", "v1"] | None = None
    """The API through which a package is played; None: the one it has."""
    dataset: str | None = None
    eval_dataset: str | None = None
    reward: str | None = None
    system_prompt: str | None = None
    head_server: str | None = None
    args: dict[str, Any] = {}
    set_kwargs: dict[str, Any] = {}
    """Attributes set on a classic environment after loading, with `env.set_kwargs`."""
    max_generating: int = -1
    """Maximum number of rollouts that this worker generates at once; -1: no limit."""
    max_scoring: int = -1
    timeout_s: float = 600.0
    """Time limit for generating one rollout, and again for scoring it."""


class Endpoint(msgspec.Struct, kw_only=True):
    """Any OpenAI-compatible server. It returns no token ids, so its rollouts are evaluated or
    collected, never trained."""

    base_url: str
    model: str
    api_key_var: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""


class PolicySpec(msgspec.Struct, kw_only=True):
    """The policy that environments sample from: the run's servers, with token ids in and out,
    `endpoint`, or `head_server`."""

    model_path: str = ""
    max_model_len: int = 2048
    vocab_size: int = 0
    """0 if unknown."""
    trust_remote_code: bool = False
    renderer: dict[str, Any] = {}
    """A RendererConfig."""
    inference_urls: list[str] = []
    inference_status: str = ""
    """Status file of the run's own inference server. It and those next to it are read if there
    are no URLs, until a ServerSet comes."""
    inference_proxy: str = ""
    """Unix socket for requests to the servers; empty: they go over the network."""
    routes: bool = False
    """Whether the servers give the routes of tokens (trainer.router_replay = engine)."""
    max_kept: int = 0
    """Up to how many ids per token they give that truncation kept; 0: none."""
    endpoint: Endpoint | None = None
    head_server: str = ""
    """Head server of NeMo Gym, whose model server is the policy instead (`rl env --serve-gym`);
    empty: it is not."""


class WorkerSetup(msgspec.Struct, kw_only=True):
    """Everything that a worker needs, passed to it as JSON in a file."""

    env: EnvSpec
    policy: PolicySpec
    orchestrator: str
    """Unix socket of the orchestrator's pool."""
    worker_id: str
    max_tokens: int
    """New tokens per turn for which prompts must leave room."""
    retries: int
    """How often a failed episode is retried with fresh state."""
    python: str = ""
    """Interpreter of the worker's own virtual environment; empty: the orchestrator's."""
    sandbox: bool = False
    """Whether it runs in a sandbox, with or without this machine's `network`, and with the
    environment variables `keys`."""
    network: bool = False
    keys: list[str] = []
    read: list[str] = []
    """Files and directories visible in the sandbox in addition to the environment's own."""
    spans: str = ""
    """Folder for its spans, see rl.run_dir.spans; empty: none are recorded."""


def derived_seed(*names: int | str) -> int:
    """Derives a seed from 0 to 2^63 - 1 from numbers and names, the same on every machine."""
    return int.from_bytes(blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()) >> 1


class PlayOrder(msgspec.Struct, tag=True):
    """Play the `num_episodes` episodes of one task, except those in `done`."""

    play_id: int
    split: Split
    task: int
    num_episodes: int
    sampling: dict[str, Any]
    session: int
    """The session of all the group's rollouts: one inference server answers them while that is
    efficient, for its prefix cache."""
    done: list[int] = []
    """Episodes that are already finished; empty if the episodes of a group are scored together."""
    seed: int | None = None
    """From which the seeds of all requests to the run's servers are derived; None: requests have
    no seed, and every draw differs."""

    def seeded(self, *names: int | str) -> "PlayOrder":
        """Returns the order for a part of this one, with independent draws."""
        return (
            self
            if self.seed is None
            else msgspec.structs.replace(self, seed=derived_seed(self.seed, *names))
        )


class ServerSet(msgspec.Struct, tag=True):
    """The inference servers to use from now on. Requests in flight at any other server are
    repeated at one of these."""

    urls: list[str]
    """Servers that take requests."""
    closed: list[str]
    """Servers that only finish the requests they have, because they hold another version than is
    wanted."""
    oldest: int
    """The oldest policy version that may answer a new request."""
    newest: int
    """The newest policy version that exists."""


class Cancel(msgspec.Struct, tag=True):
    """Cancel a group; no answer is expected."""

    play_id: int


class Describe(msgspec.Struct, tag=True):
    """Describe the environment and `num_tasks` tasks of a split (-1: all) from task `first`. The
    answer has as many tasks as fit."""

    split: Split
    num_tasks: int
    first: int = 0


class Close(msgspec.Struct, tag=True):
    """Shut down what the environment has started, then exit."""


TEMPLATE_REMEDY = (
    "give the template that the model was trained with, write eos_token after an answer, or `rl "
    "sft` first"
)
"""What to do about a template_fault."""


class RenderedChat(msgspec.Struct):
    """A conversation and what the policy's renderer makes of it, to compare a teacher with."""

    messages: list[dict[str, str]]
    token_ids: list[int]
    special_ids: set[int]
    """All special tokens of the vocabulary."""


class Ready(msgspec.Struct, tag=True):
    """The environment is loaded. Sizes are in tasks; None: endless."""

    num_train: int | None
    num_eval: int | None
    scores_groups: bool = False
    """Whether the episodes of a task are scored together, and so finish together."""
    notice: str = ""
    """A notice to the user about how the environment is played."""
    template_fault: str = ""
    """What is wrong with the model's chat template; empty if nothing seems to be."""
    chat: RenderedChat | None = None
    """None if an endpoint plays."""


class LoadFailed(msgspec.Struct, tag=True):
    """The environment cannot be used; the message names the remedy."""

    message: str


MAX_ROLLOUTS = 100_000
"""Most rollouts of a message. One takes 450 bytes of the pool's memory even where the message
has a single byte for it."""


class Played(msgspec.Struct, tag=True):
    """Finished episodes of a group, including failed rollouts with their error."""

    play_id: int
    rollouts: Annotated[list[Rollout], msgspec.Meta(max_length=MAX_ROLLOUTS)]
    unfinished: int = 0
    """Number of episodes of the group that are still being played."""


class Heartbeat(msgspec.Struct, tag=True):
    """Shows that the worker's event loop runs; without heartbeats the environment's code is
    blocking it."""


class Description(msgspec.Struct, tag=True):
    """The description of an environment, for `rl env`."""

    about: dict[str, Any]
    """kind, arguments with values and defaults, reward functions, tools, ... in display order."""
    tasks: list[dict[str, Any]]


ToWorker = ServerSet | PlayOrder | Cancel | Describe | Close
FromWorker = Ready | LoadFailed | Played | Heartbeat | Description


# The socket ---------------------------------------------------------------------------------------


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
