"""The batch scripts, and what a real Slurm makes of them (tests/cluster/slurm_here.py). There a
stand-in takes the place of `rl node`."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rl.cluster import slurm
from rl.run_dir.nodes import Nodes
from rl.system import process_table
from rl.system.children import Stopped
from rl.system.errors import RunError
from tests.cluster import slurm_here
from tests.cluster.configs import run_config

STAND_IN = """
import os, signal, sys, time
root, over, code, save_s = sys.argv[1:]
def leave(*_):
    time.sleep(float(save_s))
    open(os.path.join(root, f"saved-{os.getpid()}"), "w")
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
index = int(os.environ.get("RL_NODE_INDEX") or os.environ["SLURM_NODEID"]) + int(os.environ.get("RL_INDEX_OFFSET", 0))
with open(os.path.join(root, "starts"), "a") as file:
    file.write(f"{index} {os.environ.get('SLURM_RESTART_COUNT', 0)} {os.environ['SLURMD_NODENAME']} {os.getpid()}\\n")
while not os.path.exists(over) and not int(code):
    time.sleep(0.1)
sys.exit(int(code))
"""
HERE_S = 150.0
"""Seconds that Slurm may take to find a machine lost and to start its job elsewhere."""


def make_config(folder, cluster, **settings):
    usual = {"engine": "slurm", "grace_s": 5}
    config = run_config(folder, usual | cluster, name="run", **settings)
    config.run_dir.status_dir.mkdir(parents=True)
    return config


def render(config):
    return slurm.render(config, config.run_dir)


def submit(config):
    return slurm.submit(config, config.run_dir)


def programs(folder, **bodies):
    """Writes scripts of bash that take the place of Slurm's commands."""
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)


# Scripts ------------------------------------------------------------------------------------------


def test_scripts(tmp_path, monkeypatch):
    """Each job asks for whole machines and for what the user passes through, and its shell is
    understood by bash."""
    place = tmp_path / "wörk's #1"
    place.mkdir()
    monkeypatch.chdir(place)
    passed = {
        "partition": "gpu",
        "account": "a",
        "qos": "q",
        "time": "4:00:00",
        "gres": "gpu:8",
        "extra": ["--exclude=n7", "--comment=a b"],
    }
    cluster = {
        "nodes": 5,
        "trainer_nodes": 2,
        "max_requeues": 7,
        "slurm": passed | {"setup": "module load cuda\nexport A='1 2'"},
    }
    config = make_config(tmp_path / "100% ü", cluster)
    trainer, inference = slurm.scripts(config).values()
    assert render(config) == f"{trainer}\n{inference}"
    root = f"{tmp_path}/100% ü/run"
    given = [
        "--partition=gpu",
        "--account=a",
        "--qos=q",
        "--time=4:00:00",
        "--gres=gpu:8",
        "--exclude=n7",
        '"--comment=a b"',
    ]
    own = [
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        "--requeue",
        "--export=ALL",
        "--signal=TERM@35",
        "--open-mode=append",
    ]
    for script, size, log in (
        (trainer, ["--nodes=2"], "%j"),
        (inference, ["--nodes=1", "--array=0-2"], "%A_%a"),
    ):
        options = [
            "--job-name=run",
            *size,
            *own,
            f'"--output={root.replace("%", "%%")}/logs/slurm-{log}.log"',
            *given,
        ]
        lines = script.splitlines()
        assert lines[0] == "#!/bin/bash"
        assert lines[1 : len(options) + 1] == [f"#SBATCH {option}" for option in options]
        assert lines[len(options) + 1 :][:3] == [
            "module load cuda",
            "export A='1 2'",
            f"cd '{tmp_path}/wörk'\"'\"'s #1' || exit 3",
        ]
        assert f"over='{root}/status/nodes/over.json' most=7 job=" in script
        assert (
            f"exit 75' rl {sys.executable} -P -m rl.main node @ '{root}/config.toml' &\n" in script
        )
        assert "srun --kill-on-bad-exit=0 --wait=0 --cpu-bind=none bash -c 'tries=0" in script
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert 'RL_NODE_INDEX="$SLURM_ARRAY_TASK_ID" RL_INDEX_OFFSET=2\n' in inference
    assert "RL_INDEX_OFFSET" not in trainer
    assert "scancel" in trainer and "scancel --" not in inference


