"""Environments of the verifiers v1 API: a taskset, its agents, and the harness of each.

verifiers plays and scores an episode in one piece, so `timeout_s` and `max_generating` apply to
both together, and `max_scoring` has no effect. verifiers also enforces an agent's own limits
(`args.agent = {max_turns = 4, timeout = {rollout = 60}}`).

V1Config resolves `args`: the place of each argument, local defaults, and the two splits. An
argument is a field of the taskset's config, or else of the environment's: its agents, `timeout`,
`retries`, `max_concurrent_agents`, and its own fields. The tables `taskset` and `env` resolve a
name that both have, and pair a taskset with an environment: `args = {num = 100, agent = {max_turns
= 4}, env = {id = "best-of-n", n = 2}}`. The table `eval` holds taskset fields that differ for
evaluation: `args.eval.split = "test"`. "None" means no value, as everywhere in verifiers.
"""

import asyncio
import copy
import importlib.util
import inspect
import logging
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin

import verifiers.v1 as vf
from pydantic import BaseModel, ValidationError
from pydantic_config.cli import _extract_field_docstrings
from pydantic_core import PydanticUndefined, to_jsonable_python
from verifiers.v1.clients import ModelContext
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, taskset_config_type
from verifiers.v1.utils.memory import trim_memory_periodically
from verifiers.v1.utils.retries import run_episode_with_retry

from rl.config.environment_id import check_installed, comes_with_verifiers, module_name
from rl.envs.environment import exits_are_errors, limited, places, v1_exports
from rl.envs.policy import OVERRIDABLE, Policy, RolloutError
from rl.envs.v1.client import ActiveTrace, PolicyClientConfig, as_episode
from rl.envs.v1.harness import HARNESS_ID, MCPServer, chat_tool, opening, own_sampling
from rl.system import process_table
from rl.system.errors import RunError
from rl.system.functions import Blame
from rl.system.terminal import did_you_mean
from rl.wire.rollouts import Episode, Split
from rl.wire.worker_messages import EnvSpec, PlayOrder

TABLES = ("taskset", "env", "eval")
EVAL_SPLITS = ("eval", "test", "validation", "valid", "val", "dev")
"""Common names of splits that are not trained on, the most common first."""


