"""The user's own credit, filter and rollout metrics: what they are given, and what becomes of what they return. docs/functions.md."""

import re
from collections.abc import Callable
from functools import cache, partial

import msgspec

from rl.config.base import FunctionConfig
from rl.config.orchestrator import CustomCreditConfig, OrchestratorConfig
from rl.config.outside import own_functions
from rl.config.run import RLConfig
from rl.orchestrator.batch_metrics import TAKEN
from rl.system.user_function import UserFunction, as_bools, as_number, as_numbers, returned
from rl.wire.rollouts import Group, Rollout


@cache
def user_function(setting: str, name: str, arguments: str = "group, config") -> UserFunction:
    """A function, loaded once. Raises RunError."""
    return UserFunction(setting, name, arguments)


def load_functions(config: RLConfig) -> None:
    """Loads those that the orchestrator calls, so that what is wrong with them is said before anything is played. Raises RunError."""
    for key, name, arguments in own_functions(config):
        if key.startswith("orchestrator."):
            user_function(key, name, arguments)


def part_of(group: Group, indices: list[int], rewards: list[float]) -> Group:
    """A copy of some rollouts of a group for a function, which may change what it is given; `rewards` are those that count."""
    rollouts = [msgspec.structs.replace(group.rollouts[i], reward=reward) for i, reward in zip(indices, rewards, strict=True)]
    for rollout in rollouts:
        rollout.metrics = dict(rollout.metrics)
    return msgspec.structs.replace(
        group,
        rollouts=rollouts,
        advantages=[group.advantages[i] for i in indices],
        penalties=[group.penalties[i] for i in indices],
    )


def custom_advantages(part: Group, function: UserFunction, config: CustomCreditConfig) -> list[float]:
    """The advantages by the user's credit. Raises RunError."""
    count = len(part.rollouts)
    result = function(part, config)
    advantages = as_numbers(result, count)
    if advantages is None:
        raise function.wrong(returned(result), f"return a list of {count} finite numbers, one for each of group.rollouts")
    return advantages


def may_be_trained(part: Group, function: UserFunction, config: FunctionConfig) -> list[bool]:
    """Which rollouts the user's filter lets pass. Raises RunError."""
    count = len(part.rollouts)
    result = function(part, config)
    passed = as_bools(result, count)
    if passed is None:
        raise function.wrong(returned(result), f"return a bool for all of group.rollouts, or a list of {count}, one for each")
    return passed


def metrics_function(settings: OrchestratorConfig) -> Callable[[list[Rollout]], None] | None:
    """Adds the user's metrics to finished rollouts; None if there are none. Raises RunError."""
    if not settings.metrics:
        return None
    function = user_function("orchestrator.metrics.function", settings.metrics.function, "rollout, config")
    return partial(add_metrics, function=function, config=settings.metrics)


def add_metrics(rollouts: list[Rollout], function: UserFunction, config: FunctionConfig) -> None:
    """Adds the user's metrics to those rollouts that did not fail. Raises RunError for what is no number, or a name that is taken."""
    for rollout in rollouts:
        if rollout.error:
            continue
        result = function(msgspec.structs.replace(rollout, metrics=dict(rollout.metrics)), config)
        if not isinstance(result, dict) or not all(isinstance(name, str) for name in result):
            raise function.wrong(returned(result), "return a dict of numbers by name")
        for name, value in result.items():
            if fault := name_fault(name, rollout):
                raise function.wrong(f"returned a metric {name!r}", f"give it {fault}")
            if (number := as_number(value)) is None:
                raise function.wrong(f"{returned(value)} as {name!r}", "return finite numbers, and leave out a metric that has none")
            rollout.metrics[name] = number


def name_fault(name: str, rollout: Rollout) -> str:
    """Which name a metric needs instead of this one; empty if it may have it."""
    if not re.fullmatch(r"[^\s/]+", name):
        return "a name without space and slash"
    if TAKEN.fullmatch(name):
        return "another name: that of one of ours"
    return "another name: the environment has one of that name" if name in rollout.metrics else ""
