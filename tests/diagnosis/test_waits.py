"""What is said of runs whose files are made up: each way to stand still, to be slow, and to end
has its sentence."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple

import msgspec
import psutil
import pytest

from rl.commands import branch, stop
from rl.config.command_line import write_config
from rl.config.run import RLConfig
from rl.diagnosis.rewards import reward_summary
from rl.diagnosis.state import RunState, inspect_process
from rl.diagnosis.waits import diagnose
from rl.run_dir.lease import LockOwner
from rl.run_dir.status import (
    Phase,
    RoleStatus,
    RunEnd,
    Staleness,
    last_seen,
    write_status,
)
from rl.system import process_table
from rl.system.errors import RunError
from rl.system.linux import pid_scope
from rl.wire.batch_file import write_batch
from rl.wire.messages import TrainBatch
from tests import jsonl


def does(phase, step=None, detail=""):
    return RoleStatus(phase=phase, step=step, waiting_for=phase.waits_for, detail=detail)


SERVING = does(Phase.SERVING)
FILLING = does(Phase.FILLING_BATCH, 13)
WAITING = does(Phase.WAITING_FOR_BATCH, 13, "filling batch 13")


def manifest(**sizes):
    return json.dumps(
        {
            "step": 3,
            "world_size": 1,
            "model": {},
            "files": {name: {"size": size} for name, size in sizes.items()},
        }
    )


def ticks(pid):
    """When a process began; empty for one that is gone."""
    line = process_table.entry(pid)
    return line.start if line else ""


class Run:
    """A run directory that is written by hand."""

    def __init__(self, root, **settings):
        defaults = {"name": "run", "output_dir": str(root), "model": {"dtype": "bfloat16"}}
        defaults |= {"max_steps": 100, "orchestrator": {"environment": [{"id": "sums"}]}}
        self.config = RLConfig.model_validate(defaults | settings)
        self.dir = self.config.run_dir
        self.dir.logs.mkdir(parents=True)
        self.now = time.time()

    def plays(self, *names):
        envs = [{"id": name} for name in names]
        given = self.config.model_dump(exclude_unset=True) | {"orchestrator": {"environment": envs}}
        self.config = RLConfig.model_validate(given)

    def status(self, name, what, since=1.0, heartbeat=0.0, **more):
        """Writes a status; `what` is from `does`."""
        fields = {
            "process": name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": psutil.Process().create_time(),
            "place": more.get("host", pid_scope()),
            "start_ticks": ticks(more.get("pid", os.getpid())),
            "since": self.now - since,
            "heartbeat": self.now - heartbeat,
            "progress": 7,
            "progressed": self.now - more.pop("idle", 0.0),
        }
        write_status(self.dir.status(name), msgspec.structs.replace(what, **fields | more))

    def rl(self, pid=None):
        """Somebody holds the run."""
        lock = self.dir.lock("rl")
        lock.parent.mkdir(exist_ok=True)
        pid = pid or os.getpid()
        lock.write_bytes(
            msgspec.json.encode(LockOwner(pid, socket.gethostname(), pid_scope(), ticks(pid)))
        )

    def log(self, name, *lines):
        (self.dir.logs / f"{name}.log").write_text("".join(f"{line}\n" for line in lines))

    def metrics(self, steps, source="trainer", ago=1.0, **values):
        """The same line for each of `steps`, or values that are lists, one for each."""
        with self.dir.metrics.open("a") as file:
            for i, step in enumerate(steps):
                one = {
                    key: value[i] if isinstance(value, list) else value
                    for key, value in values.items()
                }
                file.write(
                    json.dumps({"step": step, "time": self.now - ago, "source": source, **one})
                    + "\n"
                )

    def event(self, kind, process, ago, **more):
        with (self.dir.root / "events.jsonl").open("a") as file:
            file.write(
                json.dumps({"time": self.now - ago, "event": kind, "process": process, **more})
                + "\n"
            )

    def end(self, reason, kind="done"):
        """Why it ended, as the orchestrator notes it."""
        self.dir.status_dir.mkdir(exist_ok=True)
        self.dir.run_end.write_bytes(msgspec.json.encode(RunEnd(reason, self.now, kind)))

    def checkpoint(self, step, **sizes):
        """A checkpoint whose manifest has these files."""
        self.dir.checkpoint(step).mkdir(parents=True)
        (self.dir.checkpoint(step) / "manifest.json").write_text(manifest(**sizes))

    def diagnosis(self):
        return diagnose(self.dir, self.config)

    def bottleneck(self):
        return self.diagnosis().bottleneck

    def working(self, inference=SERVING, orchestrator=FILLING, trainer=WAITING, **more):
        """A run in the middle; what one of its processes does can be said."""
        self.rl()
        self.status("trainer", trainer, since=more.pop("trainer_since", 70))
        filled = (
            {"batch": 13, "batch_done": 40, "batch_size": 64}
            if orchestrator.phase is Phase.FILLING_BATCH
            else {}
        )
        self.status(
            "orchestrator", orchestrator, since=more.pop("orchestrator_since", 70), idle=5, **filled
        )
        if inference:
            address = {"address": "http://127.0.0.1:1"} if inference is SERVING else {}
            self.status("inference", inference, since=400, **address, **more)
        return self


@pytest.fixture
def run(tmp_path, monkeypatch):
    run = Run(tmp_path)
    # seconds in sentences do not depend on how busy the machine is
    monkeypatch.setattr(time, "time", lambda: run.now)
    return run


@pytest.fixture
def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# Alive --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        (60, "60 of 64 rollouts in flight wait for tokens: sampling is the slow part, "),
        (30, "30 of 64 rollouts in flight wait for tokens"),
        (
            3,
            "3 of 64 rollouts in flight wait for tokens: the environments (tools, scoring) "
            "are the slow part; ",
        ),
    ],
)
def test_what_rollouts_wait_for_at_the_moment(run, requests, said):
    run.working(idle=2.0, requests=requests)
    run.status(
        "orchestrator", FILLING, since=70, batch=13, batch_done=40, batch_size=64, playing=64
    )
    assert run.bottleneck().startswith(
        f"inference is sampling: batch 13 has 40 of 64 rollouts, {said}"
    )


def test_inference_died_and_is_about_to_be_started_again(run):
    run.working(inference=None)
    run.event("death", "inference", 3.0, reason="was ended by SIGKILL", exit=-9)
    assert run.bottleneck().startswith(
        "the inference died 3 s ago (was ended by SIGKILL) and is about to be restarted; see "
    )
    run.event("restart", "inference", 2.0)
    found = run.diagnosis()
    assert found.bottleneck.startswith("the inference has no status yet: it is starting")
    assert not found.problems
    assert "inference: died once, 3 s ago: was ended by SIGKILL" in found.all_lines


def test_a_step_that_is_trained_again(run):
    run.metrics(range(3, 16), **{"time/step": 20.0})
    run.working(
        trainer=does(Phase.TRAINING, 13),
        orchestrator=does(Phase.WAITING_FOR_VERSION, 16),
        trainer_since=3,
    )
    assert (
        run.bottleneck()
        == "the trainer is working: training step 13 again, after resuming from its checkpoint, "
        "for 3 s; a step takes 20.0 s"
    )


def test_a_rank_without_a_heartbeat(run):
    run.working(trainer=does(Phase.TRAINING, 13))
    run.status("trainer-1", does(Phase.TRAINING, 13), heartbeat=45.0)
    found = run.diagnosis()
    assert found.bottleneck.startswith(
        "no heartbeat of the trainer-1 for 45 s, it was training step 13: it is stuck, and "
        "will be restarted after supervisor.silence_s"
    )
    assert [problem.text for problem in found.problems] == [found.bottleneck]


@pytest.mark.parametrize(
    ("heartbeat", "age"), [(45.0, "45 s"), (-3600.0, "1 s")], ids=["old", "ahead"]
)
def test_a_process_on_another_machine_is_judged_by_its_heartbeat_alone(
    run, monkeypatch, capsys, heartbeat, age
):
    monkeypatch.setattr("rl.diagnosis.state.SILENT_S", 0.5)
    run.working()
    run.config.supervisor.silence_s = 1.0
    run.status("inference", SERVING, host="elsewhere", heartbeat=heartbeat)
    assert f"no heartbeat of the inference for {age}" in run.bottleneck()
    assert "elsewhere, is down or unreachable" in run.bottleneck()
    assert "waiting up to" in capsys.readouterr().err


@pytest.mark.parametrize("off", [400.0, -3600.0])
def test_a_process_on_a_machine_with_another_clock_lives_as_long_as_its_heart_beats(run, off):
    run.working()
    run.status(
        "inference",
        SERVING,
        host="elsewhere",
        heartbeat=off,
        since=off + 70.0,
        address="http://h:1",
    )
    timer = threading.Timer(
        0.2,
        lambda: run.status(
            "inference",
            SERVING,
            host="elsewhere",
            heartbeat=off - 2.0,
            since=off + 70.0,
            address="http://h:1",
        ),
    )
    timer.start()
    inference = RunState(run.dir, run.config).processes["inference"]
    timer.join()
    assert (inference.silent, round(inference.silent_s), round(inference.phase_s)) == (False, 0, 72)


def test_the_trainer_has_ended_and_the_last_evaluation_goes_on(run):
    run.working(orchestrator=does(Phase.EVALUATING, 100, "sums"), orchestrator_since=7)
    run.dir.status("trainer").unlink()
    run.metrics(range(91, 101), **{"time/step": 10.0})
    assert run.bottleneck() == (
        "the trainer has finished its last step and exited; the orchestrator is evaluating "
        "sums at version 100 for 7 s"
    )


def test_the_model_is_downloaded(run):
    run.rl()
    run.log("model-1", "Fetching 12 files:  33%")
    assert run.bottleneck().startswith(
        "model HuggingFaceTB/SmolLM2-135M-Instruct is being found or downloaded: Fetching 12 "
        "files:  33% (log: "
    )


def test_a_stopped_process(run):
    process = subprocess.Popen(["sleep", "60"])
    try:
        run.working(idle=2.0)
        run.status("inference", SERVING, pid=process.pid, address="http://127.0.0.1:1")
        assert not run.diagnosis().problems
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        text = run.bottleneck()
    finally:
        process.kill()
        process.wait()
    assert text == (
        f"the inference is stopped: SIGSTOP or a debugger holds process {process.pid} "
        f"(sleep); `kill -CONT {process.pid}` continues it"
    )


def test_a_full_disk(run, monkeypatch):
    run.working()
    (run.dir.checkpoint(10)).mkdir(parents=True)
    (run.dir.checkpoint(10) / "x").write_bytes(b"0" * 1000)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: namedtuple("usage", "total used free")(1 << 40, 0, 12 << 20)
    )
    found = run.diagnosis()
    assert found.bottleneck == (
        f"the disk of {run.dir.root} is full: 12 MiB free, but the next file there needs "
        "about 256 MiB; free some space, or lower "
        "trainer.checkpoint.keep_last and trainer.weights.keep_last"
    )


def test_a_stall_is_said_first(tmp_path):
    run = Run(tmp_path, supervisor={"stall_s": 0.01})
    run.working(idle=700.0, requests=3)
    run.status("orchestrator", FILLING, since=700, idle=700)
    run.status("trainer", does(Phase.WAITING_FOR_BATCH, 13), since=700, idle=700)
    found = run.diagnosis()
    assert re.match(
        r"nothing has moved for \d+ (s|min): inference hangs or is far too slow: no token "
        r"for 12 min",
        found.bottleneck,
    )
    assert found.problems


UPDATING = does(Phase.WAITING_FOR_VERSION, 12)
STANDING = {
    "sampling": (
        {"idle": 2.0},
        "inference is sampling: batch 13 has 40 of 64 rollouts; in the newest steps the "
        "trainer waited 60%",
    ),
    "hanging": (
        {"requests": 9, "idle": 70.0},
        "inference hangs or is far too slow: no token for 70 s although 9 requests are open; see ",
    ),
    "scoring": (
        {"requests": 0, "idle": 70.0},
        "the environments hold up their rollouts (tools, scoring): inference has sampled "
        "nothing for 70 s and has no requests, batch 13 ",
    ),
    "a batch has just begun": (
        {"idle": 70.0, "orchestrator_since": 3},
        "inference is sampling: batch 13 has 40 of 64",
    ),
    "evaluating": (
        {"orchestrator": does(Phase.EVALUATING, 12, "sums"), "idle": 70.0},
        "no token for 70 s although inference is up: environments hold up their ",
    ),
    "starting": (
        {"inference": does(Phase.LOADING_MODEL), "orchestrator": does(Phase.WAITING_FOR_INFERENCE)},
        "inference is not ready yet: loading the model for 7 min "
        "(inference.startup_timeout_s = 900); see ",
    ),
    "unreachable": (
        {"orchestrator": does(Phase.WAITING_FOR_INFERENCE)},
        "inference is serving, and the orchestrator cannot reach it at http://127.0.0.1:1: "
        "is there a proxy or firewall between them?",
    ),
    "weights": (
        {"orchestrator": does(Phase.LOADING_VERSION, 12)},
        "inference is loading new weights: loading version 12 into inference for 70 s; see ",
    ),
    "environments": (
        {"orchestrator": does(Phase.LOADING_ENVIRONMENTS)},
        "environments have been loading for 70 s; the limit is orchestrator.worker_timeout_s "
        "= 300; see ",
    ),
    "teacher": (
        {"orchestrator": does(Phase.WAITING_FOR_TEACHER, detail="http://t:1/v1")},
        "the teacher does not answer: the orchestrator is waiting for the teacher at "
        "http://t:1/v1 for 70 s",
    ),
    "deadlock": (
        {"orchestrator": UPDATING},
        "deadlock: the trainer is waiting for batch 13: filling batch 13 for 70 s, the "
        "orchestrator is ",
    ),
    "ranks": (
        {"trainer": does(Phase.WAITING_FOR_RANKS)},
        "the trainer waits for its other ranks: none of them has a status yet; see ",
    ),
}
"""What a run in the middle does, and what is said of it."""


@pytest.mark.parametrize("name", STANDING)
def test_who_holds_up_the_others_is_told(run, name):
    what, said = STANDING[name]
    run.metrics(range(3, 13), **{"time/step": 20.0, "time/wait_for_batch": 12.0})
    assert run.working(**what).bottleneck().startswith(said), run.bottleneck()


# Ended --------------------------------------------------------------------------------------------


def test_ended_well(run, gone):
    run.rl(gone)
    run.end("100 steps done")
    run.metrics(range(91, 101), **{"time/step": 10.0})
    run.checkpoint(100)
    found = run.diagnosis()
    assert not found.problems and found.bottleneck == "the run ended well: 100 steps done"
    assert found.all_lines == [
        "step 100 of 100, batch 0, version 0, checkpoint 100, 10.0 s per step"
    ]


def test_a_run_that_may_have_learned_nothing_did_not_end_well(run, gone):
    run.rl(gone)
    run.end("nothing to learn", "doubtful")
    assert (run.diagnosis().bottleneck, run.diagnosis().state) == (
        "the run ended at step 0 of 100: nothing to learn",
        "ended",
    )


def test_a_run_that_ended_well_and_was_copied_without_its_checkpoints_is_not_said_to_be_stopped(
    run,
):
    """A resume would find nothing to go on from. The trainer that saved the last one has left no
    status and no death."""
    run.end("100 steps done")
    run.metrics(range(91, 100))
    assert run.bottleneck().startswith("the run was stopped at step 99 of 100; continue it with")
    run.metrics([100])
    found = run.diagnosis()
    assert (found.bottleneck, found.state) == (
        "the run ended well: 100 steps done; its checkpoints are not here",
        "ended",
    )
    assert not found.problems
    run.event("death", "trainer", 5, reason="killed")
    assert run.diagnosis().state == "died"


def test_fine_tuning_ended_well_by_its_passes(tmp_path, gone):
    run = Run(tmp_path, sft={"dataset": "x.jsonl", "epochs": 2.0})
    run.rl(gone)
    run.metrics([1, 2, 3], epoch=[0.7, 1.4, 2.0])
    assert "was stopped at step 3" in run.bottleneck()
    run.checkpoint(3)
    assert run.bottleneck() == "the run ended well: 3 steps done"
    shutil.rmtree(run.dir.checkpoints)  # as after a trial
    assert "was stopped at step 3" in run.bottleneck()
    run.dir.weights(3).mkdir(parents=True)
    assert run.bottleneck() == "the run ended well: 3 steps done"


TUNED, RECORDED = {"sft": {"dataset": "x.jsonl"}}, {"recorded": {"rollouts": "x.jsonl"}}


@pytest.mark.parametrize(
    ("settings", "metrics", "said"),
    [
        (
            TUNED,
            {"validation/loss": [7.0, 11.0, 17.0]},
            "the loss on held-out examples rose from 7 to 17 (validation/loss): lower the learn",
        ),
        (
            TUNED,
            {"optim/grad_norm": 4.8e9},
            "gradients are 4800000000 times the clipping limit (optim/grad_norm ",
        ),
        (
            RECORDED,
            {"lag_kl/mean": [1.0, 9.0, 9.0]},
            "rollouts are far from the trained policy: lag_kl/mean 6.3",
        ),
        (
            RECORDED,
            {
                "loss/mean": [-0.1, 0.2, 0.5],
                "lag_kl/mean": 0.4,
                "entropy/mean": 0.6,
                "optim/grad_norm": 2.0,
            },
            None,
        ),
        (
            TUNED,
            {
                "validation/loss": [2.0, 1.2, 1.4],
                "loss/mean": [2.0, 2.4, 0.1],
                "entropy/mean": 0.01,
                "optim/grad_norm": 9.0,
            },
            None,
        ),
    ],
)
def test_what_destroys_a_model_is_told_of_runs_without_environments(
    tmp_path, gone, settings, metrics, said
):
    """Their one diagnosis was that they had ended well."""
    run = Run(tmp_path, **settings)
    run.rl(gone)
    run.metrics([1, 2, 3], **metrics)
    hints = [hint.text for hint in run.diagnosis().hints]
    assert bool(hints) == bool(said)
    if said:
        assert hints[0] == "the model may be worse than the one that it began as."
        assert hints[1].startswith(said)


def test_ended_by_failure(run, gone):
    run.rl(gone)
    run.metrics(range(1, 13))
    run.log("trainer-3", "RuntimeError: boom")
    for ago in (40, 30, 20):
        run.event("death", "trainer", ago, reason="ended with exit code 1", exit=1)
    found = run.diagnosis()
    assert found.problems
    assert found.bottleneck == (
        "the run ended 20 s ago at step 12 with the trainer, the last of its 3 deaths: "
        "ended with exit code 1, saying: "
        "RuntimeError: boom; see "
        f"{run.dir.logs / 'trainer-3.log'}, then `rl @ {run.dir.config} --resume`"
    )
    assert "  | RuntimeError: boom" in found.all_lines


def test_a_death_that_was_mended_is_not_how_a_run_ended(run, gone):
    """Its trainer died, was back, and trained on, until `rl` itself was killed."""
    run.rl(gone)
    run.metrics(range(1, 13))
    run.event("start", "rl", 90)
    for ago, kind in ((45, "death"), (44, "restart"), (30, "ready")):
        run.event(kind, "trainer", ago, reason="was ended by SIGKILL")
    run.status("trainer", does(Phase.TRAINING, 13), pid=gone, heartbeat=1)
    found = run.diagnosis()
    assert found.bottleneck.startswith(
        "the run was killed 1 s ago at step 12: the trainer was training step 13; continue "
        "it with `rl @ "
    )
    assert found.all_lines[1] == "trainer: dead; it was training step 13 1 s ago"
    run.event("death", "trainer", 0.5, reason="was ended by SIGKILL")
    assert run.bottleneck().startswith(
        "the run ended 0 s ago at step 12 with the trainer, the last of its 2 deaths: was "
        "ended by SIGKILL"
    )


def test_a_run_that_its_user_stopped_is_stopped(run, gone):
    run.rl(gone)
    run.metrics(range(1, 3))
    run.event("start", "rl", 90)
    run.event("start", "trainer", 80)
    run.event("death", "trainer", 45, reason="was ended by SIGKILL")
    run.event("stop", "rl", 4, reason="SIGINT")
    # by a stop that a second signal cut short
    run.status("orchestrator", FILLING, pid=gone, heartbeat=5)
    found = run.diagnosis()
    assert (
        found.bottleneck
        == "the run was stopped by SIGINT 4 s ago at step 2 of 100; continue it with `rl @ "
        f"{run.dir.config} --resume`"
    )
    assert (found.state, [problem.serious for problem in found.problems]) == ("stopped", [False])
    run.event("start", "rl", 2)  # resumed, and killed
    assert run.diagnosis().state == "died"


def test_a_run_that_comes_to_its_end_waits_for_nobody(run):
    run.rl()
    run.end("100 steps done")
    run.metrics(range(91, 101), **{"time/step": 10.0})
    run.checkpoint(100)
    found = run.diagnosis()
    assert (found.state, found.problems) == ("live", [])
    assert (
        found.bottleneck
        == "the run is ending (100 steps done): `rl` is stopping the remaining processes and "
        "writing its report"
    )


def test_whoever_looks_again_need_not_wait_for_another_clock(run, monkeypatch):
    """A run that was copied here is dead at once; where a heart beats by another clock, it lives
    from the next look on."""
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    heartbeats = Staleness()
    for heartbeat, silent in ((400.0, True), (400.0, True), (398.0, False), (396.0, False)):
        run.status("trainer", does(Phase.TRAINING, 13), host="elsewhere", heartbeat=heartbeat)
        assert RunState(run.dir, run.config, heartbeats).processes["trainer"].silent is silent
    run.status("trainer", does(Phase.TRAINING, 13), host="elsewhere", heartbeat=400.0)
    assert diagnose(run.dir, run.config, Staleness()).state == "died"


def test_a_run_that_did_not_start_says_so_although_rl_has_counted_its_seconds(run, gone):
    run.rl(gone)
    run.metrics([0], "rl", **{"cost/machine_s": 3.0})
    assert run.bottleneck().startswith("the run did not start; `rl @ ")


def counts(env, finished, trained, **failed):
    more = {f"rollouts/{env}/failed_{cause}": count for cause, count in failed.items()}
    return {f"rollouts/{env}/finished": finished, f"rollouts/{env}/trained": trained, **more}


def test_an_environment_of_which_nothing_was_trained_is_a_problem_of_a_run_that_ended_well(
    run, gone
):
    run.plays("bad", "doubtful", "good", "lost", "solved")
    run.rl(gone)
    run.metrics(range(1, 101), **{"time/step": 10.0})
    lost = {f"rollouts/lost/{name}": [8, 0] for name in ("finished", "trained")} | {
        "env/lost/quarantined": 1
    }
    values = (
        counts("bad", 8, 0, reward=6, worker=2)
        | counts("doubtful", 8, 6, timeout=2)
        | counts("good", 80, 8, reward=1)
    )
    run.metrics([99, 100], "orchestrator", **values, **counts("solved", 8, 0), **lost)
    run.event("start", "rl", 500)
    reason = "environment bad: 4 of 4 rollouts failed (reward): ValueError: no"
    run.event("warning", "orchestrator", 400, env="bad", reason=reason)
    run.event(
        "warning",
        "orchestrator",
        300,
        env="lost",
        reason="environment lost is lost until the next start: its workers died",
    )
    run.end("100 steps done")
    run.checkpoint(100)
    found = run.diagnosis()
    assert found.state == "ended" and found.bottleneck == "the run ended well: 100 steps done"
    assert [problem.text for problem in found.problems] == [
        "environment bad: no rollout was trained on, 16 of 16 rollouts failed (reward 12, "
        "worker 4); environment bad: 4 of 4 rollouts failed "
        f"(reward): ValueError: no; `rl show {run.dir.root} --env bad --why error` shows them",
        "environment lost: it is lost; environment lost is lost until the next start: its "
        "workers died",
    ]
    assert found.all_lines[-1].startswith(
        "environment doubtful: 4 of 16 rollouts failed (timeout 4); `rl show "
    )


def test_an_environment_that_breaks_late_is_named_although_the_reward_rises(run):
    run.plays("a", "b")
    run.working()
    rewards = [step / 100 for step in range(1, 96)]
    healthy, broken = (
        counts("a", 8, 8) | counts("b", 8, 8),
        counts("a", 8, 8) | counts("b", 8, 0, reward=8),
    )
    run.metrics(range(1, 91), "orchestrator", **{"reward/mean": rewards[:90]}, **healthy)
    assert run.diagnosis().hints == []
    run.metrics(range(91, 96), "orchestrator", **{"reward/mean": rewards[90:]}, **broken)
    named = [hint.text for hint in run.diagnosis().hints]
    assert named == [
        "environment b: in the newest 10 steps, 40 of 80 rollouts failed (reward 40); "
        f"`rl show {run.dir.root} --env b --why error` shows them"
    ]
    # it works again
    run.metrics(range(96, 106), "orchestrator", **{"reward/mean": 0.95}, **healthy)
    assert run.diagnosis().hints == []


def test_a_survivor_without_rl(run, gone):
    run.working(idle=2.0)
    run.rl(gone)
    run.status("orchestrator", FILLING, pid=gone)
    assert run.bottleneck().startswith(
        "the orchestrator died while it was filling batch 13, and no `rl` is running to "
        "restart it; see "
    )


def test_damaged_files_and_quarantined_batches(run, gone):
    run.rl(gone)
    write_batch(run.dir.batch(3), TrainBatch(step=3, samples=[]), None)
    run.dir.quarantined(2).write_text("{}")
    run.event("repair", "rl", 60, lines=["batch 4 was moved away"])
    # the end alone
    assert [problem.text for problem in run.diagnosis().problems] == [run.bottleneck()]
    data = run.dir.batch(3).read_bytes()
    run.dir.batch(3).write_bytes(data[:-1])
    for name, content in {"a": b"\x05", "b": (2).to_bytes(8, "little") + b"{}xx"}.items():
        run.dir.weights(3).mkdir(parents=True, exist_ok=True)
        (run.dir.weights(3) / f"{name}.safetensors").write_bytes(content)
    os.mkfifo(run.dir.weights(3) / "c.safetensors")  # which nobody waits for
    run.checkpoint(3, one=3)
    found = run.diagnosis()
    wrong = [problem.text.partition(": ")[2].partition(";")[0] for problem in found.problems[1:]]
    assert wrong == [
        f"has {len(data) - 1} bytes, its header says {len(data)}",
        "not a safetensors file (a header of 5 bytes in a file of 1)",
        "has 12 bytes, its header says 10",
        "is not a file",
        "is missing",
    ]
    assert "repaired 60 s ago: batch 4 was moved away" in found.all_lines
    assert (
        "quarantined batches, whose steps were skipped: 2 (batches/*.quarantined says why)"
        in found.all_lines
    )


def test_a_damaged_version_of_a_run_without_batches(run, gone):
    """Regression: fine-tuning has none, and its versions were not looked at."""
    run.rl(gone)
    run.dir.weights(3).mkdir(parents=True)
    (path := run.dir.weights(3) / "model.safetensors").write_bytes(b"\x05")
    assert [p.text.partition(";")[0] for p in run.diagnosis().problems[1:]] == [
        f"{path}: not a safetensors file (a header of 5 bytes in a file of 1)"
    ]


# The reward ---------------------------------------------------------------------------------------


def rewards(run, values, orchestrator, trainer):
    run.working(idle=2.0)
    steps = range(1, len(values) + 1)
    run.metrics(steps, "orchestrator", **{"reward/mean": values, **orchestrator})
    run.metrics(steps, **trainer)
    return run.diagnosis().all_lines


FLAT = [0.04, 0.06, 0.06, 0.04] * 4


def test_a_reward_that_rises_or_is_high_needs_no_hints(tmp_path):
    cannot_be_told = [0.50, 0.61, 0.61, 0.51, 0.49, 0.77, 0.60, 0.62]
    noisy = [0.2, 0.8, 0.3, 0.7, *[0.5] * 8, 0.6, 0.9, 0.5, 0.8]
    for i, values in enumerate(
        [[0.05 * step for step in range(16)], [0.97] * 16, [0.1] * 5, cannot_be_told, noisy]
    ):
        assert not any(
            "reward does not rise" in line
            for line in rewards(Run(tmp_path / str(i)), values, {}, {})
        )


@pytest.mark.parametrize(
    ("orchestrator", "trainer", "said"),
    [
        (
            {"rollouts/zero_advantage": 0.9},
            {},
            "90% of the rollouts are in groups with all rewards equal, at a mean reward of "
            "0.050 (rollo",
        ),
        (
            {"rollouts/truncated": 0.45},
            {},
            "45% of the answers were cut off (rollouts/truncated): raise "
            "orchestrator.sampling.max_tokens = 256",
        ),
        (
            {"tokens/kept_overflow": 3, "rollouts/length_mean": 25.0, "rollouts/finished": 4},
            {},
            "3% of the tokens, those of the highest entropy, are not trained (tokens/kept_",
        ),
        ({"rollouts/errored": 0.3}, {}, "30% of the rollouts failed (rollouts/errored): `rl show "),
        ({"lag/mean": 5.5}, {}, "tokens are 5.5 versions old (lag/mean): lower max_lag = 1"),
        ({}, {"optim/lr": 0.0}, "the learning rate is 0 (optim/lr): raise trainer.optim.lr = "),
        ({}, {"optim/grad_norm": 0.0}, "all gradients are 0 (optim/grad_norm)"),
        (
            {"lag/mean": 0.9},
            {"mismatch_kl/mean": 0.02},
            "trainer and inference disagree: mismatch_kl/mean 0.02 is above 0.006; `rl doctor",
        ),
        (
            {},
            {"lag_kl/mean": 0.1},
            "rollouts are far from the trained policy: lag_kl/mean 0.1; try a lower learning "
            "rate or max_lag",
        ),
        (
            {},
            {"parity/agrees": 0.0},
            "trainer and inference disagree on the same tokens (parity/agrees): `rl doctor "
            "--parity MODEL`",
        ),
        (
            {},
            {"entropy/mean": 0.001},
            "the policy is nearly certain of each token (entropy/mean 0.001)",
        ),
    ],
)
def test_why_the_reward_does_not_rise(run, orchestrator, trainer, said):
    *_, head, hint = rewards(run, FLAT, orchestrator, trainer)
    assert (
        head
        == "the reward does not rise: 0.050 in the first 4 steps, 0.050 in the last 4. Possible "
        "causes:"
    )
    assert hint.startswith(f"  - {said}")


def test_no_figure_says_why(run):
    assert rewards(run, FLAT, {}, {})[-1].endswith(
        "No metric of the run shows why; try more steps, a higher trainer.optim.lr, or an "
        "easier task"
    )


def test_that_trainer_and_inference_were_not_compared_is_told_until_they_are(run):
    """It was in no diagnosis, and in the console only after three checkpoints."""
    name, text = (
        "parity/unjudged",
        "trainer and inference were not compared before the last 2 checkpoints",
    )
    run.working(idle=2.0)
    run.metrics([3, 4], **{name: [1.0, 2.0]})
    assert [
        line for line in run.diagnosis().all_lines if text in line and "a lower max_lag" in line
    ]
    run.metrics([5], **{"parity/agrees": [1.0]})
    assert not [line for line in run.diagnosis().all_lines if name in line]


# For whoever waited in vain -----------------------------------------------------------------------


def test_last_seen_says_heartbeat_and_the_end_of_the_newest_log(run):
    assert (
        last_seen(run.dir.status("orchestrator"))
        == "it has no status file: it has not started, or has ended"
    )
    run.log("orchestrator-9", "older")
    run.log("orchestrator-10", "first", "", "last")
    run.status("orchestrator", does(Phase.FILLING_BATCH, 3), since=80, heartbeat=12)
    assert last_seen(run.dir.status("orchestrator")).splitlines() == [
        "last heartbeat 12 s ago: filling batch 3 for 80 s; the end of "
        f"{run.dir.logs / 'orchestrator-10.log'}:",
        "  | first",
        "  | last",
    ]
    run.log("trainer-2", "of all ranks")
    run.status("trainer-1", does(Phase.LOADING_MODEL), heartbeat=1)
    assert last_seen(run.dir.status("trainer-1")).endswith("trainer-2.log:\n  | of all ranks")


@pytest.mark.parametrize(
    ("rollouts", "said"),
    [
        ([{"reward": 0.0}] * 8, "all rewards 0: nothing to learn"),
        (
            [{"reward": 0.0, "outcome": "truncated"}] * 8,
            "all rewards 0: nothing to learn; 8 of 8 answers were cut off "
            "(sampling.max_tokens = 256)",
        ),
        (
            [
                {"reward": 1.0, "advantage": 0.5},
                {"reward": 0.0, "advantage": -0.5},
                *[{"reward": 0.0, "group_id": 2}] * 2,
            ],
            "rewards 0 to 1, mean 0.250: something to learn in 1 of 2 groups",
        ),
        (
            [{"reward": 0.5}, {"reward": 0.0, "error": "KeyError: x\nat y"}],
            "all rewards 0.5: nothing to learn; 1 of 2 failed: KeyError: x",
        ),
        ([{"reward": 0.0, "error": "boom"}] * 2, "all 2 rollouts failed: boom"),
    ],
)
def test_the_verdict_on_a_trial(run, rollouts, said):
    run.metrics(range(1, 3), **{"loss/mean": 0.0})
    run.dir.rollouts_dir.mkdir()
    lines = [
        {"env": "sums", "group_id": 1, "advantage": 0.0, "messages": []} | rollout
        for rollout in rollouts
    ]
    run.dir.rollouts(1).write_text(jsonl.text(*lines) + '{"half')
    assert (
        reward_summary(RunState(run.dir, run.config))
        == f"trained 2 steps; sums: {said}; see {run.dir.rollouts_dir}"
    )


def test_servers_that_were_started_by_hand_count_as_inference(tmp_path):
    """None of them is the run's own; the one that answers is looked at."""
    run = Run(tmp_path)
    run.working(inference=None)
    run.dir.lock("rl").unlink()
    run.status("inference-a-1", does(Phase.LOADING_MODEL))
    run.status("inference-b-2", SERVING, address="http://b:2", requests=30)
    assert "inference is sampling" in run.bottleneck()
    lines = run.diagnosis().all_lines
    assert any(line.startswith("inference-a-1: loading the model") for line in lines)
    assert not any(line.startswith("inference: no status") for line in lines)