def test_scripts_of_other_shapes(tmp_path):
    """A trainer that may shrink outlives a machine; options that share a machine replace ours;
    an image has its own `rl`."""

    def scripts(name, **cluster):
        return slurm.scripts(make_config(tmp_path / name, cluster))

    shrinks = scripts("a", nodes=4, trainer_nodes=3, min_trainer_nodes=2)
    trainer = shrinks["trainer"]
    assert "#SBATCH --no-kill\n" in trainer and "\nsrun --no-kill --kill" in trainer
    assert "no-kill" not in shrinks["inference"]
    shared = scripts("b", slurm={"extra": ["--cpus-per-task=8"]})["trainer"]
    assert "#SBATCH --cpus-per-task=8\n" in shared
    assert "--exclusive" not in shared and "--mem=0" not in shared
    image = scripts("c", slurm={"container_image": "/images/rl.sqsh"})["trainer"]
    assert (
        "--container-image=/images/rl.sqsh "
        f"--container-mounts={tmp_path}/c:{tmp_path}/c,{os.getcwd()}:{os.getcwd()} " in image
    )
    assert " rl rl node @ " in image
    alone = scripts("d", nodes=1)
    assert [*alone] == ["trainer"] and "#SBATCH --nodes=1\n" in alone["trainer"]


def test_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    config = make_config(tmp_path, {})
    assert [(key, value) for key, value, _ in slurm.faults(config)] == [("cluster.engine", "slurm")]
    with pytest.raises(
        RunError, match="there is no `sbatch` on the PATH: run this on a login node"
    ):
        submit(config)


def test_a_job_of_which_one_half_is_refused_is_removed(tmp_path, monkeypatch):
    """What is queued and what is told, by a stand-in for sbatch that takes the first job only."""
    programs(
        tmp_path,
        sbatch=f'cat > /dev/null; echo "$@ [$RL_SERVERS]" >> {tmp_path}/calls\n'
        '[ -z "$RL_SERVERS" ] && echo "12;here" || { echo "sbatch: error: no more" >&2; exit 1; }',
        scancel=f'echo "$@" >> {tmp_path}/calls',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        RunError, match="job of the machines for trainer, so nothing is queued: no more"
    ):
        submit(make_config(tmp_path, {}))
    assert (tmp_path / "calls").read_text().splitlines() == [
        "--parsable []",
        "--parsable [12]",
        "--quiet 12",
    ]


def test_defaults_for_the_users_own_jobs_do_not_override_a_run(tmp_path, monkeypatch, capsys):
    """Regression: SBATCH_PARTITION and SBATCH_ARRAY_INX came before the scripts' own lines, and
    SBATCH_WAIT for ever. What is not set and says who pays and where still counts."""
    body = f'(cat; env | grep -E "^S[A-Z]+_") >> {tmp_path}/calls; echo 12'
    programs(tmp_path, sbatch=body, squeue=f'{body}; echo "12 12"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in (
        "SBATCH_ARRAY_INX",
        "SBATCH_WAIT",
        "SBATCH_TIMELIMIT",
        "SRUN_CPUS_PER_TASK",
        "SQUEUE_STATES",
        "SLURM_JOB_ID",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SBATCH_PARTITION", "small")
    monkeypatch.setenv("SBATCH_ACCOUNT", "ours")
    monkeypatch.setenv("SLURM_CONF", "/slurm.conf")
    config = make_config(tmp_path, {"nodes": 1, "slurm": {"partition": "large", "time": "4:00:00"}})
    assert slurm.active(submit(config), config) == ["12"]
    calls = (tmp_path / "calls").read_text().splitlines()
    asked = [
        line
        for line in calls
        if line.startswith(("#SBATCH --partition", "#SBATCH --account", "#SBATCH --time"))
    ]
    assert asked == [
        "#SBATCH --partition=large",
        "#SBATCH --account=ours",
        "#SBATCH --time=4:00:00",
    ]
    got = [line for line in calls if line.startswith(("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_"))]
    assert got == ["SLURM_CONF=/slurm.conf"] * 2
    names = "SBATCH_ARRAY_INX, SBATCH_TIMELIMIT, SBATCH_WAIT, SQUEUE_STATES, SRUN_CPUS_PER_TASK"
    assert (
        capsys.readouterr().err
        == f"rl: its processes do not inherit variables that are meant for others: {names}\n"
    )


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("sbatch", 60), Stopped(signal.SIGINT)])
def test_a_job_whose_other_half_gets_no_answer_is_removed(tmp_path, monkeypatch, capsys, error):
    """Regression: the machines that serve stayed in the queue, known to nobody."""
    ran = []

    def run(command, *, env, **_):
        ran.append(command)
        if env.get("RL_SERVERS"):
            raise error
        return subprocess.CompletedProcess(command, 0, "12;here\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(
        RunError if isinstance(error, subprocess.TimeoutExpired) else Stopped
    ) as raised:
        submit(make_config(tmp_path, {}))
    assert (
        "a job may be queued all the same: `squeue --name=run` shows it"
        in str(raised.value) + capsys.readouterr().err
    )
    assert ran == [["sbatch", "--parsable"]] * 2 + [["scancel", "--quiet", "12"]]


