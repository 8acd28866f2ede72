"""The user's own credit, filter and rollout metrics: their arguments, and the checks on their
results. See docs/functions.md.

They are called in a thread beside the event loop, one at a time, and each call has a deadline.
"""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar

import msgspec

from rl.config.base import FunctionConfig
from rl.config.orchestrator import OrchestratorConfig
from rl.config.outside import own_functions
from rl.config.run import RLConfig
from rl.orchestrator.batches.batch_metrics import TAKEN
from rl.system.functions import UserFunction, as_number, returned
from rl.wire.rollouts import Group, Rollout

T = TypeVar("T")
Read = Callable[[Any, int], T | None]
CALL_S = 60.0
"""Time limit of one call of a user function."""
THREAD = ThreadPoolExecutor(1, "functions")


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Makes a call that may involve user functions, in the thread reserved for them."""
    return await asyncio.get_running_loop().run_in_executor(THREAD, call, *arguments)


@cache
def user_function(setting: str, name: str, arguments: str = "group, config") -> UserFunction:
    """Returns a user function, loaded once. Raises RunError if it cannot be loaded."""
    return UserFunction(setting, name, arguments)


def load_functions(config: RLConfig) -> None:
    """Loads the functions that the orchestrator calls, so that faults are reported before
    anything is played. Raises RunError."""
    for key, name, arguments in own_functions(config):
        if key.startswith("orchestrator."):
            user_function(key, name, arguments)


def part_of(group: Group, indices: list[int], rewards: list[float]) -> Group:
    """Copies some rollouts of a group, with `rewards` as theirs, for a user function, which may
    modify its argument."""
    rollouts = [group.rollouts[i] for i in indices]
    return msgspec.structs.replace(
        group,
        rollouts=[
            msgspec.structs.replace(rollout, reward=reward, metrics=dict(rollout.metrics))
            for rollout, reward in zip(rollouts, rewards, strict=True)
        ],
        advantages=[group.advantages[i] for i in indices],
        penalties=[group.penalties[i] for i in indices],
    )


def call_for(part: Group, function: UserFunction, config: Any, read: Read[T], wanted: str) -> T:
    """Returns what a user function returns for a part of a group, as `read` reads it. Raises
    RunError for a result that is not `wanted`."""
    count = len(part.rollouts)
    result = function.within(CALL_S, part, config)
    if (values := read(result, count)) is None:
        raise function.wrong(returned(result), f"return {wanted.format(count=count)}")
    return values


def metrics_function(settings: OrchestratorConfig) -> Callable[[list[Rollout]], None] | None:
    """Returns a function that adds the user's metrics to finished rollouts; None if none are
    configured. Raises RunError."""
    if not settings.metrics:
        return None
    function = user_function(
        "orchestrator.metrics.function", settings.metrics.function, "rollout, config"
    )
    return partial(add_metrics, function=function, config=settings.metrics)


def add_metrics(rollouts: list[Rollout], function: UserFunction, config: FunctionConfig) -> None:
    """Adds the user's metrics to the rollouts that did not fail. Raises RunError for non-numbers
    and for names that are taken."""
    for rollout in rollouts:
        if rollout.error:
            continue
        result = function.within(
            CALL_S, msgspec.structs.replace(rollout, metrics=dict(rollout.metrics)), config
        )
        if not isinstance(result, dict) or not all(isinstance(name, str) for name in result):
            raise function.wrong(returned(result), "return a dict of numbers by name")
        for name, value in result.items():
            if fault := name_fault(name, rollout):
                raise function.wrong(f"returned a metric {name!r}", f"give it {fault}")
            if (number := as_number(value)) is None:
                raise function.wrong(
                    f"{returned(value)} as {name!r}",
                    "return finite numbers, and leave out a metric that has none",
                )
            rollout.metrics[name] = number


def name_fault(name: str, rollout: Rollout) -> str:
    """Returns what kind of name a metric needs instead; empty if `name` is valid."""
    if not re.fullmatch(r"[^\s/]+", name):
        return "a name without spaces and slashes"
    if TAKEN.fullmatch(name):
        return "another name: this one is a built-in metric's"
    return (
        "another name: the environment has a metric of that name" if name in rollout.metrics else ""
    )
