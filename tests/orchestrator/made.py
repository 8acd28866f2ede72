"""Turns and setups of workers for tests, in which only what a test is about is given."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.wire.messages import VersionSpan
from rl.wire.rollouts import Turn
from rl.wire.worker_messages import EnvSpec, PolicySpec, WorkerSetup


def turn(
    prompt: Sequence[int] = (1,), completion: Sequence[int] = (2,), version: int = 0, **changes: Any
) -> Turn:
    """Returns a turn whose completion is of one policy version."""
    fields = {
        "logprobs": [-1.0] * len(completion),
        "policy_versions": [VersionSpan(version, len(completion))],
    }
    return Turn.of([*prompt], [*completion], **fields | changes)


def worker_setup(name: str = "a", **changes: Any) -> WorkerSetup:
    """Returns the setup of the first worker of an environment; `changes` are fields of
    WorkerSetup or EnvSpec."""
    env = {key: changes.pop(key) for key in [*changes] if key in EnvSpec.__struct_fields__}
    fields = {
        "policy": PolicySpec(),
        "orchestrator": "",
        "worker_id": f"{name}-0",
        "max_tokens": 4,
        "retries": 0,
    }
    return WorkerSetup(env=EnvSpec(name=name, **env), **fields | changes)


def run_config(root: Path, *flags: str, env: str = "e") -> Any:
    """Returns the configuration of a run `r` in `root`; each of `flags` may be several words."""
    from rl.config.command_line import build, parse_args  # light workers do not wait for it

    words = [word for flag in flags for word in (flag.split() if flag[0] == "-" else [flag])]
    key = "--orchestrator.environment" if "{" in env else "--orchestrator.environment.id"
    base = ["--name", "r", "--output_dir", str(root), key, env]
    return build(parse_args([*base, *words]))
