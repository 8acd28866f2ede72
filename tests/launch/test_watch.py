"""`rl watch`, `rl logs` and `rl stop` beside a real `rl`, whose processes are small scripts."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.commands import follow
from rl.launch import watch
from rl.run_dir.nodes import Jobs, Nodes, RunOver
from rl.run_dir.spans import Event, append_event, read_events
from rl.run_dir.status import Staleness
from tests.cluster.configs import run_config, status_of
from tests.launch.test_run import FOREVER, Run
from tests.waiting import alive, until

RL = Path(sys.executable).parent / "rl"


@pytest.fixture
def run(tmp_path):
    with Run(tmp_path) as run:
        yield run


def rl(run, *words):
    done = subprocess.run([RL, *words], cwd=run.tmp, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def watching(run):
    command = [RL, "watch", "outputs/r"]
    return subprocess.Popen(command, cwd=run.tmp, stdout=subprocess.PIPE, text=True)


def test_a_reader_sees_the_steps_and_the_end(run):
    """Its processes are scripts that leave no checkpoint, so the run has not ended well."""
    steps = "while not (root / 'read').exists(): time.sleep(0.05)\n"
    steps += (
        "log = MetricsLog(root / 'metrics.jsonl', name)\nfor step in range(1, 4):\n    "
        "log.write(step, {})\n"
    )
    run.start(trainer=steps)
    until(run.run_dir.config.exists, 60)
    files = (path for path in run.root.rglob("*") if path.is_file() and path.suffix != ".tmp")
    before = {path for path in files if path.parent.name not in ("status", "metrics", "spans")}
    reader = watching(run)
    out = reader.stdout.readline()
    (run.root / "read").touch()
    out += reader.stdout.read()
    assert reader.wait(60) == 1 and "3 steps of" in out and "continue it with `rl @ " in out
    assert re.findall(r"^ {4,}(\d) ", out, re.MULTILINE) == ["1", "2", "3"]
    assert before <= set(run.root.rglob("*"))


def test_ctrl_c_ends_the_reader_and_not_the_run(run):
    process = run.start(orchestrator=FOREVER, trainer=FOREVER)
    run.pids(4)
    reader = watching(run)
    assert "steps of" in reader.stdout.readline() + reader.stdout.readline()
    reader.send_signal(signal.SIGINT)
    said = reader.communicate(timeout=60)[0]
    assert "detached; the run goes on" in said and reader.returncode == 0, (said, reader.returncode)
    assert process.poll() is None


def test_stop_ends_a_run_as_ctrl_c_does(run):
    """Also one that takes a while: `rl stop` repeats its request, and `rl` once met it again
    before its report."""
    slow = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), os._exit(143)))\n"
    process = run.start(orchestrator=FOREVER, trainer=slow + FOREVER)
    pids = run.pids(4)
    code, out, _ = rl(run, "stop", "outputs/r")
    assert code == 0 and "stopped; continue it with: rl @ " in out
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "resume with: rl" in error and not any(map(alive, pids))
    assert "stop" in [event.event for event in read_events(run.run_dir.events)]
    assert rl(run, "stop", "outputs/r")[0] == 0, "there is nothing left to stop"
    code, out, _ = rl(run, "watch", "outputs/r")
    assert code == 130 and "--resume" in out


def test_logs_are_listed_printed_and_searched_by_name(run):
    run(
        trainer="print('first', flush=True)\nprint('second', end='', flush=True)\n"
        + "log = MetricsLog(root / 'metrics.jsonl', name)\nlog.write(1, {})\n"
    )
    code, out, _ = rl(run, "logs", "outputs/r")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [
        "inference",
        "model",
        "orchestrator",
        "trainer",
    ]
    assert rl(run, "logs", "outputs/r", "trainer", "-n", "1")[1] == "second\n"
    code, _, error = rl(run, "logs", "outputs/r", "trainr")
    assert code == 1 and "did you mean trainer?" in error


def test_logs_follow_processes_that_start_later_until_the_run_is_over(run):
    """Regression: the reader knew only the processes that had a log when it began, and never
    ended."""
    until_read = "while not (root / 'read').exists(): time.sleep(0.05)\n"
    trainer = (
        "print('attempt of', os.getpid(), flush=True)\nif not (root / 'died').exists():\n    "
        "(root / 'died').touch()\n    sys.exit(1)\n"
    )
    trainer = f"print('begins', flush=True)\n{until_read}{trainer}"
    trainer += (
        "MetricsLog(root / 'metrics.jsonl', name).write(1, {})\nprint('last words', end='', "
        "flush=True)\n"
    )
    run.start("--max_steps 1 --supervisor.backoff_s 0.5", trainer=trainer)
    until(run.run_dir.logs.exists, 60)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [RL, "logs", "outputs/r", "-f"], cwd=run.tmp, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdout and process.stderr
    lines = [process.stdout.readline()]
    while lines[-1] and not lines[-1].endswith("begins\n"):
        lines.append(process.stdout.readline())
    (run.root / "read").touch()
    out, error = process.stdout.read(), process.stderr.read()
    assert process.wait(60) == 0 and error.startswith("rl logs: the run "), error
    said = [
        line.partition("| ")[2]
        for line in ("".join(lines) + out).splitlines()
        if line.startswith("trainer ")
    ]
    assert [line.partition(" of")[0] for line in said if line not in ("", "--- attempt 1")] == [
        "begins",
        "attempt",
        "--- attempt 2",
        "begins",
        "attempt",
        "last words",
    ]
    code, out, error = rl(run, "logs", "outputs/r", "trainer", "-f", "-n", "1")
    assert (code, out) == (0, "last words\n") and "continue it with" in error, "a run that is dead"
    assert run.processes[0].wait(60) == 0, "although its trainer died once"


# Runs on a cluster, written by hand ---------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A run on three machines, one of which trains; nobody waits long."""
    for name, seconds in (
        ("ASK_S", 0.2),
        ("LOOK_S", 0.0),
        ("POLL_S", 0.05),
        ("LEASE_S", 0.5),
        ("SILENT_S", 0.0),
    ):
        monkeypatch.setattr(watch, name, seconds)
    monkeypatch.setattr(follow, "POLL_S", 0.05)
    monkeypatch.setattr(follow, "LOOK_S", 0.0)
    config = run_config(tmp_path, {"engine": "slurm"})
    config.run_dir.logs.mkdir(parents=True)
    nodes = Nodes(config.run_dir)
    nodes.folder.mkdir(parents=True)

    def machine(index, *roles):
        status = status_of(index, roles=[*roles], place="elsewhere", heartbeat=time.time())
        nodes.write(nodes.status_path(index), status)

    return SimpleNamespace(config=config, dir=config.run_dir, nodes=nodes, machine=machine)


