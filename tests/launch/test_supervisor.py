"""The restart policy, with small scripts in place of the processes: restarts, waits, messages
and leftovers."""

import contextlib
import errno
import json
import os
import signal
import sys
import time
import types

import pytest

from rl.commands import serve
from rl.config.run import RLConfig
from rl.launch.children import Children, user_name
from rl.launch.keeper import SLOW_POLL_S
from rl.launch.roles import Role
from rl.launch.supervisor import Supervisor
from rl.run_dir.metrics import MetricsReader
from rl.run_dir.status import HEARTBEAT_S, Phase, RoleStatus, read_status, write_status
from rl.system.errors import DAMAGED, GIVE_UP, KILLED, RESTART, RunError
from rl.system.linux import pid_scope
from rl.system.process_table import entry, markers
from tests import jsonl
from tests.run_dir.test_logs import REPORT
from tests.waiting import until

PRELUDE = """
import json, os, signal, subprocess, sys, time
name, root = sys.argv[1], sys.argv[2]
attempt = sum(1 for path in os.listdir(root + "/logs") if path.startswith(name + "-"))
def status(phase, step=None, file=name, **more):
    with open(f"{root}/status/.{file}", "w") as out:
        json.dump({"process": name, "pid": os.getpid(), "phase": phase, "step": step, "heartbeat": time.time(), **more}, out)
    os.rename(f"{root}/status/.{file}", f"{root}/status/{file}.json")
def note(pid):
    print(pid, file=open(root + "/pids", "a"), flush=True)
def beat(phase, step=None, seconds=60, **more):
    until = time.monotonic() + seconds
    while time.monotonic() < until and not os.path.exists(root + "/enough"):
        status(phase, step, **more)
        time.sleep(0.05)
def come_up(phase, step=None, **more):
    until_event(f'"event":"ready","process":"{name}","attempt":{attempt},', phase, step, **more)
def until_event(event, phase, step=None, **more):
    while event not in open(root + "/events.jsonl").read():
        status(phase, step, **more)
        time.sleep(0.05)
"""
LEAVE = """
from rl.system.prefork import leave
leave(lambda: print("imported", flush=True))
"""
WORK = {
    "inference": "beat('serving', address='http://x', prefill_tokens=2048)",
    "orchestrator": "beat('filling_batch', 1)",
    "trainer": "beat('training', 1, progress=1)",
}


class Run:
    """A supervisor of scripts, in its own run directory."""

    def __init__(self, tmp_path, **settings):
        config = {"max_restarts": 5, "backoff_s": 0.05, "silence_s": 60.0} | settings
        self.config = RLConfig(
            name="r",
            output_dir=str(tmp_path),
            supervisor=config,
            orchestrator={"environment": [{"id": "e"}]},
        )
        self.run_dir, self.said = self.config.run_dir, list[str]()
        self.root = self.run_dir.root
        for name in ("logs", "status", "batches"):
            (self.root / name).mkdir(parents=True)
        self.children = Children()
        self.reader = MetricsReader(self.run_dir.metrics)
        self.supervisor = Supervisor(self.config, self.run_dir, self.children, self.said.append)
        self.keeper = self.supervisor.keeper

    def begin(self, after_server=False, **scripts):
        commands = {
            name: [sys.executable, "-S", "-c", PRELUDE + code, name, str(self.root)]
            for name, code in (WORK | scripts).items()
        }
        roles = [
            Role(name, command, dict(os.environ), after_server=after_server and name == "trainer")
            for name, command in commands.items()
        ]
        self.supervisor.begin(roles)

    def begin_one(self, name, code, before="", **role):
        """Begins a single process; `before` runs ahead of the prelude, with packages."""
        options = ["-c"] if before else ["-S", "-c"]
        command = [sys.executable, *options, before + PRELUDE + code, name, str(self.root)]
        self.supervisor.begin([Role(name, command, dict(os.environ), **role)])

    def until(self, condition, timeout_s=30.0):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (self.said, self.events())
            self.supervisor.poll(self.reader.new())
            time.sleep(0.01)

    def finish(self):
        self.until(lambda: self.keeper.finished)

    def events(self, kind="", process=""):
        events = jsonl.read(self.run_dir.events)
        return [
            event
            for event in events
            if kind in ("", event["event"]) and process in ("", event["process"])
        ]

    def ready(self, name, times=1):
        self.until(lambda: len(self.events("ready", name)) >= times)

    def silent(self, name, after_s=0.6):
        """The event of a process that gives no sign of life; until then, for as long as it does,
        none counts as silent."""
        self.keeper.settings.silence_s = after_s
        self.until(lambda: self.events("silent", name))
        self.keeper.settings.silence_s = 60.0
        return self.events("silent", name)

    def child(self, name):
        attempt = self.keeper.states[name].attempt
        return attempt and attempt.child

    def pids(self, count):
        path = self.root / "pids"
        self.until(lambda: path.exists() and len(path.read_text().split()) >= count)
        return [int(word) for word in path.read_text().split()]

    def enough(self):
        (self.root / "enough").touch()


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.launch.keeper.SLOW_POLL_S", 0.05)
    runs = []

    def make_run(**settings):
        runs.append(Run(tmp_path, **settings))
        return runs[-1]

    yield make_run
    for run in runs:
        run.children.stop(1.0)


