"""Environments of verifiers' classic API: single and multi turn, tools, groups, judges, rows with a reward function."""

import asyncio
import copy
import functools
import json
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import datasets
import openai
import verifiers as vf

from rl.chat import Message, RendererError, Tool
from rl.orchestrator.env_ids import Blame
from rl.orchestrator.envs.classic_client import PolicyClient, endpoint_clients, endpoint_sampling, joined, wire, wire_tool
from rl.orchestrator.envs.classic_loading import (
    base_class,
    check_scorable,
    describe_one,
    kept_signal_handlers,
    load_arguments,
    load_package,
    members,
    quicken,
    set_attributes,
)
from rl.orchestrator.envs.environment import Limits, RolloutError, phase
from rl.orchestrator.envs.policy import SAMPLING_KEYS, Policy
from rl.orchestrator.envs.rewards import Scoring, as_number, watch
from rl.orchestrator.envs.rows import load_rows
from rl.orchestrator.rollouts import Cause, EnvSpec, Episode, PlayGroup, Rollout, Split

CHECKED_PROMPTS = 64
"""So many prompts of a data set are measured against the context before the run starts."""
CACHED_TASKS = 256
"""Tasks kept at hand: the episodes of a group ask for the same one, each for itself."""


class Row(dict[str, Any]):
    """A task's row. verifiers deep-copies it for every rollout; of plain data that is several times faster without bookkeeping."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: copied(value) for key, value in self.items()}


def copied(value: Any) -> Any:
    """A copy of plain data in which no list and no dict is shared."""
    kind = type(value)
    if kind is str or kind is int or kind is float or value is None:
        return value
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if kind is list else copy.deepcopy(value)


@dataclass
class Task:
    """A row, and the environment that plays it: a member, where environments are grouped."""

    env: vf.Environment
    member: str
    """Names of the members on the way to it, each with a slash behind it."""
    row: Row

    @property
    def completion_style(self) -> bool:
        return self.env.message_type == "completion"

    @property
    def tools(self) -> list[Tool] | None:
        """What the environment offers for this row, as verifiers resolves it."""
        info = self.row.get("info")
        info = json.loads(info) if isinstance(info, str) and info else info
        own = info.get("tool_defs") if isinstance(info, dict) else None
        return [wire_tool(tool) for tool in (self.env.tool_defs if own is None else own) or []] or None


@dataclass
class Play:
    """A rollout under way."""

    task: Task
    client: PolicyClient | None
    """None: an endpoint is asked."""
    state: dict[str, Any] | None = None
    cause: Cause | None = None
    error: str = ""
    scoring: Scoring | None = None

    def fail(self, cause: Cause, error: str) -> None:
        self.cause, self.error = cause, error

    @property
    def overlong(self) -> bool:
        return bool(self.client and self.client.overlong) or bool(self.state and self.state.get("prompt_too_long"))

    @property
    def is_empty(self) -> bool:
        """The first prompt was too long already: there is nothing to score, and few reward functions take an empty completion."""
        return self.overlong and not (self.state or {}).get("trajectory")


class ClassicEnvironment:
    """An environment of the classic API. See `Environment` for what it does."""

    def __init__(self, spec: EnvSpec, policy: Policy):
        self.spec = spec
        self.policy = policy
        self.limits = Limits(spec)
        self.what = f"environment {spec.id} with args {spec.args}" if spec.id else f"environment {spec.name}"
        datasets.disable_progress_bars()
        with kept_signal_handlers():
            self.env = load_package(spec, self.what) if spec.id else load_rows(spec)
        self.leaves = dict(members(self.env, ""))
        set_attributes(self.env, list(self.leaves.values()), spec)
        self.splits = self._load_data()
        self.scores_groups = any(env.score_rollouts and env.requires_group_rollouts for env in self.leaves.values())
        for env in self.leaves.values():
            check_scorable(env, self.what)
            watch(env.rubric)
            quicken(env)
        self.kind = f"classic {base_class(self.env).__name__}"
        self._task = functools.lru_cache(CACHED_TASKS)(self._read_task)
        if policy.endpoint:
            self.endpoint, self.endpoint_clients = endpoint_clients(policy.endpoint)

    def _load_data(self) -> dict[Split, datasets.Dataset | None]:
        """The data sets, built where they are lazy, in plain Python's format; rows are read when they are played."""
        built: dict[Split, datasets.Dataset | None] = {}
        with Blame(f"{self.what}: its data set", "check orchestrator.environment.args and the environment itself"):
            built["train"], built["eval"] = self.env.build_dataset(), self.env.build_eval_dataset()
            return {split: data and data.with_format(None) for split, data in built.items()}

    def num_tasks(self, split: Split) -> int:
        data = self.splits[split]
        return 0 if data is None else len(data)

    def _read_task(self, split: Split, index: int) -> Task:
        data = self.splits[split]
        if data is None:
            raise IndexError(f"{self.what} has no {split} data set")
        return self._routed(self.env, Row(data[index]), "")

    def _routed(self, env: vf.Environment, row: Row, member: str) -> Task:
        """The member that plays a row. Not by EnvGroup itself: it knows no group rewards, and scores nested groups with 0."""
        if not isinstance(env, vf.EnvGroup):
            return Task(env, member, row)
        name, inner, _ = env._route_child_input(row)
        return self._routed(env.get_env_for_name(name), Row(inner), f"{member}{name}/")

    def task(self, split: Split, index: int) -> dict[str, Any]:
        task = self._task(split, index)
        info = task.row.get("info")
        prompt = task.row["prompt"]
        told: dict[str, Any] = {"prompt": prompt if isinstance(prompt, str) else [wire(message) for message in prompt]}
        if tools := task.tools:
            told["tools"] = tools
        if task.member:
            told["member"] = task.member.rstrip("/")
        told |= {key: value for key, value in task.row.items() if key not in ("prompt", "info")}
        if info:
            told["info"] = json.loads(info) if isinstance(info, str) else info
        return json.loads(json.dumps(told, default=str))

    def describe(self) -> dict[str, Any]:
        about: dict[str, Any] = {"class": f"{type(self.env).__module__}.{type(self.env).__qualname__}"}
        if self.spec.id:
            about["arguments"] = load_arguments(self.spec.id)
        about |= {"train tasks": self.num_tasks("train"), "eval tasks": self.num_tasks("eval")}
        about["scores groups"] = self.scores_groups
        if isinstance(self.env, vf.EnvGroup):
            return about | {"members": {name.rstrip("/"): describe_one(env) for name, env in self.leaves.items()}}
        return about | describe_one(self.env)

    def check_prompts(self, max_tokens: int) -> str | None:
        """What is wrong with the prompts' lengths, or None; looks at the first ones only."""
        if self.policy.endpoint:
            return None
        limit = self.policy.max_model_len
        split: Split = "train" if self.num_tasks("train") else "eval"
        for index in range(min(CHECKED_PROMPTS, self.num_tasks(split))):
            try:
                length = self._prompt_length(self._task(split, index))
            except RendererError as error:
                return f"{self.what}: {split} task {index}: {error}"
            if length + max_tokens > limit:
                return (
                    f"{self.what}: a prompt of {length} tokens and orchestrator.sampling.max_tokens = {max_tokens} exceed "
                    f"model.max_model_len = {limit}; raise model.max_model_len to {length + max_tokens} or lower max_tokens"
                )
        return None

    def _prompt_length(self, task: Task) -> int:
        prompt = task.row["prompt"]
        messages = [{"role": "text", "content": prompt}] if isinstance(prompt, str) else prompt
        if task.completion_style:
            return len(self.policy.renderer.encode(joined(messages)))
        return len(self.policy.renderer.prompt_ids([wire(message) for message in messages], task.tools))

    async def start(self) -> None:
        """Nothing to bring up: what episodes need, the environment brings up itself."""

    async def close(self) -> None:
        """Tears the environments down, which verifiers would do only when the interpreter exits by itself."""
        for env in {id(env): env for env in [self.env, *self.leaves.values()]}.values():
            await env._teardown()
            env._teardown = done  # type: ignore[method-assign]  # verifiers' exit hook calls it again
        if self.policy.endpoint:
            await self.endpoint.close()

    async def play(self, order: PlayGroup, num_episodes: int) -> list[Episode]:
        task = self._task(order.split, order.task)
        if not self.scores_groups:
            return [[rollout] for rollout in await together([self._play_one(task, order) for _ in range(num_episodes)])]
        plays = await together([self._generate(task, order) for _ in range(num_episodes)])
        await self._score(task.env, plays)
        return [[as_rollout(play)] for play in plays]

    async def _play_one(self, task: Task, order: PlayGroup) -> Rollout:
        play = await self._generate(task, order)
        await self._score(task.env, [play])
        return as_rollout(play)

    async def _generate(self, task: Task, order: PlayGroup) -> Play:
        """Plays up to where scoring begins. A failure of known cause is noted in the result, any other raises."""
        play, endpoint = Play(task, None), self.policy.endpoint
        asked = task.env.sampling_args | {key: value for key, value in order.sampling.items() if value is not None}
        sampling = {key: asked[key] for key in SAMPLING_KEYS if asked.get(key) is not None}
        if endpoint:
            client, model, sampling = self.endpoint_clients[task.completion_style], endpoint.model, endpoint_sampling(sampling)
        else:
            client, model = PolicyClient(self.policy, order, task.completion_style), "policy"
            play.client = client
        try:
            async with phase(self.limits.generating, self.spec.timeout_s, "generating the rollout"):
                play.state = await task.env.rollout(task.row, client, model, sampling)
        except RolloutError as error:
            play.fail(error.cause, str(error))
        except vf.Error as error:
            play.fail(cause_of(error), chain(error))
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            if not endpoint:  # the environment's own use of such a server
                raise
            play.fail("inference", f"{endpoint.base_url}: {error}; see endpoint.api_key_var = {endpoint.api_key_var}")
        else:
            error = play.state.get("error")
            if error is not None:
                play.fail(cause_of(error), chain(error))
            elif play.state.get("stop_condition") == "timeout_reached":
                play.fail("timeout", f"longer than the environment's own timeout_seconds = {getattr(task.env, 'timeout_seconds', '?')}")
        if play.client and play.client.fault:
            play.fail(*play.client.fault)
        return play

    async def _score(self, env: vf.Environment, plays: list[Play]) -> None:
        """Scores rollouts, together if it is a group; not if one of them failed, for then there is no group to compare with."""
        states = [play.state for play in plays if play.state is not None]
        failed = next((play for play in plays if play.cause), None)
        try:
            if failed:
                for play in plays:
                    if not play.cause:
                        play.fail(failed.cause, f"not scored, because another rollout of its group failed: {failed.error}")
            elif not all(play.is_empty for play in plays):
                async with phase(self.limits.scoring, self.spec.timeout_s, "scoring the rollout"):
                    await self._call_rubric(env, plays, states)
        except RolloutError as error:
            for play in plays:
                play.fail(error.cause, str(error))
        finally:
            async with asyncio.timeout(self.spec.timeout_s):
                for state in states:
                    await env.rubric.cleanup(state)

    async def _call_rubric(self, env: vf.Environment, plays: list[Play], states: list[Any]) -> None:
        with Scoring(len(states)) as scoring:
            if not env.score_rollouts:
                await env.rubric.dummy_score_group(states)
            elif self.scores_groups:
                await env.rubric.score_group(states)
            else:
                await env.rubric.score_rollout(states[0])
        for play, state in zip(plays, states, strict=True):
            play.scoring = scoring
            if not scoring.faults and as_number(state.get("reward")) is None:
                scoring.faults.append(f"the rubric gave the reward {repr(state.get('reward'))[:100]}, not a finite number")
        for play in plays:
            if scoring.faults:
                play.fail("reward", "; ".join(dict.fromkeys(scoring.faults)))


