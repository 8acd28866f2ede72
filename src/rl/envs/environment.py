"""The interface of every kind of environment, and the limits that all of them keep. `load.py` chooses the kind."""

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from types import ModuleType
from typing import Any, Protocol

from rl.envs.policy import Policy, RolloutError
from rl.models.chat import RendererError
from rl.wire.rollouts import Episode, Split
from rl.wire.worker_messages import PlayGroup

CHECKED_PROMPTS = 64
"""Prompts that are measured against the context before the run starts."""


@asynccontextmanager
async def limited(limit: AbstractAsyncContextManager[Any], timeout_s: float, what: str) -> AsyncIterator[None]:
    """Waits for a free place, then gives the block `timeout_s` seconds. Raises RolloutError with cause `timeout`."""
    async with limit:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                yield
        except TimeoutError as error:
            if deadline.expired():
                raise RolloutError("timeout", f"{what} took longer than {timeout_s:g} s; see timeout_s of the environment") from error
            raise


def places(count: int) -> AbstractAsyncContextManager[Any]:
    """A semaphore for `count` rollouts at once; -1: no limit."""
    return asyncio.Semaphore(count) if count > 0 else nullcontext()


async def without_exit(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has a task of its own, where an exit() of the environment's code would end the event loop."""
    try:
        return await work
    except SystemExit as end:
        raise RuntimeError(f"the environment's code called exit({'' if end.code is None else repr(end.code)})") from end


def exits_are_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Has every later task of a loop be `without_exit`, also those that a library starts for the environment's code."""

    def make(loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> "asyncio.Task[Any]":
        task = asyncio.Task(without_exit(work), loop=loop, **more)
        task.add_done_callback(lambda _: work.close())  # of one that is cancelled before it begins
        return task

    loop.set_task_factory(make)


class Environment(Protocol):
    """An environment in a worker process. Constructed in its main thread, outside of an event loop; everything else runs inside one."""

    kind: str
    name: str
    """The environment as error messages call it."""
    policy: Policy
    notice: str
    """What the user is to know about how it is played; empty: nothing."""
    scores_groups: bool
    """Whether the episodes of a task are scored together, so that one cannot be played again alone."""

    def num_tasks(self, split: Split) -> int | None:
        """Size of a split; None: endless."""

    def task(self, split: Split, index: int) -> dict[str, Any]:
        """A task as plain JSON: `prompt` (messages or text), `tools` if there are any, and the environment's own fields."""

    def describe(self) -> dict[str, Any]:
        """The environment for a reader: arguments with defaults, reward functions, tools, limits."""

    def prompt_ids(self, split: Split, index: int) -> list[int] | None:
        """The ids of a task's first prompt; None if the environment generates them while it plays. Raises RendererError."""

    async def start(self) -> None:
        """Brings up what episodes need."""

    async def close(self) -> None:
        """Ends what `start` brought up."""

    async def play(self, order: PlayGroup, num_episodes: int) -> list[Episode]:
        """Plays a task `num_episodes` times: 1 unless `scores_groups`. A failure is a raised exception (RolloutError for a known cause)
        or a Rollout with `error` and `cause`; never a reward of 0."""


def check_prompts(env: Environment, max_tokens: int) -> str | None:
    """The error if the first prompts leave less than `max_tokens` tokens of the context for answers; else None."""
    if env.policy.endpoint:
        return None
    limit = env.policy.spec.max_model_len
    split: Split = "eval" if env.num_tasks("train") == 0 else "train"
    size = env.num_tasks(split)
    for index in range(CHECKED_PROMPTS if size is None else min(CHECKED_PROMPTS, size)):
        try:
            ids = env.prompt_ids(split, index)
        except RendererError as error:
            return f"{env.name}: {split} task {index}: {error}"
        if ids is not None and (length := len(ids)) + max_tokens > limit:
            lower = f", lower max_tokens to {limit - length}" if length < limit else ""
            return (
                f"{env.name}: a prompt of {length} tokens and orchestrator.sampling.max_tokens = {max_tokens} exceed model.max_model_len = "
                f"{limit}; raise model.max_model_len to {length + max_tokens}{lower}, or leave {split} task {index} out"
            )
    return None


def v1_exports(package: ModuleType) -> list[str]:
    """The v1 plugins in a package's `__all__`: `Taskset`, `Env`, both, or none."""
    v1 = sys.modules.get("verifiers.v1")
    if v1 is None:  # then the package cannot have subclassed anything of it
        return []
    found = [getattr(package, name, None) for name in getattr(package, "__all__", ())]
    classes = [one for one in found if isinstance(one, type)]
    kinds = {"Taskset": v1.Taskset, "Env": v1.Env}
    return [name for name, base in kinds.items() if any(issubclass(one, base) and one is not base for one in classes)]
