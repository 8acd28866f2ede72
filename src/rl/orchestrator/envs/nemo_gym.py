"""Environments of a NeMo Gym deployment, over HTTP: an episode is one `POST {agent}/run`, generated and scored over there.

NeMo Gym runs in a virtual environment of its own (docs/nemo_gym.md) and asks our inference servers for tokens by itself, so two things
differ from the other kinds. A token's policy version is the one that the servers had loaded when its episode began: a lower bound, for
weights may be swapped in the middle; the logprobs are always those of the weights that sampled. And a later turn is rendered from text by
the server's chat template: its ids are exactly what the policy saw, but need not continue the turn before, and then begin a new sample.
"""

import asyncio
import json
import math
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import yaml

from rl.orchestrator.env_ids import EnvLoadError
from rl.orchestrator.envs.environment import Limits, RolloutError, phase
from rl.orchestrator.envs.nemo_gym_wire import (
    SAMPLING_PARAMS,
    check_append_only,
    decoded,
    input_items,
    no_tokens,
    request_body,
    to_messages,
    to_rollout,
    wrapped,
)
from rl.orchestrator.envs.policy import Policy
from rl.orchestrator.inference_client import InferenceLostError
from rl.orchestrator.rollouts import EnvSpec, Episode, PlayGroup, Split