def gone(pid):
    line = entry(pid)
    return line is None or line.state == "Z"


def test_who_came_up_starts_warm_next_time_and_who_did_not_or_gets_nowhere_from_nothing(make):
    run = make()
    attempts = [
        ("training", 1, 1),
        ("training", 2, 0),
        ("training", 2, 0),
        ("loading_model", None, 0),
    ]
    run.begin_one(
        "trainer",
        f"""
attempts = {attempts}
if attempt <= len(attempts):
    phase, step, progress = attempts[attempt - 1]
    beat(phase, step, 0.3, progress=progress)
    os.kill(os.getpid(), signal.SIGKILL)
""",
        LEAVE,
        leaves_copy=True,
    )
    run.finish()
    logs = [(run.root / "logs" / f"trainer-{attempt}.log").read_text() for attempt in range(1, 6)]
    assert logs == ["imported\n", "", "", "imported\n", "imported\n"]
    assert len(run.events("death")) == 4 and len(run.events("restart")) == 4


def test_a_dead_process_is_started_again_and_the_others_wait_for_it(make):
    run = make(backoff_s=0.2)
    run.begin(
        trainer="if attempt < 4: come_up('waiting_for_batch', 1); print('out of luck'); "
        "sys.exit(7)\nbeat('training', 1)"
    )
    run.ready("inference")
    others = [run.child(name).pid for name in ("inference", "orchestrator")]
    run.ready("trainer", 4)
    deaths = run.events("death", "trainer")
    assert [(d["attempt"], d["exit"], d["reason"], d["said"]) for d in deaths] == [
        (attempt, 7, "ended with exit code 7", "out of luck") for attempt in (1, 2, 3)
    ]
    assert [
        line.partition("again in ")[2].partition(" s")[0] for line in run.said if "again in" in line
    ] == ["0.2", "0.4", "0.8"]
    assert run.said[0] == (
        "  trainer ended with exit code 7, waiting for batch 1; it starts again in 0.2 s "
        f"(log: {run.run_dir.logs}/trainer-1.log)"
    )
    assert run.said[-1].startswith("  trainer is back after ")
    assert run.said[-1].endswith(" s (training step 1)")
    assert [run.child(name).pid for name in ("inference", "orchestrator")] == others
    run.enough()
    run.finish()
    assert not run.events("give_up") and not run.events("death", "orchestrator")


def test_a_process_says_what_its_user_is_to_know_once_in_each_attempt(make):
    run = make()
    one, two = (
        {"about": about, "env": env, "text": f"environment {env}: no"}
        for about, env in (("failed", "e"), ("lost", "f"))
    )
    again = f"beat('filling_batch', 1, warnings={[one, two]})"
    come = (
        f"if attempt > 1: {again}\nbeat('filling_batch', 1, seconds=0.3, warnings={[one]}); exit(1)"
    )
    run.begin(orchestrator=come)
    run.until(lambda: len(run.events("warning", "orchestrator")) == 3)
    texts = ["environment e: no"] * 2 + ["environment f: no"]
    assert [(event["env"], event["reason"]) for event in run.events("warning")] == [
        (text[12], text) for text in texts
    ]
    assert [event["about"] for event in run.events("warning")] == ["failed", "failed", "lost"]
    assert [text for text in run.said if "environment" in text] == [
        f"warning: {text}" for text in texts
    ]


def test_who_made_progress_starts_again_at_once(make):
    run = make(backoff_s=0.05)
    run.begin(
        orchestrator="status('filling_batch', 1, progress=int(attempt != "
        "2))\ntime.sleep(0.1)\nif attempt "
        "< 5: sys.exit(1)"
    )
    run.until(lambda: len(run.events("death", "orchestrator")) == 4)
    starts = [
        line.partition("starts again ")[2].partition(" (")[0]
        for line in run.said
        if "starts again" in line
    ]
    assert starts == ["now", "in 0.05 s", "now", "now"]