class V1Config:
    """The resolved `args`: `env` is the environment's config, `eval_tasksets()` those of
    evaluation, `agents` the agents' names."""

    def __init__(self, spec: EnvSpec, endpoint: bool):
        assert spec.id is not None
        self.name = f"environment {spec.name}"
        args = copy.deepcopy(spec.args)  # verifiers modifies what it validates
        taskset, env, self.for_eval = (self._table(args.pop(name, {}), name) for name in TABLES)
        self._set_ids(spec.id, taskset, env)
        self.taskset_class: type[vf.TasksetConfig] = taskset_config_type(taskset["id"])
        self.env_class: type[vf.EnvConfig] = env_config_type(taskset["id"], env.get("id", ""))
        of_taskset, of_env = self.taskset_class.model_fields, self.env_class.model_fields
        self.agents = [
            name for name, field in of_env.items() if isinstance(field.default, vf.AgentConfig)
        ]
        for key, value in args.items():
            if key in of_taskset and key != "id":
                taskset[key] = value
            elif key in of_env and key not in ("id", "taskset"):
                both = isinstance(value, dict) and isinstance(env.get(key), dict)
                env[key] = {**value, **env[key]} if both else value
            else:
                hint = did_you_mean(key, {*of_taskset, *of_env, *TABLES} - {"id"})
                raise RunError(f"{self.name} has no argument {key}; {hint}")
        self.split_is_free = "split" in of_taskset and "split" not in taskset
        if self.split_is_free and "train" in self.split_names():
            taskset["split"] = "train"
        for agent in self.agents:
            env[agent] = self._local(taskset["id"], agent, env.get(agent, {}))
        self.env = self._validated(self.env_class, {**env, "taskset": taskset})
        for agent in [] if endpoint else self.agents:
            config = getattr(self.env, agent)
            if config.model and config.client is None:
                raise RunError(
                    f"{self.name}: agent {agent} asks for the model {config.model}, but the "
                    "inference servers have the policy only; set its server as "
                    f'args.{agent}.client = {{base_url = "...", api_key_var = "..."}}, or let '
                    f'the policy play it with args.{agent}.model = "None"'
                )

    def _table(self, value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise RunError(f"{self.name}: args.{name} must be a table")
        return value

    def _set_ids(self, env_id: str, taskset: dict[str, Any], env: dict[str, Any]) -> None:
        """Fills in the ids: the package is the taskset (and may bring its environment), or the
        environment for a taskset in `args`."""
        path = check_installed(env_id)
        module = module_name(path)
        if comes_with_verifiers(module):
            module = f"verifiers.v1.tasksets.{module}"
        # A module of verifiers that is not a taskset is an environment.
        if importlib.util.find_spec(module) and "Taskset" in v1_exports(
            importlib.import_module(module)
        ):
            taskset.setdefault("id", path)
            return
        env.setdefault("id", path)
        if not taskset.get("id"):
            raise RunError(
                f"{self.name}: {path} plays the tasks of another package; name it with "
                'args.taskset.id = "..."'
            )
        check_installed(taskset["id"])

    def _local(self, taskset_id: str, agent: str, config: Any) -> dict[str, Any]:
        """Replaces verifiers' defaults, which run a program per rollout in a remote sandbox.
        Unless the user or the author chose otherwise, the agent runs in this process, its tools
        on this machine, and our equivalent replaces the `null` harness."""
        author = self.env_class.model_fields[agent].default
        config = self._table(config, agent)
        if "runtime" not in author.model_fields_set:
            config.setdefault("runtime", {"type": "subprocess"})
        named = author.harness.id if author.harness else default_harness_id(taskset_id)
        # bash is verifiers' default
        unnamed = named == ("null" if author.harness else "bash")
        harness = config.get("harness", {})
        if isinstance(harness, dict) and "id" not in harness and (unnamed or harness):
            config["harness"] = {**harness, "id": HARNESS_ID if unnamed else named}
        return config

    def _validated(self, config: type[BaseModel], data: dict[str, Any]) -> Any:
        try:
            return config.model_validate(data)
        except ValidationError as error:
            faults = [self._fault(config, fault) for fault in error.errors(include_url=False)]
            raise RunError(f"{self.name}: {'; '.join(faults)}") from error

    def _fault(self, config: type[BaseModel], fault: Any) -> str:
        path = [str(part) for part in fault["loc"]]
        model: Any = config
        for part in path[:-1]:
            field = getattr(model, "model_fields", {}).get(part)
            model = self.taskset_class if part == "taskset" else field and field.annotation
        if path[0] == "taskset" and len(path) > 1:
            del path[0]
        name = ".".join(["args", *path])
        if fault["type"] != "extra_forbidden":
            return f"{name}: {fault['msg']}"
        known = getattr(model, "model_fields", {})
        return f"{name} is not known{(known and '; ' + did_you_mean(path[-1], known)) or ''}"

    def split_names(self) -> list[str]:
        """Possible values of the taskset's field `split`: its literals, or the common names if
        it is a free text."""
        kind = self.taskset_class.model_fields["split"].annotation
        if get_origin(kind) is Literal:
            return [name for name in get_args(kind) if isinstance(name, str)]
        return ["train", *EVAL_SPLITS[:3]] if kind is str else []

    def eval_tasksets(self) -> list[vf.TasksetConfig]:
        """Configs to try for evaluation, of which the first that loads is used; empty means the
        training tasks.

        A split that the user set applies to both, and `args.eval` has everything that differs.
        """
        if self.for_eval or not self.split_is_free:
            changes = [self.for_eval] if self.for_eval else []
        else:
            names = self.split_names()
            changes = [{"split": name} for name in EVAL_SPLITS if name in names]
            if get_origin(self.taskset_class.model_fields["split"].annotation) is Literal:
                del changes[1:]
        train = self.env.taskset.model_dump()
        return [self._validated(self.taskset_class, {**train, **change}) for change in changes]

    def arguments(self) -> dict[str, Any]:
        """Every argument with its value, default and description, or docstring, as in verifiers'
        own help."""
        arguments = {}
        hidden = {*vf.EnvConfig.model_fields, *self.agents, "id"}
        for values in (self.env, self.env.taskset):
            docs = _extract_field_docstrings(type(values))
            for name, field in type(values).model_fields.items():
                if name == "id" or (values is self.env and name in hidden):
                    continue
                default = field.get_default(call_default_factory=True)
                facts = {
                    "value": getattr(values, name),
                    "default": None if default is PydanticUndefined else default,
                }
                about = inspect.cleandoc(field.description or docs.get(name, ""))
                arguments[name] = {**to_jsonable_python(facts, fallback=str), "about": about}
        return arguments


log = logging.getLogger(__name__)

START_S = 300.0
"""Deadline for the start of the tool servers that all tasks share; verifiers itself waits 180 s
for one."""
STOP_S = 30.0
TOOL_SERVER_CHECK_S = 2.0
KEPT_TASKS = 4096
"""Number of an endless taskset's newest tasks that are kept in memory."""


class EndlessTasks(Sequence[vf.Task]):
    """The tasks of an endless taskset by index, drawn in order on demand.

    The last KEPT_TASKS of them are kept. For an older one, the taskset is iterated again from its
    beginning, as after a restart: the task is the same if the taskset's own seed makes it so.
    """

    def __init__(self, taskset: vf.Taskset):
        self.taskset, self.tasks, self.num_drawn = taskset, iter(taskset), 0
        self.kept: deque[vf.Task] = deque(maxlen=KEPT_TASKS)

    def __len__(self) -> int:
        raise TypeError("an endless taskset has no size")

    def __getitem__(self, index: Any) -> vf.Task:
        if index < self.num_drawn - len(self.kept):
            self.__init__(self.taskset)
        for _ in range(self.num_drawn, index + 1):
            task = next(self.tasks, None)
            if task is None:
                raise RolloutError(
                    "environment",
                    f"the taskset is marked INFINITE, but ended after {self.num_drawn} tasks",
                )
            self.kept.append(task)
            self.num_drawn += 1
        return self.kept[index - self.num_drawn]


class V1Environment:
    """A verifiers v1 taskset or environment with all its agents."""

    scores_groups = False

    def __init__(self, spec: EnvSpec, policy: Policy):
        self.spec, self.policy = spec, policy
        self.name, self.notice = f"environment {spec.name}", ""
        if spec.set_kwargs:
            raise RunError(
                f"{self.name}: set_kwargs is for classic environments; this one is configured by "
                "args alone"
            )
        self.generating = places(spec.max_generating)
        self.client_config = PolicyClientConfig()
        self.active = self.client_config.client.active
        with self._load_errors("loading it"):
            self.config = V1Config(spec, policy.endpoint is not None)
            self.env = vf.load_environment(self.config.env)
            train = tasks_of(self.env.taskset)
            self.tasks: dict[Split, Sequence[vf.Task]] = {
                "train": train,
                "eval": self._eval_tasks(train),
            }
        for split in self.tasks:
            if self.num_tasks(split) == 0:
                raise RunError(
                    f"{self.name}: its taskset has no {split} tasks with args {spec.args}"
                )
        with self._load_errors("describing its tools"):
            self.tools = asyncio.run(self._tools())
            hooks, judges = train[0].hooks("reward"), train[0].plugged_judges()
            self.rewards = {hook.__name__: getattr(hook, "_vf_weight", 1.0) for hook in hooks}
            self.rewards |= {judge.reward_name: judge.config.weight for judge in judges}
        if not any(self.rewards.values()) and type(self.env).finalize is vf.Env.finalize:
            self.notice = (
                "every reward is 0, as its tasks have no @vf.reward and no judge with a weight"
            )
        self.kind = "v1 taskset" if isinstance(self.env, vf.SingleAgentEnv) else "v1 environment"

    def _load_errors(self, doing: str) -> Blame:
        what = f"{self.name} ({self.spec.id}): {doing}"
        return Blame(what, f"check its args {self.spec.args} and the environment itself")

    def _eval_tasks(self, train: Sequence[vf.Task]) -> Sequence[vf.Task]:
        """The tasks of the first split that exists. If `split` is a free text, a missing one
        shows as an error of the data set."""
        configs = self.config.eval_tasksets()
        for config in configs:
            try:
                return tasks_of(vf.load_taskset(config))
            except (ValueError, LookupError, OSError) as error:
                if len(configs) == 1:
                    raise
                log.info("%s: no split %s: %s", self.name, config.split, error)
        return train

    def num_tasks(self, split: Split) -> int | None:
        tasks = self.tasks[split]
        return None if isinstance(tasks, EndlessTasks) else len(tasks)

    def task(self, split: Split, index: int) -> dict[str, Any]:
        data = self.tasks[split][index].data
        shown = {"prompt": opening(data.system_prompt, data.prompt)}
        if self.tools:
            shown["tools"] = self.tools
        apart = {"prompt", "system_prompt"}
        return shown | data.model_dump(
            mode="json", exclude_defaults=True, exclude=apart, fallback=str
        )

    def prompt_ids(self, split: Split, index: int) -> list[int] | None:
        with self._load_errors("drawing its tasks"):
            data = self.tasks[split][index].data
            messages = opening(data.system_prompt, data.prompt)
        if not messages or messages[-1]["role"] == "system":  # a user opens the conversation
            return None
        return self.policy.renderer.prompt_ids(messages, self.tools or None)

    def describe(self) -> dict[str, Any]:
        task = self.tasks["train"][0]
        about: dict[str, Any] = {"class": place_of(self.env.taskset)}
        if not isinstance(self.env, vf.SingleAgentEnv):
            about["environment"] = place_of(self.env)
        return about | {
            "arguments": self.config.arguments(),
            **{f"{split} tasks": self.num_tasks(split) or "endless" for split in self.tasks},
            "agents": {name: self._describe_agent(name) for name in self.config.agents},
            "rewards": self.rewards,
            "metrics": [fn.__name__ for fn in task.hooks("metric")],
            "stops": [fn.__name__ for fn in task.hooks("stop")],
            "tools": {
                tool["function"]["name"]: tool["function"]["description"] for tool in self.tools
            },
        }

    def _describe_agent(self, name: str) -> dict[str, Any]:
        """An agent's harness, runtime, own endpoint (if any), and limits."""
        config: vf.AgentConfig = getattr(self.config.env, name)
        harness = self.config.env.agent_harnesses()[name]
        limits = config.model_dump(
            mode="json",
            exclude_none=True,
            include={"model", "max_turns", "max_output_tokens", "max_total_tokens"},
        )
        about = {"harness": harness.id, "runtime": config.runtime.type}
        if config.client:
            about["endpoint"] = config.client.base_url
        return about | limits

    async def _tools(self) -> list[dict[str, Any]]:
        """The tools offered to tasks, in chat API form; servers that run elsewhere list theirs
        only to the harness."""
        tools = []
        for owner in (self.env.taskset, self.tasks["train"][0]):
            for toolset in owner.toolsets(owner.config):
                is_own = type(toolset).register is vf.Toolset.register
                if is_own and not getattr(toolset.config, "url", None):
                    listing = MCPServer(toolset.server_name)
                    toolset.register(listing)
                    for tool in await listing.list_tools():
                        tools.append(chat_tool(toolset.server_name, tool))
        return tools

    async def start(self) -> None:
        """Starts the interception server and the tool servers that all tasks share."""
        # verifiers runs reward functions in tasks of their own
        exits_are_errors(asyncio.get_running_loop())
        up, self.stop_servers = asyncio.Event(), asyncio.Event()
        self.servers = asyncio.create_task(self._serve(up))
        self.servers.add_done_callback(lambda _: up.set())
        try:
            async with asyncio.timeout(START_S):
                await up.wait()
        except TimeoutError as error:
            await self.close()
            raise RunError(
                f"{self.name}: its servers did not start within {START_S:.0f} s; check its "
                "tool servers"
            ) from error
        if self.servers.done():
            with self._load_errors("starting its servers"):
                self.servers.result()

    async def _serve(self, up: asyncio.Event) -> None:
        """Runs verifiers' servers until `stop_servers`. Enters and leaves them in the same task, as
        their cancel scopes require.

        Ends this worker when a tool server died, because verifiers does not restart it; the next
        worker starts all of them.
        """
        async with self.env.serving():
            tool_servers = self._tool_servers()
            up.set()
            while not self.stop_servers.is_set():
                for pid, start in tool_servers.items():
                    line = process_table.entry(pid)
                    if line is None or line.start != start or line.state == "Z":
                        print(
                            f"{self.name}: its tool server (pid {pid}) died; the worker "
                            "exits, and the next one restarts it",
                            flush=True,
                        )
                        os._exit(1)
                with suppress(TimeoutError):
                    async with asyncio.timeout(TOOL_SERVER_CHECK_S):
                        await self.stop_servers.wait()

    def _tool_servers(self) -> dict[int, str]:
        """Maps the pids of the processes that serve this environment's tools to their start
        times."""
        toolsets = self.env.taskset.toolsets(self.env.taskset.config)
        modules = {type(toolset).__module__ for toolset in toolsets}
        processes = process_table.table()
        below = process_table.trees(processes, [os.getpid()])
        return {
            pid: processes[pid].start
            for pid in below
            if modules & set(process_table.command_line(pid))
        }

    async def close(self) -> None:
        """Stops the servers; any that do not stop in time die with this process."""
        self.stop_servers.set()
        done, _ = await asyncio.wait([self.servers], timeout=STOP_S)
        if not done:
            self.servers.cancel()
        elif not self.servers.cancelled() and (error := self.servers.exception()):
            log.warning("%s: its servers ended with %r", self.name, error)

    async def play(self, order: PlayOrder, num_episodes: int) -> list[Episode]:
        return [await self._episode(order.seeded("member", i)) for i in range(num_episodes)]

    async def _episode(self, order: PlayOrder) -> Episode:
        """Plays and scores one episode and converts it to rollouts."""
        task = self.tasks[order.split][order.task]
        context = self._context(order)
        active: dict[str, ActiveTrace] = {}

        def start_trace(trace: vf.Trace) -> None:
            active[trace.id] = self.active[trace.id] = self._active_trace(
                trace, order.seeded("conversation", len(active))
            )

        try:
            async with limited(
                self.generating, self.spec.timeout_s, "an episode (generation and scoring)"
            ):
                episode = await run_episode_with_retry(
                    lambda: self.env.run_episode(task, context, on_trace=start_trace),
                    self.config.env.retries,
                )
        finally:
            for trace_id in active:
                self.active.pop(trace_id, None)
        await trim_memory_periodically()
        return as_episode(self.env, episode, active)

    def _context(self, order: PlayOrder) -> ModelContext:
        """The model of agents without their own endpoint. Our client knows the run's sampling;
        an endpoint gets it here."""
        if self.policy.endpoint is None:
            return ModelContext(model="policy", client=self.client_config)
        endpoint, sampling = self.policy.endpoint, vf.SamplingConfig(**order.sampling)
        client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=endpoint.api_key_var)
        return ModelContext(model=endpoint.model, client=client, sampling=sampling)

    def _active_trace(self, trace: vf.Trace, order: PlayOrder) -> ActiveTrace:
        """A trace with its conversation. A trained agent's own sampling parameters apply only if
        they are OVERRIDABLE."""
        if self.policy.endpoint is not None:
            return ActiveTrace(trace, None)
        pinned = own_sampling(trace.agent.config.sampling) | {"max_kept": None}
        if trace.agent.trainable:
            pinned = {key: value for key, value in pinned.items() if key in OVERRIDABLE}
        return ActiveTrace(
            trace,
            self.policy.chat(self.policy, order.session, order.sampling | pinned, seed=order.seed),
        )


def place_of(value: Any) -> str:
    """Where the class of a value is defined."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def tasks_of(taskset: vf.Taskset) -> Sequence[vf.Task]:
    return EndlessTasks(taskset) if taskset.INFINITE else list(taskset)