START = "start it with `python scripts/nemo_gym.py start ...` or `ng_run`, see docs/nemo_gym.md"
AGENTS, MODELS = "responses_api_agents", "responses_api_models"
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Between tries while nothing answers: together as long as NeMo Gym needs to start again."""
MAX_FAILURES = 3
"""Answers of 500 and above that end an episode: the environment's own code fails, and seldom recovers."""
RECENT_S = 1.0
"""So old may an answer about versions or addresses be; every episode wants one."""
CHECKED_PROMPTS = 64
"""So many prompts are measured against the context before the run starts."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Row(NamedTuple):
    """A line of a data set, decoded when it is played."""

    agent: str | None
    line: bytes


class Agent(NamedTuple):
    """An agent server and the policy servers that it is configured to ask."""

    url: str
    policy_urls: list[str]
    tells_tokens: bool


class NemoGymEnvironment:
    """The rows of a data set, each played by the agent that it names."""

    kind = "nemo_gym"
    scores_groups = False

    def __init__(self, spec: EnvSpec, policy: Policy):
        self.spec, self.policy = spec, policy
        self.head = (spec.head_server or "").rstrip("/")
        if not spec.dataset:
            raise EnvLoadError(f"environment {spec.name}: head_server needs dataset = FILE.jsonl, the rows to play; see docs/nemo_gym.md")
        if taken := [key for key in SAMPLING_PARAMS if key in spec.args]:
            raise EnvLoadError(f"environment {spec.name}: args.{taken[0]} is said by the sampling settings; set it there")
        train = read_rows(Path(spec.dataset))
        self.rows: dict[Split, list[Row]] = {"train": train, "eval": read_rows(Path(spec.eval_dataset)) if spec.eval_dataset else train}
        self.limits = Limits(spec)
        self.agents: dict[str, Agent] = {}
        self.agents_at = self.version_at = -math.inf
        self.version = 0
        self.version_lock = asyncio.Lock()

    def num_tasks(self, split: Split) -> int:
        return len(self.rows[split])

    def task(self, split: Split, index: int) -> dict[str, Any]:
        row = json.loads(self.rows[split][index].line)
        params = row.pop("responses_create_params")
        tools = [wrapped(tool) for tool in params.get("tools") or ()]
        return {"prompt": to_messages(input_items(params)), **({"tools": tools} if tools else {}), **row}

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

    def check_prompts(self, max_tokens: int) -> str | None:
        """Looks at the first prompts: the server refuses one that leaves no room for a whole answer."""
        if self.policy.endpoint is not None:
            return None
        for row in self.rows["train"][:CHECKED_PROMPTS]:
            params = json.loads(row.line)["responses_create_params"]
            tools = [wrapped(tool) for tool in params.get("tools") or ()]
            length = len(self.policy.renderer.prompt_ids(to_messages(input_items(params)), tools or None))
            if length + max_tokens > self.policy.max_model_len:
                return (
                    f"environment {self.spec.name}: a prompt of {length} tokens and orchestrator.sampling.max_tokens = {max_tokens} exceed "
                    f"model.max_model_len = {self.policy.max_model_len}; raise it to {length + max_tokens} or lower max_tokens"
                )
        return None

    async def start(self) -> None:
        """Finds the agents. Raises EnvLoadError if the head server is down or knows none for a row."""
        # No cookies are kept: they carry the session of an episode, which the next one must not continue.
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=10.0),
        )
        try:
            self.agents = await self._discover()
            for row in {row.agent for rows in self.rows.values() for row in rows}:
                self._check_agent(row)
        except EnvLoadError:
            await self.close()
            raise

    async def close(self) -> None:
        await self.http.close()

    async def play(self, order: PlayGroup, num_episodes: int) -> list[Episode]:
        row = self.rows[order.split][order.task]
        body = request_body(json.loads(row.line), self.spec.args, order.sampling)
        return list(await asyncio.gather(*(self._episode(row, body) for _ in range(num_episodes))))

    async def _episode(self, row: Row, body: dict[str, Any]) -> Episode:
        async with phase(self.limits.generating, self.spec.timeout_s, "a NeMo Gym episode (generation and scoring)"):
            version = await self._policy_version()
            agent = self._agent_name(row.agent)
            self._check_asks_us(agent)
            reply = await self._run(agent, body)
        rollout = to_rollout(reply, body, version)
        if self.policy.spec.enforce_monotonicity:
            check_append_only(rollout.turns)
        return [rollout]

    async def _policy_version(self) -> int | None:
        """The loaded version, at most a second old; None if an endpoint plays."""
        if self.policy.endpoint is not None:
            return None
        async with self.version_lock:
            if time.monotonic() - self.version_at > RECENT_S:
                asked_at = time.monotonic()
                try:
                    self.version = await self.policy.servers.loaded_version()
                except InferenceLostError as error:
                    raise RolloutError("inference", str(error)) from error
                self.version_at = asked_at
            return self.version

    async def _run(self, agent: str, body: dict[str, Any]) -> dict[str, Any]:
        """The agent's answer to a row. Asks again, with growing pauses, while nobody answers or the answer is a server error."""
        failures = 0
        for pause in (*PAUSES_S, None):
            url = self.agents[agent].url
            try:
                async with self.http.post(f"{url}/run", json=body) as response:
                    status, text = response.status, await response.text()
                if status == 200:
                    return decoded(text)
                problem = f"{url}/run answered {status}: {text[-500:]}"
                failures += 1
                if status < 500 or failures == MAX_FAILURES:
                    break
            except aiohttp.ClientError as error:
                problem = f"{url}/run: {type(error).__name__} {error}"
            if pause is not None:
                await asyncio.sleep(pause)
                await self._rediscover()
        raise RolloutError("environment", f"NeMo Gym (head server {self.head}): {problem}. See ng_run's output; if it is gone, {START}")

    async def _discover(self) -> dict[str, Agent]:
        """Asks the head server for its agents. Raises EnvLoadError if it does not answer."""
        try:
            async with self.http.get(f"{self.head}/global_config_dict_yaml") as response:
                response.raise_for_status()
                config = yaml.safe_load(json.loads(await response.text()))
        except (aiohttp.ClientError, ValueError, yaml.YAMLError) as error:
            raise EnvLoadError(f"no NeMo Gym head server at {self.head} ({type(error).__name__}: {error}); {START}") from error
        return find_agents(config, self.head)

    async def _rediscover(self) -> None:
        """After a failure: a NeMo Gym that was started again has other ports. Keeps the known ones while the head server is away."""
        if time.monotonic() - self.agents_at > RECENT_S:
            self.agents_at = time.monotonic()
            with suppress(EnvLoadError):
                self.agents |= await self._discover()

    def _agent_name(self, name: str | None) -> str:
        return name if name is not None else next(iter(self.agents))

    def _check_agent(self, name: str | None) -> None:
        """Raises EnvLoadError if the rows of `name` cannot be played, or not be trained on."""
        known = ", ".join(self.agents) or "none"
        if name is None and len(self.agents) != 1:
            raise EnvLoadError(
                f"environment {self.spec.name}: rows of {self.spec.dataset} have no agent_ref, and the head server's agents are {known}; "
                "add it with `ng_prepare_data +mode=example_validation`"
            )
        if name is not None and name not in self.agents:
            raise EnvLoadError(f"environment {self.spec.name}: rows are for agent {name}; {self.head} has {known}: start ng_run with it")
        agent = self.agents[self._agent_name(name)]
        if self.policy.endpoint is None and agent.policy_urls and not agent.tells_tokens:
            raise EnvLoadError(f"environment {self.spec.name}: {no_tokens(f'the model server of agent {self._agent_name(name)}')}")

    def _check_asks_us(self, agent: str) -> None:
        """Another server on this machine would give tokens of another policy, and nothing else would look wrong."""
        if self.policy.endpoint is not None:
            return
        servers = self.policy.servers
        ours = {local_port(url) for url in map(servers.url, range(servers.count)) if url}
        asked = {local_port(url) for url in self.agents[agent].policy_urls}
        if None not in ours and None not in asked and not asked <= ours:
            raise RolloutError(
                "inference",
                f"NeMo Gym asks port {sorted(asked - ours)} for the policy (policy_base_url), but inference serves at {sorted(ours)}; "
                "set inference.port, and start ng_run with that address",
            )


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file. Raises EnvLoadError that names the line."""
    if not path.is_file():
        raise EnvLoadError(f"no file {path}; NeMo Gym's rows are made as docs/nemo_gym.md says")
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
            raise EnvLoadError(f"{path}:{number} is not a NeMo Gym row with responses_create_params.input ({fault})") from error
    if not rows:
        raise EnvLoadError(f"{path} has no rows")
    return rows


def server_of(config: dict[str, Any], name: str, kind: str) -> dict[str, Any] | None:
    """The settings of the server `name`, which lie two levels down: `{name: {kind: {implementation: settings}}}`."""
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
        if host == "0.0.0.0":  # bound everywhere; reached where the head server is
            host = urlsplit(head).hostname
        model = server_of(config, (settings.get("model_server") or {}).get("name", ""), MODELS) or {}
        urls = resolved(config, model.get("base_url")) or []
        agents[name] = Agent(
            f"http://{host}:{settings['port']}", [urls] if isinstance(urls, str) else urls, bool(model.get("return_token_id_information"))
        )
    return agents


def resolved(config: dict[str, Any], value: Any) -> Any:
    """A setting, or the one that `${name}` refers to: the head server gives its configuration as it was written."""
    name = value.removeprefix("${").removesuffix("}") if isinstance(value, str) and value.startswith("${") else None
    return config.get(name) if name else value


def local_port(url: str) -> int | None:
    """The port of an address on this machine; None elsewhere."""
    parts = urlsplit(url)
    return parts.port if parts.hostname in LOOPBACK else None
