"""Configurations of runs on a cluster, what their machines say of themselves, and what is left
of real ones."""

import time
from pathlib import Path
from typing import Any

import psutil

from rl.config.run import RLConfig
from rl.run_dir.metrics import read_metrics
from rl.run_dir.nodes import NodeStatus, TrainerWorld
from rl.run_dir.paths import RunDir

REAL = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(Path(__file__).parents[1] / "environments"),
}
"""The environment of a real run."""


def run_config(folder: Path, cluster: dict[str, object], **tables: object) -> RLConfig:
    """The run `x` in a folder, on three machines unless `cluster` says otherwise."""
    usual = {"name": "x", "output_dir": str(folder), "cluster": {"nodes": 3} | cluster}
    orchestrator = {"environment": [{"id": "first-half"}]}
    return RLConfig.model_validate(usual | {"orchestrator": orchestrator} | tables)


def status_of(index: int, **fields: Any) -> NodeStatus:
    """What a machine that trains says of itself."""
    usual = {"host": f"host{index}", "address": f"10.0.0.{index}", "port": 1000 + index}
    usual |= {"roles": ["trainer"], "ranks": 2, "gpus": 2, "software": "rl 1", "config": "abc"}
    usual |= {"lease": 1, "pid": 1, "place": "", "started": time.time(), "heartbeat": 0.0}
    return NodeStatus(index=index, **usual | fields)


def world_of(generation: int, nodes: list[int], **fields: Any) -> TrainerWorld:
    """A world of machines that were never started again."""
    usual = {"leases": [1] * len(nodes), "ranks": [2] * len(nodes)}
    return TrainerWorld(generation=generation, nodes=nodes, **usual | fields)


def real_config(folder: Path, model: Path, cluster: dict[str, object], name: str) -> RLConfig:
    """A run of the tiny model that does not end: two machines train, one serves."""
    trainer = {"optim": {"lr": 1e-5}, "micro_batch_tokens": 128, "checkpoint": {"interval": 20}}
    played = {"batch_size": 16, "sampling": {"max_tokens": 16}}
    return run_config(
        folder,
        {"trainer_nodes": 2, "grace_s": 20} | cluster,
        trainer=trainer | {"gpus": 0, "ranks": 1},
        orchestrator={"environment": [{"id": "first-half"}]} | played,
        inference={"gpus": 0},
        name=name,
        max_steps=100_000,
        model={"name": str(model), "dtype": "float32", "max_model_len": 128},
    )


def steps_of(run_dir: RunDir) -> int:
    path = run_dir.metrics
    steps = read_metrics(path, "trainer") if path.exists() else ()
    return max((step for step, _ in steps), default=0)


def assert_each_step_once(run_dir: RunDir, last: int) -> None:
    for source in ("trainer", "orchestrator"):
        steps = sorted(step for step, _ in read_metrics(run_dir.metrics, source))
        assert steps == [*range(1, last + 1)]


def processes_of(run_dir: RunDir) -> list[int]:
    return [pid for pid in psutil.pids() if str(run_dir.root).encode() in command_line(pid)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