@pytest.mark.parametrize(
    ("job", "number", "inside"),
    [("1", "3", True), ("1", "2", False), (None, "3", False), ("1", None, False)],
)
def test_stays(tmp_path, job, number, inside):
    variables = {
        key: value
        for key, value in {"SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": number}.items()
        if value
    }
    assert slurm.stays(make_config(tmp_path, {}), variables) == inside


# A real Slurm -------------------------------------------------------------------------------------

real = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(slurm_here.unable()), reason=slurm_here.unable()),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with (
        slurm_here.SlurmHere(tmp_path_factory.mktemp("slurm")) as here,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SLURM_CONF", str(here.conf))
        yield here


class Run:
    """A run whose machines are stand-ins: they end with `code`, when the run is over, or when
    they were told to and have saved."""

    def __init__(
        self,
        here,
        folder,
        monkeypatch,
        code=0,
        save_s=1.0,
        **cluster,
    ):
        self.here = here
        self.config = make_config(folder / "rün 1", {"trainer_nodes": 2} | cluster)
        self.root = self.config.run_dir.root
        self.nodes = Nodes(self.config.run_dir)
        program = [
            sys.executable,
            "-c",
            STAND_IN,
            str(self.root),
            str(self.nodes.over_path),
            str(code),
            str(save_s),
        ]
        monkeypatch.setattr(slurm, "command", lambda _: program)
        assert not list(slurm.faults(self.config))
        self.jobs = [] if slurm.stays(self.config) else submit(self.config)

    def starts(self):
        """Lines of: index, restarts of its job, Slurm's name of the machine, process id."""
        path = self.root / "starts"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, what, condition, timeout_s=HERE_S):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (
                "waited for "
                f"{what}\n{self.starts()}\n{self.here.ask('squeue', '-l')}\n{self.logs()}"
            )
            time.sleep(0.2)

    def wait_for_starts(self, *expected):
        """Until machines were started exactly so often: pairs of index and restarts of the job."""
        wanted = sorted(expected)
        self.wait(
            f"{wanted}",
            lambda: (
                sorted((int(index), int(restarts)) for index, restarts, *_ in self.starts())
                == wanted
            ),
        )

    def wait_for_end(self):
        self.wait("an empty queue", lambda: not self.here.ask("squeue", "-h"))
        lines = [process_table.entry(int(pid)) for *_, pid in self.starts()]
        assert not [line for line in lines if line and line.state != "Z"]

    def logs(self):
        return "\n".join(path.read_text() for path in self.config.run_dir.logs.glob("slurm-*.log"))

    def state(self, job):
        return self.here.ask("scontrol", "show", "job", job).partition("JobState=")[2].split()[0]


@pytest.mark.parametrize(
    ("settings", "key", "remedy"),
    [
        (
            {"slurm": {"partition": "no"}},
            "cluster.slurm",
            "sbatch refuses the job: ",
        ),
        (
            {"slurm": {"gres": "gpu:3"}},
            "cluster.slurm",
            "sbatch refuses the job: allocation failure: Requested node configuration is not",
        ),
        (
            {"slurm": {"time": "soon"}},
            "cluster.slurm",
            "sbatch refuses the job: Invalid --time specification",
        ),
    ],
)
class TestFaults:
    pytestmark = [pytest.mark.proof, *real]

    def test_faults(self, cluster, tmp_path, settings, key, remedy):
        [(found, _, told)] = slurm.faults(make_config(tmp_path, settings))
        assert found == key and told.startswith(remedy)


