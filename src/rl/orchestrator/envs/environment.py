"""The seam to environments: what every kind of them offers to a worker. One kind, one file; `load` finds out which it is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from rl.orchestrator.envs.policy import Policy
from rl.orchestrator.rollouts import Cause, EnvSpec, Episode, PlayGroup, Split


class RolloutError(Exception):
    """A rollout failed for a known cause; anything else that an environment raises has the cause `environment`."""

    def __init__(self, cause: Cause, message: str):
        super().__init__(message)
        self.cause: Cause = cause


@asynccontextmanager
async def phase(limit: asyncio.Semaphore, timeout_s: float, what: str) -> AsyncIterator[None]:
    """Waits for a free place, then gives the block `timeout_s` seconds. Raises RolloutError `timeout`."""
    async with limit:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                yield
        except TimeoutError as error:
            if deadline.expired():
                raise RolloutError("timeout", f"{what} took longer than {timeout_s:g} s; see timeout_s of the environment") from error
            raise


class Limits:
    """How many rollouts of a worker are generated, and how many scored, at once."""

    def __init__(self, spec: EnvSpec):
        self.generating = asyncio.Semaphore(spec.max_generating if spec.max_generating > 0 else 2**30)
        self.scoring = asyncio.Semaphore(spec.max_scoring if spec.max_scoring > 0 else 2**30)


class Environment(Protocol):
    """An environment in a worker process. Constructed in its main thread, outside of an event loop; everything else runs inside one."""

    kind: str
    scores_groups: bool
    """Whether the episodes of a task are scored together, so that one cannot be played again alone."""

    def num_tasks(self, split: Split) -> int | None:
        """Size of a split; None: endless."""
        ...

    def task(self, split: Split, index: int) -> dict[str, Any]:
        """A task as plain JSON: `prompt` (messages or text), `tools` if there are any, and what the environment keeps beside it."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the environment is, for a reader: arguments with defaults, reward functions, tools, limits."""
        ...

    def check_prompts(self, max_tokens: int) -> str | None:
        """What is wrong with the first prompts' lengths, given that answers need `max_tokens`; None if nothing is."""
        ...

    async def start(self) -> None:
        """Brings up what episodes need."""
        ...

    async def close(self) -> None:
        """Ends what `start` brought up."""
        ...

    async def play(self, order: PlayGroup, num_episodes: int) -> list[Episode]:
        """Plays a task `num_episodes` times: 1 unless `scores_groups`. A failure is a raised exception (RolloutError for a known cause)
        or a Rollout with `error` and `cause`; never a reward of 0."""
        ...


def load(spec: EnvSpec, policy: Policy) -> Environment:
    """Loads an environment of whichever kind it is. Raises EnvLoadError with the remedy."""
    from rl.orchestrator.env_ids import is_v1

    if spec.head_server:
        from rl.orchestrator.envs.nemo_gym import NemoGymEnvironment

        return NemoGymEnvironment(spec, policy)
    if spec.id and is_v1(spec.id):
        from rl.orchestrator.envs.v1 import V1Environment

        return V1Environment(spec, policy)
    from rl.orchestrator.envs.classic import ClassicEnvironment

    return ClassicEnvironment(spec, policy)
