"""Supervision with real processes: whatever happens to a child or to the parent, no process is
left."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.launch.children import Children, Guard
from rl.run_dir.logs import last_lines, next_log
from rl.system import process_table
from rl.system.children import Child, RestartPolicy, start
from tests.waiting import alive, until

SLEEP = "import time; time.sleep(60)"


def pids_in(path, count):
    until(lambda: path.exists() and len(path.read_text().split()) >= count)
    return [int(word) for word in path.read_text().split()]


def python(code):
    return [sys.executable, "-c", code]


def test_output_goes_to_the_log_of_the_attempt(tmp_path):
    """The child has its own session and cores, and may write bytecode."""
    core = min(os.sched_getaffinity(0))
    code = (
        "import os, sys; print(os.getsid(0) == os.getpid(), os.sched_getaffinity(0), "
        "os.environ.get('PYTHONDONTWRITEBYTECODE'));"
    )
    command, env = (
        python(code + "print('err', file=sys.stderr); sys.exit(3)"),
        {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert next_log(tmp_path, "trainer").name == "trainer-1.log"
    child = start("trainer", command, env, next_log(tmp_path, "trainer"), cores=[core])
    child.wait()
    assert (child.exit_code, child.ending()) == (3, "ended with exit code 3")
    assert sorted(last_lines(child.log)) == [f"True {{{core}}} None", "err"]
    (tmp_path / "trainer-10.log").touch()
    (tmp_path / "trainer-extra-70.log").touch()
    assert next_log(tmp_path, "trainer").name == "trainer-11.log"
    assert next_log(tmp_path, "inference").name == "inference-1.log"


def test_last_lines_end_before_torchruns_own_account(tmp_path):
    account = "E1 14:11 7 torch/distributed/elastic/multiprocessing/api.py:1002] failed\nnoise"
    said = [*(f"line {i}" for i in range(30)), "ValueError: boom"]
    (tmp_path / "x.log").write_text("\n".join([*said, account]))
    assert last_lines(tmp_path / "x.log") == said[11:]


def test_the_pid_of_a_child_stays_its_own_until_it_is_reaped(tmp_path, monkeypatch):
    child = start("x", python("pass"), dict(os.environ), tmp_path / "x-1.log")
    assert child.wait(20.0) == 0 and process_table.entry(child.pid).state == "Z"
    groups, kill = [], os.killpg
    monkeypatch.setattr(
        os, "killpg", lambda group, signum: (groups.append(group), kill(group, signum))
    )
    child.terminate()
    assert groups == [child.pid] * 2
    child.reap()
    child.reap()
    child.terminate()
    child.kill_tree()
    assert groups == [child.pid] * 2 and process_table.entry(child.pid) is None
    assert (child.exit_code, child.wait()) == (0, 0)


def test_a_pid_that_went_to_another_process_is_not_signalled():
    """The same for a session's number: the guard and a child's tree identify the leader by its
    start."""
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        line = until(lambda: process_table.entry(stranger.pid))
        before = replace(line, start=str(int(line.start) - 1))
        process_table.send_signal({stranger.pid: before}, signal.SIGKILL)
        processes = process_table.table()
        for entry, found in ((before, set()), (line, {stranger.pid})):
            starts = {stranger.pid: entry.start}
            assert process_table.marked(processes, [stranger.pid], "none", starts) == found
        assert stranger.poll() is None
        process_table.send_signal({stranger.pid: line}, signal.SIGKILL)
        assert stranger.wait(20) == -signal.SIGKILL
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_whose_name_is_no_text_is_in_the_table():
    """Regression: any such process on the machine ended `rl` and the orchestrator, and the guard
    before it had ended anything."""
    code = (
        'import ctypes, time; ctypes.CDLL(None).prctl(15, b"\\xd0) R 1", 0, 0, 0); '
        "print(flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(python(code), stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        line = process_table.table()[process.pid]
        assert line.parent == os.getpid() and line.start.isdigit()
    finally:
        process.kill()
        process.communicate()


def test_waiting_has_a_deadline(tmp_path):
    child = start("x", python(SLEEP), dict(os.environ), tmp_path / "x-1.log")
    began = time.monotonic()
    assert (child.wait(0.1), asyncio.run(child.wait_async(0.1))) == (None, None)
    assert 0.2 <= time.monotonic() - began < 30
    child.signal_group(signal.SIGKILL)
    assert asyncio.run(child.wait_async(20.0)) == -signal.SIGKILL
    assert (
        child.ending()
        == "was ended by SIGKILL (the kernel does that when memory runs out: see `dmesg`)"
    )
    child.reap()


def test_kill_tree_reaches_what_left_the_group_and_bears_the_marker(tmp_path):
    far = (
        "import os, subprocess, sys, time; p = subprocess.Popen(['sleep', '60'], "
        "start_new_session=True); print(p.pid, flush=True); "
    )
    child = start(
        "x",
        python(far + "os._exit(0)"),
        dict(os.environ),
        tmp_path / "x-1.log",
        new_session=False,
        marker="1:2:x:1",
    )
    child.wait(20.0)
    pid = int(child.log.read_text())
    until(lambda: process_table.markers(pid))  # there are none during exec
    assert alive(pid) and os.getsid(pid) == pid and process_table.markers(pid)[-1] == "1:2:x:1"
    child.kill_tree()
    until(lambda: not alive(pid))
    child.reap()


def test_a_restart_waits_twice_as_long_after_each_death_without_progress_until_there_were_too_many():
    policy = RestartPolicy(backoff_s=0.5, backoff_limit_s=10.0)
    expected = [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert [policy.delay_s(barren) for barren in range(8)] == expected
    assert policy.delay_s(5000) == 10.0
    policy = RestartPolicy(1.0, 30.0, max_restarts=2, window_s=60.0)
    assert policy.delay_s(0, [0.0, 10.0]) == 0.0
    assert policy.delay_s(0, [0.0, 10.0, 60.0]) is None
    assert policy.delay_s(1, [0.0, 10.0, 60.1]) == 1.0  # the first is outside the window
    assert RestartPolicy(1.0, 30.0, max_restarts=0).delay_s(1, [5.0]) is None
    barren = RestartPolicy(1.0, 30.0, barren_limit=3)
    assert [barren.delay_s(number) for number in (1, 2, 3, 4)] == [1.0, 2.0, None, None]


@pytest.fixture
def driver(tmp_path):
    """Runs code in a separate parent process, which keeps its signal handlers and subreaper
    state out of pytest."""
    started = []

    def run(code):
        prelude = (
            "import os, sys, time, signal\nfrom pathlib import Path\nfrom rl.launch.children "
            f"import *\ntmp = Path({str(tmp_path)!r})\n"
        )
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            python(prelude + code), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


STUBBORN = (
    "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), "
    "file=open({path!r}, 'a'), flush=True); time.sleep(60)"
)


def test_stop_kills_what_ignores_sigterm_and_what_left_its_group(driver, tmp_path):
    """A child ignores SIGTERM, and so does its grandchild in its own session, like torchrun's
    workers."""
    pids = tmp_path / "pids"
    stubborn = STUBBORN.format(path=str(pids))
    code = f"""
