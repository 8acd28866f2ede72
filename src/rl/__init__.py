"""Reinforcement learning for language models. Runs on Linux alone, which every command says before an import fails elsewhere."""

import sys

if sys.platform != "linux":
    where = (
        "on Windows, install WSL2 (`wsl --install` as administrator) and install and run rl in its Linux"
        if sys.platform == "win32"
        else f"this is {sys.platform}: use a Linux machine, or a Linux container (Docker, Podman)"
    )
    raise SystemExit(f"rl runs on Linux; {where}")
