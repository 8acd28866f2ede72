"""Test taskset of the v1 API that brings its own harness: one that streams, or speaks another
dialect."""

import asyncio
import json
from typing import Any

import aiohttp
import verifiers.v1 as vf


class ProgramConfig(vf.HarnessConfig):
    id: str = "v1-program"
    route: str = "/chat/completions"
    stream: bool = True
    also: list[str] = []
    """What it asks next, all at once; a refusal is not minded."""
    body: dict[str, Any] = {}
    """Further fields of its requests."""
    then: list[str] = []
    """What it asks after these, one by one."""


class ProgramHarness(vf.Harness[ProgramConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        body = {
            "model": ctx.model,
            "messages": [{"role": "user", "content": data.prompt}],
            "stream": self.config.stream,
        }
        body |= {"max_tokens": 5, "temperature": 0.1, "stop": ["."]} | self.config.body
        headers = {"Authorization": f"Bearer {secret}", "x-api-key": secret}
        async with (
            aiohttp.ClientSession() as http,
            http.post(endpoint + self.config.route, json=body, headers=headers) as reply,
        ):
            text = await reply.text()

            async def ask(content):
                more = body | {"messages": [{"role": "user", "content": content}], "stream": False}
                async with http.post(
                    endpoint + self.config.route, json=more, headers=headers
                ) as ignored:
                    await ignored.read()

            await asyncio.gather(*map(ask, self.config.also))
            for content in self.config.then:
                await ask(content)
        if reply.status >= 400:
            return vf.ProgramResult(exit_code=1, stdout="", stderr=text)
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        trace.info["streamed"] = events[0]["choices"][0]["delta"]["content"]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class ProgramTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def streamed(self, trace: vf.Trace) -> float:
        return float(trace.info["streamed"] == trace.last_reply)


class ProgramSet(vf.Taskset[ProgramTask, vf.TasksetConfig]):
    def load(self):
        return [ProgramTask(vf.TaskData(idx=0, prompt="go"))]


__all__ = ["ProgramHarness", "ProgramSet"]
