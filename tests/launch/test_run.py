"""The command `rl`, with small scripts in place of the three processes: what it starts, watches,
prints and leaves behind."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from rl.cluster.submit import dry_run
from rl.config.cluster import ClusterConfig
from rl.config.command_line import CommandLine, from_toml
from rl.config.run import RLConfig
from rl.diagnosis.waits import diagnose
from rl.launch.children import Children
from rl.launch.run import (
    Placement,
    RunLoop,
    launch,
    on_this_machine,
    resume_command,
    run,
)
from rl.run_dir.access_token import page_secret
from rl.run_dir.lease import LockOwner, lease_path
from rl.run_dir.metrics import read_metrics
from rl.run_dir.paths import RunDir
from rl.run_dir.spans import read_events
from rl.system import sandbox
from rl.system.errors import RunError
from rl.system.linux import bind
from rl.system.machine import Machine
from rl.wire.batch_file import write_batch
from rl.wire.messages import TrainBatch
from tests.flags import flags, made
from tests.view.serving import enter
from tests.waiting import alive, until

DRIVER = """
import sys, rl.launch.roles
prelude = '''
import json, os, signal, sys, time
from pathlib import Path
from rl.config.command_line import from_toml
from rl.run_dir.metrics import MetricsLog
from rl.run_dir.status import Phase, Status
from rl.system.linux import die_with_parent
die_with_parent()
name, root = sys.argv[1], Path(sys.argv[2])
print(os.getpid(), file=open(root / "pids", "a"), flush=True)
config = from_toml(root / "config.toml")
'''
scripts = {scripts!r}
rl.launch.roles.command = lambda name, run_dir, ranks: [sys.executable, "-c", prelude + scripts[name], name, str(run_dir.root)]
import rl.main, rl.launch.curves
rl.launch.curves.EVERY_S = 1.0
sys.exit(rl.main.main())
"""
SCRIPTS = {
    "model": "",
    "inference": """
status = Status(root / "status/inference.json", name)
status.enter(Phase.LOADING_MODEL)
time.sleep(0.3)
status.enter(Phase.SERVING, address="http://127.0.0.1:1")
time.sleep(60)
""",
    "orchestrator": """
while not config.orchestrator.inference_urls and not (root / "status/inference.json").exists():
    time.sleep(0.05)
time.sleep(0.5)
log, evals = MetricsLog(root / "metrics.jsonl", name), MetricsLog(root / "metrics.jsonl", "eval")
evals.write(0, {"eval/e/reward_mean": 0.1})
for step in range(1, config.max_steps + 1):
    (root / "rollouts").mkdir(exist_ok=True)
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rollout = {"env": "e", "group_id": 1, "rollout_id": 0, "messages": messages, "reward": 1.0, "advantage": 0.5, "trained": True}
    (root / f"rollouts/{step:06d}.jsonl").write_text(json.dumps(rollout) + "\\n")
    log.write(step, {"reward/mean": step / 10, "lag/mean": 0.5})
evals.write(config.max_steps, {"eval/e/reward_mean": 0.9})
""",
    "trainer": """
log = MetricsLog(root / "metrics.jsonl", name)
for step in range(1, config.max_steps + 1):
    time.sleep(0.05)
    log.write(step, {"loss/mean": -0.01, "entropy/mean": 1.0, "mismatch_kl/mean": 1e-5, "time/step": 2.0, "time/wait_for_batch": 0.5})
