"""Measures what our own code costs, beside stubs for the model and the trainer. `uv run
scripts/bench.py orchestrator` prints JSON."""

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil

from rl.wire.messages import VersionSpan
from rl.wire.turns import Turn, pack_ids, pack_logprobs

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PROBE_S = 0.01
ENVIRONMENT = """
import random
import verifiers as vf
from datasets import Dataset

def reward(completion) -> float:
    return random.random()

def load_environment():
    rows = Dataset.from_list([{"question": f"say {i}", "answer": str(i)} for i in range(1000)])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[reward]))
"""
V1_ENVIRONMENT = """
import random
import verifiers.v1 as vf

class BenchTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def reward(self, trace: vf.Trace) -> float:
        return random.random()

class BenchSet(vf.Taskset[BenchTask, vf.TasksetConfig]):
    def load(self):
        return [BenchTask(vf.TaskData(idx=i, prompt=f"say {i}")) for i in range(1000)]

__all__ = ["BenchSet"]
"""


async def stub_server(status: Path, num_tokens: int, delay_s: float) -> None:
    """An inference server that answers with random tokens after `delay_s`, by our protocol."""
    from aiohttp import web

    from rl.config.run import ModelConfig
    from rl.run_dir.status import RoleStatus, write_status
    from rl.wire.inference_client import PROTOCOL

    state = {
        "policy_version": 0,
        "max_model_len": 1 << 30,
        "served_model": ModelConfig().name,
        "protocol": PROTOCOL,
    }

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(delay_s)
        ids = [random.randrange(200) for _ in range(num_tokens)]
        turn = Turn(
            packed_ids=pack_ids(ids),
            packed_logprobs=pack_logprobs([-1.0] * num_tokens),
            policy_versions=[VersionSpan(state["policy_version"], num_tokens)],
            finish_reason="stop",
        )
        return web.Response(body=msgspec.msgpack.encode(turn))

    async def load(request: web.Request) -> web.Response:
        state["policy_version"] = (await request.json())["policy_version"]
        return web.json_response({**state, "pause_s": 0.0})

    async def get_status(_: web.Request) -> web.Response:
        return web.json_response(state)

    app = web.Application()
    app.add_routes(
        [
            web.post("/generate", generate),
            web.post("/load_weights", load),
            web.get("/status", get_status),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    write_status(status, RoleStatus(address=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    await asyncio.Event().wait()


def stub_trainer(run_dir: Path, steps: int) -> None:
    """A trainer that publishes empty versions at once."""
    from rl.run_dir.paths import RunDir
    from rl.wire.messages import WeightVersion
    from rl.wire.transport import OrchestratorClient, Wait

    directory = RunDir(run_dir, run_dir / "weights")
    client, wait = OrchestratorClient(directory), Wait(600.0, lambda *_: None)
    for step in range(1, steps + 1):
        directory.weights(step).mkdir(parents=True)
        with wait:
            client.get_batch(step, wait)
            client.published(WeightVersion(step, str(directory.weights(step))), wait)


class Probe:
    """Samples event-loop lag, and CPU time at each committed batch, of this process and of its
    workers."""

    def __init__(self, run_dir: Path):
        self.batches = run_dir / "batches"
        self.late: list[float] = []
        self.at_batch: list[tuple[float, float, float]] = []
        """(wall, our CPU, workers' CPU) seconds."""
        self.memory = 0
        """Highest seen, of us and the workers, bytes."""

    def workers(self) -> list[psutil.Process]:
        return [
            child
            for child in psutil.Process().children()
            if "rl.envs.worker" in " ".join(child.cmdline())
        ]

    def look(self) -> tuple[float, float, float]:
        times = psutil.Process().cpu_times()
        theirs = sum(sum(worker.cpu_times()[:2]) for worker in self.workers())
        return time.monotonic(), times.user + times.system, theirs

    async def run(self) -> None:
        ticks = 0
        while True:
            before = time.monotonic()
            await asyncio.sleep(PROBE_S)
            if self.at_batch:
                self.late.append(time.monotonic() - before - PROBE_S)
            if (self.batches / f"{len(self.at_batch) + 1:06d}.batch").exists():
                self.at_batch.append(self.look())
            ticks += 1
            if ticks % 50 == 0:
                self.memory = max(self.memory, self.used())

    def used(self) -> int:
        return sum(process.memory_info().rss for process in [psutil.Process(), *self.workers()])


async def measure(
    args: argparse.Namespace, in_flight: int, steps: int, workers: int, folder: Path, model: Path
) -> dict[str, Any]:
    """One run of the real orchestrator with the real workers, and what it cost from the first
    batch to the last."""
    from rl.config.command_line import build, parse_args
    from rl.homes.resolve import homes_of
    from rl.orchestrator.main import run
    from rl.run_dir.metrics import read_metrics
    from rl.run_dir.status import Status

    num_tokens, delay_s = args.tokens, args.delay
    (folder / "bench_env.py").write_text(V1_ENVIRONMENT if args.v1 else ENVIRONMENT)
    os.environ["PYTHONPATH"] = str(folder)
    flags = [
        "--name",
        "bench",
        "--output_dir",
        str(folder),
        "--orchestrator.environment.id",
        "bench-env",
        "--max_steps",
        str(steps),
    ]
    flags += [
        "--orchestrator.batch_size",
        str(in_flight // 2),
        "--orchestrator.sampling.max_tokens",
        str(num_tokens),
        "--max_lag",
        "1",
    ]
    config = build(parse_args([*flags, "--orchestrator.environment.workers", str(workers)]))
    os.chdir(folder)  # where a module is looked for
    status_path = config.run_dir.status("inference")
    status_path.parent.mkdir(parents=True)
    stub = [
        sys.executable,
        __file__,
        "stub-server",
        str(status_path),
        str(num_tokens),
        str(delay_s),
    ]
    trainer = [sys.executable, __file__, "stub-trainer", str(config.run_dir.root), str(steps)]
    children = [subprocess.Popen(stub), subprocess.Popen(trainer)]
    probe, status = (
        Probe(config.run_dir.root),
        Status(config.run_dir.status("orchestrator"), "orchestrator"),
    )
    empty = probe.used()
    task = asyncio.create_task(probe.run())
    gc.freeze()  # as the orchestrator's own process does
    try:
        await run(config, status, str(model), homes_of(config, print, recorded=True))
    finally:
        task.cancel()
        status.close()
        for child in children:
            child.kill()
            child.wait()
    metrics = read_metrics(config.run_dir.metrics)
    rollouts = sum(
        metrics[step, "orchestrator"]["rollouts/finished"] for step in range(2, steps + 1)
    )
    (wall0, cpu0, theirs0), (wall, cpu, theirs) = probe.at_batch[0], probe.at_batch[-1]
    late = sorted(probe.late)
    return {
        "in_flight": in_flight,
        "workers": workers,
        "rollouts": rollouts,
        "rollouts_per_orchestrator_cpu_s": round(rollouts / (cpu - cpu0)),
        "rollouts_per_worker_cpu_s": round(rollouts / (theirs - theirs0)),
        "rollouts_per_s": round(rollouts / (wall - wall0)),
        "loop_lag_ms_median": round(1000 * median(late), 1),
        "loop_lag_ms_p99": round(1000 * late[int(0.99 * (len(late) - 1))], 1),
        "loop_lag_ms_max": round(1000 * late[-1], 1),
        "peak_mib": round((probe.memory - empty) / 2**20),
    }


def orchestrator(args: argparse.Namespace) -> None:
    """Prints one JSON object: a measurement for each number of rollouts in flight."""
    from rl.models.tiny import make_tiny_model

    results = []
    for in_flight, workers in itertools.product(args.in_flight, args.workers):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            model = make_tiny_model(path / "model")
            steps = max(4, min(40, args.rollouts // (in_flight // 2)))
            results.append(asyncio.run(measure(args, in_flight, steps, workers, path, model)))
            print(json.dumps(results[-1]), file=sys.stderr)
    first, last = results[0], results[-1]
    growth = {}
    if len(args.in_flight) > 1:
        added = last["in_flight"] - first["in_flight"]
        growth["kib_per_rollout_in_flight"] = round(
            (last["peak_mib"] - first["peak_mib"]) * 1024 / added, 1
        )
    print(
        json.dumps(
            {
                "cores": os.cpu_count(),
                "tokens": args.tokens,
                "delay_s": args.delay,
                "runs": results,
                **growth,
            },
            indent=2,
        )
    )


def main() -> None:
    if sys.argv[1:2] == ["stub-server"]:
        return asyncio.run(stub_server(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
    if sys.argv[1:2] == ["stub-trainer"]:
        return stub_trainer(Path(sys.argv[2]), int(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 1000, 10000])
    parser.add_argument(
        "--rollouts", type=int, default=20000, help="at least, for each number in flight"
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[1], help="numbers of them")
    parser.add_argument("--v1", action="store_true", help="an environment of the v1 API")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that an answer takes")
    return orchestrator(parser.parse_args())


if __name__ == "__main__":
    main()
