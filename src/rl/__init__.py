"""Reinforcement learning for language models: `rl.open`, `rl.train`, `rl.evaluate`, `rl.record`
(docs/python.md).

Runs on Linux alone, which every command says before an import fails elsewhere.
"""

import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    where = (
        "on Windows, install WSL2 (`wsl --install` as administrator) and install and run rl "
        "in its Linux"
        if sys.platform == "win32"
        else f"this is {sys.platform}: use a Linux machine, or a Linux container (Docker, Podman)"
    )
    raise SystemExit(f"rl runs on Linux; {where}")

if TYPE_CHECKING:
    from rl.api import evaluate as evaluate
    from rl.api import open as open
    from rl.api import record as record
    from rl.api import train as train

API = ("evaluate", "open", "record", "train")
"""What the package itself offers, loaded when it is asked for; see rl.api."""


def __getattr__(name: str) -> Any:
    if name in API:
        from rl import api

        return getattr(api, name)
    raise AttributeError(f"module 'rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *API]
