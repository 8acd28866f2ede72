"""torch.compile as the trainer uses it: one graph for all lengths, and never a silent fallback
to uncompiled code."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from rl.system.errors import RunError

LIMIT = 16
"""Sizes of 0, of 1 and equal ones have graphs of their own, each with and without gradients: up
to ten for the log-probabilities of a row."""


class CompilerError(RunError):
    """Torch cannot compile a function: it may be at fault, or a full disk, or a machine without
    a C compiler."""


def compiled(function: Callable[..., Any], remedy: str) -> Callable[..., Any]:
    """Compiles `function` at its first call, with symbols for all sizes.

    Each value of a size or flag that cannot be a symbol costs another compilation, and after LIMIT
    of one code object torch would continue uncompiled, with many times the memory. The function
    raises RunError with `remedy` then, and CompilerError if torch cannot compile it.
    """
    from torch._dynamo import config  # takes seconds, which runs without compilation need not spend
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit

    config.fail_on_recompile_limit_hit, config.recompile_limit = True, LIMIT
    # caps on scores must be constants of the graph: inductor cannot compile them as symbols
    config.specialize_float = True
    inner = torch.compile(function, dynamic=True)
    name = getattr(function, "__qualname__", "a function")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise RunError(
                f"torch compiled {name} {LIMIT} times, each time for other inputs; {remedy}"
            ) from error
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, torch.OutOfMemoryError):  # needs another remedy
                raise
            raise CompilerError(
                f"torch cannot compile {name} ({describe(error.inner_exception)}); {remedy}"
            ) from error

    return call


def describe(error: Exception) -> str:
    """The first line of an error, with its kind."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
