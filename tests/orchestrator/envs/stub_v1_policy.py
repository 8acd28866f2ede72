"""A policy for tests of v1 environments: the seam's own conversations over a renderer of characters and servers that say what a test says.

`reply(prompt, sampling)` is asked for each turn with the whole prompt as text; `log` keeps what was asked for.
"""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

from rl.messages import VersionSpan
from rl.orchestrator.envs.policy import Conversation
from rl.orchestrator.inference_client import Generation
from rl.orchestrator.rollouts import Endpoint, PolicySpec
from rl.renderer import Answer, ToolCall

END = 3
"""Id of the end of a turn; all others are code points."""


class CharRenderer:
    """One id a character. A line `call NAME {...}` in an answer is a tool call."""

    stop_token_ids = [END]
    supports_tools = True

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(id) for id in ids if id != END)

    def one(self, message: dict[str, Any]) -> list[int]:
        calls = "".join(f"\ncall {c['function']['name']} {c['function']['arguments']}" for c in message.get("tool_calls") or [])
        return [*self.encode(f"<{message['role']}>{message.get('content') or ''}{calls}"), END]

    def prompt_ids(self, messages, tools=None):
        names = self.encode(f"<tools>{','.join(tool['function']['name'] for tool in tools)}") if tools else []
        return [*names, *(id for message in messages for id in self.one(message)), *self.encode("<assistant>")]

    def next_prompt_ids(self, before, messages, num_old, tools=None):
        close = [] if before[-1] == END else [END]
        return [*before, *close, *(id for message in messages[num_old:] for id in self.one(message)), *self.encode("<assistant>")]

    def parse(self, completion_ids, tools=None, prompt_ids=None):
        text = self.decode(completion_ids)
        found = re.findall(r"^call (\w+) (\{.*\})$", text, re.MULTILINE) if tools else []
        calls = [ToolCall(f"call_{len(prompt_ids)}_{at}", name, json.dumps(json.loads(args))) for at, (name, args) in enumerate(found)]
        content = re.sub(r"^call .*$", "", text, flags=re.MULTILINE).strip() if calls else text
        return Answer(content, None, calls, [])


class StubServers:
    """Samples what `reply` says, 2 ms an answer."""

    def __init__(self, reply: Callable[[str, dict[str, Any]], str]):
        self.reply = reply
        self.log: list[tuple[int, str, dict[str, Any]]] = []
        self.now, self.peak, self.version, self.pause_s = 0, 0, 7, 0.002

    async def generate(self, server: int, token_ids: list[int], sampling: dict[str, Any]) -> Generation:
        prompt = "".join(chr(id) for id in token_ids)
        self.log.append((server, prompt, sampling))
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            await asyncio.sleep(self.pause_s)
            ids = [*(ord(char) for char in self.reply(prompt, sampling)), END]
        finally:
            self.now -= 1
        ids, cut = ids[: sampling["max_tokens"]], len(ids) > sampling["max_tokens"]
        versions = [VersionSpan(self.version, len(ids))]
        return Generation(ids, [-0.25] * len(ids), versions, "length" if cut else "stop")


class StubPolicy:
    """What v1 environments need of a Policy."""

    def __init__(self, reply=lambda prompt, sampling: "ok", max_model_len: int = 2000, endpoint: Endpoint | None = None):
        self.spec = PolicySpec(max_model_len=max_model_len, endpoint=endpoint)
        self.endpoint = endpoint
        self.max_model_len = max_model_len
        self.renderer = CharRenderer()
        self.servers = StubServers(reply)

    def conversation(self, server: int, sampling: dict[str, Any]) -> Conversation:
        return Conversation(self, server, sampling)