children = Children()
nested = "import subprocess as s, sys; s.Popen([sys.executable, '-c', " + repr({stubborn!r}) + "], start_new_session=True);" + {stubborn!r}
children.start("a", [sys.executable, "-c", nested], dict(os.environ), tmp)
while not (tmp / "pids").exists() or len((tmp / "pids").read_text().split()) < 2: time.sleep(0.02)
began = time.monotonic()
print(children.stop(deadline_s=0.5), time.monotonic() - began < 30)
"""
    parent = driver(code)
    assert parent.communicate(timeout=60)[0] == "[] True\n"
    assert not any(alive(pid) for pid in pids_in(pids, 2))


def test_stop_reaps_orphans_and_spares_what_was_there_before(driver):
    code = """
import subprocess
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
children = Children()
orphan = "import os, time\\nif os.fork() == 0: time.sleep(60)"
child = children.start("a", [sys.executable, "-c", orphan], dict(os.environ), tmp)
child.wait()
import psutil
children.stop(deadline_s=0.5)
print(helper.poll(), [p.pid for p in psutil.Process().children(recursive=True)] == [helper.pid])
helper.kill()
"""
    assert driver(code).communicate(timeout=60)[0] == "None True\n"


def test_sigkill_of_the_parent_ends_children_and_their_workers(driver, tmp_path):
    """start() binds the children to the parent, die_with_parent() binds a worker in its own
    session below them."""
    pids = tmp_path / "pids"
    note = f"import os; print(os.getpid(), file=open({str(pids)!r}, 'a'), flush=True);"
    worker = "from rl.system.linux import die_with_parent; die_with_parent();" + note + SLEEP
    agent = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {worker!r}], "
        "start_new_session=True);" + note + SLEEP
    )
    code = f"""