def as_rollout(play: Play) -> Rollout:
    """A finished or failed play in our terms."""
    state: dict[str, Any] = play.state if play.state is not None else {}
    client, trajectory = play.client, state.get("trajectory") or []
    turns = client.kept_turns(trajectory) if client else []
    rollout = Rollout(
        turns=turns,
        messages=messages_of(state) if state else client.messages() if client else [],
        stop=state.get("stop_condition") or ("" if not play.cause else "timeout" if play.cause == "timeout" else "error"),
        truncated=bool(state.get("is_truncated")) or any(turn.finish_reason == "length" for turn in turns),
        overlong=play.overlong,
    )
    if state and not client:
        usage = play.task.env.get_state_usage(state)
        rollout.completion_tokens = int(usage["output_tokens"]) if usage else 0
    if play.cause:
        rollout.error, rollout.cause = play.error, play.cause
    elif play.scoring:
        rollout.reward = float(state["reward"])
        rollout.metrics = metrics_of(play, state)
    return rollout


def metrics_of(play: Play, state: dict[str, Any]) -> dict[str, float]:
    """What the rubric measured, as far as it is finite; in a group of environments under the member's name, with its reward."""
    member, absent = play.task.member, play.scoring.absent if play.scoring else set()
    found = {f"{member}{name}": as_number(value) for name, value in (state.get("metrics") or {}).items() if name not in absent}
    metrics = {name: value for name, value in found.items() if value is not None}
    if member:
        metrics[f"{member}reward"] = float(state["reward"])
    if play.client and play.client.offered_tools:
        metrics[f"{member}bad_tool_calls"] = float(play.client.bad_tool_calls)
    return metrics


def messages_of(state: dict[str, Any]) -> list[Message]:
    """Prompt and completion in the form of chat APIs."""
    prompt, completion = state.get("prompt") or [], state.get("completion") or []
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    completion = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    return [wire(message) for message in [*prompt, *completion]]


def chain(error: BaseException) -> str:
    """An error and what caused it. verifiers raises its own without a text, and the reason is the cause."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(f"{type(cause).__name__}: {cause}".removesuffix(": "))
        cause = cause.__cause__
    return " <- ".join(texts)


def cause_of(error: BaseException) -> Cause:
    """Of an error of verifiers: the model could not be asked, or the environment failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, vf.ModelError):
            return "inference"
        cause = cause.__cause__
    return "environment"


async def together(plays: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results of coroutines that run at once. If one raises, the others end, and what it raised is raised."""
    if len(plays) == 1:
        return [await plays[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play) for play in plays]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def done() -> None:
    """A teardown with nothing left to do."""
