"""Measures long rollouts, a death of a worker, and what holds the event loop. `uv run scripts/bench.py rollouts` prints JSON."""

import argparse
import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
MIB = 2**20


def play_group(path: Path, turns: int, tokens: int) -> None:
    """Plays a group of 8 in a classic environment with a stub for the model, and writes the worker's message. Prints MiB that it took."""
    import verifiers as vf
    from datasets import Dataset

    from rl.envs.classic import environment as classic
    from rl.envs.worker import encode_result
    from rl.wire.worker_messages import EnvSpec
    from tests.envs.stub_policy import StubPolicy, order

    new = tokens // turns // 2 - 12

    class Talk(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": "q" * new}]

    rows = Dataset.from_list([{"question": "q" * new, "answer": ""}])
    talk = Talk(dataset=rows, rubric=vf.Rubric(funcs=[lambda **_: 0.5], weights=[1.0]), max_turns=turns)
    classic.load_rows = lambda _: talk
    policy = StubPolicy(lambda _: "a" * new, max_model_len=10 * tokens)
    env = classic.ClassicEnvironment(EnvSpec(name="talk"), policy)

    async def play() -> bytes:
        asked = order(num_episodes=8, max_tokens=tokens)
        episodes = await asyncio.gather(*(env.play(asked, 1) for _ in range(8)))
        rollouts = [rollout for (episode,) in episodes for rollout in episode]
        for i, rollout in enumerate(rollouts):
            rollout.episode, rollout.reward = i, i % 2
        policy.servers.asked.clear()
        (message,) = encode_result(asked, rollouts)
        return message

    record, policy.servers.asked = [], type("Unrecorded", (list,), {"append": lambda *_: None})()
    before = psutil.Process().memory_info().rss
    record.append(asyncio.run(play()))
    path.write_bytes(record[0])
    print(json.dumps({"worker_mib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / MIB)}))


async def long_rollouts(folder: Path, turns: int, tokens: int) -> dict[str, float]:
    """The way of a group of 8 from a worker's message to a committed batch."""
    from rl.orchestrator.workers.pool_worker import ANSWERS
    from rl.wire.rollouts import Group
    from tests.interpreters import interpreter
    from tests.loop_lag import LoopLag
    from tests.orchestrator.test_loop_lag import builder

    message = folder / "message"
    child = [str(interpreter("0.3.1")), __file__, "play-group", str(message), str(turns), str(tokens)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    worker = json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE, env=environment).stdout)
    one, process = builder(folder, 7), psutil.Process()
    await one.restore()
    memory = process.memory_info().rss
    with LoopLag() as lag:
        played = ANSWERS.decode(message.read_bytes())
        await one.add([Group(group_id=0, env="e", task=0, rollouts=played.rollouts)])
        held = process.memory_info().rss - memory
        await one.commit_full_batches()
    in_all = sum(chain.num_tokens for rollout in played.rollouts for chain in rollout.turns.chains)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - memory
    return {
        "tokens": in_all,
        "turns": sum(len(rollout.turns) for rollout in played.rollouts),
        "bytes_per_token": round(message.stat().st_size / in_all, 1),
        "longest_hold_ms": round(1000 * lag.longest_s, 1),
        "orchestrator_mib": round(held / MIB),
        "orchestrator_peak_mib": round(peak / MIB),
        **worker,
    }


class Unpatched:
    """In place of pytest's monkeypatch."""

    def setattr(self, place: str, value: object) -> None:
        module, _, name = place.rpartition(".")
        setattr(sys.modules[module], name, value)


async def death(folder: Path, in_flight: int, wait_s: float) -> dict[str, float]:
    """Groups a second before a worker is killed, and `wait_s` seconds after that."""
    from rl.orchestrator.workers.pool import WorkerPool
    from tests.orchestrator import light_worker

    pool, finished = WorkerPool(folder / "logs"), []

    async def feed(seconds: float) -> None:
        while True:
            await pool.play("light", "train", 0, 1, {"seconds": seconds}, 0)
            finished.append(time.monotonic())

    async def pace(seconds: float) -> float:
        began, start = len(finished), time.monotonic()
        await asyncio.sleep(seconds)
        return (len(finished) - began) / (time.monotonic() - start)

    try:
        light_worker.start(pool, Unpatched())
        await pool.sizes(60.0)
        feeds = [asyncio.create_task(feed(0.2 + 0.01 * i)) for i in range(in_flight)]
        await asyncio.sleep(1.0)
        before = await pace(10.0)
        os.kill(pool.workers["light-0"].child.pid, signal.SIGKILL)
        await asyncio.sleep(wait_s)
        after = await pace(10.0)
        for task in feeds:
            task.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)
    finally:
        await pool.close()
    return {"groups_per_s_before": round(before, 1), "groups_per_s_after": round(after, 1), "ratio": round(after / before, 3)}


async def many_tasks(folder: Path, tasks: int) -> dict[str, float]:
    """A start with many tasks."""
    from tests.loop_lag import LoopLag
    from tests.orchestrator.test_loop_lag import builder

    one, began = builder(folder, tasks), time.monotonic()
    with LoopLag() as lag:
        await one.restore()
    return {"tasks": tasks, "seconds": round(time.monotonic() - began, 1), "longest_hold_ms": round(1000 * lag.longest_s, 1)}


async def large_commit(folder: Path, groups: int) -> dict[str, float]:
    """A batch of groups of 480,000 tokens each, which are on disk already."""
    from tests.loop_lag import LoopLag
    from tests.orchestrator.test_loop_lag import builder, long_group

    one = builder(folder, 7)
    await one.restore()
    one.config.orchestrator.batch_size = 8 * groups
    for i in range(groups):
        await one.add([long_group(i, 50, 600)])
    began = time.monotonic()
    with LoopLag() as lag:
        await one.commit_full_batches()
    seconds, size = time.monotonic() - began, one.run_dir.batch(1).stat().st_size
    held = {"longest_hold_ms": round(1000 * lag.longest_s, 1)}
    return {"tokens": 480_000 * groups, "seconds": round(seconds, 1), "batch_mib": round(size / MIB), **held}


def main() -> None:
    if sys.argv[1:2] == ["play-group"]:
        return play_group(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=300, help="of each of 8 rollouts")
    parser.add_argument("--tokens", type=int, default=60_000, help="of each of 8 rollouts")
    parser.add_argument("--in-flight", type=int, default=20, help="groups at the worker that is killed")
    parser.add_argument("--wait", type=float, default=5.0, help="seconds from its death to the second count")
    parser.add_argument("--tasks", type=int, default=10_000_000)
    parser.add_argument("--groups", type=int, default=17, help="of the large batch, 480,000 tokens each")
    args = parser.parse_args()
    results = {"cores": os.cpu_count()}
    measures = {
        "long_rollouts": lambda folder: long_rollouts(folder, args.turns, args.tokens),
        "death": lambda folder: death(folder, args.in_flight, args.wait),
        "many_tasks": lambda folder: many_tasks(folder, args.tasks),
        "large_commit": lambda folder: large_commit(folder, args.groups),
    }
    for name, measure in measures.items():
        with tempfile.TemporaryDirectory() as folder:
            results[name] = asyncio.run(measure(Path(folder)))
            print(json.dumps({name: results[name]}), file=sys.stderr)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