def test_a_server_that_ends_well_is_dead_all_the_same_and_one_that_was_ready_may_be_late(make):
    run = make()
    keeper = run.keeper
    code = "if attempt == 1: sys.exit(come_up('serving', address='http://x'))\n"
    run.begin(
        inference=f"{code}status('loading_model')\nif attempt == 2: "
        "time.sleep(60)\nbeat('serving', "
        "address='http://x')"
    )
    run.until(
        lambda: (
            (attempt := keeper.states["inference"].attempt)
            and attempt.child.attempt == 2
            and attempt.statuses
        )
    )
    keeper.startup_timeout_s = 0.5
    run.until(lambda: len(run.events("death")) == 2)
    keeper.startup_timeout_s = 60.0
    run.ready("inference", 2)
    reasons = [death["reason"] for death in run.events("death")]
    assert reasons == [
        "ended with exit code 0",
        "is not ready after inference.startup_timeout_s = 0.5 s; it was doing: loading the model",
    ]


def test_a_server_that_never_comes_up_ends_the_run(make):
    run = make()
    run.keeper.startup_timeout_s = 1.0
    run.begin(inference="beat('loading_model')")
    with pytest.raises(
        RunError, match=r"inference\.startup_timeout_s = 1 s; it was doing: loading"
    ):
        run.finish()
    assert run.events("give_up", "inference") and not run.events("death")


def test_too_many_deaths_end_the_run_with_a_summary(make):
    run = make(max_restarts=2, backoff_s=0.01)
    run.begin(
        inference="if attempt == 1: sys.exit(5)\n" + WORK["inference"],
        trainer="if attempt == 1: come_up('training', 1)\nstatus('loading_model'); print('no "
        "luck'); "
        "os.kill(os.getpid(), 11)",
    )
    with pytest.raises(RunError) as error:
        run.finish()
    lines = str(error.value).splitlines()
    assert (
        lines[0] == "trainer died once more: 2 restarts within 1800 s are the limit "
        "(supervisor.max_restarts, window_s)."
    )
    assert lines[1] == "  inference died once:" and lines[3] == "  trainer died 3 times:"
    assert [line.split(" ", 5)[5] for line in lines[4:7]] == [
        f"attempt {i}, loading the model: was ended by SIGSEGV" for i in (1, 2, 3)
    ]
    assert lines[7:] == [
        "trainer was ended by SIGSEGV. The end of its log:",
        "  | no luck",
        f"  the whole log: {run.run_dir.logs}/trainer-3.log",
    ]
    assert [event["process"] for event in run.events("give_up")] == ["trainer"]


ENGINE = """
status('loading_model')
print('(EngineCore pid=7) Traceback (most recent call last):\\n(EngineCore pid=7)   raise ValueError(')
print('(EngineCore pid=7) ValueError: no such activation: swish')
print('Traceback\\n' * 30)
print('RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}')
sys.exit(1)
"""


def test_what_never_came_up_is_tried_twice_and_its_own_error_is_told(make):
    """It stands above the end of the log, and the last line is skipped, where vLLM's server only refers to its engine's error. A SIGKILL
    comes from outside and does not count."""
    run = make(backoff_s=0.01)
    run.begin(inference="if attempt == 1: os.kill(os.getpid(), 9)\n" + ENGINE)
    with pytest.raises(RunError) as error:
        run.finish()
    never = (
        "never came up: attempt 3 ended with exit code 1, too, saying: ValueError: no such "
        "activation: swish"
    )
    assert str(error.value).startswith(f"inference {never}. The end of its log:\n")
    assert run.events("give_up")[0]["reason"] == never
    assert run.events("death")[1]["said"] == "ValueError: no such activation: swish"
    assert (
        "ended with exit code 1, loading the model, saying: ValueError: no such activation: "
        "swish; it starts again in " in run.said[1]
    )
    assert len(run.events("death")) == 3


@pytest.mark.parametrize(
    "ending",
    [
        f"sys.exit({KILLED})",  # of the launcher of worlds
        # of torchrun's agent
        f"open(root + '/status/trainer.exit', 'w').write('{RESTART}'); print({REPORT!r}); "
        "sys.exit(1)",
    ],
)
def test_what_was_ended_from_outside_before_it_came_up_is_tried_again(make, ending):
    """Regression: two machines that were lost, or ranks that were killed, before the first step
    ended the run."""
    run = make(backoff_s=0.01)
    run.begin(trainer=f"status('loading_model')\nif attempt < 4: {ending}\n" + WORK["trainer"])
    run.ready("trainer")
    assert [death["exit"] for death in run.events("death")] == [KILLED] * 3
    assert not run.events("give_up")


