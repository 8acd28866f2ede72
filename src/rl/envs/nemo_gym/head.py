"""A NeMo Gym deployment, found through its head server: its agents, their addresses, and
requests that are repeated."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import yaml

from rl.envs.policy import RolloutError
from rl.system.errors import RunError
from rl.wire.rollouts import Cause

START = "start it with `python scripts/nemo_gym.py start ...` or `ng_run`, see docs/nemo_gym.md"
AGENTS, MODELS = "responses_api_agents", "responses_api_models"
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Pauses in seconds between tries while nothing answers; their sum is the time that NeMo Gym
takes to restart."""
MAX_FAILURES = 3
"""Number of answers with status >= 500 that fail an episode: the server's own code failed, and
rarely recovers."""


class Agent(NamedTuple):
    """An agent server, its model server, and the policy servers that this is configured to
    query."""

    url: str
    policy_urls: list[str]
    returns_tokens: bool
    """Whether its answers have token ids and log-probabilities."""
    model_url: str = ""
    """Empty if the head server names no model server that has an address."""


class Head:
    """Requests to the servers of a deployment. Cookies are not kept: they carry the session of
    one episode."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.agents: dict[str, Agent] = {}
        self._http: aiohttp.ClientSession | None = None

    @property
    def http(self) -> aiohttp.ClientSession:
        if self._http is None:  # can only be made inside a running event loop
            timeout, jar = aiohttp.ClientTimeout(total=None, connect=10.0), aiohttp.DummyCookieJar()
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=jar, timeout=timeout
            )
        return self._http

    async def close(self) -> None:
        if self._http:
            await self._http.close()

    async def discover(self) -> None:
        """Asks the head server for its agents. Raises RunError if it does not answer."""
        try:
            async with self.http.get(f"{self.url}/global_config_dict_yaml") as response:
                response.raise_for_status()
                config = yaml.safe_load(json.loads(await response.text()))
        except (aiohttp.ClientError, ValueError, yaml.YAMLError) as error:
            raise RunError(
                f"no NeMo Gym head server at {self.url} ({type(error).__name__}: {error}); {START}"
            ) from error
        self.agents |= find_agents(config, self.url)

    async def post(
        self, url: Callable[[], str], body: Any, cause: Cause, cookies: dict[str, str] | None = None
    ) -> str:
        """Returns a server's answer. Retries with growing pauses while nothing answers or its
        status is 500 or more. Raises RolloutError.

        `url` is asked before each try, because a restarted NeMo Gym has new ports. `cookies` gets
        those of the answer.
        """
        failures = 0
        for pause in (*PAUSES_S, None):
            address = url()
            try:
                async with self.http.post(address, json=body, cookies=cookies) as response:
                    status, text = response.status, await response.text()
                if status == 200:
                    if cookies is not None:
                        cookies.update(
                            {name: morsel.value for name, morsel in response.cookies.items()}
                        )
                    return text
                problem = f"{address} answered {status}: {text[-500:]}"
                failures += 1
                if status < 500 or failures == MAX_FAILURES:
                    break
            except aiohttp.ClientError as error:
                problem = f"{address}: {type(error).__name__} {error}"
            if pause is not None:
                await asyncio.sleep(pause)
                # while the head server is down, the old addresses are kept
                with suppress(RunError):
                    await self.discover()
        raise RolloutError(
            cause,
            f"NeMo Gym (head server {self.url}): {problem}. See ng_run's output; if it is "
            f"gone, {START}",
        )


def server_of(config: dict[str, Any], name: str, kind: str) -> dict[str, Any] | None:
    """The settings of the server `name`, nested as `{name: {kind: {implementation: settings}}}`."""
    entry = config.get(name)
    servers = entry.get(kind) if isinstance(entry, dict) else None
    return next(iter(servers.values())) if isinstance(servers, dict) and servers else None


def find_agents(config: Any, head: str) -> dict[str, Agent]:
    """The agents in a head server's configuration that have an address."""
    agents = {}
    for name in config if isinstance(config, dict) else ():
        settings = server_of(config, name, AGENTS)
        if not settings or not settings.get("port"):
            continue
        model = (
            server_of(config, (settings.get("model_server") or {}).get("name", ""), MODELS) or {}
        )
        urls = resolved(config, model.get("base_url")) or []
        agents[name] = Agent(
            url_of(settings, head),
            [urls] if isinstance(urls, str) else urls,
            bool(model.get("return_token_id_information")),
            url_of(model, head) if model.get("port") else "",
        )
    return agents


def url_of(settings: dict[str, Any], head: str) -> str:
    """The address of a server. One bound to all interfaces is reachable at the head server's
    host."""
    host = settings.get("host") or "127.0.0.1"
    return f"http://{urlsplit(head).hostname if host == '0.0.0.0' else host}:{settings['port']}"


def resolved(config: dict[str, Any], value: Any) -> Any:
    """A setting, or the one that `${name}` refers to: the head server returns its configuration
    unresolved."""
    name = (
        value.removeprefix("${").removesuffix("}")
        if isinstance(value, str) and value.startswith("${")
        else None
    )
    return config.get(name) if name else value
