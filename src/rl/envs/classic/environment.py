"""Environments of verifiers' classic API: single and multi turn, tools, groups, judges, rows
with a reward function."""

import asyncio
import functools
import json
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import datasets
import openai
import verifiers as vf

from rl.envs.classic.client import (
    ClassicClient,
    chat_message,
    chat_tool,
    completion_prompt,
    endpoint_clients,
    endpoint_sampling,
)
from rl.envs.classic.rewards import Scoring, guard, scored_by_verifiers
from rl.envs.classic.rows import (
    COLUMNS,
    describe_one,
    kept_signal_handlers,
    load_arguments,
    load_package,
    load_rows,
    members,
    set_attributes,
    share_rubrics,
)
from rl.envs.environment import limited, places, without_exit
from rl.envs.policy import SAMPLING_KEYS, TALKS, Policy, RolloutError
from rl.models.chat import Message, Tool
from rl.run_dir import spans
from rl.system.functions import Blame, as_number, described, returned
from rl.wire.rollouts import Episode, Rollout, Split
from rl.wire.turns import Turns
from rl.wire.worker_messages import EnvSpec, PlayOrder

CACHED_TASKS = 256
"""Number of tasks kept in memory: each episode of a group asks for the same task again."""


@dataclass
class Task:
    """A row and the environment that plays it (one of the members of an EnvGroup)."""

    env: vf.Environment
    member: str
    """Names of the nested group members that lead to it, each followed by a slash; "" without a
    group."""
    row: dict[str, Any]

    @property
    def completion_style(self) -> bool:
        return self.env.message_type == "completion"

    @property
    def info(self) -> Any:
        """The row's `info`, which some data sets store as JSON text."""
        info = self.row.get("info")
        return json.loads(info) if isinstance(info, str) and info else info

    @property
    def tools(self) -> list[Tool] | None:
        """The tools that the environment offers for this row, as verifiers resolves them."""
        tools = self.info.get("tool_defs") if isinstance(self.info, dict) else None
        tools = self.env.tool_defs if tools is None else tools
        return [chat_tool(tool) for tool in tools or ()] or None


@dataclass
class Play:
    """A rollout while it is generated and scored."""

    task: Task
    client: ClassicClient | None = None
    """None if an endpoint plays."""
    state: dict[str, Any] = field(default_factory=dict)
    failure: RolloutError | None = None
    scoring: Scoring | None = None

    @property
    def overlong(self) -> bool:
        return bool((self.client and self.client.overlong) or self.state.get("prompt_too_long"))

    @property
    def is_empty(self) -> bool:
        """Whether even the first prompt was too long. It is not scored: few reward functions
        handle an empty completion."""
        return self.overlong and not (
            self.client.turns if self.client else self.state.get("trajectory")
        )


PRIVATE = vf.Environment._teardown, vf.EnvGroup._route_child_input
"""What is used of verifiers without its promise: a version without one of them does not load."""


