"""Watches reward functions: if one raises or returns no number, the rollout fails; verifiers would count it as 0.0."""

import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import verifiers as vf
from verifiers.utils.async_utils import maybe_await

from rl.envs.policy import RolloutError
from rl.system.functions import place
from rl.system.user_function import as_number, as_numbers

SHOWN = 300
"""Maximum number of characters of an error or a value quoted in a message."""


@dataclass
class Scoring:
    """One call of a rubric, in a `with` block: the number of rollouts it scores, and its failures."""

    num_rollouts: int
    faults: list[str] = field(default_factory=list)
    """Failures of functions that count for the reward."""
    absent: set[str] = field(default_factory=set)
    """Metrics (functions of weight 0) that returned no number."""

    def __enter__(self) -> "Scoring":
        self.token = SCORING.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        SCORING.reset(self.token)
        if isinstance(error, Exception):  # of a custom rubric, or of verifiers' arithmetic on the rewards
            raise RolloutError("reward", f"the rubric raised {error_text(error)}") from error


SCORING: ContextVar[Scoring | None] = ContextVar("scoring", default=None)
"""The current call. A context variable, because the functions are called by rubrics, which may be the environment's own."""


def error_text(error: BaseException) -> str:
    """An error with the place where it was raised."""
    return f"{type(error).__name__}: {error}"[:SHOWN] + f" (at {place(error)})"


def watch(rubric: vf.Rubric) -> None:
    """Makes every function of a rubric and its members report to `SCORING`; only once, as environments may share a rubric."""
    for inner in rubrics(rubric):
        for i, func in enumerate(inner.funcs):
            if not hasattr(func, "watched"):
                inner.funcs[i] = watched(func, inner.weights[i], inner._is_group_func(func))


def rubrics(rubric: vf.Rubric) -> list[vf.Rubric]:
    """A rubric and, recursively, its members."""
    return [rubric, *(inner for member in getattr(rubric, "rubrics", []) for inner in rubrics(member))]


def watched(func: Callable[..., Any], weight: float, is_group: bool) -> Callable[..., Awaitable[Any]]:
    """Wraps a function so that its failure is recorded before verifiers turns it into a zero."""

    @functools.wraps(func)
    async def call(*args: Any, **kwargs: Any) -> Any:
        scoring = SCORING.get()
        if scoring is None:  # called by the environment itself, while it plays
            return await maybe_await(func, *args, **kwargs)
        try:
            value = await maybe_await(func, *args, **kwargs)
        # Broad, because the caller's is too: it would turn the error into a reward of 0.0, and an exit() would end the event loop.
        except (Exception, SystemExit) as error:
            problem = f"raised {error_text(error)}"
        else:
            result = as_numbers(value, scoring.num_rollouts) if is_group else as_number(value)
            if result is not None:
                return result
            wanted = f"a list of {scoring.num_rollouts} finite numbers" if is_group else "a finite number"
            problem = f"returned {repr(value)[:SHOWN]}, not {wanted}"
        if weight:
            scoring.faults.append(f"reward function {call.__name__} {problem}")
        else:
            scoring.absent.add(call.__name__)
        return [0.0] * scoring.num_rollouts if is_group else 0.0

    call.__name__ = getattr(func, "__name__", type(func).__name__)
    call.watched = True  # type: ignore[attr-defined]
    return call
