"""Environments of a NeMo Gym deployment, over HTTP: one `POST {agent}/run` generates and scores an
episode.

NeMo Gym runs in its own virtual environment (docs/nemo_gym.md) and queries our inference servers
itself, so two things differ from the other kinds. First, a token's policy version is what the
server that sampled it remembers of the answer; if none does (it was started again), the oldest one
that the agent's servers held when the episode began: a lower bound, as weights may be swapped
during an episode. Second, the server continues the ids of earlier turns if the agent sends them
back unchanged (rl.inference.chat); other turns begin a new sample.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rl.envs.environment import limited, places
from rl.envs.nemo_gym.wire import (
    SAMPLING_PARAMS,
    Head,
    chat_prompt,
    decode_reply,
    digest_of,
    input_items,
    no_tokens,
    request_body,
    to_rollout,
)
from rl.envs.policy import Policy, RolloutError
from rl.run_dir.access_token import is_loopback
from rl.system.errors import RunError
from rl.wire.inference_client import InferenceLostError
from rl.wire.rollouts import Episode, Split
from rl.wire.worker_messages import EnvSpec, PlayOrder


class Row(NamedTuple):
    """A line of a data set, decoded only when played."""

    agent: str | None
    line: bytes


class NemoGymEnvironment:
    """The rows of a data set, each played by the agent that it names."""

    kind = "nemo_gym"
    notice = ""
    scores_groups = False

    def __init__(self, spec: EnvSpec, policy: Policy):
        self.spec, self.policy = spec, policy
        self.name = f"environment {spec.name}"
        self.head = Head(spec.head_server or "")
        if not spec.dataset:
            raise RunError(
                f"{self.name}: head_server needs dataset = FILE.jsonl, the rows to play; see "
                "docs/nemo_gym.md"
            )
        for key in spec.args.keys() & {*SAMPLING_PARAMS}:
            raise RunError(f"{self.name}: args.{key} is set by the sampling settings; set it there")
        files: dict[Split, str | None] = {"train": spec.dataset, "eval": spec.eval_dataset}
        self.rows = {split: read_rows(Path(file)) if file else [] for split, file in files.items()}
        self.generating = places(spec.max_generating)

    def num_tasks(self, split: Split) -> int:
        return len(self.rows[split])

    def task(self, split: Split, index: int) -> dict[str, Any]:
        row = json.loads(self.rows[split][index].line)
        messages, tools = chat_prompt(row.pop("responses_create_params"))
        return {"prompt": messages, **({"tools": tools} if tools else {}), **row}

    def describe(self) -> dict[str, Any]:
        counts = Counter(row.agent or "(the only agent)" for row in self.rows["train"])
        spec = self.spec
        return {
            "head_server": self.head.url,
            "dataset": spec.dataset,
            "eval_dataset": spec.eval_dataset,
            "rows of each agent": dict(counts),
            "responses_create_params": spec.args,
            "timeout_s": spec.timeout_s,
        }

    def prompt_ids(self, split: Split, index: int) -> list[int] | None:
        task = self.task(split, index)
        if not task["prompt"]:  # a v1 user may open the conversation
            return None
        return self.policy.renderer.prompt_ids(task["prompt"], task.get("tools"))

    async def start(self) -> None:
        """Finds the agents. Raises RunError if the head server is down or lacks the agent of a
        row."""
        try:
            await self.head.discover()
            for agent in {row.agent for rows in self.rows.values() for row in rows}:
                self._check_agent(agent)
        except RunError:
            await self.close()
            raise

    async def close(self) -> None:
        await self.head.close()

    async def play(self, order: PlayOrder, num_episodes: int) -> list[Episode]:
        row = self.rows[order.split][order.task]
        body = request_body(json.loads(row.line), self.spec.args, order.sampling)
        return [await self._episode(row, body) for _ in range(num_episodes)]

    async def _episode(self, row: Row, body: dict[str, Any]) -> Episode:
        is_ours = self.policy.endpoint is None
        async with limited(
            self.generating, self.spec.timeout_s, "a NeMo Gym episode (generation and scoring)"
        ):
            agent = row.agent or next(iter(self.head.agents))
            version, exact = None, {}
            try:
                if is_ours:
                    self._check_policy_urls(agent)
                    version = await self.policy.servers.loaded_version(self._own_servers(agent))
                text = await self.head.post(
                    lambda: f"{self.head.agents[agent].url}/run", body, "environment"
                )
                reply = decode_reply(text)
                digests = [*filter(None, map(digest_of, reply["response"]["output"]))]
                if is_ours and digests:
                    exact = await self.policy.servers.versions(digests, self._own_servers(agent))
            except InferenceLostError as error:
                raise RolloutError("inference", str(error)) from error
        return [to_rollout(reply, body, version, exact)]

    def _own_servers(self, agent: str) -> tuple[str, ...]:
        """The run's servers that the agent queries; none if it queries an address unknown here,
        such as a router's."""
        ours = {address(url): url for url in self.policy.servers.find()}
        asked = {address(url) for url in self.head.agents[agent].policy_urls}
        return tuple(sorted(ours[url] for url in asked)) if asked <= ours.keys() else ()

    def _check_agent(self, name: str | None) -> None:
        """Raises RunError if the rows of agent `name` cannot be played or cannot be trained on."""
        agents = self.head.agents
        known = ", ".join(agents) or "none"
        if name is None and len(agents) != 1:
            raise RunError(
                f"{self.name}: rows of {self.spec.dataset} have no agent_ref, and the head "
                f"server's agents are {known}; "
                "add agent_ref with `ng_prepare_data +mode=example_validation`"
            )
        name = name or next(iter(agents))
        if name not in agents:
            raise RunError(
                f"{self.name}: rows are for agent {name}; {self.head.url} has {known}: start "
                "ng_run with it"
            )
        agent = agents[name]
        if self.policy.endpoint is None and agent.policy_urls and not agent.returns_tokens:
            raise RunError(f"{self.name}: {no_tokens(f'the model server of agent {name}')}")

    def _check_policy_urls(self, agent: str) -> None:
        """Checks that NeMo Gym queries our servers: tokens of another policy would look valid.
        Raises RolloutError."""
        ours, asked = (
            {address(url) for url in urls}
            for urls in (self.policy.servers.find(), self.head.agents[agent].policy_urls)
        )
        if not any(host for host, _ in ours | asked) and not asked <= ours:
            raise RolloutError(
                "inference",
                f"NeMo Gym asks port {sorted(port or 0 for _, port in asked - ours)} for the "
                f"policy (policy_base_url), but inference serves at "
                f"{sorted(port or 0 for _, port in ours)}; set inference.port, and start ng_run "
                "with that address",
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
            raise RunError(
                f"{path}:{number} is not a NeMo Gym row with responses_create_params.input "
                f"({fault})"
            ) from error
    if not rows:
        raise RunError(f"{path} has no rows")
    return rows


def address(url: str) -> tuple[str | None, int | None]:
    """Host and port of a URL; the host is "" for this machine."""
    split = urlsplit(url)
    return "" if is_loopback(split.hostname or "") else split.hostname, split.port