class TestShort:
    pytestmark = [pytest.mark.proof, *real]

    def test_cancel_leaves_nothing(self, cluster, tmp_path, monkeypatch):
        """Nothing comes back, although each machine asks to be started again. Cancelled jobs can
        be cancelled."""
        run = Run(cluster, tmp_path, monkeypatch)
        run.wait_for_starts((0, 0), (1, 0), (2, 0))
        slurm.cancel(run.jobs, run.config)
        run.wait_for_end()
        slurm.cancel(run.jobs, run.config)
        assert [run.state(job) for job in run.jobs] == ["CANCELLED", "CANCELLED"]
        assert len(run.starts()) == 3


class TestSlurm:
    pytestmark = [pytest.mark.cluster, *real]

    def test_requeues_have_an_end(self, cluster, tmp_path, monkeypatch):
        """With the last start the trainer's job ends, and with it the machines that serve."""
        run = Run(cluster, tmp_path, monkeypatch, max_requeues=1)
        run.wait_for_starts((0, 0), (1, 0), (2, 0))
        cluster.ask("scancel", "--signal=TERM", run.jobs[0])
        run.wait_for_starts((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))
        cluster.ask("scancel", "--signal=TERM", run.jobs[0])
        run.wait_for_end()
        assert "queued again cluster.max_requeues = 1 times: continue with --resume" in run.logs()
        assert [run.state(job) for job in run.jobs] == ["FAILED", "CANCELLED"]
        assert len(run.starts()) == 5

    def test_never_again(self, cluster, tmp_path, monkeypatch):
        """Exit code 3 of the machines ends everything."""
        run = Run(cluster, tmp_path, monkeypatch, code=3)
        run.wait_for_end()
        assert run.state(run.jobs[0]) == "FAILED"
        assert {restarts for _, restarts, *_ in run.starts()} == {"0"}

    def test_fewer_trainers(self, cluster, tmp_path, monkeypatch):
        """With min_trainer_nodes the job outlives the loss of a machine, and has all of them
        when it is queued again."""
        run = Run(cluster, tmp_path, monkeypatch, min_trainer_nodes=1)
        run.wait_for_starts((0, 0), (1, 0), (2, 0))
        lost = next(node for index, _, node, _ in run.starts() if index == "1")
        cluster.kill(lost)
        run.wait(
            "a smaller job",
            lambda: cluster.ask("squeue", "-h", "-j", run.jobs[0], "-o", "%D %t") == "1 R",
        )
        cluster.start(lost)
        cluster.ask("scancel", "--signal=TERM", run.jobs[0])
        run.wait_for_starts((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))
        slurm.cancel(run.jobs, run.config)
        run.wait_for_end()

    def test_inside_an_allocation(self, cluster, tmp_path, monkeypatch, children):
        """All machines are one step of the allocation, and save when `rl` is told to end."""
        cluster.ask("salloc", "--nodes=4", "--no-shell")
        job = cluster.ask("squeue", "-h", "-o", "%i")
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
        run = Run(cluster, tmp_path, monkeypatch)
        assert not run.jobs

        def stop():
            run.wait_for_starts((0, 0), (1, 0), (2, 0))
            os.kill(os.getpid(), signal.SIGTERM)

        before = {
            signum: signal.getsignal(signum)
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
        }
        children.stop_on_signals()
        thread = threading.Thread(target=stop)
        thread.start()
        assert slurm.run(run.config, run.config.run_dir, children) == 128 + signal.SIGTERM
        for signum, handler in before.items():
            signal.signal(signum, handler)
        assert len(list(run.root.glob("saved-*"))) == 3
        slurm.cancel([job], run.config)
        run.wait_for_end()

    def test_time_limit(self, cluster, tmp_path, monkeypatch):
        """A job that reaches its time limit is queued again even if it cannot save in time."""
        run = Run(
            cluster,
            tmp_path,
            monkeypatch,
            save_s=100.0,
            nodes=2,
            trainer_nodes=2,
            slurm={"time": "1"},
        )
        run.wait_for_starts((0, 0), (1, 0), (0, 1), (1, 1))
        slurm.cancel(run.jobs, run.config)
        run.wait_for_end()
