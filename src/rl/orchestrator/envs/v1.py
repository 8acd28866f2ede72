"""Environments of the verifiers v1 API: a taskset, its agents' seats, and the harness that plays each; see v1_config.py for `args`.

verifiers plays and scores an episode in one piece, so `timeout_s` and `max_generating` hold for both together, and `max_scoring` has no
place of its own. A seat's own limits (`args.agent = {max_turns = 4, timeout = {rollout = 60}}`) are verifiers' and come on top.
"""

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from mcp.server.fastmcp import FastMCP
from verifiers.v1.clients import ModelContext
from verifiers.v1.utils.memory import trim_memory_periodically
from verifiers.v1.utils.retries import run_episode_with_retry

from rl import guard
from rl.orchestrator.env_ids import Blame, EnvLoadError
from rl.orchestrator.envs.environment import Limits, RolloutError, phase
from rl.orchestrator.envs.policy import OVERRIDABLE, Policy
from rl.orchestrator.envs.v1_client import PolicyClient, PolicyClientConfig, Seat
from rl.orchestrator.envs.v1_config import V1Config, plain
from rl.orchestrator.envs.v1_rollouts import as_episode, opening
from rl.orchestrator.rollouts import EnvSpec, Episode, PlayGroup, Split
from rl.renderer import RendererError

log = logging.getLogger(__name__)

START_S = 300.0
"""For the tool servers that all tasks share; verifiers itself waits 180 s for one."""
STOP_S = 30.0
LOOK_S = 2.0
CHECKED_PROMPTS = 64
"""So many prompts are measured against the context before the run starts."""
KEPT_TASKS = 4096
"""So many tasks of an endless taskset stay reachable at once."""


class Stream(Sequence[vf.Task]):
    """The tasks of an endless taskset by index, drawn in order when they are asked for.

    The last KEPT_TASKS of them are kept. For an older one the taskset is started again and drawn up to it, as after a restart: it is the
    same task as far as the taskset's own seed makes it so.
    """

    def __init__(self, taskset: vf.Taskset, kept: int = KEPT_TASKS):
        self.taskset = taskset
        self.max_kept = kept
        self.kept: dict[int, vf.Task] = {}
        self._start()

    def _start(self) -> None:
        self.tasks: Iterator[vf.Task] = iter(self.taskset)
        self.num_drawn = 0

    def __len__(self) -> int:
        raise TypeError("an endless taskset has no size")

    def __getitem__(self, index: Any) -> vf.Task:
        if index not in self.kept and index < self.num_drawn:
            self._start()
        while index not in self.kept:
            task = next(self.tasks, None)
            if task is None:
                raise RolloutError("environment", f"the taskset says it is INFINITE, but it ended after {self.num_drawn} tasks")
            self.kept.pop(self.num_drawn, None)  # to the end of the order in which tasks are forgotten
            self.kept[self.num_drawn] = task
            self.num_drawn += 1
            if len(self.kept) > self.max_kept:
                del self.kept[next(iter(self.kept))]
        return self.kept[index]


@dataclass
class Serving:
    """The task that holds what verifiers serves an environment with, and how to end it."""

    task: asyncio.Task[None]
    end: asyncio.Event


