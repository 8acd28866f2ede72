"""Loads and describes classic environments. Errors name the place and the remedy."""

import inspect
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import verifiers as vf
from verifiers.utils.env_utils import import_env_module

from rl.config.installed import check_installed
from rl.envs.classic.client import chat_tool
from rl.envs.classic.rewards import rubrics
from rl.system.errors import RunError
from rl.system.functions import Blame
from rl.system.terminal import did_you_mean
from rl.wire.worker_messages import EnvSpec


@contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Restores the signal handlers that every verifiers environment replaces in its constructor."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def load_package(spec: EnvSpec, what: str) -> vf.Environment:
    """Loads an environment that `load.is_v1` has imported and classified as classic. Raises
    RunError."""
    assert spec.id
    path = check_installed(spec.id)
    module = import_env_module(path)
    remedy = "check orchestrator.environment.args and the environment itself"
    if takes := ", ".join(load_arguments(spec.id)):
        remedy += f"; its arguments are {takes}"
    file = Path(module.__file__ or "")
    with Blame(
        f"{what}: its load_environment",
        remedy,
        file.parent if hasattr(module, "__path__") else file,
    ):
        # not vf.load_environment, which hides the original exception in its own
        env = module.load_environment(**spec.args)
    if not isinstance(env, vf.Environment):
        raise RunError(
            f"{what}: its load_environment returned a {type(env).__name__}, not a "
            "vf.Environment of verifiers 0.3"
        )
    env.env_id, env.env_args = env.env_id or path, env.env_args or spec.args
    return env


def load_arguments(env_id: str, given: dict[str, Any] | None = None) -> dict[str, str]:
    """The arguments of load_environment: name -> `type = default`, or `type = value (default:
    ...)` for those in `given`."""
    arguments, given = {}, dict(given or {})
    for name, parameter in inspect.signature(
        import_env_module(check_installed(env_id)).load_environment
    ).parameters.items():
        kind = (
            ""
            if parameter.annotation is parameter.empty
            else inspect.formatannotation(parameter.annotation)
        )
        default = "required" if parameter.default is parameter.empty else f"{parameter.default!r}"
        if name in given:
            default = (
                f"{given.pop(name)!r} "
                f"({default if default == 'required' else f'default: {default}'})"
            )
        arguments[f"**{name}" if parameter.kind is parameter.VAR_KEYWORD else name] = (
            f"{kind} = {default}" if kind else default
        )
    return arguments | {name: repr(value) for name, value in given.items()}  # passed in **kwargs


def members(env: vf.Environment, path: str) -> Iterator[tuple[str, vf.Environment]]:
    """The environments that play, with their paths: the members of an EnvGroup and its nested
    groups, or the environment itself."""
    if isinstance(env, vf.EnvGroup):
        for name, member in env.env_map.items():
            yield from members(member, f"{path}{name}/")
    else:
        yield path, env


def share_rubrics(env: vf.Environment, added: list[vf.Rubric]) -> None:
    """Gives the rubrics that were added to a group to its members, whose rubrics score their
    rows."""
    if isinstance(env, vf.EnvGroup):
        added = added + getattr(env.rubric, "rubrics", [])[1:]
        for member in set(env.envs):
            share_rubrics(member, added)
    elif added:
        env.rubric = vf.RubricGroup([env.rubric, *added])


def settable(env: vf.Environment) -> set[str]:
    """The names that set_kwargs accepts: those with a setter, and data attributes."""
    setters = {
        name.removeprefix("set_")
        for name in dir(type(env))
        if name.startswith("set_") and name != "set_kwargs"
    }
    return setters | {name for name in vars(env) if not name.startswith("_")}


def set_attributes(env: vf.Environment, leaves: list[vf.Environment], spec: EnvSpec) -> None:
    """Applies `set_kwargs` to the environment and, if it is a group, to every member that has
    the attribute. Raises RunError."""
    targets = list(dict.fromkeys([env, *leaves]))
    for name, value in spec.set_kwargs.items():
        takers = [target for target in targets if name in settable(target)]
        if not takers:
            known = sorted(set().union(*map(settable, targets)))
            raise RunError(
                f"environment {spec.name}: set_kwargs has {name}, but {type(env).__name__} "
                f"has no such attribute; {did_you_mean(name, known)}"
            )
        for target in takers:
            with Blame(
                f"environment {spec.name}: set_kwargs.{name} = {value!r}",
                "give a value that the environment accepts",
            ):
                target.set_kwargs(**{name: value})


def check_scorable(env: vf.Environment, what: str) -> None:
    """Checks once that each rubric has a reward function, which verifiers asserts in every
    rollout. Raises RunError."""
    if not env.score_rollouts or env.requires_group_rollouts:
        return
    for rubric in rubrics(env.rubric):
        if type(rubric).score_rollout is vf.Rubric.score_rollout and not rubric.funcs:
            raise RunError(
                f"{what}: a {type(rubric).__name__} of its {type(env).__name__} has no "
                "reward function; "
                "add one, or set set_kwargs.score_rollouts = false to play without rewards"
            )


def describe_one(env: vf.Environment) -> dict[str, Any]:
    """A human-readable description of an environment that is not a group."""
    functions = dict(
        zip(env.rubric._get_reward_func_names(), env.rubric._get_reward_weights(), strict=True)
    )
    about: dict[str, Any] = {
        "style": env.message_type,
        "system prompt": env.system_prompt,
        "reward functions": {name: weight for name, weight in functions.items() if weight},
        "metrics": [name for name, weight in functions.items() if not weight],
        "tools": [chat_tool(tool)["function"] for tool in env.tool_defs or []],
        "max turns": getattr(env, "max_turns", None),
        "own timeout_seconds": getattr(env, "timeout_seconds", None),
        "parser": type(env.parser).__name__,
        "scored": env.score_rollouts,
    }
    return {name: value for name, value in about.items() if value not in (None, [], {})}