def test_a_pid_of_another_container_is_not_looked_at_here():
    """Its host has our name, and a live process here has its pid. Nor is one that has got the
    pid since taken for it."""
    here = {"pid": os.getpid(), "host": socket.gethostname(), "start_ticks": ticks(os.getpid())}
    there = RoleStatus(process="trainer", phase=Phase.TRAINING, started=time.time(), **here)
    other = str(int(there.start_ticks) - 1)  # a hundredth of a second
    for changes, alive in (
        ({"place": "0123abcd-4026531836"}, None),
        ({}, True),
        ({"start_ticks": other}, False),
    ):
        changed = msgspec.structs.replace(there, **{"place": pid_scope()} | changes)
        assert inspect_process("trainer", changed, time.time()).alive is alive


def test_a_model_of_the_tinker_server_is_continued_by_its_server(tmp_path):
    """`rl` was named, which refuses such a configuration."""
    run = Run(tmp_path / "serve-tiny" / "models", name="session-0", serve={"alias": "someone/else"})
    (run.dir.root / "calls.log").touch()
    run.metrics([1, 2, 3])
    again = tmp_path / "serve-tiny" / "config.toml"
    assert (
        run.bottleneck()
        == f"clients of `rl serve` trained 3 steps; they can go on after `rl serve @ {again}`"
    )
    server = Run(tmp_path, name="serve-tiny", serve={"alias": "someone/else"})
    assert (
        server.bottleneck()
        == f"clients of `rl serve` made 1 models; they can go on after `rl serve @ {again}`"
    )
    write_config(run.dir.config, run.config)
    with pytest.raises(RunError, match=f"`rl stop {tmp_path}/serve-tiny` ends its server"):
        stop.main([str(run.dir.root)], None)
    with pytest.raises(RunError, match="create_training_client_from_state"):
        branch.main([str(run.dir.root), "--name", "new"], None)