DEATH = """
beat('serving', seconds=0.2, address='http://x', progress=int(attempt == 1 and os.path.exists(root + '/worked')))
print('(EngineCore pid=7) ERROR 11-23 15:56:07 [core.py:1512] RuntimeError: no kernel for head_dim=16')
print('(MainProcess pid=6) ERROR 11-23 15:56:07 [a.py:9] EngineDeadError: EngineCore encountered an issue. See stack trace (above).')
print('inference: the engine process died; its last lines are above')
print('(MainProcess pid=6) INFO 11-23 15:56:07 [core_client.py:777] [shutdown] MPClient: complete')
sys.exit(1)
"""


def test_a_server_that_dies_twice_of_its_first_request_ends_the_run(make):
    """It came up, so its start is not at fault; but the same error would end every attempt, and
    20 restarts take 15 minutes."""
    run = make(backoff_s=0.01)
    run.begin(inference=DEATH)
    with pytest.raises(RunError) as error:
        run.finish()
    why = (
        "has not sampled one token: attempt 2 ended with exit code 1, too, saying: RuntimeError: "
        "no kernel for head_dim=16"
    )
    assert str(error.value).startswith(f"inference {why}. The end of its log:\n")
    assert "[shutdown]" not in str(error.value)
    assert ", saying: RuntimeError: no kernel for head_dim=16; it starts again " in run.said[0]


def test_a_server_that_has_sampled_and_dies_is_started_again(make):
    run = make(backoff_s=0.01, max_restarts=3)
    (run.root / "worked").touch()
    run.begin(inference=DEATH)
    run.until(lambda: len(run.events("death", "inference")) == 3)
    assert not run.events("give_up")


@pytest.mark.parametrize(
    ("role", "ending", "code"),
    [
        ("orchestrator", "sys.exit(2)", 2),
        ("orchestrator", f"sys.exit({GIVE_UP})", GIVE_UP),
        (
            "trainer",
            f"open(root + '/status/trainer.exit', 'w').write('{GIVE_UP}'); sys.exit(1)",
            1,
        ),  # torchrun's code; the rank told another
    ],
)
def test_a_diagnosis_that_a_restart_does_not_change_ends_the_run(make, role, ending, code):
    run = make()
    run.begin(**{role: f"print('model.name: not there'); {ending}"})
    with pytest.raises(
        RunError,
        match=rf"{role} ended with exit code {code}. The end of its log:\n  \| model.name: not "
        r"there\n",
    ):
        run.finish()
    assert not run.events("death")


LEAVES = """
def leave(code, env=None, session=True):
    if os.fork() == 0:  # its parent ends, so that the supervisor adopts it
        note(subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=session, env=env).pid)
        os._exit(0)
    os.wait()
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
"""


def test_nothing_stays_of_a_dead_process_and_everything_of_the_others(make):
    """Leftovers are orphans in their own session, stopped ones, and one that lost its
    environment but not its session."""
    run = make(backoff_s=0.3)
    leaves = (
        LEAVES + "leave(deaf)\nleave(deaf, env={}, session=False)\nleave('import os; "
        "os.kill(os.getpid(), 19)')\n"
    )
    run.begin(
        orchestrator=LEAVES + "leave(deaf)\nbeat('filling_batch')",
        inference=leaves + WORK["inference"],
    )
    pids = run.pids(4)
    run.ready("inference")
    run.ready("orchestrator")
    (theirs,) = [
        pid for pid in pids if any(word.endswith(":orchestrator:1") for word in markers(pid))
    ]
    first = run.child("inference").pid
    os.kill(first, signal.SIGKILL)
    run.until(lambda: run.events("death"))
    assert gone(first) and all(gone(pid) for pid in pids if pid != theirs) and not gone(theirs)
    assert not run.run_dir.status("inference").exists()
    run.ready("inference", 2)
    assert run.child("inference").attempt == 2
    run.children.stop(0.2)
    assert all(gone(pid) for pid in run.pids(7))


def test_a_trainer_that_shares_a_gpu_starts_when_the_server_is_up(make):
    """vLLM measures the GPU's memory at its start, and fails if it changes meanwhile."""
    run = make()
    run.begin(after_server=True, inference="beat('loading_model', None, 0.3)\n" + WORK["inference"])
    assert run.child("orchestrator") and run.child("trainer") is None
    run.until(lambda: run.child("trainer"))
    assert [event["prefill_tokens"] for event in run.events("ready", "inference")] == [2048]
    run.ready("trainer")
    os.kill(run.child("trainer").pid, signal.SIGKILL)
    run.ready("trainer", 2)
    for name in ("inference", "trainer"):
        os.kill(run.child(name).pid, signal.SIGKILL)
    run.ready("trainer", 3)
    order = [event["process"] for event in run.events("ready") if event["attempt"] > 1]
    assert order == ["trainer", "inference", "trainer"]


