"""torch.compile as the trainer uses it: one graph for all lengths, and never uncompiled in silence."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from rl.system.errors import RunError

KEEP_RESULT = "wrap_inductor_compiled_regions"
"""The option of inductor by which selective checkpointing sees a compiled function as one operation, whose result it can keep."""


def compiled(function: Callable[..., Any], remedy: str, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """`function` compiled, with symbols for all sizes. Nothing is compiled before the first call.

    A size or a flag that the graph cannot have as a symbol costs another compilation, and after eight of one code object torch would go on
    without any, at many times the memory. Raises RunError then, with this remedy.
    """
    from torch._dynamo import config  # seconds, which what never compiles need not spend
    from torch._dynamo.exc import FailOnRecompileLimitHit

    config.fail_on_recompile_limit_hit = True
    config.specialize_float = True  # a cap on scores is a number of the graph: as a symbol inductor does not compile it
    inner = torch.compile(function, dynamic=True, options=options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            name = getattr(function, "__qualname__", "a function")
            raise RunError(f"torch compiled {name} {config.recompile_limit} times, each for other inputs; {remedy}") from error

    return call


def kept_operations() -> list[Any]:
    """The operation that stands for a function compiled with KEEP_RESULT, if torch has it."""
    from torch import _higher_order_ops

    found = getattr(_higher_order_ops, "inductor_compiled_code", None)
    return [found] if found is not None and keeps_results() else []


def keeps_results() -> bool:
    """Whether torch knows the option KEEP_RESULT."""
    from torch._inductor import config

    return hasattr(config, KEEP_RESULT)