children = Children()
children.start("plain", [sys.executable, "-c", {note + SLEEP!r}], dict(os.environ), tmp)
children.start("agent", [sys.executable, "-c", {agent!r}], dict(os.environ), tmp)
time.sleep(60)
"""
    parent = driver(code)
    found = pids_in(pids, 3)
    assert all(alive(pid) for pid in found)
    parent.send_signal(signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in found))


def refuse(*_, **__):
    """As a system that has no more processes or files."""
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def killed_guard(folder):
    guard = Guard("none", folder / "none", 1.0)
    guard.process.kill()
    guard.process.wait()
    return guard


def test_a_guard_that_the_system_refuses_is_started_by_a_later_poll(tmp_path, monkeypatch):
    """Regression: a killed guard and a full process table at once ended the run without a
    report."""
    guard = killed_guard(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        guard.poll()
        guard.forget(SimpleNamespace(pid=1))
    guard.poll()
    assert guard.process.poll() is None
    guard.close()


def test_a_guard_without_a_pipe_writes_to_no_file_of_others(tmp_path, monkeypatch):
    """The pipe's number is reused when the next pipe is refused: no descriptor is left."""
    guard = killed_guard(tmp_path)
    number = guard.pipe
    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", refuse)
        guard.poll()
        with (tmp_path / "file").open("wb") as opened:
            file = os.dup2(opened.fileno(), number)
        guard.watch(Child("one", os.getpid(), tmp_path / "one-1.log"))
        guard.close()
    assert os.fstat(file).st_size == 0
    os.close(file)
    guard.poll()
    assert guard.process.poll() is None
    guard.close()


def test_a_start_that_the_system_refuses_leaves_no_descriptor_open(tmp_path, monkeypatch):
    children = Children()
    monkeypatch.setattr("rl.launch.children.start", refuse)
    counts = []
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            children.start("trainer", ["true"], dict(os.environ), tmp_path, warm=False)
        counts.append(len(os.listdir("/proc/self/fd")))
    children.stop()
    assert counts[1] == counts[2]


@pytest.mark.parametrize("phase", ["alone", "second guard"])
def test_the_guard_ends_what_outlives_a_killed_parent(driver, tmp_path, phase):
    """A child that ignores SIGTERM, a stopped one, and an orphan in its own session all end soon
    after `rl`."""
    pids = tmp_path / "pids"
    stopped = (
        f"import os; print(os.getpid(), file=open({str(pids)!r}, 'a'), flush=True); "
        "os.kill(os.getpid(), 19)"
    )
    stubborn = STUBBORN.format(path=str(pids))
    orphan = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}], "
        "start_new_session=True)"
    )
    code = f"""
import rl.launch.children
rl.launch.children.STOP_DEADLINE_S = 0.5
children = Children()
for name, script in [("deaf", {stubborn!r}), ("stopped", {stopped!r}), ("orphan", {orphan!r})]:
    children.start(name, [sys.executable, "-c", script], dict(os.environ), tmp)
if {phase!r} == "second guard":
    os.kill(children.guard.process.pid, 9)
    first = children.guard.process.pid
    while children.guard.process.pid == first: children.poll()
print(children.directory, children.guard.process.pid, flush=True)
time.sleep(60)
"""
    parent = driver(code)
    directory, guard = parent.stdout.readline().split()
    found = pids_in(pids, 3)
    assert all(alive(pid) for pid in found) and Path(directory).is_dir()
    parent.send_signal(signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in [*found, int(guard)]))
    assert not Path(directory).exists()


def test_semaphores_and_shared_memory_of_a_killed_child_go_with_it(driver):
    """Its resource tracker gets time to delete them."""
    mess = (
        "import os, multiprocessing as m; from multiprocessing.shared_memory import SharedMemory;"
    )
    mess += "s = m.get_context('spawn').Lock(); h = SharedMemory(create=True, size=64);"
    mess += "names = f'{h.name} sem.{s._semlock.name[1:]}'; print(names, flush=True)\n"
    # before exec it cannot be told from the child itself
    mess += "tracker = m.resource_tracker._resource_tracker._pid\n"
    mess += (
        "while 'resource_tracker' not in open(f'/proc/{tracker}/cmdline').read(): "
        "pass\nos.kill(os.getpid(), 9)"
    )
    code = f"""
children = Children()
child = children.start("a", [sys.executable, "-c", {mess!r}], dict(os.environ), tmp)
child.wait()
children.kill_tree(child)
names = child.log.read_text().splitlines()[0].split()
print(len(names), [os.path.exists("/dev/shm/" + name) for name in names])
children.stop()
"""
    assert driver(code).communicate(timeout=60)[0] == "2 [False, False]\n"


