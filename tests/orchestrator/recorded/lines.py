"""Lines of recorded rollouts for tests, in which only what a test is about is given, and the
settings of a run that trains on them."""

import json
from pathlib import Path
from typing import Any

from rl.config.command_line import build, parse_args
from rl.config.run import RLConfig


def turn(
    prompt: Any = (5, 6), completion: Any = (7, 8), version: int = 0, **changes: Any
) -> dict[str, Any]:
    """Returns a turn of a line, sampled by one version."""
    known = {
        "logprobs": [-0.5] * len(completion),
        "policy_versions": [[version, len(completion)]],
        "finish_reason": "stop",
    }
    return {"prompt_ids": [*prompt], "completion_ids": [*completion], **known | changes}


def line(task: int = 0, reward: float = 0.0, **changes: Any) -> dict[str, Any]:
    return {"env": "e", "task": task, "reward": reward, "turns": [turn()], **changes}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def config(path: Path, model: Path, **settings: Any) -> RLConfig:
    """Returns the configuration of a run in the directory of `path`, without a file."""
    settings = {
        "recorded__rollouts": path,
        "model__name": model,
        "output_dir": path.parent,
        "name": "r",
    } | settings
    words = [
        word
        for key, value in settings.items()
        for word in (f"--{key.replace('__', '.')}", str(value))
    ]
    return build(parse_args(words)).with_absolute_paths()