class ClassicEnvironment:
    """An environment of the classic API. See `Environment` for its methods."""

    notice = ""

    def __init__(self, spec: EnvSpec, policy: Policy):
        self.spec, self.policy = spec, policy
        self.generating, self.scoring = places(spec.max_generating), places(spec.max_scoring)
        self.name = f"environment {f'{spec.id} with args {spec.args}' if spec.id else spec.name}"
        datasets.disable_progress_bars()
        with kept_signal_handlers():
            self.env, tasks = (load_package(spec, self.name), None) if spec.id else load_rows(spec)
        guard()
        share_rubrics(self.env, [])
        self.leaves = dict(members(self.env, ""))
        set_attributes(self.env, list(self.leaves.values()), spec)
        self.splits = tasks or self._load_data()
        self.scores_groups = any(
            env.score_rollouts and env.requires_group_rollouts for env in self.leaves.values()
        )
        for path, env in self.leaves.items():
            if not env.score_rollouts or (
                scored_by_verifiers(env.rubric) and not any(env.rubric._get_reward_weights())
            ):
                self.notice += (
                    f"every reward of {path or spec.name} is 0, as no function has a weight or "
                    "score_rollouts is false. "
                )
        bases = [
            kind for kind in type(self.env).__mro__ if kind.__module__.startswith("verifiers.")
        ]
        self.kind = f"classic {bases[0].__name__}"
        self._task = functools.lru_cache(CACHED_TASKS)(
            lambda split, index: self._routed(self.env, self.splits[split][index], "")
        )
        if policy.endpoint:
            self.endpoint_clients = endpoint_clients(policy.endpoint)

    def _load_data(self) -> dict[Split, Any]:
        """Builds the data sets, which may be lazy. Rows are plain Python, read when they are
        played."""
        remedy = "check orchestrator.environment.args and the environment itself"
        with Blame(f"{self.name}: its data set", remedy):
            data = {"train": self.env.build_dataset(), "eval": self.env.build_eval_dataset()}
            return {split: rows.with_format(None) if rows else [] for split, rows in data.items()}

    def num_tasks(self, split: Split) -> int:
        return len(self.splits[split])

    def _routed(self, env: vf.Environment, row: dict[str, Any], member: str) -> Task:
        """Finds the member that plays a row. EnvGroup itself is not used: it has no group
        rewards, and scores nested groups with 0."""
        if not isinstance(env, vf.EnvGroup):
            return Task(env, member, row)
        name, inner, _ = env._route_child_input(row)
        return self._routed(env.get_env_for_name(name), inner, f"{member}{name}/")

    def task(self, split: Split, index: int) -> dict[str, Any]:
        task = self._task(split, index)
        prompt, columns = task.row["prompt"], task.row.get(COLUMNS, task.row)
        shown = {"prompt": prompt if isinstance(prompt, str) else [*map(chat_message, prompt)]}
        optional = {"tools": task.tools, "member": task.member.rstrip("/"), "info": task.info}
        shown |= {key: value for key, value in columns.items() if key not in ("prompt", "info")}
        shown |= {key: value for key, value in optional.items() if value}
        return json.loads(json.dumps(shown, default=str))

    def describe(self) -> dict[str, Any]:
        about: dict[str, Any] = {
            "class": f"{type(self.env).__module__}.{type(self.env).__qualname__}"
        }
        if self.spec.id:
            about["arguments"] = load_arguments(self.spec.id, self.spec.args)
        about |= {f"{split} tasks": len(rows) for split, rows in self.splits.items()}
        about["scores groups"] = self.scores_groups
        members = {name.rstrip("/"): describe_one(env) for name, env in self.leaves.items()}
        is_group = isinstance(self.env, vf.EnvGroup)
        return about | ({"members": members} if is_group else members[""])

    def prompt_ids(self, split: Split, index: int) -> list[int]:
        task = self._task(split, index)
        prompt = task.row["prompt"]
        messages = [{"role": "text", "content": prompt}] if isinstance(prompt, str) else prompt
        if task.completion_style:
            return self.policy.renderer.text_ids(completion_prompt(messages))
        return self.policy.renderer.prompt_ids([*map(chat_message, messages)], task.tools)

    async def start(self) -> None:
        """Does nothing: the environment itself starts what episodes need."""

    async def close(self) -> None:
        """Tears the environments down, which verifiers does only at a regular exit of the
        interpreter, and a worker never has one."""
        for env in {self.env, *self.leaves.values()}:
            await env._teardown()
        if self.policy.endpoint:
            await self.endpoint_clients[False].close()

    async def play(self, order: PlayOrder, num_episodes: int) -> list[Episode]:
        task = self._task(order.split, order.task)
        plays = await run_together(
            [self._generate(task, order.seeded("member", i)) for i in range(num_episodes)]
        )
        await self._score(task.env, plays)
        return [[as_rollout(play)] for play in plays]

    async def _generate(self, task: Task, order: PlayOrder) -> Play:
        """Plays up to the scoring. Records a failure with a known cause in the result; raises
        any other."""
        play, endpoint, model = Play(task), self.policy.endpoint, "policy"
        asked = {key: value for key, value in order.sampling.items() if value is not None}
        asked = task.env.sampling_args | asked
        sampling = {key: asked[key] for key in SAMPLING_KEYS if asked.get(key) is not None}
        if endpoint:
            client, model = self.endpoint_clients[task.completion_style], endpoint.model
            sampling = endpoint_sampling(sampling)
        else:
            client = play.client = ClassicClient(self.policy, order, task.completion_style)
            TALKS.get([]).append(client)
        try:
            async with limited(self.generating, self.spec.timeout_s, "generating the rollout"):
                play.state = await task.env.rollout(task.row, client, model, sampling)
        except RolloutError as error:
            play.failure = error
        except vf.Error as error:
            play.failure = as_failure(error)
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            if not endpoint:  # then it comes from the environment's own calls to such a server
                raise
            play.failure = RolloutError(
                "inference",
                f"{endpoint.base_url}: {error}; see endpoint.api_key_var = {endpoint.api_key_var}",
            )
        else:
            if (error := play.state.get("error")) is not None:
                play.failure = as_failure(error)
            elif play.state.get("stop_condition") == "timeout_reached":
                limit_s = getattr(task.env, "timeout_seconds", "?")
                play.failure = RolloutError(
                    "timeout", f"longer than the environment's own timeout_seconds = {limit_s}"
                )
        if play.client and play.client.failure:
            play.failure = play.client.failure
        return play

    async def _score(self, env: vf.Environment, plays: list[Play]) -> None:
        """Scores rollouts, together if they are a group. Scores none if one failed, as the group
        to compare with is incomplete."""
        states = [play.state for play in plays if play.state]
        failed = next((play.failure for play in plays if play.failure), None)
        try:
            if failed:
                also = f"not scored, because another rollout of its group failed: {failed}"
                for play in plays:
                    play.failure = play.failure or RolloutError(failed.cause, also)
            elif not all(play.is_empty for play in plays):
                async with limited(self.scoring, self.spec.timeout_s, "scoring the rollout"):
                    with spans.span("score", "scoring"):
                        await self._call_rubric(env, plays, states)
        except RolloutError as error:
            for play in plays:
                play.failure = error
        finally:
            async with asyncio.timeout(self.spec.timeout_s):
                for state in states:
                    await env.rubric.cleanup(state)

    async def _call_rubric(self, env: vf.Environment, plays: list[Play], states: list[Any]) -> None:
        with Scoring(env.rubric) as scoring:
            if not env.score_rollouts:
                await env.rubric.dummy_score_group(states)
            elif self.scores_groups:
                await env.rubric.score_group(states)
            else:
                await env.rubric.score_rollout(states[0])
            for play in plays:
                play.scoring = scoring
                reward = play.state.get("reward")
                if as_number(reward) is None:
                    scoring.faults.append(
                        f"the rubric {returned(reward)} as the reward, not a finite number"
                    )


