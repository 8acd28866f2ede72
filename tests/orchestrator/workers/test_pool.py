"""Environments that misbehave, in real worker processes: only the guilty task fails."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from rl.orchestrator.workers.pool import EnvLostError, WorkerPool
from rl.orchestrator.workers.pool_worker import WorkerLauncher
from rl.run_dir.spans import DECODER, Span
from rl.system import process_table
from rl.system.errors import RESTART
from rl.wire.worker_messages import PolicySpec
from tests.interpreters import worker_python
from tests.orchestrator import light_worker
from tests.orchestrator.made import worker_setup
from tests.orchestrator.stub_inference import StubInference
from tests.raised import run_error

ENVIRONMENTS = Path(__file__).parents[2] / "environments"
SAMPLING = {"max_tokens": 4, "temperature": 1.0}


def run(tmp_path, model, work, *setups, env_id="trouble", **limits):
    """Runs `work(pool)` with a stub server and a worker for each (name, args of the environment,
    python)."""

    async def main():
        async with StubInference(model, tmp_path / "inference.json"):
            pool = WorkerPool(tmp_path / "logs", **limits)
            # which shows tools
            status, renderer = str(tmp_path / "inference.json"), {"name": "chatml"}
            policy = PolicySpec(
                model_path=str(model),
                max_model_len=1024,
                inference_status=status,
                renderer=renderer,
            )
            try:
                place = {
                    "policy": policy,
                    "orchestrator": pool.address,
                    "spans": str(tmp_path / "spans"),
                    "id": env_id,
                    "timeout_s": 60.0,
                }
                workers = [
                    worker_setup(name, args=args, python=python or worker_python(), **place)
                    for name, args, python in setups
                ]
                async with asyncio.timeout(280):
                    await pool.start_all(workers)
                    await pool.sizes(120.0)
                    return await work(pool)
            finally:
                await pool.close()

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def environments(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))


@pytest.mark.timeout(300)
def test_only_the_guilty_task_is_lost(tmp_path, model, monkeypatch):
    monkeypatch.setattr("rl.orchestrator.workers.pool_worker.MAX_KILLS", 2)
    kinds = ["", "exit", "crash", "sleep", "memory", "thread"]

    async def work(pool):
        began = time.monotonic()

        async def play(kind):
            rollouts = await asyncio.gather(
                *(pool.play(kind or "good", "train", task, 2, SAMPLING, 0) for task in range(6))
            )
            return kind, rollouts, time.monotonic() - began

        results = await asyncio.gather(*(play(kind) for kind in kinds))
        return {
            kind: (rollouts, seconds) for kind, rollouts, seconds in results
        }, pool.num_started - len(pool.workers)

    setups = [(kind or "good", {"how": kind}, "") for kind in kinds]
    results, deaths = run(tmp_path, model, work, *setups, memory_gib=1.5, silence_s=8.0)
    for kind, (groups, seconds) in results.items():
        deadly = kind in ("crash", "sleep", "memory")
        for task, group in enumerate(groups):
            assert len(group) == 2
            if kind == "exit" and task == 1:
                assert {rollout.cause for rollout in group} == {"reward"} and "SystemExit" in group[
                    0
                ].error
            elif deadly and task == 1:
                assert {rollout.cause for rollout in group} == {
                    "worker"
                } and "died 2 times" in group[0].error
            else:
                assert [(rollout.error, rollout.reward) for rollout in group] == [
                    (None, float(task))
                ] * 2
        # the others did not wait for those that died, here of two silences of 8 s
        assert deadly or seconds < results["sleep"][1]
    assert "blocked the event loop" in results["sleep"][0][1][0].error
    assert "GiB (orchestrator.worker_memory_gib = 1.5)" in results["memory"][0][1][0].error
    assert deaths == 3 * 2


def test_a_poison_environment_is_lost_alone(tmp_path, model, monkeypatch):
    monkeypatch.setattr("rl.orchestrator.workers.pool.BARREN_DEATHS", 2)
    told = []

    async def work(pool):
        pool.on_lost = lambda env, why: told.append((env, why))
        good = asyncio.gather(
            *(pool.play("good", "train", task, 1, SAMPLING, 0) for task in range(6))
        )
        with pytest.raises(
            EnvLostError, match="its workers died 2 times and finished nothing in between"
        ):
            await pool.play("poison", "train", 0, 1, SAMPLING, 0)
        with pytest.raises(EnvLostError):
            await pool.play("poison", "train", 1, 1, SAMPLING, 0)
        return [rollout.reward for (rollout,) in await good], dict(pool.lost), pool.failed.done()

    rewards, lost, failed = run(
        tmp_path, model, work, ("good", {}, ""), ("poison", {"how": "poison"}, "")
    )
    assert rewards == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert told == list(lost.items())
    assert list(lost) == ["poison"]
    assert not failed
    lines = (tmp_path / "spans" / "worker-good-0.jsonl").read_bytes().splitlines()
    spans = [line for line in map(DECODER.decode, lines) if isinstance(line, Span)]
    assert {name: sum(span.name == name for span in spans) for name in ("play", "score")} == {
        "play": 6,
        "score": 6,
    }
    assert {span.about.get("task") for span in spans if span.name == "play"} == {*range(6)}


def test_a_tool_server_that_died_comes_back_with_a_new_worker(tmp_path, model):
    """verifiers starts the server that all tasks share only once; without it every later rollout
    of this environment would fail."""

    async def until(condition):
        async with asyncio.timeout(60):
            while not (found := condition()):
                await asyncio.sleep(0.05)
            return found

    async def work(pool):
        def tool_server():
            (worker,) = pool.workers.values()
            if not worker.ready.done() or worker.child.exit_code is not None:
                return None
            with contextlib.suppress(psutil.NoSuchProcess):
                below = psutil.Process(worker.child.pid).children(recursive=True)
                return next(
                    (process for process in below if "v1_calc" in " ".join(process.cmdline())), None
                )

        first = await until(tool_server)
        first.kill()
        await until(lambda: pool.num_started > 1)
        second = await until(tool_server)
        about = await pool.describe("calc", "train", 1, 30.0)
        return (
            first.pid != second.pid,
            pool.num_started,
            [tool["function"]["name"] for tool in about.tasks[0]["tools"]],
        )

    assert run(tmp_path, model, work, ("calc", {}, ""), env_id="v1-calc") == (True, 2, ["calc_add"])
    assert "its tool server (pid" in (tmp_path / "logs" / "worker-calc-0.log").read_text()


def test_groups_go_to_the_worker_that_has_the_fewest(tmp_path, monkeypatch):
    async def work(pool):
        plays = [
            asyncio.create_task(light_worker.play(pool, task, seconds=0.3)) for task in range(9)
        ]
        while sum(len(worker.sent) for worker in pool.workers.values()) < len(plays):
            await asyncio.sleep(0)
        spread = [len(worker.sent) for worker in pool.workers.values()]
        return spread, [(await play)[0].reward for play in plays]

    assert light_worker.run(tmp_path, monkeypatch, work, workers=3) == (
        [3, 3, 3],
        [float(task) for task in range(9)],
    )


def test_a_stopped_worker_is_noticed_and_what_it_started_ends_with_it(tmp_path, model, monkeypatch):
    monkeypatch.setattr("rl.orchestrator.workers.pool_worker.STOPPED_S", 3.0)

    async def work(pool):
        (worker,) = pool.workers.values()
        os.kill(worker.child.pid, signal.SIGSTOP)
        env = os.environ | {process_table.MARKER: worker.child.marker}
        # as a tool server is started
        server = subprocess.Popen(["sleep", "1000"], env=env, start_new_session=True)
        (rollout,) = await pool.play("good", "train", 3, 1, SAMPLING, 0)
        return (
            rollout.reward,
            pool.num_started,
            server.wait(20),
            (tmp_path / "logs" / "worker-good-0.log").exists(),
        )

    assert run(tmp_path, model, work, ("good", {}, "")) == (3.0, 2, -signal.SIGKILL, True)


def test_no_signal_goes_to_a_worker_that_was_reaped(tmp_path, monkeypatch):
    """Its pid may be another process's by then."""
    killpg, strangers = os.killpg, []

    def careful_killpg(group, signum):
        leader = process_table.entry(group)
        if leader is None or leader.parent != os.getpid():
            strangers.append(group)
        else:
            killpg(group, signum)

    monkeypatch.setattr(os, "killpg", careful_killpg)

    async def main():
        pool = WorkerPool(tmp_path / "logs")
        pool.start(worker_setup(python="/bin/false"))
        with run_error("ended with code 1 while loading"):
            await pool.sizes(20.0)
        await pool.close()

    asyncio.run(main())
    assert strangers == []


