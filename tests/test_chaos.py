"""The chaos script on the tiny model: real processes, a few kills, every promise. And that its
checks see a promise that is broken."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from rl.config.run import RLConfig
from rl.models.tiny import make_tiny_model
from rl.run_dir.files import append_file, encode_record, write_file
from rl.run_dir.metrics import Merger, MetricsLog
from rl.run_dir.paths import RunDir
from rl.wire.batch_file import write_batch
from rl.wire.messages import TrainBatch
from rl.wire.rollouts import Group, Rollout
from tests.hosts import permitted
from tests.proofs import promises
from tests.trainer.samples import make_sample
from tests.waiting import until
from tests.wire.samples import with_version

CONFIG = """
max_steps = 999999
max_lag = 1
[model]
name = "model"
dtype = "float32"
max_model_len = 128
[orchestrator]
batch_size = 16
group_size = 4
worker_silence_s = 8
[orchestrator.environment]
id = "first-half"
[orchestrator.sampling]
max_tokens = 16
[trainer]
learning_rate = 3e-3
[trainer.checkpoint]
interval = 5
[supervisor]
silence_s = 10
max_restarts = 100
backoff_s = 0.1
"""


def check_chaos(folder, kills, targets):
    """A run in which each of these is killed in turn, and recovers."""
    make_tiny_model(folder / "model")
    (folder / "run.toml").write_text(CONFIG)
    here = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": f"{here / 'environments'}:{here.parent}",
        "HF_HUB_OFFLINE": "1",
    }
    flags = f"--out out --kills {kills} --every 4 --undisturbed 3 --targets {targets}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.proofs.chaos", "@", "run.toml", *flags.split()],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    log = (folder / "out" / "rl.log").read_text()
    assert done.returncode == 0, done.stdout + log[-3000:]
    report = json.loads((folder / "out" / "chaos.json").read_text())
    names = {target.partition(":")[0] for target in targets.split(",")}
    assert {kill["target"] for kill in report["kills"]} == names
    assert all(kill["recovered_s"] is not None for kill in report["kills"])
    assert report["figures"]["rollouts_lost"] == 0 and report["figures"]["versions"] >= 8


@pytest.mark.proof
@pytest.mark.timeout(450)
def test_a_run_under_kills_keeps_every_promise(tmp_path):
    """Trainer (stopped, not killed), orchestrator, worker, engine and `rl` itself."""
    check_chaos(tmp_path, 5, "trainer:STOP,orchestrator,worker,engine,rl")


@pytest.mark.proof
@pytest.mark.skipif(not permitted(), reason="may not make pid namespaces")
@pytest.mark.timeout(450)
def test_a_run_on_two_hosts_outlives_each(tmp_path):
    """Orchestrator and trainer die together, and inference does; each is started again on
    another host, after 30 s of watching leases."""
    check_chaos(tmp_path, 2, "host-train,host-serve")


@pytest.fixture
def run_dir(tmp_path):
    """Two batches of two groups each, a third group that waits."""
    run_dir = RunDir(tmp_path, tmp_path / "weights")
    trainer, orchestrator = (
        MetricsLog(run_dir.metrics, "trainer"),
        MetricsLog(run_dir.metrics, "orchestrator"),
    )
    for step in (1, 2):
        groups = (2 * step - 1, 2 * step)
        samples = [
            make_sample([5, 6], [7, 8], group=group, rollout=i)
            for group in groups
            for i in range(2)
        ]
        samples = [with_version(sample, step - 1) for sample in samples]
        lines = [
            {"group_id": group, "rollout_id": i, "trained": True, "why": None}
            for group in groups
            for i in range(2)
        ]
        write_file(
            run_dir.rollouts(step), b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        )
        write_batch(run_dir.batch(step), TrainBatch(step=step, samples=samples), {})
        run_dir.weights(step).mkdir(parents=True)
        for log in (trainer, orchestrator):
            log.write(step, {"time/step": 2.0})
    Merger(run_dir.metrics).merge()
    group = Group(group_id=5, env="e", task=0, rollouts=[Rollout(), Rollout()])
    append_file(run_dir.pending, encode_record(msgspec.msgpack.encode(group)))
    return run_dir


def config(**orchestrator):
    environment = [{"id": "x"}]
    return RLConfig.model_validate(
        {
            "max_lag": 1,
            "orchestrator": {"environment": environment, "max_off_policy_steps": 1} | orchestrator,
        }
    )


def test_a_sound_run_has_nothing_broken(run_dir):
    assert promises.exactly_once(run_dir, {1, 2, 3, 4, 5}) == ([], 0)
    assert promises.lag(run_dir, config()) == ([], 0.0, 0)
    assert promises.numbers_once(run_dir) == []
    assert promises.every_step_trained(run_dir) == []
    assert promises.repeated_steps(run_dir) == (
        0,
        0.0,
    )


def test_a_lost_group_and_one_used_twice_are_told(run_dir):
    broken, lost = promises.exactly_once(run_dir, {4, 5, 6})
    assert broken == ["groups finished and lost: [6]"] and lost == 2
    lines = (
        run_dir.rollouts(1).read_bytes()
        + run_dir.rollouts(2).read_bytes().splitlines(keepends=True)[0]
    )
    write_file(run_dir.rollouts(1), lines)
    broken, _ = promises.exactly_once(run_dir, set())
    assert broken == [
        "batch 1 trains other rollouts than rollouts/000001.jsonl says",
        "groups in several batches: {3: [1, 2]}",
    ]
    run_dir.batch(1).unlink()
    assert promises.exactly_once(run_dir, set())[0][0] == "batches are missing: there are [2]"


def test_lag_repeated_steps_and_missing_lines_are_told(run_dir):
    samples = [make_sample([5], [6], group=9)]
    write_batch(run_dir.batch(3), TrainBatch(step=3, samples=samples), {})
    assert promises.lag(run_dir, config()) == (
        ["a token lags 0 to 2 versions; allowed are 0 to 1"],
        2 / 17,
        2,
    )
    MetricsLog(run_dir.metrics, "trainer").write(1, {"time/step": 3.0})
    Merger(run_dir.metrics).merge()
    assert promises.repeated_steps(run_dir) == (1, 2.0)
    run_dir.weights(4).mkdir()
    with run_dir.metrics.open("ab") as file:
        file.write(run_dir.metrics.read_bytes().splitlines(keepends=True)[0] + b'{"step": 3, "so\n')
    MetricsLog(run_dir.metrics, "trainer").write(2, {"time/step": 3.0})
    assert [line.split(":")[0] for line in promises.numbers_once(run_dir)] == [
        "metrics.jsonl has a torn line",
        "metrics.jsonl has a line 2 times",
        "metrics.jsonl lacks a line of a source",
    ]
    told = promises.every_step_trained(run_dir)
    assert told == [
        "no line of the trainer in metrics.jsonl for steps [3]",
        "version 4 has no batch",
    ]


def test_what_is_left_behind_is_told(run_dir, tmp_path):
    (tmp_path / "tmp").mkdir()
    assert promises.nothing_left(run_dir, tmp_path / "tmp", set(), "nobody") == []
    (tmp_path / "tmp" / "socket").touch()
    # the second: the stop interrupted it
    for name, age_s in ((".000003.tmp", 120), (".000004.tmp", 5)):
        (run_dir.weights_dir / name).mkdir()
        os.utime(run_dir.weights_dir / name, (time.time() - age_s,) * 2)
    word = f"word-{time.time_ns()}"
    with subprocess.Popen(
        ["sleep", "60"], env={"RL_CHAOS": f"{word}:1."}, start_new_session=True
    ) as orphan:
        until(lambda: psutil.Process(orphan.pid).status() == "sleeping")  # it has just begun
        told = promises.nothing_left(run_dir, tmp_path / "tmp", {str(tmp_path / "gone")}, word)
        orphan.kill()
    assert told == [
        f"an orphan is left: {orphan.pid} sleeping sleep 60",
        f"{tmp_path}/tmp/socket is left",
        f"{tmp_path}/weights/.000003.tmp is left",
    ]
