"""Environments of a NeMo Gym deployment, over HTTP: one `POST {agent}/run` generates and scores an episode.

NeMo Gym runs in its own virtual environment (docs/nemo_gym.md) and queries our inference servers itself, so two things differ from
the other kinds. First, a token's policy version is the oldest one that the agent's servers held when the episode began: a lower bound,
as weights may be swapped during an episode; the logprobs are always those of the weights that sampled. Second, the server's chat
template renders later turns from text: their ids are exactly what the policy saw, but may not continue the turn before; then they
begin a new sample.
"""

import asyncio
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import yaml

from rl.envs.environment import limited, places
from rl.envs.nemo_gym.wire import (
    SAMPLING_PARAMS,
    chat_prompt,
    check_append_only,
    decode_reply,
    input_items,
    no_tokens,
    request_body,
    to_rollout,
)
from rl.envs.policy import Policy, RolloutError
from rl.system.errors import RunError
from rl.wire.inference_client import InferenceLostError
from rl.wire.rollouts import Episode, Split
from rl.wire.worker_messages import EnvSpec, PlayGroup

START = "start it with `python scripts/nemo_gym.py start ...` or `ng_run`, see docs/nemo_gym.md"
AGENTS, MODELS = "responses_api_agents", "responses_api_models"
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Pauses in seconds between tries while nothing answers; their sum is the time that NeMo Gym takes to restart."""
MAX_FAILURES = 3
"""Number of answers with status >= 500 that fail an episode: the environment's own code failed, and rarely recovers."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Row(NamedTuple):
    """A line of a data set, decoded only when played."""

    agent: str | None
    line: bytes


class Agent(NamedTuple):
    """An agent server and the policy servers that it is configured to query."""

    url: str
    policy_urls: list[str]
    returns_tokens: bool
    """Whether its answers have token ids and log-probabilities."""