def test_a_refused_start_of_a_worker_is_tried_again_and_does_not_blame_its_interpreter(
    tmp_path, monkeypatch
):
    def refuse(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("rl.orchestrator.workers.pool_worker.start", refuse)
    with run_error("cannot be started now: Resource temporarily unavailable; make room") as caught:
        WorkerLauncher().start(worker_setup(), tmp_path / "setup", tmp_path / "log", "", warm=False)
    assert caught.value.exit_code == RESTART


def test_an_interpreter_that_is_not_there_or_lacks_packages(tmp_path, model):
    with run_error(r"nowhere/python does not start: No such file"):
        run(tmp_path, model, None, ("own", {}, "/nowhere/python"))
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    with run_error(
        r"ended with code 1.*; its interpreter lacks .*: `uv pip install --python "
        r"\S+/bare/bin/python (.|\n)*No module named"
    ):
        run(tmp_path, model, None, ("own", {}, str(bare / "bin" / "python")))
    assert os.listdir(tmp_path / "logs") == ["worker-own-0.log"]


def test_a_long_temporary_folder_has_no_sockets(tmp_path, monkeypatch):
    """The longest path that is used has room for the longest name; one more byte, also of a
    letter of two, leads to /tmp."""
    room = 107 - len("/rl-workers-12345678/inference")
    for text in ("x", "\u00e9"):
        for length in (room, room + 1):
            folder = tmp_path / (text * ((length - len(str(tmp_path)) - 1) // len(text.encode())))
            folder = folder.with_name(folder.name + "y" * (length - len(os.fsencode(folder))))
            folder.mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(folder))

            async def address():
                pool = WorkerPool(tmp_path / "logs")
                try:
                    with socket.socket(socket.AF_UNIX) as inference:
                        inference.bind(f"{pool.directory.name}/inference")
                    return Path(pool.address).parents[1]
                finally:
                    await pool.close()

            assert asyncio.run(address()) == (folder if length == room else Path("/tmp")), (
                text,
                length,
            )