""",
}
FOREVER = "time.sleep(60)\n"
TRAINING = ("orchestrator", "trainer")
ELSEWHERE = "--orchestrator.inference_urls http://127.0.0.1:1"
ENVIRONMENTS = Path(__file__).parents[1] / "environments"


class Run:
    """Runs the command in its own directory."""

    def __init__(self, tmp):
        self.tmp = tmp
        self.root = tmp / "outputs" / "r"
        self.run_dir = RunDir(self.root, self.root / "weights")
        self.processes: list[subprocess.Popen] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def start(self, *args, **scripts):
        code = DRIVER.replace("{scripts!r}", repr(SCRIPTS | scripts))
        environment = "--orchestrator.environment.id say-digit --orchestrator.environment.name e"
        base = f"--name r --max_steps 3 --output_dir {self.tmp}/outputs"
        command_line = [sys.executable, "-c", code, *flags(environment, base, *args)]
        paths = f"{ENVIRONMENTS}:{os.environ.get('PYTHONPATH', ENVIRONMENTS)}"
        env = os.environ | {"PYTHONPATH": paths}
        process = subprocess.Popen(
            command_line,
            cwd=self.tmp,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def __call__(self, *args, **scripts):
        process = self.start(*args, **scripts)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def pids(self, count):
        path = self.root / "pids"
        until(lambda: path.exists() and len(path.read_text().split()) >= count, 120)
        return [int(word) for word in path.read_text().split()]

    def lose(self):
        """Another `rl`, on another host, takes the run over."""
        owner = LockOwner(1, "far", "elsewhere")
        lease_path(self.run_dir.lock("rl"), 2).write_bytes(msgspec.json.encode(owner))

    def nobody_left(self):
        """Returns whether none of its processes runs; ended ones may be zombies until init has
        reaped them."""
        return not any(alive(pid) for pid in self.pids(1))


@pytest.fixture
def rl(tmp_path, classic_home):
    with Run(tmp_path) as run:
        yield run


def test_a_shorter_length_that_the_model_has_is_said(rl):
    shorten = """
