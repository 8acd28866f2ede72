"""Warm starts with real processes: the copy waits, takes over, leaves the next one, and never
stays behind."""

import os
import signal
import subprocess

import psutil
import pytest

from rl.system import process_table
from tests.system.test_children import python
from tests.waiting import alive, until

ROLE = """
import os, sys, time
from rl.system.prefork import leave
def imports():
    print("imported", flush=True)
    {imports}
leave(imports)
print(os.getpid(), os.environ["TMPDIR"], os.environ["RL_CHILD"].split()[-1].split(":")[-1], "RL_PREFORK" in os.environ, flush=True)
{work}
"""
WAIT = "import time; time.sleep(60)"


def role(imports="pass", work=WAIT):
    return python(ROLE.format(imports=imports, work=work))


def begin(children, tmp_path, command, warm=False):
    """Starts a child and waits until it works."""
    child = children.start("x", command, dict(os.environ), tmp_path, warm=warm)
    until(
        lambda: any(line.endswith(("True", "False")) for line in child.log.read_text().splitlines())
    )
    return child


def said(child):
    return child.log.read_text().split("\n")[:-1]


def kill(children, child):
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: child.exit_code is not None)
    assert child.exit_code == -signal.SIGKILL
    assert children.kill_tree(child) == []


def test_a_copy_takes_over_without_importing_again_and_leaves_the_next(children, tmp_path):
    first = begin(children, tmp_path, role())
    pids, directories = [first.pid], [str(first.temporary)]
    assert said(first)[0] == "imported"
    for attempt in (2, 3, 4):
        (waiting,) = until(children.waiting)
        kill(children, first)
        assert not first.temporary.exists()
        first = begin(children, tmp_path, role(), warm=True)
        assert first.pid == waiting and first.log.name == f"x-{attempt}.log"
        # its own log, directory and marker
        assert said(first) == [f"{waiting} {first.temporary} {attempt} False"]
        assert os.getsid(waiting) == waiting
        pids.append(waiting)
        directories.append(str(first.temporary))
    assert len(set(pids)) == len(set(directories)) == 4
    (waiting,) = until(children.waiting)
    assert children.stop() == []
    assert not any(psutil.pid_exists(pid) for pid in [*pids, waiting])


def test_each_copy_draws_random_numbers_of_its_own(children, tmp_path):
    command = role(
        imports="global numpy, fingerprint_rng; import numpy.random; from datasets.fingerprint "
        "import fingerprint_rng",
        work=f"print(numpy.random.rand(), fingerprint_rng.random(), True, flush=True)\n{WAIT}",
    )
    drawn = []
    for _ in range(3):
        child = begin(children, tmp_path, command, warm=True)
        drawn += until(
            lambda child=child: [line.split()[:2] for line in said(child) if line.startswith("0.")]
        )
        until(children.waiting)
        kill(children, child)
    assert len({one for one, _ in drawn}) == len({other for _, other in drawn}) == 3


@pytest.mark.parametrize(
    ("signum", "warm"), [(signal.SIGKILL, True), (signal.SIGSTOP, True), (signal.SIGCONT, False)]
)
def test_a_copy_that_is_dead_or_stopped_or_not_wanted_ends_and_the_start_is_cold(
    children, tmp_path, signum, warm
):
    first = begin(children, tmp_path, role())
    (waiting,) = until(children.waiting)
    os.kill(waiting, signum)
    until(lambda: not warm or (line := process_table.entry(waiting)) is None or line.state in "TZ")
    kill(children, first)
    second = begin(children, tmp_path, role(), warm=warm)
    assert said(second)[0] == "imported" and second.pid != waiting
    assert not psutil.pid_exists(waiting)
    kill(children, second)
    unasked = begin(children, tmp_path, role(), warm=None)
    assert len(said(unasked)) == 1  # nothing is imported early, and no copy is left


THREAD = "import threading; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
GPU = "os.readlink = lambda path: '/dev/nvidiactl'"
NO_MEMORY = """
    def fork():
        raise OSError(12, "Cannot allocate memory")
    os.fork = fork"""


@pytest.mark.parametrize(
    ("imports", "why"),
    [
        (THREAD, "1 threads are already running"),
        (GPU, "a GPU is already in use"),
        (NO_MEMORY, "[Errno 12] Cannot allocate memory"),
    ],
)
def test_where_there_can_be_no_copy_the_process_itself_goes_on(children, tmp_path, imports, why):
    first = begin(children, tmp_path, role(imports))
    assert f"no copy for a warm start: {why}" in said(first)
    assert not children.waiting()
    kill(children, first)
    assert said(begin(children, tmp_path, role(), warm=True))[0] == "imported"


def test_what_a_copy_forks_in_a_session_of_its_own_is_killed_with_it(children, tmp_path):
    """/proc shows the first process's environment, and so not the copy's own marker."""
    work = f"""
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        print("far", os.getpid(), flush=True)
        {WAIT}
    os._exit(0)
{WAIT}"""
    first = begin(children, tmp_path, role(work=work))
    until(children.waiting)
    kill(children, first)
    second = begin(children, tmp_path, role(work=work), warm=True)
    far = int(
        until(lambda: [line for line in said(second) if line.startswith("far")])[0].split()[1]
    )
    (waiting,) = until(children.waiting)
    assert alive(far) and os.getsid(far) == far
    kill(children, second)
    assert not alive(far) and alive(waiting)


def test_the_copy_ends_with_the_launcher(tmp_path):
    """`rl` is killed, so that it ends nothing itself, and there is no guard, so that only the
    kernel and the pipe can."""
    launcher = f"""
import os, sys, time
from pathlib import Path
from rl.launch.children import Children
children = Children()
child = children.start("x", {role()!r}, dict(os.environ), Path({str(tmp_path)!r}), warm=False)
while not children.waiting():
    time.sleep(0.02)
children.guard.process.kill()
print(child.pid, *children.waiting(), flush=True)
time.sleep(60)
"""

    with subprocess.Popen(python(launcher), stdout=subprocess.PIPE, text=True) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
        process.kill()
    until(lambda: not any(map(alive, pids)))  # they sleep for longer
