"""Differences between the tested versions of verifiers, and between mcp 1 and mcp 2, which
verifiers 0.3 and 0.4 need."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import verifiers.v1 as vf

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
    from mcp.server.fastmcp import FastMCP as MCPServer
    from mcp.types import CallToolRequest, CallToolRequestParams, CallToolResult, ClientRequest

    SCHEMA, MIME_TYPE = "inputSchema", "mimeType"
    REQUEST_TIMEOUT = httpx.codes.REQUEST_TIMEOUT

    def open_session(
        read: Any, write: Any, timeout_s: float
    ) -> AbstractAsyncContextManager[ClientSession]:
        return ClientSession(read, write, read_timeout_seconds=timedelta(seconds=timeout_s))

    def whole_request(request: CallToolRequest) -> Any:
        return ClientRequest(request)


__all__ = [
    "MIME_TYPE",
    "REQUEST_TIMEOUT",
    "SCHEMA",
    "ClientSession",
    "MCPServer",
    "McpError",
    "httpx",
]


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
