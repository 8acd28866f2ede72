"""A verifiers v1 harness that runs in our own process: no program, no virtual environment and no
subprocess per rollout.

The model sees the same as with the library's `null` harness (system prompt, prompt, tools named
`<server>_<tool>`, their results as text), and the same tasks work: single turns, tool loops over
MCP, and conversations that a user resumes. The interception server enforces limits and stop
conditions by refusing the next call, which ends the loop.

Also the differences between mcp 1 and mcp 2, which verifiers 0.3 and 0.4 need.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import aiohttp
import anyio
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from rl.envs.policy import RolloutError

CONNECT_S = 5.0

if int(version("mcp").split(".")[0]) >= 2:
    import httpx2 as httpx
    from mcp import ClientSession
    from mcp import MCPError as McpError
    from mcp.client.streamable_http import streamable_http_client
    from mcp.server.mcpserver import MCPServer
    from mcp_types import REQUEST_TIMEOUT, CallToolRequest, CallToolRequestParams, CallToolResult

    SCHEMA, MIME_TYPE = "input_schema", "mime_type"

    def open_session(
        read: Any, write: Any, timeout_s: float
    ) -> AbstractAsyncContextManager[ClientSession]:
        return ClientSession(read, write, read_timeout_seconds=timeout_s)

    def whole_request(request: CallToolRequest) -> Any:
        return request

else:
    import httpx
    from mcp import ClientSession, McpError
    from mcp.client.streamable_http import streamable_http_client
    from mcp.server.fastmcp import FastMCP as MCPServer  # noqa: F401
    from mcp.types import CallToolRequest, CallToolRequestParams, CallToolResult, ClientRequest

    SCHEMA, MIME_TYPE = "inputSchema", "mimeType"
    REQUEST_TIMEOUT = httpx.codes.REQUEST_TIMEOUT

    def open_session(
        read: Any, write: Any, timeout_s: float
    ) -> AbstractAsyncContextManager[ClientSession]:
        return ClientSession(read, write, read_timeout_seconds=timedelta(seconds=timeout_s))

    def whole_request(request: CallToolRequest) -> Any:
        return ClientRequest(request)


@asynccontextmanager
async def mcp_session(url: str, timeout_s: float) -> AsyncIterator[ClientSession]:
    """A session with a tool server over streamable HTTP. Raises if the server is silent for
    `timeout_s`."""
    timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
    # A TLS context takes 24 ms of CPU to build; a server on this machine needs none.
    async with (
        httpx.AsyncClient(
            timeout=timeout, verify=url.startswith("https"), follow_redirects=True
        ) as http,
        streamable_http_client(url, http_client=http) as (read, write, *_),
        open_session(read, write, timeout_s) as session,
    ):
        yield session


async def call_tool(session: ClientSession, name: str, arguments: dict[str, Any]) -> list[Any]:
    """The content of a tool's answer. Raises McpError.

    Bypasses session.call_tool, which checks the result against the tool's schema: that costs as
    much as the call, and we show the text.
    """
    request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
    return (await session.send_request(whole_request(request), CallToolResult)).content


def own_sampling(config: vf.SamplingConfig | None) -> dict[str, Any]:
    """The sampling parameters set in an agent's config."""
    if config is None:
        return {}
    return (
        config.wire_args() if hasattr(config, "wire_args") else config.model_dump(exclude_none=True)
    )


HARNESS_ID = "rl-in-process"
DISCONNECTED = (httpx.HTTPError, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)
"""Errors raised when a server died; within a session, a stream ends."""
LIST_TOOLS_S = 60.0


class InProcessConfig(HarnessConfig):
    """The fields common to all harnesses; only `tool_timeout` and `disabled_tools` have an
    effect here."""

    id: str = HARNESS_ID


class InProcessHarness(Harness[InProcessConfig]):
    """The chat loop: queries the model and runs its tool calls one by one, until an answer has
    none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Plays one segment. A refused or failed call ends it with exit code 1; verifiers knows
        the reason."""
        system, prompt = self.resolve_prompt(data)
        url = f"{endpoint.rstrip('/')}/chat/completions"
        body: dict[str, Any] = {"model": ctx.model, "messages": opening(system, prompt)}
        headers = {"Authorization": f"Bearer {secret}"}
        # answers wait for the inference server, and episodes have a deadline
        no_deadline = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=no_deadline) as http,
            tool_servers(mcp_urls, self.config) as servers,
        ):
            if servers.tools:
                body["tools"] = servers.tools
            while True:
                message, problem = await ask(http, url, body)
                if problem:
                    return ProgramResult(exit_code=1, stdout="", stderr=problem)
                body["messages"].append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    result = await servers.result(call["function"])
                    body["messages"].append(
                        {"role": "tool", "tool_call_id": call["id"], "content": result}
                    )


