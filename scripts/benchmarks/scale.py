"""Measures what grows with servers, workers and machines, without any of them. `uv run scripts/bench.py scale` prints JSON.

The orchestrator is the real one; one process stands in for all servers (each announces itself), one for all workers, one for the trainer.
What one process of each kind on a cluster does in the run directory is counted beside the files of all others (cluster_files.py).
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from cluster_files import cluster, count_files, counts
from orchestrator import ENVIRONMENT, stub_server

from rl.config.command_line import build, parse_args
from rl.homes.resolve import homes_of
from rl.models.tiny import make_tiny_model
from rl.orchestrator import main as orchestrator
from rl.orchestrator.workers.pool import WorkerPool
from rl.orchestrator.workers.pool_worker import Worker
from rl.run_dir.status import HEARTBEAT_S, Status
from rl.system.children import start
from rl.wire.http import HttpClient
from rl.wire.messages import VersionSpan
from rl.wire.rollouts import Rollout
from rl.wire.streams import MessageStream
from rl.wire.transport import TrainerServer
from rl.wire.turns import Turn
from rl.wire.worker_messages import Close, Heartbeat, Played, PlayGroup, Ready, ServerSet, ToWorker, WorkerSetup

SPEEDS = ("rollouts_per_s", "cpu_ms_per_rollout")
MESSAGES = {"http": (HttpClient, "request"), "zmq": (TrainerServer, "reply"), "to_workers": (WorkerPool, "_send")}
MESSAGES |= {"from_workers": (WorkerPool, "_take")}


def count_calls(key: str, owner: type, name: str) -> None:
    """Counts the calls of a method from now on."""
    method = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[key] += 1
        return method(*args, **kwargs)

    setattr(owner, name, counted)


class StandIns(WorkerPool):
    """A pool whose workers are one process."""

    async def start_all(self, setups: Sequence[WorkerSetup]) -> None:
        names = [setup.worker_id for setup in setups]
        child = start(
            "workers", [sys.executable, __file__, "workers", self.address, *names], {**os.environ}, self.log_dir / "workers-1.log"
        )
        self.workers |= {setup.worker_id: Worker(setup, child) for setup in setups}


async def play(path: str, name: str) -> None:
    """A worker that has played every group at once."""
    stream, orders, encode, version = await MessageStream.connect(path), msgspec.msgpack.Decoder(ToWorker), msgspec.msgpack.encode, 0

    async def beat() -> None:
        while True:
            await stream.send(encode(Heartbeat(0.5)))
            await asyncio.sleep(HEARTBEAT_S)

    await stream.send(name.encode())
    await stream.send(encode(Ready(1000, 0)))
    beating = asyncio.create_task(beat())
    while (data := await stream.receive()) is not None:
        match orders.decode(data):
            case ServerSet() as servers:
                version = servers.oldest
            case PlayGroup() as order:
                spans, ids, logprobs = [VersionSpan(version, 16)], [65] * 16, [-1.0] * 16
                turn = Turn(prompt_ids=ids, completion_ids=ids, logprobs=logprobs, policy_versions=spans, finish_reason="stop")
                rollouts = [Rollout(turns=[turn], reward=i % 2, stop="stop", episode=i) for i in range(order.num_episodes)]
                await stream.send(encode(Played(order.play_id, rollouts)))
            case Close():
                break
    beating.cancel()


async def together(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*parts)


async def measure(servers: int, workers: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns what a rollout costs the orchestrator, from its second batch to its last, and what it does a second."""
    (folder / "bench_env.py").write_text(ENVIRONMENT)
    os.chdir(folder)  # where a module is looked for
    flags = ["--name", "run", "--output_dir", str(folder), "--orchestrator.environment.id", "bench-env", "--max_lag", "1"]
    flags += [
        "--max_steps",
        str(args.steps),
        "--orchestrator.batch_size",
        str(args.batch),
        "--orchestrator.environment.workers",
        str(workers),
    ]
    config = build(parse_args(flags))
    run_dir = config.run_dir
    run_dir.status_dir.mkdir(parents=True)
    commands = [[__file__, "servers", str(run_dir.status_dir), str(servers)]]
    commands += [[str(Path(__file__).with_name("orchestrator.py")), "stub-trainer", str(run_dir.root), str(args.steps)]]
    looks: list[tuple[float, float, Counter[str]]] = []

    async def look() -> None:
        while True:
            if os.access(run_dir.batch(len(looks) + 1), os.F_OK):
                looks.append((time.monotonic(), time.process_time(), counts.copy()))
            await asyncio.sleep(0.01)

    looking, status = asyncio.create_task(look()), Status(run_dir.status("orchestrator"), "orchestrator")
    children = [subprocess.Popen([sys.executable, *command]) for command in commands]
    try:
        await orchestrator.run(config, status, str(make_tiny_model(folder / "model")), homes_of(config, print, recorded=True))
    finally:
        looking.cancel()
        status.close()
        for child in children:
            child.kill()
            child.wait()
    (began, cpu, before), (ended, cpu_after, after) = looks[1], looks[-1]
    batches, seconds = len(looks) - 2, ended - began
    played = args.batch * batches
    per_s = {key: round(number / seconds, 1) for key, number in sorted((after - before).items())}
    speeds = dict(zip(SPEEDS, (round(played / seconds), round(1000 * (cpu_after - cpu) / played, 4)), strict=True))
    return {"servers": servers, "workers": workers, **speeds, "batches_per_s": round(batches / seconds, 2), "per_s": per_s}


def main() -> None:
    match sys.argv[1:]:
        case ["servers", folder, number]:
            paths = [Path(folder) / f"inference-node{i}.json" for i in range(int(number))]
            return asyncio.run(together(stub_server(path, 1, 0.0) for path in paths))
        case ["workers", path, *names]:
            return asyncio.run(together(play(path, name) for name in names))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", default=["1x1", "8x8", "64x64"], help="numbers of servers x workers")
    parser.add_argument("--rounds", type=int, default=3, help="of all sizes; medians are printed")
    parser.add_argument("--batch", type=int, default=8192, help="rollouts")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--machines", type=int, nargs="*", default=[2, 8, 64], help="of clusters whose files are counted")
    args = parser.parse_args()
    orchestrator.WorkerPool = StandIns  # type: ignore[misc]
    runs: dict[str, list[dict[str, Any]]] = {size: [] for size in args.sizes}
    with tempfile.TemporaryDirectory() as folder:
        count_files(Path(folder))
        for key, (owner, name) in MESSAGES.items():
            count_calls(key, owner, name)
        for size in args.sizes * args.rounds:
            place = Path(tempfile.mkdtemp(dir=folder))
            runs[size].append(asyncio.run(measure(*map(int, size.split("x")), args, place)))
            print(json.dumps(runs[size][-1]), file=sys.stderr)
        machines = [cluster(number, Path(tempfile.mkdtemp(dir=folder))) for number in args.machines]
    table = []
    for found in runs.values():
        pairs = list(zip(found, runs[args.sizes[0]], strict=True))
        ratios = {f"{key}_over_first": round(median(one[key] / base[key] for one, base in pairs), 3) for key in SPEEDS}
        table.append(found[-1] | {key: median(one[key] for one in found) for key in SPEEDS} | ratios)
    print(json.dumps({"cores": os.cpu_count(), "orchestrator": table, "cluster": machines}, indent=2))


if __name__ == "__main__":
    main()