def test_temporary_files_go_with_their_process_and_all_with_the_run(make):
    run = make(backoff_s=0.3)
    code = (
        "names = map(os.environ.get, ('TMPDIR', 'VLLM_RPC_BASE_PATH', 'TORCHINDUCTOR_CACHE_DIR'))\n"
    )
    code += "print(*names, file=open(root + '/tmp', 'a'), flush=True)\n"
    code += "open(os.environ['TMPDIR'] + '/socket', 'w')\n"
    run.begin(
        inference=code
        + "if attempt == 1: sys.exit(beat('starting', None, 0.3))\n"
        + WORK["inference"]
    )
    run.ready("inference", 1)
    lines = [line.split() for line in (run.root / "tmp").read_text().splitlines()]
    assert all(directory == base and len(directory) < 60 for directory, base, _ in lines)
    (first, _, compiled), (second, _, compiled_again) = lines
    # outlives both
    assert compiled == compiled_again and not compiled.startswith(str(run.children.directory))
    assert not os.path.exists(first) and os.path.exists(second + "/socket")
    # where torch puts its headers
    assert os.path.realpath(f"{second}/torchinductor_{user_name()}") == os.path.realpath(compiled)
    guard = run.children.guard.process
    run.enough()
    run.until(lambda: run.child("inference") is None)
    run.children.stop(5.0)
    assert not os.path.exists(os.path.dirname(second)) and guard.returncode == -9


def test_a_log_is_cut_on_the_host_of_its_writer_alone(make, monkeypatch):
    """Regression: on a cluster each machine that serves cut the logs of all, in the same moment
    as others."""
    for name, size in (("MAX_LOG_BYTES", 6_000), ("FIRST_BYTES", 800), ("NEWEST_BYTES", 2_400)):
        monkeypatch.setattr(f"rl.run_dir.logs.{name}", size)
    run = make()
    own, worker, far = (
        run.run_dir.logs / f"{name}.log"
        for name in ("inference-1", "worker-e-0", "inference-node3-1")
    )
    for log in (worker, far):
        log.write_bytes(b"x" * 10_000)
    run.begin(inference="print('x' * 10_000)\n" + WORK["inference"])
    run.until(
        lambda: all(
            log.exists() and b"bytes were cut out here" in log.read_bytes() for log in (own, worker)
        )
    )
    assert far.stat().st_size == 10_000


@pytest.mark.parametrize("victim", ["leader", "below"])
def test_a_stopped_process_is_noticed_like_a_dead_one(make, victim):
    run = make()
    below = (
        "note(subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], "
        "start_new_session=True).pid)\n"
    )
    run.begin(inference=below + WORK["inference"])
    (grandchild,) = run.pids(1)
    run.ready("inference")
    leader = run.child("inference").pid
    os.kill(leader if victim == "leader" else grandchild, signal.SIGSTOP)
    (silent,) = run.silent("inference")
    run.ready("inference", 2)
    assert gone(leader) and gone(grandchild)
    assert "supervisor.silence_s = 0.6" in silent["reason"]
    assert run.events("death", "inference")[0]["reason"] == silent["reason"]


RANK = """
if attempt == 1 and os.fork() == 0:
    note(os.getpid())
    while True:
        status("training", file="trainer-1", host="b", place=PLACE)
        time.sleep(0.05)
"""


def test_a_rank_that_stands_still_is_named_with_its_machine_within_a_minute(make):
    run = make()
    run.begin(trainer=RANK.replace("PLACE", repr(pid_scope())) + WORK["trainer"])
    (rank,) = run.pids(1)
    run.until(lambda: len(run.keeper.states["trainer"].attempt.statuses) == 2)
    os.kill(rank, signal.SIGSTOP)
    assert "trainer rank 1 on b" in run.silent("trainer")[0]["reason"] and gone(rank)
    run.ready("trainer", 2)
    assert not list(run.root.glob("status/trainer-*.json"))
    assert RLConfig().supervisor.silence_s + SLOW_POLL_S + HEARTBEAT_S < 60