def test_events_of_machines_and_what_becomes_of_these_are_shown(cluster, capsys, monkeypatch):
    monkeypatch.setattr(watch, "LEASE_S", 60.0)
    seen = watch.Watch(cluster.dir, cluster.config, watch.Life(cluster.dir, cluster.config))
    cluster.machine(1, "inference")
    assert seen.look() is None
    append_event(cluster.dir.events, Event(time=1.0, event="start", process="rl"))
    append_event(cluster.dir.events, Event(time=3.0, event="ready", process="trainer", seconds=4))
    append_event(
        cluster.dir.root / "events-node1.jsonl",
        Event(time=2.0, event="death", process="inference-node1", reason="was killed"),
    )
    seen.show()
    cluster.nodes.status_path(1).unlink()
    seen.look()
    assert capsys.readouterr().out.splitlines() == [
        "  machine 1 (host1) serves",
        "rl has started",
        "  inference-node1 was killed, not started",
        "  trainer is up after 4 s",
        "  machine 1 has left",
        "no machine of the run is there: waiting for one up to cluster.join_timeout_s = 1800 "
        "s after the last sign of life seen here",
    ]


def test_a_run_on_a_cluster_that_stands_still_is_diagnosed(cluster, capsys):
    """Regression: only runs on one machine were."""
    cluster.config.supervisor.stall_s = 0.01
    cluster.machine(0, "trainer", "leader")
    seen = watch.Watch(cluster.dir, cluster.config, watch.Life(cluster.dir, cluster.config))
    until(
        lambda: (
            seen.show()
            or (
                "nothing new for" in (said := capsys.readouterr().out)
                and "the trainer has no status yet" in said
            )
        )
    )