def as_rollout(play: Play) -> Rollout:
    """Converts a finished or failed play to a Rollout."""
    client, state, failure = play.client, play.state, play.failure
    turns = client.kept_turns(state.get("trajectory") or []) if client else Turns()
    prompt, answered = messages_of(state) if state else client.messages() if client else ([], [])
    stop = "timeout" if failure and failure.cause == "timeout" else "error" if failure else ""
    cut = any(answer.finish_reason == "length" for answer in turns.answers)
    rollout = Rollout(
        turns=turns,
        text=[*prompt, *answered],
        num_prompt_messages=len(prompt),
        stop=state.get("stop_condition") or stop,
        truncated=bool(state.get("is_truncated")) or cut,
        overlong=play.overlong,
    )
    if state and not client:
        usage = play.task.env.get_state_usage(state)
        rollout.completion_tokens = int(usage["output_tokens"]) if usage else 0
    if failure:
        rollout.error, rollout.cause = str(failure), failure.cause
    elif play.scoring:
        rollout.reward = float(state["reward"])
        rollout.metrics = metrics_of(play, play.scoring)
    return rollout


def metrics_of(play: Play, scoring: Scoring) -> dict[str, float]:
    """The rubric's finite metrics. In an EnvGroup they have the member's name as a prefix, and
    include its reward."""
    member, measured = play.task.member, play.state.get("metrics") or {}
    metrics = {
        f"{member}{name}": number
        for name, value in measured.items()
        if (number := as_number(value)) is not None and (id(play.state), name) not in scoring.absent
    }
    if member:
        metrics[f"{member}reward"] = float(play.state["reward"])
    if client := play.client:
        if client.offered_tools:
            metrics[f"{member}bad_tool_calls"] = float(client.bad_tool_calls)
        if forced := sum(chat.forced for chat in client.conversations.values()):
            metrics[f"{member}forced_sampling"] = float(forced)
    return metrics


def messages_of(state: dict[str, Any]) -> tuple[list[Message], list[Message]]:
    """Prompt and completion in chat API form."""
    prompt, completion = state.get("prompt") or [], state.get("completion") or []
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return [*map(chat_message, prompt)], [*map(chat_message, completion)]


def cause_chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__


def error_text(error: BaseException) -> str:
    """The text of an error and its causes: verifiers raises its errors without a text, and the
    reason is in the cause."""
    return " <- ".join(described(cause).removesuffix(": ") for cause in cause_chain(error))


def as_failure(error: BaseException) -> RolloutError:
    """Converts a verifiers error: the cause is `inference` if the model did not answer, else
    `environment`."""
    of_model = any(isinstance(cause, vf.ModelError) for cause in cause_chain(error))
    return RolloutError("inference" if of_model else "environment", error_text(error))


async def run_together(plays: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Runs coroutines concurrently and returns their results. If one raises, cancels the others
    and raises its exception."""
    if len(plays) == 1:
        return [await plays[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(without_exit(play)) for play in plays]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