def test_markers_tell_runs_and_attempts_apart():
    env = {"RL_CHILD": "1:2:orchestrator:1 3:4:trainer:12"}  # a run within a run
    process = subprocess.Popen(["sleep", "60"], env=env | {"PATH": os.environ["PATH"]})
    until(lambda: process_table.markers(process.pid))
    asked = ["3:4:", "3:4:trainer:12", "1:2:", "3:4:trainer:1", "3:", "4:"]
    found = [
        process.pid in process_table.marked(process_table.table(), [process.pid], marker, {})
        for marker in asked
    ]
    process.kill()
    process.wait()
    assert found == [True, True, True, False, True, False]
    assert process_table.markers(process.pid) == []


def test_die_with_parent_ends_a_process_whose_launcher_is_gone_already():
    gone = subprocess.Popen(python("pass"))
    gone.wait()
    code = "from rl.system.linux import die_with_parent; die_with_parent(); print('still here')"
    for parent, ends in (
        ({"RL_PARENT_PID": str(gone.pid)}, (143, "")),
        ({"RL_PARENT_PID": str(os.getpid())}, (0, "still here\n")),
        ({}, (0, "still here\n")),
    ):
        env = {**os.environ, **parent}
        result = subprocess.run(python(code), env=env, capture_output=True, text=True)
        assert (result.returncode, result.stdout) == ends


def test_first_signal_stops_second_kills_at_once(driver, tmp_path):
    pids = tmp_path / "pids"
    code = f"""
import threading
children = Children()
children.forwarded_s = 3600.0
def end_it():
    sys.stdin.readline()
    children.forwarded_s = 0.0
    print("over", flush=True)
threading.Thread(target=end_it, daemon=True).start()
children.stop_on_signals()
children.start("a", [sys.executable, "-c", {STUBBORN.format(path=str(pids))!r}], dict(os.environ), tmp)
print(children.directory, children.guard.process.pid, flush=True)
try:
    time.sleep(60)
except Stopped as stop:
    print("stopping by", stop, flush=True)
    children.stop(deadline_s=60)
"""
    parent = driver(code)
    directory, guard = parent.stdout.readline().split()
    (pid,) = pids_in(pids, 1)
    parent.send_signal(signal.SIGINT)
    assert parent.stdout.readline() == "stopping by SIGINT\n"
    parent.send_signal(signal.SIGINT)  # the same one, from `uv run`: see FORWARDED_S
    time.sleep(0.3)
    assert alive(pid) and parent.poll() is None
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "over\n"
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=30) == 130  # not after its deadline of 60 s
    assert not alive(pid)
    assert not Path(directory).exists() and not alive(int(guard))


@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_while_a_child_is_started_waits_until_the_child_is_known(driver, times):
    """Regression: the child that had just been forked was not told to end, and `rl` waited for
    it until the deadline. `uv` sends two."""
    code = """
from rl.launch import children as launch

children, start = Children(), launch.start
children.forwarded_s = 3600.0
children.stop_on_signals()

def interrupted(*arguments, **more):
    child = start(*arguments, **more)
    for _ in range(TIMES):
        signal.raise_signal(signal.SIGTERM)
    return child

launch.start = interrupted
try:
    children.start("a", [sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), tmp)
except Stopped as stop:
    children.stop_caught()
    began = time.monotonic()
    left = children.stop(deadline_s=30)
    print("stopping by", stop, left, time.monotonic() - began < 15, flush=True)
"""
    assert (
        driver(code.replace("TIMES", str(times))).stdout.readline()
        == "stopping by SIGTERM [] True\n"
    )


def test_a_signal_that_arrives_in_a_finalizer_is_not_lost(driver):
    """Neither that one, nor what runs while the exception is on its way: it is not raised a
    second time there."""
    code = """
class Slow:
    def __del__(self):
        print("in", flush=True)
        time.sleep(60)

children = Children()
children.stop_on_signals()
try:
    slow = Slow()
    del slow
    print("goes on", flush=True)
    try:
        time.sleep(60)
    finally:
        time.sleep(2.5)
        print("cleaned up", flush=True)
except Stopped as stop:
    children.stop_caught()
    print("stopping by", stop, flush=True)
time.sleep(1.5)
"""
    parent = driver(code)
    assert parent.stdout.readline() == "in\n"
    parent.send_signal(signal.SIGINT)
    printed = parent.stdout.read()  # with Python's report of the exception that it ignored
    assert printed.endswith("goes on\ncleaned up\nstopping by SIGINT\n")
    assert parent.wait(timeout=30) == 0
