"""TensorBoard event files from the lines of metrics.jsonl. test_run.py has W&B with a run."""

import sys
import time
from types import SimpleNamespace

import pytest
import wandb

from rl.config.run import RLConfig, WandbConfig
from rl.launch.trackers import TensorboardLog, Trackers, WandbLog
from rl.run_dir.paths import RunDir
from rl.system.errors import RunError

LINES = [
    {
        "step": 1,
        "time": 1_790_000_000.5,
        "source": "orchestrator",
        "reward/mean": 0.25,
        "reward/none": None,
    },
    {"step": 1, "time": 1_790_000_001.0, "source": "trainer", "loss/mean": -0.5},
    {"step": 2, "time": 1_790_000_002.0, "source": "orchestrator", "reward/mean": 0.75},
]


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path, tmp_path / "weights")


def scalars(file):
    """Reads an event file as TensorBoard does: records of length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, at, found = file.read_bytes(), 0, {}
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + length])
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
        at += 16 + length
    return {name: sorted(points) for name, points in found.items()}


def test_a_start_writes_all_lines_anew_so_none_is_there_twice(run_dir):
    said: list[str] = []
    for _ in range(2):  # a start, and a resume
        log = Trackers(RLConfig(tensorboard=True), run_dir, said.append)
        log.send(LINES[:2])
        log.send(LINES[2:])
        log.close(0)
    (file,) = run_dir.tensorboard.iterdir()
    assert scalars(file) == {"reward/mean": [(1, 0.25), (2, 0.75)], "loss/mean": [(1, -0.5)]}
    assert said == []
    assert Trackers(RLConfig(), run_dir, said.append).left == []


def test_a_step_that_is_trained_again_is_there_once(run_dir):
    log = Trackers(RLConfig(tensorboard=True), run_dir, print)
    log.send([*LINES, LINES[2] | {"reward/mean": 0.5}])
    log.send(
        [LINES[1], {"step": 2, "time": 1_790_000_003.0, "source": "trainer", "loss/mean": 0.5}]
    )
    log.close(0)
    (file,) = run_dir.tensorboard.iterdir()
    assert scalars(file) == {
        "reward/mean": [(1, 0.25), (2, 0.75)],
        "loss/mean": [(1, -0.5), (2, 0.5)],
    }


def test_each_of_several_evaluations_is_sent_to_wandb_once(run_dir):
    log = WandbLog(RLConfig(wandb=WandbConfig(rollouts=0)), run_dir)
    sent: list[dict[str, object]] = []
    log.run = SimpleNamespace(log=sent.append)
    evals = [
        {"step": 10, "time": 1.0, "source": "eval", f"eval/{name}/reward_mean": 0.5}
        for name in ("a", "b")
    ]
    log.send(evals[:1])
    log.send(evals[1:])
    log.send(evals)
    assert sent == [{"step": 10, f"eval/{name}/reward_mean": 0.5} for name in ("a", "b")]


COSTS = [
    {"step": step, "time": 1_790_000_000.5 + seconds, "source": "rl", "cost/machine_s": seconds}
    for step, seconds in ((1, 1.0), (2, 2.0), (2, 2.25))
]


def test_totals_at_the_end_of_a_run_are_sent_to_wandb_once_though_their_step_was(run_dir):
    """Regression: the total there was that of the last step."""
    config, sent = RLConfig(wandb=WandbConfig()), list[dict[str, object]]()
    for _ in range(2):  # a start, and a resume
        log = WandbLog(config, run_dir)
        log.run = SimpleNamespace(log=sent.append, finish=lambda exit_code: None)
        log.send([*LINES, *COSTS[:2]])
        log.send(COSTS[2:])
        log.close(0)
    totals = [(line["step"], line["cost/machine_s"]) for line in sent if "cost/machine_s" in line]
    assert totals == [(1, 1.0), (2, 2.0), (2, 2.25)]
    assert len(sent) == len(LINES) + len(COSTS)


def test_totals_that_an_earlier_version_sent_by_their_steps_are_not_sent_again(run_dir):
    run_dir.wandb.write_text('{"id": "x", "sent": {"rl": 2, "trainer": 2}}')
    log, sent = WandbLog(RLConfig(wandb=WandbConfig()), run_dir), list[dict[str, object]]()
    log.run = SimpleNamespace(log=sent.append)
    log.send(COSTS)
    later = {"step": 3, "time": time.time() + 9.0, "source": "rl", "cost/machine_s": 3.0}
    log.send([*COSTS, later])
    assert sent == [{"step": 3, "cost/machine_s": 3.0}]


def test_totals_at_the_end_of_a_run_are_in_event_files(run_dir):
    log = Trackers(RLConfig(tensorboard=True), run_dir, print)
    log.send(COSTS)
    log.close(0)
    (file,) = run_dir.tensorboard.iterdir()
    assert scalars(file) == {"cost/machine_s": [(1, 1.0), (2, 2.0), (2, 2.25)]}


def test_a_wandb_that_does_not_answer_is_waited_for_a_minute_and_named_with_the_remedy(
    run_dir, monkeypatch
):
    """Regression: a run that had ended waited for W&B until Ctrl-C, and its first process for a
    dead host."""
    asked = []

    def finish(exit_code):
        raise TimeoutError("Timed out finishing run.")

    run = SimpleNamespace(define_metric=lambda *_, **__: None, log=lambda _: None, finish=finish)
    monkeypatch.setattr(wandb, "init", lambda **given: asked.append(given) or run)
    for name, value in {"WANDB_PROJECT": "shell's", "WANDB_NAME": "named there"}.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    trackers = Trackers(RLConfig(name="x", wandb=WandbConfig(rollouts=0)), run_dir, said.append)
    trackers.send(LINES)
    trackers.close(0)
    limits = asked[0]["settings"]
    assert (limits.init_timeout, limits.finish_timeout, limits.finish_timeout_raises) == (
        20,
        60,
        True,
    )
    assert (asked[0]["project"], asked[0]["name"]) == ("shell's", "named there")
    (line,) = said
    assert "the run continues: TimeoutError: Timed out finishing run.; `wandb sync " in line
    assert line.endswith(
        f"`wandb sync {run_dir.root / 'wandb' / 'latest-run'}` sends what it has not got"
    )
    again = Trackers(
        RLConfig(name="x", wandb=WandbConfig(project="p", name="n")), run_dir, said.append
    )
    assert (asked[1]["project"], asked[1]["name"]) == ("p", "n")
    assert asked[1]["id"] == asked[0]["id"]
    assert isinstance(again.left[0], WandbLog)
    assert again.left[0].sent == {
        "orchestrator": 2,
        "trainer": 1,
    }


def test_without_the_package_the_run_does_not_start(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(RunError, match="uv pip install tensorboardX"):
        TensorboardLog(run_dir)