class V1Environment:
    """A verifiers v1 taskset or environment, all agents of it."""

    scores_groups = False

    def __init__(self, spec: EnvSpec, policy: Policy):
        if spec.set_kwargs:
            raise EnvLoadError(f"environment {spec.name}: set_kwargs are for classic environments; this one is configured by args alone")
        self.spec = spec
        self.policy = policy
        self.limits = Limits(spec)
        self.client = PolicyClient()
        self.client_config = PolicyClientConfig.of(self.client)
        self.serving: Serving | None = None
        self.watching: asyncio.Task[None] | None = None
        with self._blame("loading it"):
            self.config = V1Config(spec, policy.endpoint is not None)
            self.env = vf.load_environment(self.config.env)
            train = listed(self.env.taskset)
            self.tasks: dict[Split, Sequence[vf.Task]] = {"train": train, "eval": self._eval_tasks(train)}
        for split, tasks in self.tasks.items():
            if not isinstance(tasks, Stream) and not tasks:
                raise EnvLoadError(f"environment {spec.name}: its taskset has no {split} tasks with args {spec.args}")
        with self._blame("describing its tools"):
            self.tools = asyncio.run(self._tools())
        self.kind = "v1 taskset" if isinstance(self.env, vf.SingleAgentEnv) else "v1 environment"

    def _blame(self, doing: str) -> Blame:
        what = f"environment {self.spec.name} ({self.spec.id}): {doing}"
        return Blame(what, f"check its args {self.spec.args} and the environment itself")

    def _eval_tasks(self, train: Sequence[vf.Task]) -> Sequence[vf.Task]:
        """The tasks of the first split that there is. Where `split` is any text, a taskset refuses one by what its data set raises."""
        configs = self.config.eval_tasksets()
        for config in configs:
            try:
                return listed(vf.load_taskset(config))
            except (ValueError, LookupError, OSError) as error:
                if len(configs) == 1:
                    raise
                log.info("environment %s: no split %s: %s", self.spec.name, config.split, error)
        return train

    def num_tasks(self, split: Split) -> int | None:
        tasks = self.tasks[split]
        return None if isinstance(tasks, Stream) else len(tasks)

    def task(self, split: Split, index: int) -> dict[str, Any]:
        data = self.tasks[split][index].data
        own = data.model_dump(mode="json", exclude_defaults=True, exclude={"prompt", "system_prompt"})
        return {"prompt": opening(data), **({"tools": self.tools} if self.tools else {}), **own}

    def check_prompts(self, max_tokens: int) -> str | None:
        """What is wrong with the prompts' lengths, or None; looks at the first ones only."""
        if self.policy.endpoint:
            return None
        limit = self.policy.max_model_len
        for index in range(min(CHECKED_PROMPTS, self.num_tasks("train") or CHECKED_PROMPTS)):
            with self._blame("drawing its tasks"):
                messages = opening(self.tasks["train"][index].data)
            if not messages or messages[-1]["role"] == "system":  # a user opens the talk
                continue
            try:
                length = len(self.policy.renderer.prompt_ids(messages, self.tools or None))
            except RendererError as error:
                return f"environment {self.spec.name}: train task {index}: {error}"
            if length + max_tokens > limit:
                return (
                    f"environment {self.spec.name}: a prompt of {length} tokens and orchestrator.sampling.max_tokens = {max_tokens} exceed "
                    f"model.max_model_len = {limit}; raise model.max_model_len to {length + max_tokens} or lower max_tokens"
                )
        return None

    def describe(self) -> dict[str, Any]:
        task = self.tasks["train"][0]
        judges = {judge.reward_name: judge.config.weight for judge in task.plugged_judges()}
        about: dict[str, Any] = {"class": f"{type(self.env.taskset).__module__}.{type(self.env.taskset).__qualname__}"}
        if not isinstance(self.env, vf.SingleAgentEnv):
            about["environment"] = f"{type(self.env).__module__}.{type(self.env).__qualname__}"
        return about | {
            "arguments": self.config.arguments(),
            **{f"{split} tasks": "endless" if isinstance(tasks, Stream) else len(tasks) for split, tasks in self.tasks.items()},
            "agents": {name: self._seat(name) for name in self.config.agents},
            "rewards": {fn.__name__: getattr(fn, "_vf_weight", 1.0) for fn in task.hooks("reward")} | judges,
            "metrics": [fn.__name__ for fn in task.hooks("metric")],
            "stops": [fn.__name__ for fn in task.hooks("stop")],
            "tools": {tool["function"]["name"]: tool["function"]["description"] for tool in self.tools},
        }

    def _seat(self, name: str) -> dict[str, Any]:
        """Who sits there and what limits it has."""
        config: vf.AgentConfig = getattr(self.config.env, name)
        harness = self.config.env.agent_harnesses()[name]
        limits = config.model_dump(mode="json", exclude_none=True, include={"model", "max_turns", "max_output_tokens", "max_total_tokens"})
        own = {"endpoint": config.client.base_url} if config.client else {}
        return {"harness": harness.id, "runtime": config.runtime.type, **own, **plain(limits)}

    async def _tools(self) -> list[dict[str, Any]]:
        """The tools that tasks are offered, as chat APIs have them; servers that run elsewhere tell theirs only to the harness."""
        task = self.tasks["train"][0]
        tools = []
        for toolset in [*self.env.taskset.toolsets(self.env.taskset.config), *task.toolsets(task.config)]:
            if getattr(toolset.config, "url", None) or type(toolset).register is not vf.Toolset.register:
                continue
            listing = FastMCP(toolset.server_name)
            toolset.register(listing)
            for tool in await listing.list_tools():
                name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
                function = {"name": name, "description": tool.description or "", "parameters": tool.inputSchema}
                tools.append({"type": "function", "function": function})
        return tools

    async def start(self) -> None:
        """Brings up the interception server and the tool servers that all tasks share."""
        up, end = asyncio.Event(), asyncio.Event()

        async def serve() -> None:  # enters and leaves in one task, as cancel scopes inside demand
            async with self.env.serving():
                up.set()
                await end.wait()

        task = asyncio.create_task(serve())
        task.add_done_callback(lambda _: up.set())
        self.serving = Serving(task, end)
        try:
            async with asyncio.timeout(START_S):
                await up.wait()
        except TimeoutError as error:
            await self.close()
            raise EnvLoadError(f"environment {self.spec.name}: its servers were not up in {START_S:.0f} s; see its tool servers") from error
        if task.done():
            self.serving = None
            with self._blame("starting its servers"):
                task.result()
        self.watching = asyncio.create_task(self._watch(self._tool_servers()))

    def _tool_servers(self) -> dict[int, str]:
        """Pid -> start of the processes that serve this environment's tools."""
        modules = {type(toolset).__module__ for toolset in self.env.taskset.toolsets(self.env.taskset.config)}
        processes = guard.table()
        return {pid: processes[pid].start for pid in guard.below(processes, [os.getpid()]) if modules & set(command_line(pid))}

    async def _watch(self, servers: dict[int, str]) -> None:
        """Loop. verifiers does not bring a tool server that died back: then this worker ends, and its successor starts all of them."""
        while servers:
            await asyncio.sleep(LOOK_S)
            for pid, start in servers.items():
                line = guard.entry(pid)
                if line is None or line.start != start or line.state == "Z":
                    print(f"environment {self.spec.name}: its tool server (pid {pid}) died: the worker ends, to start anew", flush=True)
                    os._exit(1)

    async def close(self) -> None:
        """Ends the servers; those that do not end in time are left to die with this process."""
        if self.serving is None:
            return
        serving, self.serving = self.serving, None
        if self.watching:
            self.watching.cancel()
        serving.end.set()
        done, _ = await asyncio.wait([serving.task], timeout=STOP_S)
        if not done:
            serving.task.cancel()
        elif not serving.task.cancelled() and (error := serving.task.exception()):
            log.warning("environment %s: its servers ended with %r", self.spec.name, error)

    async def play(self, order: PlayGroup, num_episodes: int) -> list[Episode]:
        return list(await asyncio.gather(*(self._episode(order) for _ in range(num_episodes))))

    async def _episode(self, order: PlayGroup) -> Episode:
        """One episode: generated, judged, and turned into rollouts."""
        task = self.tasks[order.split][order.task]
        context = self._context(order)
        seats: dict[str, Seat] = {}

        def take_seat(trace: vf.Trace) -> None:
            seats[trace.id] = self.client.seats[trace.id] = self._seat_for(trace, order)

        try:
            async with phase(self.limits.generating, self.spec.timeout_s, "an episode (generation and scoring)"):
                episode = await run_episode_with_retry(
                    lambda: self.env.run_episode(task, context, on_trace=take_seat), self.config.env.retries
                )
        finally:
            for trace_id in seats:
                self.client.seats.pop(trace_id, None)
        rollouts, failure = as_episode(self.env, episode, seats)
        await trim_memory_periodically()
        if failure and not rollouts:
            raise RolloutError(*failure)
        return rollouts

    def _context(self, order: PlayGroup) -> ModelContext:
        """What seats without an endpoint of their own ask. Our client knows the run's sampling; an endpoint is sent it."""
        if self.policy.endpoint is None:
            return ModelContext(model="policy", client=self.client_config)
        endpoint = self.policy.endpoint
        client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=endpoint.api_key_var)
        return ModelContext(model=endpoint.model, client=client, sampling=vf.SamplingConfig(**order.sampling))

    def _seat_for(self, trace: vf.Trace, order: PlayGroup) -> Seat:
        """A seat's own sampling counts in full where its tokens are not trained; else only what leaves the distribution as it is."""
        if self.policy.endpoint is not None:
            return Seat(None)
        pinned = trace.agent.config.sampling.wire_args() if trace.agent.config.sampling else {}
        if trace.agent.trainable:
            pinned = {key: value for key, value in pinned.items() if key in OVERRIDABLE}
        return Seat(self.policy.conversation(order.server, order.sampling | pinned))


def command_line(pid: int) -> list[str]:
    """Words of a process's command; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def listed(taskset: vf.Taskset) -> Sequence[vf.Task]:
    return Stream(taskset) if taskset.INFINITE else list(taskset)