async def ask(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Queries the model. Returns its message and "", or {} and the reason why the call failed."""
    try:
        async with http.post(url, json=body) as reply:
            if reply.status >= 400:
                return {}, await reply.text() or f"status {reply.status}"
            return (await reply.json())["choices"][0]["message"], ""
    except aiohttp.ClientError as error:
        return {}, f"the interception server at {url} does not answer: {error!r}"


def opening(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """The messages before the first answer; only the system prompt, or none, if a user opens the
    conversation."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(message_to_wire(message) for message in prompt or [])]


def chat_tool(server: str | None, tool: Any) -> dict[str, Any]:
    """Converts an MCP tool to chat API form, named `<server>_<tool>`."""
    name = f"{server}_{tool.name}" if server else tool.name
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": tool.description or "",
            "parameters": getattr(tool, SCHEMA),
        },
    }


class ToolServers:
    """The tools of a rollout's MCP servers, and the sessions that call them."""

    def __init__(self, config: HarnessConfig):
        self.disabled = set(config.disabled_tools or [])
        self.tools: list[dict[str, Any]] = []
        """In chat API form."""
        self.origins: dict[str, tuple[str, ClientSession, str]] = {}
        """Name of the tool for the model -> server, its session, and the server's own name for
        the tool."""
        self.last_server = ""
        """The server called last, to which a broken connection belongs."""

    async def add(self, server: str, session: ClientSession) -> None:
        """Opens a server's session and lists its tools. Raises RolloutError if two tools have
        the same name."""
        self.last_server = server
        async with asyncio.timeout(LIST_TOOLS_S):
            await session.initialize()
            offered = (await session.list_tools()).tools
        for tool in offered:
            description = chat_tool(server, tool)
            name = description["function"]["name"]
            if name in self.origins:
                raise RolloutError(
                    "environment",
                    f"two tools are named {name}; give one of their servers its own TOOL_PREFIX",
                )
            if name in self.disabled or tool.name in self.disabled:
                continue
            self.origins[name] = server, session, tool.name
            self.tools.append(description)

    async def result(self, call: dict[str, Any]) -> str | list[dict[str, Any]]:
        """The content of the tool message that answers a call; for a malformed call the error,
        so that the model can correct it."""
        if call["name"] not in self.origins:
            return (
                f"error: there is no tool {call['name']!r}; there are "
                f"{', '.join(sorted(self.origins)) or 'none'}"
            )
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except json.JSONDecodeError as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return f"error: the arguments must be a JSON object, not {type(arguments).__name__}"
        self.last_server, session, name = self.origins[call["name"]]
        try:
            return content_of(await call_tool(session, name, arguments))
        except McpError as error:
            if error.error.code == REQUEST_TIMEOUT:
                raise
            return f"error: {error}"


@asynccontextmanager
async def tool_servers(urls: dict[str, str], config: HarnessConfig) -> AsyncIterator[ToolServers]:
    """Sessions with all servers for one segment. Raises RolloutError if one died, or does not
    answer for `tool_timeout` s.

    The sessions live in task groups: an error in one of them cancels the block, and is raised here
    as an exception group.
    """
    servers = ToolServers(config)
    try:
        async with AsyncExitStack() as stack:
            for server, url in urls.items():
                servers.last_server = server
                await servers.add(
                    server, await stack.enter_async_context(mcp_session(url, config.tool_timeout))
                )
            yield servers
    except (*DISCONNECTED, McpError, ExceptionGroup) as error:
        cause = error
        while isinstance(cause, ExceptionGroup):
            cause = cause.exceptions[0]
        url = urls.get(servers.last_server, "").partition("?")[0]  # the query may contain a secret
        where = f"tool server {servers.last_server!r} at {url}"
        if isinstance(cause, McpError) and cause.error.code == REQUEST_TIMEOUT:
            slow = (
                f"{where} took longer than {config.tool_timeout:g} s; see tool_timeout of the "
                "harness"
            )
            raise RolloutError("environment", slow) from error
        if isinstance(cause, DISCONNECTED):
            raise RolloutError("environment", f"{where} does not answer: {cause!r}") from error
        raise cause from error


def content_of(blocks: list[Any]) -> str | list[dict[str, Any]]:
    """Converts an MCP result to the content of a chat message: text, or a list of parts if it
    has an image."""
    content: list[dict[str, Any]] = []
    for block in blocks:
        if block.type == "image":
            url = f"data:{getattr(block, MIME_TYPE)};base64,{block.data}"
            content.append({"type": "image_url", "image_url": {"url": url}})
        else:
            text = block.text if block.type == "text" else block.model_dump_json()
            content.append({"type": "text", "text": text})
    if any(part["type"] != "text" for part in content):
        return content
    return "\n".join(part["text"] for part in content)


# verifiers finds a harness by importing the top-level module named like its id.
sys.modules.setdefault(HARNESS_ID.replace("-", "_"), sys.modules[__name__])

__all__ = ["InProcessConfig", "InProcessHarness"]
