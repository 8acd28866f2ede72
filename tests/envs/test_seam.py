"""The policy as an endpoint on loopback: who may ask, and what a turn is over HTTP."""

import asyncio
import json
from types import SimpleNamespace

import aiohttp

from rl.envs.policy import Conversation
from rl.envs.v1.active import ActiveTrace
from rl.envs.v1.seam import SESSION, HttpSeam
from tests.envs.stub_policy import StubPolicy, call

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}


def test_only_who_has_the_token_of_a_trace_that_is_played_is_answered():
    policy = StubPolicy(lambda prompt: call("add", a=1), max_model_len=200)
    active = ActiveTrace(SimpleNamespace(stop=lambda why: stopped.append(why)), Conversation(policy, 3, {"max_tokens": 60}))
    stopped: list[str] = []
    seam = HttpSeam({"one": active})

    async def main():
        config = await seam.start()
        assert config.base_url.startswith("http://127.0.0.1:")

        async def ask(token, trace, content="hi", route="/chat/completions", **body):
            headers = {"Authorization": f"Bearer {token}", SESSION: trace}
            asked = {"messages": [{"role": "user", "content": content}], "tools": [TOOL], **body}
            async with aiohttp.ClientSession() as http, http.post(config.base_url + route, json=asked, headers=headers) as reply:
                return reply.status, await reply.text()

        refused = [(await ask("guess", "one"))[0], (await ask("", "one"))[0], (await ask(seam.token, "two"))[0]]
        refused.append((await ask(seam.token, "one", "x" * (1 << 24)))[0])
        whole = await ask(seam.token, "one")
        streamed = await ask(seam.token, "one", stream=True)
        long = await ask(seam.token, "one", "x" * 400)
        other = await ask(seam.token, "one", route="/messages")
        await seam.close()
        return refused, whole, streamed, long, other

    refused, (status, text), (_, events), (long_status, long), (other_status, other) = asyncio.run(main())
    assert refused == [401, 401, 409, 413] and status == 200
    [choice] = json.loads(text)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"][0]["function"]["name"] == "add"
    first, usage, done = events.strip().split("\n\n")
    [delta] = json.loads(first.removeprefix("data: "))["choices"]
    assert delta["delta"]["tool_calls"][0]["index"] == 0 and delta["finish_reason"] == "tool_calls" and done == "data: [DONE]"
    assert json.loads(usage.removeprefix("data: "))["usage"]["total_tokens"] > 0
    assert len(active.conversation.turns) == 2, "what was refused is no turn"
    assert long_status == 400 and "context length exceeded" in long and stopped == ["context_length"]
    assert other_status == 400 and "chat completions only" in other and active.failure == "environment"