def test_a_run_whose_jobs_are_gone_is_over(cluster, capsys):
    """Regression: after `scancel` the console waited for ever. A queue that is empty only for a
    moment says nothing."""
    queue = iter([True, False, True, False, False])
    cluster.nodes.write(cluster.nodes.jobs_path, Jobs("slurm", ["12"]))
    assert watch.watch(cluster.dir, cluster.config, is_queued=lambda: next(queue)) == 1
    said = capsys.readouterr().out
    assert f"no jobs in the queue any more: {cluster.dir.logs} has" in said and not [*queue]
    assert said.count("waiting for its jobs, 12 (`squeue --jobs=12`)") == 1


def test_a_run_whose_machines_no_engine_replaces_is_waited_for_as_long_as_they_wait_for_each_other(
    cluster, monkeypatch
):
    """By this process's clock. Regression: one that was ahead of the disk's ended the wait at
    once."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time))
    monkeypatch.setattr(Staleness.__init__, "__defaults__", (lambda: clock.now,))
    cluster.machine(0, "trainer")
    os.utime(cluster.nodes.folder, (5.0, 5.0))
    life = watch.Life(cluster.dir, cluster.config)
    assert life.end() is None and not life.waiting, "its heartbeat has not been seen to stand still"
    for seconds in (1.0, 1790.0):
        clock.now += seconds
        assert life.end() is None
        assert "up to cluster.join_timeout_s = 1800 s after the last sign" in life.waiting
    os.utime(cluster.nodes.folder, (6.0, 6.0))
    for seconds in (20.0, 1790.0):
        clock.now += seconds
        assert life.end() is None
    clock.now += 20.0
    code, text = life.end()
    assert code == 1
    assert text.startswith(
        "no machine has given a sign of life for cluster.join_timeout_s = 1800 s: "
    )
    cluster.machine(0, "trainer")
    life = watch.Life(cluster.dir, cluster.config)
    cluster.nodes.write(cluster.nodes.over_path, RunOver(exit_code=7, text="done", time=1.0))
    assert life.end() == (7, "done")


def test_logs_of_a_role_on_all_machines_and_on_one(cluster, capsys):
    for name in (
        "trainer-1",
        "trainer-node0-1",
        "trainer-node1-1",
        "trainer-node1-2",
        "node-1-1",
        "inference-node2-1",
        "slurm-5_1",
    ):
        (cluster.dir.logs / f"{name}.log").write_text(f"of {name}\n")
    view = follow.View(cluster.dir.logs, "trainer", None, None)
    view.show_last(view.logs(), 5)
    (cluster.dir.logs / "trainer-node3-1.log").write_text("of trainer-node3-1\nmore")
    view.show_new(is_last=True)
    assert capsys.readouterr().out.splitlines() == [
        "trainer       | of trainer-1",
        "trainer-node0 | of trainer-node0-1",
        "trainer-node1 | of trainer-node1-2",
        "trainer-node3 | --- attempt 1",
        "trainer-node3 | of trainer-node3-1",
        "trainer-node3 | more",
    ]
    for process, node, found in (
        ("trainer", "1", ["trainer-node1"]),
        ("", "1", ["node-1", "trainer-node1"]),
        ("inference", None, ["inference-node2"]),
        ("trainer-node0", None, ["trainer-node0"]),
        ("", "7", []),
    ):
        assert [*follow.View(cluster.dir.logs, process, node, None).logs()] == found
    assert follow.View(cluster.dir.logs, "trainer", "7", None).may_come()
    assert not follow.View(cluster.dir.logs, "trainr", None, None).may_come()