class NemoGymEnvironment:
    """The rows of a data set, each played by the agent that it names."""

    kind = "nemo_gym"
    notice = ""
    scores_groups = False

    def __init__(self, spec: EnvSpec, policy: Policy):
        self.spec, self.policy = spec, policy
        self.name = f"environment {spec.name}"
        self.head = (spec.head_server or "").rstrip("/")
        if not spec.dataset:
            raise RunError(f"environment {spec.name}: head_server needs dataset = FILE.jsonl, the rows to play; see docs/nemo_gym.md")
        if fixed := [key for key in SAMPLING_PARAMS if key in spec.args]:
            raise RunError(f"environment {spec.name}: args.{fixed[0]} is set by the sampling settings; set it there")
        train = read_rows(Path(spec.dataset))
        self.rows: dict[Split, list[Row]] = {"train": train, "eval": read_rows(Path(spec.eval_dataset)) if spec.eval_dataset else train}
        self.generating = places(spec.max_generating)
        self.agents: dict[str, Agent] = {}

    def num_tasks(self, split: Split) -> int:
        return len(self.rows[split])

    def task(self, split: Split, index: int) -> dict[str, Any]:
        row = json.loads(self.rows[split][index].line)
        messages, tools = chat_prompt(row.pop("responses_create_params"))
        return {"prompt": messages, **({"tools": tools} if tools else {}), **row}

    def describe(self) -> dict[str, Any]:
        counts = Counter(row.agent or "(the only agent)" for row in self.rows["train"])
        return {
            "head_server": self.head,
            "dataset": self.spec.dataset,
            "eval_dataset": self.spec.eval_dataset or self.spec.dataset,
            "rows of each agent": dict(counts),
            "responses_create_params": self.spec.args,
            "timeout_s": self.spec.timeout_s,
        }

    def prompt_ids(self, split: Split, index: int) -> list[int]:
        messages, tools = chat_prompt(json.loads(self.rows[split][index].line)["responses_create_params"])
        return self.policy.renderer.prompt_ids(messages, tools or None)

    async def start(self) -> None:
        """Finds the agents. Raises RunError if the head server is down or lacks the agent of a row."""
        # Cookies are dropped: they carry the session of an episode, which the next one must not continue.
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=10.0),
        )
        try:
            self.agents = await self._discover()
            for row in {row.agent for rows in self.rows.values() for row in rows}:
                self._check_agent(row)
        except RunError:
            await self.close()
            raise

    async def close(self) -> None:
        await self.http.close()

    async def play(self, order: PlayGroup, num_episodes: int) -> list[Episode]:
        row = self.rows[order.split][order.task]
        body = request_body(json.loads(row.line), self.spec.args, order.sampling)
        return [await self._episode(row, body) for _ in range(num_episodes)]

    async def _episode(self, row: Row, body: dict[str, Any]) -> Episode:
        async with limited(self.generating, self.spec.timeout_s, "a NeMo Gym episode (generation and scoring)"):
            agent = self._agent_name(row.agent)
            self._check_policy_urls(agent)
            version = await self._policy_version(agent)
            reply = await self._run(agent, body)
        rollout = to_rollout(reply, body, version)
        if self.policy.spec.enforce_monotonicity:
            check_append_only(rollout)
        return [rollout]

    async def _policy_version(self, agent: str) -> int | None:
        """The oldest version on the agent's servers; None if an endpoint plays."""
        if self.policy.endpoint is not None:
            return None
        try:
            return await self.policy.servers.loaded_version(self._own_servers(agent))
        except InferenceLostError as error:
            raise RolloutError("inference", str(error)) from error

    def _own_servers(self, agent: str) -> tuple[str, ...]:
        """The run's servers that the agent queries; none if it queries an address unknown here, such as a router's."""
        ours = {address(url): url for url in self.policy.servers.find()}
        asked = [ours.get(address(url)) for url in self.agents[agent].policy_urls]
        return tuple(sorted(url for url in asked if url)) if all(asked) else ()

    async def _run(self, agent: str, body: dict[str, Any]) -> dict[str, Any]:
        """The agent's answer to a row. Retries with growing pauses while nothing answers or the answer is a server error."""
        failures = 0
        for pause in (*PAUSES_S, None):
            url = self.agents[agent].url
            try:
                async with self.http.post(f"{url}/run", json=body) as response:
                    status, text = response.status, await response.text()
                if status == 200:
                    return decode_reply(text)
                problem = f"{url}/run answered {status}: {text[-500:]}"
                failures += 1
                if status < 500 or failures == MAX_FAILURES:
                    break
            except aiohttp.ClientError as error:
                problem = f"{url}/run: {type(error).__name__} {error}"
            if pause is not None:
                await asyncio.sleep(pause)
                with suppress(RunError):  # a restarted NeMo Gym has new ports; while the head server is down, the old ones are kept
                    self.agents |= await self._discover()
        raise RolloutError("environment", f"NeMo Gym (head server {self.head}): {problem}. See ng_run's output; if it is gone, {START}")

    async def _discover(self) -> dict[str, Agent]:
        """Asks the head server for its agents. Raises RunError if it does not answer."""
        try:
            async with self.http.get(f"{self.head}/global_config_dict_yaml") as response:
                response.raise_for_status()
                config = yaml.safe_load(json.loads(await response.text()))
        except (aiohttp.ClientError, ValueError, yaml.YAMLError) as error:
            raise RunError(f"no NeMo Gym head server at {self.head} ({type(error).__name__}: {error}); {START}") from error
        return find_agents(config, self.head)

    def _agent_name(self, name: str | None) -> str:
        return name if name is not None else next(iter(self.agents))

    def _check_agent(self, name: str | None) -> None:
        """Raises RunError if the rows of agent `name` cannot be played or cannot be trained on."""
        known = ", ".join(self.agents) or "none"
        if name is None and len(self.agents) != 1:
            raise RunError(
                f"{self.name}: rows of {self.spec.dataset} have no agent_ref, and the head server's agents are {known}; "
                "add agent_ref with `ng_prepare_data +mode=example_validation`"
            )
        if name is not None and name not in self.agents:
            raise RunError(f"{self.name}: rows are for agent {name}; {self.head} has {known}: start ng_run with it")
        agent = self.agents[self._agent_name(name)]
        if self.policy.endpoint is None and agent.policy_urls and not agent.returns_tokens:
            raise RunError(f"{self.name}: {no_tokens(f'the model server of agent {self._agent_name(name)}')}")

    def _check_policy_urls(self, agent: str) -> None:
        """Checks that NeMo Gym queries our servers: tokens of another policy would look valid. Raises RolloutError."""
        if self.policy.endpoint is not None:
            return
        servers = self.policy.servers
        ours = {local_port(url) for url in servers.find()}
        configured = {local_port(url) for url in self.agents[agent].policy_urls}
        if None not in ours and None not in configured and not configured <= ours:
            raise RolloutError(
                "inference",
                f"NeMo Gym asks port {sorted(configured - ours)} for the policy (policy_base_url), but inference serves at {sorted(ours)}; "
                "set inference.port, and start ng_run with that address",
            )


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file. Raises RunError with the line number."""
    if not path.is_file():
        raise RunError(f"no file {path}; docs/nemo_gym.md says how to make NeMo Gym's rows")
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            input_items(row["responses_create_params"])
            rows.append(Row((row.get("agent_ref") or {}).get("name"), line))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            fault = f"{type(error).__name__}: {error}"
            raise RunError(f"{path}:{number} is not a NeMo Gym row with responses_create_params.input ({fault})") from error
    if not rows:
        raise RunError(f"{path} has no rows")
    return rows


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
        host = settings.get("host") or "127.0.0.1"
        if host == "0.0.0.0":  # bound to all interfaces; reachable at the head server's host
            host = urlsplit(head).hostname
        model = server_of(config, (settings.get("model_server") or {}).get("name", ""), MODELS) or {}
        urls = resolved(config, model.get("base_url")) or []
        agents[name] = Agent(
            f"http://{host}:{settings['port']}", [urls] if isinstance(urls, str) else urls, bool(model.get("return_token_id_information"))
        )
    return agents


def resolved(config: dict[str, Any], value: Any) -> Any:
    """A setting, or the one that `${name}` refers to: the head server returns its configuration unresolved."""
    name = value.removeprefix("${").removesuffix("}") if isinstance(value, str) and value.startswith("${") else None
    return config.get(name) if name else value


def address(url: str) -> tuple[str | None, int | None]:
    """Host and port of a URL; the host is "" for this machine."""
    parts = urlsplit(url)
    return "" if parts.hostname in LOOPBACK else parts.hostname, parts.port


def local_port(url: str) -> int | None:
    """The port of a URL on this machine; None for another machine."""
    host, port = address(url)
    return None if host else port
