"""A made-up run directory of many steps, for tests of what the steps behind cost."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

from rl.config.command_line import to_toml
from rl.config.run import RLConfig
from rl.orchestrator.batches.batch_files import OrchestratorState
from rl.orchestrator.tasks.task_source import EnvTasks, TaskSource
from rl.run_dir.checksums import checksum
from rl.run_dir.files import clean_leftovers, encode_record, sha256
from rl.run_dir.paths import RunDir
from rl.run_dir.safetensors import HASH, digest
from rl.wire.batch_file import encode_batch
from rl.wire.messages import TrainBatch
from tests.flags import made

LINKS = 30_000
"""Names of one file; a file system has its limit."""
EVAL_EVERY, SEED = 100, 3
NUMBERS = 30
"""Metrics in a line, beside those that are looked at."""


def config_of(root: Path, steps: int) -> RLConfig:
    flags = (
        f"--name long --output_dir {root} --max_steps {steps + 1} --orchestrator.environment.id e "
        f"--orchestrator.eval.interval {EVAL_EVERY} --orchestrator.show_rollout_every 0"
    )
    return made(flags)


def link_all(paths: Iterator[Path], data: bytes) -> None:
    """Makes files of the same bytes, nearly all of them as further names of one."""
    source = None
    for i, path in enumerate(paths):
        if source is None or i % LINKS == 0:
            path.write_bytes(data)
            source = path
        else:
            os.link(source, path)


def make_run(root: Path, steps: int) -> RLConfig:
    """A run directory as a run of so many steps leaves it: tiny batches, rollouts and versions,
    metrics of their usual size."""
    config = config_of(root, steps)
    run_dir, every = config.run_dir, range(1, steps + 1)
    for folder in (
        run_dir.batches,
        run_dir.rollouts_dir,
        run_dir.digests_dir,
        run_dir.evals,
        run_dir.status_dir,
        run_dir.logs,
    ):
        folder.mkdir(parents=True)
    run_dir.config.write_text(to_toml(config))
    line = (
        json.dumps(
            {"group_id": 1, "env": "e", "reward": 1.0, "messages": [], "trained": True, "why": None}
        ).encode()
        + b"\n"
    )
    link_all(map(run_dir.batch, every), encode_record(b"a batch of long ago"))
    link_all(map(run_dir.rollouts, every), line)
    link_all(
        (run_dir.rollouts_dir / f"{step:06d}.sha256" for step in every),
        f"{sha256(line)}  x\n".encode(),
    )
    link_all(map(run_dir.digests, every), b'{"hash": "blake3", "tensors": {}}')
    for version in range(0, steps, EVAL_EVERY):
        path = run_dir.eval(version, "e")
        path.parent.mkdir()
        path.write_bytes(line)
    (run_dir.evals / "best.json").write_text("{}")
    state = OrchestratorState(
        tasks=TaskSource({"e": EnvTasks(7, 1.0, 2)}, SEED).state([]), settled=[]
    )
    run_dir.batch(steps).unlink()
    run_dir.batch(steps).write_bytes(encode_batch(TrainBatch(step=steps, samples=[]), state))
    make_checkpoint(run_dir, steps)
    make_version(run_dir, steps)
    write_metrics(run_dir, steps)
    return config


def make_version(run_dir: RunDir, number: int) -> None:
    folder, data = run_dir.weights(number), bytes([number % 256] * 8)
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    (folder / "digests.json").write_text(json.dumps({"hash": HASH, "tensors": {"w": digest(data)}}))


def make_checkpoint(run_dir: RunDir, step: int) -> None:
    folder = run_dir.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes([step % 256]) * 100)
    files = {"__0_0.distcp": checksum(folder / "__0_0.distcp")}
    (folder / "manifest.json").write_text(
        json.dumps({"step": step, "world_size": 1, "model": "m", "files": files})
    )


def write_metrics(run_dir: RunDir, steps: int) -> None:
    more = ", ".join(f'"part/of_some_metric_{i}": 0.{i + 1}2345678901' for i in range(NUMBERS))
    sources = {
        "orchestrator": '"reward/mean": 0.5, "lag/mean": 1.0, "time/batch": 10.0, '
        '"perf/inference_idle_fraction": 0.1',
        "trainer": '"loss/mean": 0.01, "entropy/mean": 1.5, "optim/grad_norm": 0.3, "time/step": '
        "10.0, "
        '"time/wait_for_batch": 1.0',
    }
    with run_dir.metrics.open("w") as file:
        for step in range(1, steps + 1):
            for source, own in sources.items():
                file.write(
                    f'{{"step": {step}, "time": {1.7e9 + step}, "source": "{source}", {own}, '
                    f"{more}}}\n"
                )
            if step % EVAL_EVERY == 0:
                file.write(
                    f'{{"step": {step}, "time": {1.7e9 + step}, "source": "eval", '
                    f'"eval/e/reward_mean": 0.5}}\n'
                )


def restored(config: RLConfig) -> Any:
    """An orchestrator that has read what it needs of the run, without workers, inference or
    trainer."""
    from rl.orchestrator.evals.evaluator import Evaluator
    from rl.orchestrator.orchestrator import Orchestrator
    from rl.orchestrator.policy.served_policy import ServedPolicy
    from rl.orchestrator.progress import StepClock

    run_dir, pool = config.run_dir, SimpleNamespace(lost={}, contents={})
    clean_leftovers(run_dir.batches, run_dir.rollouts_dir, run_dir.evals, *run_dir.evals.glob("*/"))
    evaluator = Evaluator(
        config, pool, {"e": SimpleNamespace(worker_env="e", num_tasks=4)}, StepClock()
    )
    policy = ServedPolicy(pool, run_dir, "/base", evaluator, tell=AsyncMock())
    status = SimpleNamespace(current=None, advance=lambda count: None, warn=lambda warning: None)
    one = Orchestrator(
        config, pool, policy, TaskSource({"e": EnvTasks(7, 1.0, 2)}, SEED), evaluator, status, {}
    )
    asyncio.run(one.pipeline.restore())
    return one
