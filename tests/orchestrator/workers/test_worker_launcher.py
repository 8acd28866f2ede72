"""Workers that are forked from a copy of the first one in their home, in homes with two versions
of verifiers, in one run."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil

from rl.orchestrator.workers.pool import WorkerPool
from rl.orchestrator.workers.pool_worker import WorkerLauncher
from rl.wire.worker_messages import PolicySpec
from tests.interpreters import interpreter
from tests.orchestrator.made import worker_setup
from tests.orchestrator.stub_inference import StubInference

ENVIRONMENTS = Path(__file__).parents[2] / "environments"
SAMPLING = {"max_tokens": 4, "temperature": 1.0}
PACKAGE = """
import sys, threading
import verifiers as vf
from datasets import Dataset

def load_environment():
    def version() -> float:
        return {version}
    def heavy() -> float:
        return float("torch" in sys.modules)
    rubric = vf.Rubric(funcs=[version, heavy], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list([{{"question": "say 1", "answer": ""}}] * 3), rubric=rubric)
"""
NOISE = """
print("noise " * 200_000)
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def package(folder, version, more=""):
    """Returns the id of a package in a folder."""
    folder.mkdir(parents=True)
    (folder / f"{folder.name}.py").write_text(PACKAGE.format(version=version) + more)
    return str(folder)


def cpu_s(pid):
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def test_versions_of_packages_and_of_verifiers_beside_each_other(tmp_path, model, monkeypatch):
    """One package prints a megabyte and starts a thread when it is imported. This happens after
    the copy is made, from which the other package's worker, of the same name and in the same
    home, is forked."""
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    old, new = str(interpreter("0.3.1")), str(interpreter("0.4.0"))
    one, two = package(tmp_path / "one" / "pkg", 1.0, NOISE), package(tmp_path / "two" / "pkg", 2.0)
    sources = {"new": ("v1-echo", new, 2), "one": (one, old, 1), "two": (two, old, 1)}

    async def play(pool, env, num_groups=1):
        groups = await asyncio.gather(
            *(pool.play(env, "train", task % 3, 2, SAMPLING, 0) for task in range(num_groups))
        )
        assert not any(rollout.error for group in groups for rollout in group), groups
        return groups[0][0]

    async def main():
        async with StubInference(model, tmp_path / "inference.json"):
            pool = WorkerPool(tmp_path / "logs")
            policy = PolicySpec(
                model_path=str(model),
                max_model_len=1024,
                inference_status=str(tmp_path / "inference.json"),
            )
            setups = [
                worker_setup(
                    name,
                    id=env_id,
                    timeout_s=60.0,
                    policy=policy,
                    orchestrator=pool.address,
                    worker_id=f"{name}-{i}",
                    python=python,
                )
                for name, (env_id, python, count) in sources.items()
                for i in range(count)
            ]
            try:
                async with asyncio.timeout(100):
                    await pool.start_all(setups)
                    await pool.sizes(120.0)
                    spent = [cpu_s(pool.workers[f"new-{i}"].child.pid) for i in range(2)]
                    other = [cpu_s(pool.workers[f"{name}-0"].child.pid) for name in ("one", "two")]
                    assert spent[1] < spent[0] / 3 and other[1] < other[0] / 2, (spent, other)
                    assert {
                        psutil.Process(worker.child.pid).ppid() for worker in pool.workers.values()
                    } == {os.getpid()}
                    await play(pool, "new", 6)
                    first, second = await play(pool, "one"), await play(pool, "two")
                    assert (first.reward, second.reward) == (1.0, 2.0)
                    assert first.metrics["heavy"] == second.metrics["heavy"] == 0.0
                    survivor = pool.workers["new-1"].child.pid
                    for name in ("new-0", "one-0"):
                        os.kill(pool.workers[name].child.pid, signal.SIGKILL)
                    while pool.num_started < len(setups) + 2:
                        await asyncio.sleep(0.02)
                    await asyncio.gather(*(pool.workers[name].ready for name in ("new-0", "one-0")))
                    assert (await play(pool, "one")).reward == 1.0
                    await play(pool, "new", 6)
                    assert pool.workers["new-1"].child.pid == survivor, (
                        "those that came of a dead worker's copy live on"
                    )
                    spent += [cpu_s(pool.workers[name].child.pid) for name in ("new-0", "one-0")]
                    copies = pool.launcher.waiting()
                    assert len(copies) == 2
                    return spent, copies
            finally:
                await pool.close()

    spent, copies = asyncio.run(main())
    assert max(spent[2:]) < spent[0] / 2 and not any(map(psutil.pid_exists, copies))
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs["worker-one-0.log"].count("noise") == 2 * 200_000 and not any(
        "no copy" in text for text in logs.values()
    )


def test_the_current_directory_is_not_searched_before_what_is_installed(tmp_path, monkeypatch):
    """A folder of a package's name in the working directory would shadow it, and a queue.py the
    standard library."""
    program = "import os, sys; print('' in sys.path, __debug__, os.environ.get('PYTHONWARNINGS'))"
    monkeypatch.setattr("rl.orchestrator.workers.pool_worker.BOOTSTRAP", program)
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # which would take the asserts out of rewards
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    child = WorkerLauncher().start(
        worker_setup(python=sys.executable), tmp_path / "setup.json", tmp_path / "x.log", "", False
    )
    assert child.wait(30) == 0 and child.log.read_text() == "False True None\n"
    child.reap()
