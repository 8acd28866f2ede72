"""Whole runs on a real Slurm, by the commands that a user types, while machines are taken away
and jobs are ended in every way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl.config.command_line import write_config
from tests.cluster import slurm_here
from tests.cluster.configs import REAL, assert_each_step_once, processes_of, real_config, steps_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("classic_home"),
    pytest.mark.skipif(bool(slurm_here.unable()), reason=slurm_here.unable()),
]
RL = Path(sys.executable).parent / "rl"


class Run:
    """A run on Slurm, as its user sees it."""

    def __init__(self, here, folder, model):
        self.here, self.file = here, folder / "run.toml"
        config = real_config(folder / "out puts", model, {"engine": "slurm"}, "rün")
        self.run_dir, self.said = config.run_dir, folder / "said"
        self.root = str(self.run_dir.root)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.trainer = self.servers = ""
        write_config(self.file, config)

    def start(self, *words, before=()):
        """Types a command of `rl`."""
        with self.said.open("ab") as file:
            process = subprocess.Popen(
                [*before, RL, *words],
                env=os.environ | self.here.env | REAL | {"OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=file,
            )
        self.processes.append(process)
        return process

    def submit(self, *words):
        """Has `rl` submit the run, and waits until it trains."""
        before = self.text().count("submitted ")
        process = self.start("@", str(self.file), *words)
        self.wait("jobs", lambda: self.text().count("submitted ") > before)
        self.trainer, self.servers = (
            self.text().rpartition("submitted ")[2].split("\n")[0].split(", ")
        )
        self.wait_for_steps(5)
        return process

    def text(self):
        return self.said.read_text() if self.said.exists() else ""

    def wait(self, what, condition, timeout_s=400.0):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (
                f"waited for {what}\n{self.here.ask('squeue', '-l')}\n{self.text()[-3000:]}"
            )
            time.sleep(0.5)

    def wait_for_steps(self, more):
        wanted = steps_of(self.run_dir) + more
        self.wait(f"step {wanted}", lambda: steps_of(self.run_dir) >= wanted)

    def wait_for_requeue(self, number):
        self.wait(
            f"requeue {number}",
            lambda: f"Restarts={number} " in self.here.ask("scontrol", "show", "job", self.trainer),
        )
        self.wait_for_steps(5)

    def machine(self, job):
        """The last machine of a running job; empty if none runs."""
        nodes = self.here.ask("squeue", "-h", "-t", "R", "-j", job, "-o", "%N")
        return self.here.ask("scontrol", "show", "hostnames", nodes).split()[-1] if nodes else ""

    def lose(self, job):
        """Cuts the power of a machine, until its job runs elsewhere."""
        lost = self.machine(job)
        self.here.kill(lost)
        self.wait(f"job {job} elsewhere", lambda: self.machine(job) not in ("", lost))
        self.here.start(lost)
        self.wait_for_steps(5)

    def finish(self, *before):
        """Trains a few more steps, to the end: then every step was trained once, and a replay
        makes the same weights."""
        last = steps_of(self.run_dir) + 5
        words = f"@ {self.file} --resume --max_steps {last}".split()
        assert self.start(*words, before=before).wait(600) == 0
        self.wait_for_nothing()
        assert_each_step_once(self.run_dir, last)
        assert self.start("replay", self.root).wait(600) == 0 and "EQUAL" in self.text()

    def wait_for_nothing(self):
        """Until the queue is empty: then no process is left."""
        self.wait("an empty queue", lambda: not self.here.ask("squeue", "-h"))
        self.wait("no process", lambda: not processes_of(self.run_dir), 30.0)


@pytest.fixture
def run(tmp_path, tmp_path_factory, model):
    # a short name, for sockets
    with slurm_here.SlurmHere(tmp_path_factory.mktemp("s")) as here:
        found = Run(here, tmp_path, model)
        yield found
        for process in found.processes:
            process.kill()
            process.wait()


def test_machines_that_are_taken_away_and_lost(run):
    """Preemption, the loss of a server and that of a trainer, `rl stop`."""
    process = run.submit()
    run.here.preempt(run.machine(run.trainer))
    run.wait_for_requeue(1)
    run.lose(run.servers)
    run.lose(run.trainer)
    assert run.start("stop", run.root).wait(60) == 0 and process.wait(60) == 130
    run.wait_for_nothing()
    run.finish()


def test_jobs_that_end(run):
    """Its time limit, a requeue by the administrator, a Ctrl-C that ends only the console,
    `scancel`, and a resume inside an allocation."""
    process = run.submit("--cluster.slurm.time", "3")
    run.wait_for_requeue(1)
    run.here.ask("scontrol", "requeue", run.trainer)
    run.wait_for_requeue(2)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0 and "detached; the run goes on" in run.text()
    run.wait_for_steps(5)
    watch = run.start("watch", run.root)
    run.here.ask("scancel", run.trainer)
    assert watch.wait(120) == 1 and "the run has no jobs in the queue any more" in run.text()
    run.wait_for_nothing()
    run.finish("salloc", "--nodes=3", "--exclusive")
