"""Units for bounds that hold on every machine: of time what this machine needs here and now for
something known, of numbers roundings."""

import resource
import subprocess
import sys

IMPORTS = (
    "import msgspec, tomli_w; from pydantic import BaseModel; type('A', (BaseModel,), "
    "{'__annotations__': {'x': int}, '__module__': 'a'})"
)
EPSILON = 2.0**-23
"""The gap between 1 and the next number of float32: a rounding moves a number by at most half of
that, relative to its size."""
OPERATIONS = 128
"""Roundings in one direction in a tiny model: a path through it is some 20 sums of 64 to 128
products, whose roundings add up as the root of their number, to 50; and the worst of some
hundred numbers is taken."""


def rounding(operations: int, size: float = 1.0) -> float:
    """How far two float32 computations of one number may be apart that each round so often on
    the way, at numbers up to `size`."""
    return operations * EPSILON * size


def children_cpu_s() -> float:
    """CPU seconds of all children of this process that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def imports_s() -> float:
    """CPU seconds of a Python that imports pydantic and makes a model: a third of what `rl
    --help` takes."""
    before = children_cpu_s()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return children_cpu_s() - before