config.model.max_model_len = 1024
from rl.config.command_line import write_config
write_config(root / "config.toml", config)
"""
    code, out, _ = rl(model=shorten)
    assert code == 0 and out.count("max_model_len = 1024: the longest sequence of this model") == 1


@pytest.mark.parametrize(("kind", "head"), [("early", ""), ("doubtful", "warning: ")])
def test_why_a_run_ended_before_its_last_step_is_said(rl, kind, head):
    end = (
        "from rl.run_dir.status import RunEnd\nimport msgspec\nend = "
        f"msgspec.json.encode(RunEnd('solved', 1.0, {kind!r}))\n"
    )
    writes_it = f"{end}time.sleep(0.5)\n(root / 'status/orchestrator.end').write_bytes(end)\n"
    code, out, err = rl("--max_steps 5", orchestrator=writes_it, trainer="")
    said = f"{head}the run ended at step 0 of 5: solved"
    assert (code, err) == (0, "") and sum(line.startswith(said) for line in out.splitlines()) == 1
    (event,) = (event for event in read_events(rl.run_dir.events) if event.event == "end")
    assert (event.process, event.reason) == ("rl", "the run ended at step 0 of 5: solved")


def test_who_has_lost_the_run_to_another_rl_leaves_it_alone(rl):
    """Its host slept: the other one holds the next lease."""
    process = rl.start(ELSEWHERE, orchestrator=FOREVER, trainer=FOREVER)
    rl.pids(3)
    rl.lose()
    write = "from rl.run_dir.metrics import MetricsLog; import sys; from pathlib import Path\n"
    write += "MetricsLog(Path(sys.argv[1]), 'trainer').write(1, {'loss/mean': 1.0})"
    subprocess.run([sys.executable, "-c", write, str(rl.run_dir.metrics)], check=True)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 3
    assert err.startswith(
        f"rl: {rl.root}: another process (pid 1 on far) has taken over as rl of this run"
    )
    assert err.count("\n") == 1
    assert "resume with" not in out + err and not rl.run_dir.curves.exists() and rl.nobody_left()


@pytest.mark.parametrize("code", [1, 3])
def test_who_has_lost_the_run_judges_no_death(rl, code):
    """Regression: one that was stopped for long, and whose trainer ended because another `rl`
    had one, too, wrote that it gives up."""
    dies = (
        "while not (root / 'status/rl.000002.lease').exists():\n    "
        f"time.sleep(0.05)\nsys.exit({code})"
    )
    process = rl.start(ELSEWHERE, orchestrator=FOREVER, trainer=dies)
    until(
        lambda: [
            event
            for event in read_events(rl.run_dir.events)
            if (event.event, event.process) == ("start", "trainer")
        ],
        60,
    )
    rl.lose()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3 and "has taken over as rl of this run" in err
    assert not {event.event for event in read_events(rl.run_dir.events)} & {
        "death",
        "give_up",
        "stop",
    }


@pytest.mark.skipif(bool(sandbox.fault()), reason=sandbox.fault())
def test_without_shared_memory_it_says_so_before_anything_starts(tmp_path):
    """Regression: the trainer ended with "Read-only file system; free space" minutes later."""
    hidden = ["bwrap", "--dev-bind", "/", "/", "--tmpfs", "/dev/shm", "--remount-ro", "/dev/shm"]
    command = [*hidden, sys.executable, "-m", "rl.main", "--orchestrator.environment.id", "e"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.startswith("rl: /dev/shm cannot be written, and torch and vLLM keep locks")
    assert list(tmp_path.iterdir()) == []


def test_a_run_from_start_to_report(rl):
    # for that to be seen
    code, out, err = rl(
        inference=SCRIPTS["inference"].replace("time.sleep(0.3)", "time.sleep(1.5)")
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "  inference: loading the model" in lines and "  eval at version 0: e 0.100" in lines
    assert [line.split()[:2] for line in lines if line[:6].strip().isdigit()] == [
        ["1", "0.100"],
        ["2", "0.200"],
        ["3", "0.300"],
    ]
    assert "  assistant: 2" in lines
    assert "3 steps in 6 s; trainer waited for batches 25% of the time" in lines
    assert "eval      0.100 -> 0.900   (e, version 0 and version 3)" in lines
    assert rl.run_dir.curves.stat().st_size > 20_000
    assert {path.name for path in rl.run_dir.logs.iterdir()} == {
        f"{name}-1.log" for name in SCRIPTS
    }
    assert rl.nobody_left()
    config = from_toml(rl.run_dir.config)
    assert config.trainer.ranks is None and config.run_dir.root == rl.root


def test_a_run_that_trained_no_step_does_not_end_with_0(rl):
    skips = (
        "log = MetricsLog(root / 'metrics.jsonl', name)\nfor step in (1, 2, 3): log.write(step, "
        "{'quarantined': 1.0})\n"
    )
    code, _, err = rl(trainer=skips)
    assert code == 1
    assert err.startswith(
        "rl: no step was trained: every batch was quarantined (see batches/*.quarantined); "
        "fix the cause, then"
    )
    assert rl("--clean", trainer="(root / 'discarded').mkdir(exist_ok=True)\n" + skips)[2].endswith(
        " --resume 0\n"
    )
    assert rl("--clean", trainer=skips + "log.write(4, {'loss/mean': 1.0})")[0] == 0


def test_with_no_restarts_a_child_that_fails_ends_the_run(rl):
    """The server runs elsewhere."""
    dying = (
        "for i in range(30): print('line', i)\nprint('out of luck', "
        "file=sys.stderr)\ntime.sleep(0.5)\nsys.exit(7)\n"
    )
    code, _, err = rl("--supervisor.max_restarts 0", ELSEWHERE, orchestrator=FOREVER, trainer=dying)
    assert code == 1 and not list(rl.run_dir.logs.glob("inference*"))
    assert (
        "rl: trainer ended with exit code 7, saying: out of luck. The end of its log:\n  | "
        "line 11\n" in err
    )
    assert (
        f"  | line 29\n  | out of luck\n  the whole log: {rl.run_dir.logs}/trainer-1.log\n" in err
    )
    assert err.endswith(
        "\nnothing was made yet: a start with other settings reuses the directory\n"
    )
    assert rl.nobody_left()


@pytest.mark.parametrize("asked", [(), ("--trainer.checkpoint.interval", "1")])
def test_a_trial_ends_with_a_verdict(rl, asked):
    """Its weights stay; its checkpoints, of 2 GiB each for a small model, only where asked for."""
    save = (
        "(root / 'weights/000002').mkdir(parents=True)\n(root / "
        "'checkpoints/000002').mkdir(parents=True)\n"
    )
    code, out, err = rl("--quick", *asked, trainer=SCRIPTS["trainer"] + save)
    assert (code, err) == (0, "")
    root = rl.root.with_name("r-quick")
    assert (root / "weights/000002").is_dir()
    assert (root / "checkpoints").exists() == bool(asked)
    assert (
        out.splitlines()[-1]
        == "verdict   trained 2 steps; e: all rewards 1: something to learn in 1 of 1 groups; "
        f"see {root}/rollouts"
    )


@pytest.mark.parametrize("place", ["orchestrator", "inference", "serve"])
def test_a_port_in_use_is_told_before_anything_is_made_and_by_a_dry_run(
    monkeypatch, tmp_path, place
):
    """It was found after the model was loaded."""
    monkeypatch.setattr("rl.launch.run.bind", partial(bind, wait_s=0.0))
    with bind("127.0.0.1", 0, "x") as taken:
        taken.listen()
        port = taken.getsockname()[1]
        kind = {"serve": {"port": port}} if place == "serve" else {place: {"port": port}}
        config = RLConfig.model_validate({"output_dir": str(tmp_path / "o")} | kind)
        told = f"{place}.port = {port} on 127.0.0.1: Address already in use; choose another"
        for start in (dry_run, lambda config: launch(config, CommandLine(), Children(), "again")):
            with pytest.raises(
                RunError,
                match="belongs to|start it with `rl serve"
                if config.serve and start != dry_run
                else told,
            ):
                start(config)
        assert dry_run(config.model_copy(update={"cluster": ClusterConfig(engine="none")})), (
            "its machines are others"
        )
    assert not (tmp_path / "o").exists()


def test_an_environment_that_is_missing_is_told_before_anything_is_made(rl):
    for name, said in (
        ("nope", "nope is not installed: there is no ./nope.py"),
        (
            "owner/nope",
            "owner/nope: the Environments Hub does not answer (http://127.0.0.1:9/owner/nope",
        ),
    ):
        code, out, err = rl("--orchestrator.environment.id", name)
        assert (code, out) == (1, "") and err.startswith(f"rl: environment {said}")
    assert not rl.root.exists()


def test_a_stop_says_which_steps_a_resume_trains_again(rl):
    save = '(root / "checkpoints/000001").mkdir(parents=True)\n'
    stays = {name: SCRIPTS[name] + save * (name == "trainer") + FOREVER for name in TRAINING}
    process, path = rl.start(**stays), rl.run_dir.metrics

    def all_trained():
        text = path.read_text() if path.exists() else ""
        return text.count("loss/mean") == text.count('"reward/mean') == 3

    until(all_trained, 120)
    until((rl.root / "checkpoints" / "000001").exists)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert "no checkpoint after step 1: a resume trains 2 to 3 again\nresume with: rl " in err


@pytest.mark.parametrize(
    ("phase", "signum", "expected"),
    [
        ("model", signal.SIGINT, 130),
        ("start-up", signal.SIGTERM, 143),
        ("running", signal.SIGINT, 130),
    ],
)
def test_a_signal_stops_everything_and_says_how_to_resume(rl, phase, signum, expected):
    scripts = {"orchestrator": FOREVER, "trainer": FOREVER}
    if phase == "model":
        scripts["model"] = FOREVER
    if phase == "start-up":
        scripts["inference"] = FOREVER
    process = rl.start(**scripts)
    rl.pids(1 if phase == "model" else 4)
    process.send_signal(signum)
    _, err = process.communicate(timeout=120)
    assert process.returncode == expected
    assert f"{signum.name}: stopping" in err and "resume with: rl " in err
    assert rl.nobody_left() and not list(rl.root.glob("status/*.json"))
    assert (
        '"event":"stop","process":"rl"' in (said := rl.run_dir.events.read_text().splitlines()[-1])
        and signum.name in said
    )
    found = diagnose(rl.run_dir, from_toml(rl.run_dir.config))
    assert (found.state, f"the run was stopped by {signum.name} " in found.bottleneck) == (
        "stopped",
        True,
    )


def test_a_second_rl_on_the_same_run_is_refused(rl):
    first = rl.start(orchestrator=FOREVER, trainer=FOREVER)
    rl.pids(4)
    code, _, err = rl("--clean")
    assert code == 1 and f"rl of this run is already running (pid {first.pid} on " in err
    assert first.poll() is None


def test_clean_keeps_the_run_until_the_next_one_has_made_something(rl):
    """A misspelt name must not destroy a run."""
    trains = SCRIPTS["trainer"] + "(root / 'checkpoints/000003').mkdir(parents=True)\n"
    (rl.root / "checkpoints/000003").mkdir(parents=True)
    (rl.root / "config.toml").touch()
    code, _, err = rl("--clean", model="sys.exit('no such model')")
    assert code == 1 and (rl.run_dir.cleaned / "checkpoints/000003").is_dir()
    assert err.endswith(
        f"the run that was there before --clean is in {rl.run_dir.cleaned}: move it "
        "elsewhere to continue it\n"
    )
    assert rl("--clean", trainer=trains)[0] == 0
    assert (rl.root / "checkpoints/000003").is_dir() and not rl.run_dir.cleaned.exists()


def test_resume_continues_without_printing_old_steps(rl):
    assert rl()[0] == 0
    for step in (1, 2, 3):  # a step without its batch was undone, and its line is removed
        write_batch(
            rl.root / "batches" / f"{step:06d}.batch", TrainBatch(step=step, samples=[]), None
        )
    code, _, err = rl()
    assert (code, err) == (
        1,
        f"rl: {rl.root} exists: continue that run with --resume, delete it with --clean, or "
        "choose another --name\n",
    )
    last = (
        "log = MetricsLog(root / 'metrics.jsonl', name)\nfor step in (3, 4): log.write(step, "
        "{'loss/mean': 5.0, 'reward/mean': 0.5})\n"
    )
    code, out, err = rl("--max_steps 4 --resume", orchestrator=last, trainer=last)
    assert (code, err) == (0, "")
    assert (
        f"resuming {rl.root}: checkpoint none, newest batch 3\nchanged: max_steps: 3 -> 4\n" in out
    )
    assert [line.split()[0] for line in out.splitlines() if line[:6].strip().isdigit()] == ["4"]
    assert (rl.run_dir.logs / "trainer-2.log").exists()


def test_a_system_error_in_the_loop_ends_the_run_with_its_report_and_how_to_go_on(
    tmp_path, monkeypatch, capsys
):
    """Regression: neither was printed where the system refused anything but a start."""

    class Broken(SimpleNamespace):
        def until_finished(self, _):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/disk/status/trainer.json")

    closed = []
    console = SimpleNamespace(close=lambda: None, shown=0)
    watch = Broken(console=console, close=closed.append, cleaned=None)
    monkeypatch.setattr("rl.launch.run.RunLoop", lambda *_: watch)
    run_dir = RunDir(tmp_path, tmp_path / "weights")
    run_dir.batch(1).parent.mkdir()
    run_dir.batch(1).touch()
    config = SimpleNamespace(kind="rl", sft=None, is_remote=False)
    children = SimpleNamespace(stop=lambda _: [])
    assert (
        run(
            config,
            SimpleNamespace(run_dir=run_dir),
            Placement(lambda _: []),
            children,
            "rl @ x.toml --resume",
        )
        == 1
    )
    assert closed == [1]
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(
        "rl: /disk/status/trainer.json: Read-only file system; free space or make it writable"
    )
    assert said[1] == "resume with: rl @ x.toml --resume"


@pytest.mark.parametrize(
    ("num_gpus", "devices"),
    [(4, ([0], [1, 2, 3], 3)), (8, ([0], [*range(1, 8)], 7)), (2, ([0], [1], None))],
)
def test_each_start_divides_the_machine_that_it_is_on(tmp_path, monkeypatch, num_gpus, devices):
    """config.toml has what the user asked for, so that a resume on more GPUs takes them."""
    gpus = [str(number) for number in range(num_gpus)]
    monkeypatch.setattr("rl.launch.run.machine", lambda: Machine(gpus, [0]))
    config = made(f"--name r --output_dir {tmp_path} --orchestrator.environment.id say-digit")
    placement = on_this_machine(config)
    trainer, inference, engines = devices
    replicas = [] if engines is None else ["--inference.vllm.data_parallel_size", str(engines)]
    said = ["--trainer.gpus", str(trainer), "--inference.gpus", str(inference), *replicas]
    roles = {role.name: role.command for role in placement.roles(config.run_dir)}
    assert placement.notes == [] and roles["orchestrator"][-1] == str(config.run_dir.config)
    assert all(roles[name][-len(said) :] == said for name in ("trainer", "inference"))


def test_gpus_that_nobody_uses_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.launch.run.machine", lambda: Machine(["0", "1", "2", "3"], [0]))
    two = "--trainer.gpus 1 --inference.gpus 1 --orchestrator.environment.id say-digit"
    assert on_this_machine(made(f"--output_dir {tmp_path}", two)).notes == [
        "GPUs 1, 2 of this machine are not used by this run: trainer.gpus = [0], "
        "inference.gpus = [3]"
    ]


class Loop(RunLoop):
    """The loop of `rl` alone, whose supervisor meets these errors, one at each poll; None is a
    good poll. Then all processes end."""

    def __init__(self, root, *errors):
        self.run_dir, self.said, self.polls = (
            RunDir(root, root / "weights"),
            list[str](),
            iter(errors),
        )
        self.console = SimpleNamespace(update=lambda _: None)
        self.say, self.not_merged = self.said.append, False
        self.supervisor = SimpleNamespace(
            begin=lambda _: None, poll=self.meet, keeper=SimpleNamespace(finished=False)
        )
        self.merger = SimpleNamespace(merge=lambda: None)
        self.check_fence = lambda: None
        self.unshown, self.cleaned, self.beside, self.curves_at = [], None, [], math.inf
        self.trackers = self.meter = SimpleNamespace(send=lambda _: None, note=lambda _: None)
        self.shown = list[object]()

    def meet(self, lines):
        self.shown += lines
        number = next(self.polls, 0)
        self.supervisor.keeper.finished = number == 0
        if number:
            raise OSError(number, os.strerror(number), "/disk/x")


def test_a_disk_that_does_not_answer_for_a_moment_does_not_end_a_run(tmp_path, monkeypatch):
    """Regression: one error of a shared disk under the leader ended the run on all machines, for
    good."""
    monkeypatch.setattr("rl.launch.run.POLL_S", 0.0)
    loop = Loop(tmp_path, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, None, errno.EIO)
    lines = iter([["a"], ["b"]])
    loop.reader = SimpleNamespace(new=lambda: next(lines, []))
    fences = iter([OSError(errno.EIO, "Input/output error", "/disk/rl.000001.lease")])

    def check_fence():
        if error := next(fences, None):
            raise error

    loop.check_fence = check_fence
    loop.until_finished([])
    failed = "Input/output error; this is tried again for 30 s"
    assert loop.said == [
        f"warning: /disk/rl.000001.lease: {failed}",
        f"warning: /disk/x: {failed}",
    ], "once until a good poll"
    assert loop.shown == ["a", "b"], "no line is lost"


@pytest.mark.parametrize(
    ("error", "patience_s"), [(errno.EIO, 0.0), (errno.EROFS, 30.0), (errno.EPIPE, 30.0)]
)
def test_an_error_that_stays_ends_the_run(tmp_path, monkeypatch, error, patience_s):
    monkeypatch.setattr("rl.launch.run.POLL_S", 0.0)
    monkeypatch.setattr("rl.launch.run.LEASE_S", patience_s)
    loop = Loop(tmp_path, error, error)
    loop.reader = SimpleNamespace(new=lambda: [])
    with pytest.raises(OSError, match=os.strerror(error)):
        loop.until_finished([])
    assert len(loop.said) == (error == errno.EIO)


def test_a_reader_that_has_gone_stops_the_run(rl):
    """As `head` does. Regression: the run directory was said to be a broken pipe."""
    waits = "while not (root / 'gone').exists(): time.sleep(0.05)\n"
    process = rl.start(
        orchestrator=waits + SCRIPTS["orchestrator"] + FOREVER,
        trainer=waits + SCRIPTS["trainer"] + FOREVER,
    )
    rl.pids(4)
    assert process.stdout and process.stderr
    process.stdout.close()
    (rl.root / "gone").touch()
    err = process.stderr.read()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert "Broken pipe" not in err
    assert "resume with: rl" in err
    assert rl.nobody_left()


def test_a_page_beside_the_run_says_its_address_and_ends_with_the_run(rl):
    """The orchestrator waits for a file that the test writes after it has seen the page."""
    waits = "while not (root / 'seen').exists(): time.sleep(0.05)\n"
    process = rl.start(
        "--view", orchestrator=waits + SCRIPTS["orchestrator"], trainer=waits + SCRIPTS["trainer"]
    )
    lines = (line.split()[1] for line in process.stdout if line.startswith("view "))
    link = next(lines)
    with httpx.Client() as browser:
        enter(browser, link)
        (row,) = browser.get("/api/runs").json()["runs"]
    log = (rl.root / "logs/view-1.log").read_text()
    assert (row["key"], row["state"]) == ("r", "live")
    assert link.partition("link=")[2] not in log
    assert "link=" not in log
    (rl.root / "seen").touch()
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "") and "3 steps in" in out
    assert not (rl.root / "logs/view-1.log").exists() and rl.nobody_left()
    kept = rl.root / "status/view.secret"
    # an open tab keeps working after a resume
    assert kept.read_text() == page_secret(rl.run_dir.status_dir)
    assert kept.read_text() not in out and kept.stat().st_mode & 0o777 == 0o600
    with pytest.raises(httpx.ConnectError):
        httpx.get(link)


def test_resume_command():
    assert (
        resume_command(["@", "run.toml", "--clean", "--x", "a b"])
        == "rl @ run.toml --x 'a b' --resume"
    )
    assert resume_command(["@run.toml", "--resume", "40"]) == "rl @run.toml --resume"


def test_wandb_offline_gets_every_step_once(rl, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("JUDGE_API_KEY", "assistant: 2")
    code, _, err = rl("--wandb.tags", '["sums"]', "--wandb.group sweep")
    assert code == 0, err

    def check_sent():
        *_, totals = read_metrics(rl.run_dir.metrics, "rl").values()
        steps = dict.fromkeys(("eval/e", "orchestrator", "trainer", "rollouts"), 3)
        state = json.loads((rl.root / "wandb.json").read_text())
        assert state["sent"] == steps | {"rl": totals["time"]}
        return state["id"]

    name = check_sent()
    (table,) = (rl.root / "wandb").glob("offline-run-*/files/media/table/rollouts_*.table.json")
    row = [None, "e", None, 1, 0, 1.0, 0.5, None, None, "trained", "user: 1+1?\n[$JUDGE_API_KEY]"]
    assert json.loads(table.read_bytes())["data"] == [row]
    code, _, err = rl("--wandb --resume", orchestrator="", trainer="")
    assert code == 0, err
    assert check_sent() == name
