"""The interface of every kind of environment, and the limits common to all.

CONTRIBUTING.md lists what else a new kind needs.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from types import ModuleType
from typing import Any, Protocol

from rl.envs.policy import Policy, RolloutError
from rl.models.chat import RendererError
from rl.models.tokenizer import without_row
from rl.wire.rollouts import Episode, Split
from rl.wire.worker_messages import PlayOrder

CHECKED_PROMPTS = 64
"""Number of prompts checked against the context length before the run starts."""


@asynccontextmanager
async def limited(
    limit: AbstractAsyncContextManager[Any], timeout_s: float, what: str
) -> AsyncIterator[None]:
    """Waits for a free slot, then lets the block run for `timeout_s` seconds. Raises
    RolloutError with cause `timeout`."""
    async with limit:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                yield
        except TimeoutError as error:
            if deadline.expired():
                raise RolloutError(
                    "timeout",
                    f"{what} took longer than {timeout_s:g} s; see timeout_s of the environment",
                ) from error
            raise


def places(count: int) -> AbstractAsyncContextManager[Any]:
    """A semaphore that admits `count` rollouts at once; -1 means no limit."""
    return asyncio.Semaphore(count) if count > 0 else nullcontext()


async def without_exit(work: Coroutine[Any, Any, Any]) -> Any:
    """Awaits a coroutine and turns SystemExit into RuntimeError: in a task of its own, exit()
    would end the event loop."""
    try:
        return await work
    except SystemExit as end:
        raise RuntimeError(
            f"the environment's code called exit({'' if end.code is None else repr(end.code)})"
        ) from end


def exits_are_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Wraps every later task of a loop in `without_exit`, including those that a library starts
    for the environment's code."""

    def make(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
        task = asyncio.Task(without_exit(work), loop=loop, **options)
        # a task cancelled before it starts never awaits it
        task.add_done_callback(lambda _: work.close())
        return task

    loop.set_task_factory(make)


class Environment(Protocol):
    """An environment in a worker process. Constructed in the main thread outside an event loop;
    its methods run inside one."""

    kind: str
    name: str
    """The environment's name in error messages."""
    policy: Policy
    notice: str
    """A remark for the user on how the environment is played; usually empty."""
    scores_groups: bool
    """Whether the episodes of a task are scored together, so that a single one cannot be
    replayed."""

    def num_tasks(self, split: Split) -> int | None:
        """Number of tasks in a split; None if endless."""

    def task(self, split: Split, index: int) -> dict[str, Any]:
        """A task as plain JSON: `prompt` (messages or text), `tools` if there are any, and the
        environment's own fields."""

    def describe(self) -> dict[str, Any]:
        """A human-readable description: arguments with defaults, reward functions, tools,
        limits."""

    def prompt_ids(self, split: Split, index: int) -> list[int] | None:
        """Token ids of a task's first prompt; None if the prompt arises only during play. Raises
        RendererError."""

    async def start(self) -> None:
        """Starts the servers and connections that episodes need."""

    async def close(self) -> None:
        """Stops what `start` started."""

    async def play(self, order: PlayOrder, num_episodes: int) -> list[Episode]:
        """Plays `num_episodes` episodes of a task: all of a group in one call if `scores_groups`,
        else one. A failure is a raised exception (RolloutError for a known cause) or a Rollout with
        `error` and `cause`, never a reward of 0."""


def check_prompts(env: Environment, max_tokens: int) -> str | None:
    """Returns an error message if one of the first prompts has a token that the model has no row
    for, or leaves fewer than `max_tokens` tokens for an answer, else None."""
    if env.policy.endpoint or env.policy.spec.head_server:
        return None
    limit = env.policy.spec.max_model_len
    split: Split = "eval" if env.num_tasks("train") == 0 else "train"
    size = env.num_tasks(split)
    for index in range(CHECKED_PROMPTS if size is None else min(CHECKED_PROMPTS, size)):
        try:
            ids = env.prompt_ids(split, index)
        except RendererError as error:
            return f"{env.name}: {split} task {index}: {error}"
        if fault := without_row(
            env.policy.renderer.tokenizer, ids or [], env.policy.spec.vocab_size
        ):
            return f"{env.name}: {split} task {index}: {fault}"
        if ids is not None and (length := len(ids)) + max_tokens > limit:
            lower = f", lower max_tokens to {limit - length}" if length < limit else ""
            return (
                f"{env.name}: a prompt of {length} tokens and "
                f"orchestrator.sampling.max_tokens = {max_tokens} exceed model.max_model_len "
                "= "
                f"{limit}; raise model.max_model_len to {length + max_tokens}{lower}, or "
                f"leave {split} task {index} out"
            )
    return None


def v1_exports(package: ModuleType) -> list[str]:
    """The v1 plugins in a package's `__all__`: `Taskset`, `Env`, both, or none."""
    v1 = sys.modules.get("verifiers.v1")
    if v1 is None:  # the package cannot subclass what was never imported
        return []
    exported = [getattr(package, name, None) for name in getattr(package, "__all__", ())]
    parents = {base for kind in exported if isinstance(kind, type) for base in kind.__mro__[1:]}
    return [name for name in ("Taskset", "Env") if getattr(v1, name) in parents]