def test_a_first_rank_that_has_left_is_not_silent_while_the_launcher_of_worlds_is_there(make):
    """Regression: a planned departure of its machine was a death of all, silence_s later.
    Without any status the last one is judged."""
    run = make()
    run.begin_one("trainer", "time.sleep(60)")
    keeper, rank = run.keeper, run.run_dir.status("trainer")
    launcher = run.run_dir.status("trainer-launcher")
    for beat, path in enumerate([rank, launcher]):
        write_status(
            path, RoleStatus(process=path.stem, phase=Phase.TRAINING, step=1, heartbeat=float(beat))
        )
    run.until(lambda: len(keeper.states["trainer"].attempt.statuses) == 2)
    rank.unlink()
    write_status(launcher, RoleStatus(process=launcher.stem, heartbeat=2.0))
    keeper.clock += 100.0
    assert not keeper.poll() and keeper.states["trainer"].attempt.doing == "training step 1"
    launcher.unlink()
    keeper.clock += 100.0
    assert [death.reason.partition(" for ")[0] for death in keeper.poll()] == ["gave no heartbeat"]


def test_the_statuses_of_hundreds_of_ranks_are_read_every_two_seconds_only(make, monkeypatch):
    """Each is a file on the shared disk of a cluster."""
    reads = []
    monkeypatch.setattr(
        "rl.launch.keeper.read_status", lambda path: reads.append(path.stem) or read_status(path)
    )
    run = make()
    run.begin(
        trainer="[status('training', file=f'trainer-{i}') for i in range(1, 101)]\n"
        + WORK["trainer"]
    )
    keeper = run.keeper
    run.until(lambda: len(keeper.states["trainer"].attempt.statuses) == 101)
    monkeypatch.setattr("rl.launch.keeper.SLOW_POLL_S", 60.0)
    reads.clear()
    for _ in range(10):
        keeper.poll()
    assert reads.count("trainer") == 10 and "trainer-7" not in reads
    assert len(keeper.states["trainer"].attempt.statuses) == 101


def test_a_pause_of_rl_itself_makes_nobody_silent(make, monkeypatch):
    """Its children were stopped with it, as on a sleeping machine: their heartbeats are as old
    as its last poll."""
    monkeypatch.setattr("rl.launch.keeper.LONGEST_POLL_S", 0.1)
    run = make(silence_s=0.9)
    run.begin()
    run.ready("inference")
    pids = [run.child(name).pid for name in WORK]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.0)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    for _ in range(30):
        run.supervisor.poll([])
        time.sleep(0.01)
    assert not run.events("silent") and not run.events("death")


POISON = """
step = 3 + sum(1 for file in os.listdir(root + "/batches"))
if os.path.exists(root + "/good") and step > 3:
    print(json.dumps({"step": step, "source": "trainer"}), file=open(root + "/metrics.jsonl", "a"))
    sys.exit()
status("loading_model" if attempt == 2 else "training", step)
sys.exit(1)
"""


def test_a_batch_that_kills_its_reader_is_quarantined(make):
    run = make(backoff_s=0.01)
    (run.root / "good").touch()
    run.begin(trainer=POISON)
    run.until(lambda: run.keeper.states["trainer"].done)
    # a death while loading does not count against a batch
    assert len(run.events("death", "trainer")) == 4
    record = json.loads(run.run_dir.quarantined(3).read_text())
    assert record["step"] == 3
    assert record["why"] == "ended with exit code 1"
    assert len(record["deaths"]) == 3
    assert [(event["step"], event["deaths"]) for event in run.events("quarantine")] == [(3, 3)]
    assert any(
        f"{run.run_dir.batch(3)} is quarantined, and version 3 will equal version 2" in line
        for line in run.said
    )


def test_a_step_that_was_done_in_between_starts_the_count_anew(make):
    """The trainer died three times in step 3, but completed it in between: the batch is not
    poisonous."""
    run = make(backoff_s=0.01)
    done = (
        "print(json.dumps({'step': 3, 'source': 'trainer'}), file=open(root + '/metrics.jsonl', "
        "'a'))\n"
    )
    run.begin(
        trainer=f"if attempt == 5: sys.exit()\nif attempt == 3:\n    {done}    "
        "time.sleep(0.3)\nstatus('training', 3)\nsys.exit(1)"
    )
    run.until(lambda: run.keeper.states["trainer"].done)
    assert len(run.events("death")) == 4 and not run.events("quarantine")


