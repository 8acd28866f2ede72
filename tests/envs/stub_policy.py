"""A policy without a model: a token is a character, and a function names the answer to the text
of a prompt."""

import asyncio
import inspect
import json
import re
import zlib
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

from rl.envs.policy import Policy
from rl.envs.worker import Worker
from rl.models.chat import Answer, Message, RendererError, Tool, ToolCall
from rl.wire.messages import VersionSpan
from rl.wire.turns import Turn
from rl.wire.worker_messages import Endpoint, PlayOrder, PolicySpec
from tests import steady

END = "\x03"
CALL = re.compile(r"<call>(.*?)</call>", re.DOTALL)


def call(name: str, **arguments: Any) -> str:
    """A tool call as the stub's model writes it."""
    return f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


class StubRenderer:
    """`role: content` a line, each closed by END; tools are named in front."""

    stop_token_ids = [ord(END)]
    special_ids = {ord(END)}
    supports_tools = True
    tokenizer = SimpleNamespace(convert_ids_to_tokens=chr)
    bos = ""

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def text_ids(self, text: str) -> list[int]:
        return self.encode(self.bos + text)

    def decode(self, ids: list[int]) -> str:
        return text(ids).replace(END, "")

    def render(self, messages: list[Message]) -> str:
        lines = []
        for message in messages:
            content = message["content"] or ""
            if not isinstance(content, str):
                raise RendererError("only text can be rendered: take the image out")
            calls = "".join(
                call(made["function"]["name"], **json.loads(made["function"]["arguments"]))
                for made in message.get("tool_calls", [])
            )
            lines.append(f"{message['role']}: {content}{calls}{END}")
        return "".join(lines) + "assistant: "

    def prompt_ids(self, messages: list[Message], tools: list[Tool] | None = None) -> list[int]:
        head = "".join(f"[{tool['function']['name']}]" for tool in tools or [])
        return self.encode(head + self.render(messages))

    def next_prompt_ids(
        self,
        before: list[int],
        messages: list[Message],
        num_old: int,
        tools: list[Tool] | None = None,
    ) -> list[int] | None:
        close = [] if before[-1] == ord(END) else [ord(END)]
        return before + close + self.encode(self.render(messages[num_old:]))

    def parse(
        self,
        completion_ids: list[int],
        tools: list[Tool] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> Answer:
        text = self.decode(completion_ids)
        reasoning, thought, rest = text.partition("</think>")
        text = rest if thought else text
        calls, bad = [], []
        for match in CALL.finditer(text) if tools else ():
            try:
                made = json.loads(match[1])
            except ValueError:
                bad.append(match[0])
                continue
            number = zlib.crc32(repr(prompt_ids).encode())
            calls.append(
                ToolCall(f"call_{number}_{len(calls)}", made["name"], json.dumps(made["arguments"]))
            )
            text = text.replace(match[0], "")
        return Answer(text, reasoning if thought else None, calls, bad)


class StubServers:
    """Answers with what `reply(prompt)` gives: a text, an exception, or a coroutine of either.
    Longer than max_tokens is cut off."""

    def __init__(self, reply: Callable[[str], Any]):
        self.reply = reply
        self.asked: list[dict[str, Any]] = []
        self.busy = self.peak = 0

    async def generate(self, server: int, token_ids: list[int], sampling: dict[str, Any]) -> Turn:
        self.asked.append({"server": server, "token_ids": token_ids, "sampling": sampling})
        self.busy += 1
        self.peak = max(self.peak, self.busy)
        try:
            said = self.reply(text(token_ids))
            said = await said if inspect.isawaitable(said) else said
        finally:
            self.busy -= 1
        if isinstance(said, Exception):
            raise said
        ids = [ord(char) for char in said + END]
        kept = ids[: sampling["max_tokens"]]
        finish = "stop" if len(kept) == len(ids) else "length"
        routes = bytes(2 * (len(token_ids) + len(kept) - 1)) if sampling.get("routes") else b""
        spans = [VersionSpan(7, len(kept))]
        return Turn.of(token_ids, kept, [-0.5] * len(kept), spans, finish, routes=routes)


class StubPolicy(Policy):
    """A Policy whose renderer and servers are stubs."""

    def __init__(
        self,
        reply: Callable[[str], Any] = lambda prompt: "ok",
        *,
        max_model_len: int = 4096,
        endpoint: Endpoint | None = None,
    ):
        self.spec = PolicySpec(max_model_len=max_model_len)
        self.endpoint = endpoint
        self.renderer = StubRenderer()
        self.servers = StubServers(reply)


def order(task: int = 0, num_episodes: int = 1, split: Any = "train", **sampling: Any) -> PlayOrder:
    sampling = {"max_tokens": 64, "temperature": 1.0} | sampling
    return PlayOrder(
        play_id=0, split=split, task=task, num_episodes=num_episodes, sampling=sampling, session=3
    )


def worker_of(env: Any, retries: int = 0) -> Any:
    """What `Worker.play` needs of a worker."""
    worker = SimpleNamespace(setup=SimpleNamespace(retries=retries), env=env, plays={})
    for method in (Worker.play_once, Worker.play_with_retries):
        setattr(worker, method.__name__, MethodType(method, worker))
    return worker


def played(
    env: Any, task: int = 0, num_episodes: int = 1, *, run: Any = steady.run, **sampling: Any
) -> list[Any]:
    """The rollouts of a group, as a worker has them played. What uses threads or processes needs
    `run = asyncio.run`: their waits would never end by a clock that stands still."""

    async def play() -> list[Any]:
        given = order(task, num_episodes, **sampling)
        if env.scores_groups:
            episodes = await env.play(given, num_episodes)
        else:
            each = await asyncio.gather(*(env.play(given, 1) for _ in range(num_episodes)))
            episodes = [episode for episodes in each for episode in episodes]
        return [rollout for episode in episodes for rollout in episode]

    return run(play())
