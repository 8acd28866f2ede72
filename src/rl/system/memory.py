"""Memory limits of this process."""

import contextlib

import psutil

from rl.system.machine import control_groups


def memory_bytes() -> tuple[int, int]:
    """Returns (total, free) memory in bytes that this process may use: that of the machine, container or job, whichever has less."""
    total, free = psutil.virtual_memory()[:2]
    for group in control_groups("memory"):
        for limited, taken in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # no such file, or `max`
                limit, used = (int((group / name).read_text()) for name in (limited, taken))
                total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free