@pytest.mark.parametrize(
    ("ending", "same"),
    [
        (
            "print(f'trainer: step {step}: loss nan, gradient norm {step}.5; nothing of the "
            "step was applied')",
            True,
        ),
        ("print(f'[rank0]: ValueError: {step}', '[rank1]: RuntimeError: closed', sep='\\n')", True),
        ("print('ValueError: of step', ['three', 'four', 'five'][step - 3])", False),
        ("os.kill(os.getpid(), 9)", False),
    ],
)
def test_the_same_error_with_the_next_batch_is_no_poison(make, ending, same):
    run = make(backoff_s=0.0, quarantine_after=2, max_restarts=20)
    run.begin(
        trainer=POISON.replace("attempt == 2", "False").replace(
            "sys.exit(1)", ending + "\nsys.exit(1)"
        )
    )
    with pytest.raises(RunError) as error:
        run.finish()
    quarantined = sorted(os.listdir(run.run_dir.batches))
    if same:
        assert str(error.value).startswith(
            "the same error in step 4 as in step 3, whose batch was quarantined: no batch is "
            "the cause; fix the cause, then continue "
            "before the skipped batch: --resume 2\ntrainer ended with exit code 1. The end "
            "of its log:\n"
        )
        assert error.value.resume_at == 2
        assert len(run.events("death")) == 3 and quarantined == ["000003.quarantined"]
        assert run.events("give_up", "trainer")[0]["reason"].endswith("no batch is the cause")
    else:
        assert "batches 3, 4, 5 were quarantined with no good step between" in str(error.value)
        assert quarantined == [f"00000{step}.quarantined" for step in (3, 4, 5)]


def test_damage_is_repaired_while_nobody_works_with_it(make, monkeypatch):
    run, running = make(), []

    def repair(run_dir, logged):
        running.extend(name for name in WORK if run.child(name))
        (run.root / "mended").touch()
        return ["moved batches/000003.batch away"]

    monkeypatch.setitem(sys.modules, "rl.launch.repair", types.SimpleNamespace(repair=repair))
    code = (
        "status('loading_model')\ntime.sleep(0.3)\nif not os.path.exists(root + '/mended'): "
        f"sys.exit({DAMAGED})\n"
    )
    run.begin(trainer=code + WORK["trainer"])
    run.ready("trainer")
    run.ready("orchestrator", 2)
    assert running == ["inference"]
    assert run.child("inference").attempt == 1
    assert run.child("orchestrator").attempt == 2
    assert run.events("repair")[0]["lines"] == ["moved batches/000003.batch away"]
    assert "  moved batches/000003.batch away" in run.said and len(run.events("death")) == 1


def test_a_process_that_is_ended_for_a_repair_has_its_own_time_for_it(make, monkeypatch):
    """Regression: the launcher of worlds was killed after 20 s, while its ranks on other
    machines saved."""
    monkeypatch.setattr(Children.end, "__defaults__", (0.1,))
    run = make()
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.0), open(root + '/saved', "
        "'w'), os._exit(143)))\n" + WORK["trainer"]
    )
    run.begin_one("trainer", code, stop_s=60.0)
    run.ready("trainer")
    run.keeper.end("trainer")
    assert (run.root / "saved").exists()


def test_damage_is_repaired_before_a_run_ends_because_of_it(make, monkeypatch):
    repaired = []
    monkeypatch.setitem(
        sys.modules,
        "rl.launch.repair",
        types.SimpleNamespace(repair=lambda *_, **__: repaired.append(1) or ["moved"]),
    )
    run = make(max_restarts=0)
    run.begin(trainer=f"sys.exit({DAMAGED})")
    with pytest.raises(RunError, match="ended with exit code 4"):
        run.finish()
    assert repaired == [1]


def test_damage_that_only_another_machine_sees_ends_the_run(make, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "rl.launch.repair", types.SimpleNamespace(repair=lambda *_, **__: [])
    )
    run = make()
    run.begin(
        trainer="print('checkpoints/000003: not what was written, as rank 1 on b reads "
        f"it')\nsys.exit({DAMAGED})"
    )
    with pytest.raises(
        RunError,
        match=r"(?s)finds damage where this machine finds none, twice:.*as rank 1 on b reads it",
    ):
        run.finish()
    assert len(run.events("repair")) == 2


@pytest.mark.parametrize("first", ["orchestrator", "trainer"])
def test_an_orchestrator_that_has_ended_well_comes_back_for_a_trainer_that_has_not(make, first):
    """Also if it ended while the trainer was dead, which it took for finished: the next attempt
    would wait for a missing process."""
    run, ends = (
        make(backoff_s=1.5 if first == "trainer" else 0.05),
        "status('waiting_for_trainer_end')\n",
    )
    after_death = (
        """until_event('"event":"death","process":"trainer"', 'waiting_for_trainer_end')\n"""
        if first == "trainer"
        else ""
    )
    after_end = (
        "while not os.path.exists(root + '/ended'): beat('training', 9, 0.05)\n"
        if first == "orchestrator"
        else ""
    )
    run.begin(
        orchestrator=f"{after_death}{ends}open(root + '/ended', 'w')",
        trainer=f"{after_end}beat('training', 9, 0.3)\nsys.exit(attempt == 1)",
    )
    run.finish()
    assert (run.run_dir.logs / "orchestrator-2.log").exists()
    assert [event["process"] for event in run.events("death")] == ["trainer"]


def test_a_stall_is_told_with_what_everything_waits_for(make, monkeypatch):
    found = types.SimpleNamespace(
        bottleneck="the trainer waits for batch 2", all_lines=["orchestrator: filling"]
    )
    monkeypatch.setattr(
        "rl.diagnosis.waits.diagnose",
        lambda run_dir, config: time.sleep(1.0) or found,
        raising=False,
    )
    run = make(stall_s=0.5)
    poll, polls = run.supervisor.poll, []

    def timed(*lines):
        began = time.perf_counter()
        poll(*lines)
        polls.append(time.perf_counter() - began)

    run.supervisor.poll = timed
    busy = "for i in range(15): status('serving', address='x', progress=i); time.sleep(0.05)\n"
    run.begin(inference=busy + WORK["inference"])
    began = time.time()
    run.until(lambda: len(run.events("stall")) == 2)
    first, second = run.events("stall")
    assert first["time"] - began > 1.1 and second["time"] - first["time"] > 0.45
    assert first["reason"] == "the trainer waits for batch 2" and not run.events("death")
    text = (
        "warning: no token, rollout, batch or step for 0.5 s (supervisor.stall_s): the trainer "
        "waits for batch 2\n  orchestrator: filling"
    )
    assert run.said == [text, text]
    assert sorted(polls)[-2] < 0.9  # the diagnosis does not run within a poll


def test_a_search_for_the_model_that_hangs_is_told_again_and_again(make):
    run = make(stall_s=0.3)
    run.begin_one("model", "print('Fetching 12 files:  33%', flush=True); time.sleep(60)")
    run.until(lambda: len(run.said) == 2)
    for text in run.said:
        assert text.startswith("warning: the model is being found or downloaded, for ")
        assert "so far: Fetching 12 files:  33% (log: " in text


def test_a_model_that_cannot_be_found_ends_the_run_with_its_last_line_and_a_killed_search_is_repeated(
    make,
):
    run = make()
    dies = "if attempt == 1: os.kill(os.getpid(), 9)\nsys.exit('model.name: not there')"
    run.begin_one("model", dies)
    with pytest.raises(
        RunError, match=rf"^model.name: not there\n  the whole log: {run.run_dir.logs}/model-2.log$"
    ):
        run.finish()
    assert len(run.events("death", "model")) == 1


def test_a_first_start_that_the_system_refuses_is_tried_again(make, monkeypatch):
    """Regression: it ended the run at once."""
    run, begin = make(), Children.start
    refusals = [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")]

    def start(self, name, *args):
        if name == "trainer" and refusals:
            raise refusals.pop()
        return begin(self, name, *args)

    monkeypatch.setattr(Children, "start", start)
    run.begin()
    assert not run.child("trainer")
    run.ready("trainer")


def test_other_processes_are_watched_while_a_start_is_refused(make, monkeypatch):
    """Regression: a process that died meanwhile was noticed when the start had succeeded."""
    run = make()

    def start(self, name, *args):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def is_noticed(name):
        with contextlib.suppress(BlockingIOError):
            run.supervisor.poll([])
        return run.events("death", name)

    run.begin()
    run.ready("trainer")
    run.ready("orchestrator")
    monkeypatch.setattr(Children, "start", start)
    for name in ("trainer", "orchestrator"):
        os.kill(run.child(name).pid, signal.SIGKILL)
        until(lambda name=name: is_noticed(name))


@pytest.mark.parametrize(("number", "patience_s"), [(errno.EAGAIN, 0.0), (errno.ENOSPC, 30.0)])
def test_rl_serve_tries_a_start_again_that_the_system_refuses(monkeypatch, number, patience_s):
    """Regression: a full process table while a server was started again ended `rl serve`."""
    monkeypatch.setattr(serve, "POLL_S", 0.0)
    refusals = [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")] * 2

    def poll():
        if refusals:
            raise refusals.pop()
        return []

    serve.poll(types.SimpleNamespace(poll=poll))
    assert not refusals
    refusals.append(OSError(number, os.strerror(number)))
    monkeypatch.setattr(serve, "LEASE_S", patience_s)
    with pytest.raises(OSError, match=os.strerror(number)):
        serve.poll(types.SimpleNamespace(poll=poll))
