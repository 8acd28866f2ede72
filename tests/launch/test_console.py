"""The console output, line by line, for a run directory that the tests write."""

import errno
import io
import os
import re
import time

import pytest

from rl.diagnosis.rollouts import messages_text
from rl.launch.console import COLUMNS, Console, alike, cell, phase_text
from rl.run_dir.metrics import PASS, Merger, MetricsLog, MetricsReader
from rl.run_dir.status import Phase, RoleStatus, write_status
from tests import jsonl
from tests.flags import made

TRAINER = {
    "loss/mean": -0.01234,
    "entropy/mean": 1.25,
    "mismatch_kl/mean": 1.2e-5,
    "lag_kl/mean": 3.4e-3,
    "optim/grad_norm": 0.4567,
    "perf/tokens_per_s": 1234.4,
    "time/step": 12.34,
    "time/wait_for_batch": 4.06,
    "time/publish_weights": 0.3,
}


EVAL = "--orchestrator.eval.interval 2"
"""An evaluation named `e`."""
QUIET = "--orchestrator.show_rollout_every 0"


class Screen:
    """A console on a run directory that the test writes in place of the processes."""

    def __init__(self, tmp_path, *args, out=None):
        base = f"--orchestrator.environment.id e --name r --output_dir {tmp_path} --max_steps 9"
        self.config = made(base, *args)
        self.run_dir = self.config.run_dir
        self.out = out or io.StringIO()
        self.reader = MetricsReader(self.run_dir.metrics)
        self.open()

    def open(self):
        Merger(self.run_dir.metrics).merge()
        self.console = Console(self.config, self.run_dir, self.out)
        self.reader.new()

    def write(self, step, source, metrics):
        MetricsLog(self.run_dir.metrics, source).write(step, metrics)

    def step(self, step, **metrics):
        """Writes the lines of a step; `metrics` are more of the orchestrator's."""
        self.write(step, "orchestrator", {"reward/mean": 0.5} | metrics)
        self.write(step, "trainer", TRAINER)

    def look(self):
        """Returns what this update prints."""
        start = self.out.tell()
        Merger(self.run_dir.metrics).merge()
        self.console.update(self.reader.new())
        self.out.seek(start)
        return self.out.read()


def test_a_step_appears_when_both_sides_have_reported(tmp_path):
    screen = Screen(tmp_path, QUIET, EVAL)
    screen.write(1, "orchestrator", {"reward/mean": 0.21875, "lag/mean": 0.5})
    assert screen.look() == ""
    screen.write(1, "trainer", TRAINER)
    assert screen.look() == (
        "  step  reward    eval      loss  entropy  mismatch    grad   lag   lag kl   tok/s  "
        "  time    left  of that waiting\n"
        "     1   0.219       -   -0.0123    1.250   1.2e-05   0.457  0.50  3.4e-03    1234  "
        "  12.3       -  4.1 wait_for_batch\n"
    )
    screen.write(2, "trainer", {"loss/mean": float("nan")})
    screen.write(0, "eval", {"eval/e/reward_mean": 0.25})
    screen.write(2, "orchestrator", {"reward/mean": 1.0, "lag/mean": 0})
    assert screen.look().endswith(
        "     2   1.000   0.250         -        -         -       -  0.00        -       -  "
        "     -       -\n"
    )
    assert screen.look() == ""


def test_repeated_lines_are_not_printed_again_nor_steps_from_before_a_resume(tmp_path):
    screen = Screen(tmp_path, QUIET)
    for step in (1, 1, 2):
        screen.step(step)
    assert screen.look().count("\n") == 3
    screen.write(1, "trainer", TRAINER | {"loss/mean": 9.0})
    assert screen.look() == ""
    screen.write(0, "eval", {"eval/e/reward_mean": 0.5})
    screen.write(3, "orchestrator", {"reward/mean": 0.75})
    screen.open()
    screen.write(2, "trainer", TRAINER)  # replayed
    screen.write(3, "trainer", TRAINER)
    assert [line.split()[:2] for line in screen.look().splitlines()] == [
        ["step", "reward"],
        ["3", "0.750"],
    ]


def test_a_long_run_is_not_kept_in_memory(tmp_path, monkeypatch):
    screen = Screen(tmp_path, "--orchestrator.show_rollout_every 0 --max_steps 1000", EVAL)
    screen.write(90, "eval", {"eval/e/reward_mean": 0.25})
    screen.write(100, "eval", {"eval/e/reward_mean": 0.75})
    for step in range(1, 301):
        screen.step(step)
        said = screen.look()
    assert not screen.console.lines
    assert list(screen.console.evals) == [100]
    assert len(screen.console.paces) == 10
    assert said.split()[:3] == ["300", "0.500", "0.750"]
    assert said.endswith(" 12.3   2.4 h  4.1 wait_for_batch\n")
    monkeypatch.setattr("rl.launch.console.NEWEST_BYTES", 10_000)  # of 80,000
    screen.open()
    assert screen.console.shown == 300 and not screen.console.lines
    screen.write(300, "trainer", TRAINER)  # replayed
    screen.step(301)
    assert [line.split()[:3] for line in screen.look().splitlines()] == [
        ["step", "reward", "eval"],
        ["301", "0.500", "0.750"],
    ]


def test_evals_are_printed_as_they_come(tmp_path):
    screen = Screen(tmp_path)
    screen.write(
        10,
        "eval",
        {
            "eval/gsm8k/reward_mean": 0.4123,
            "eval/gsm8k/pass@4": 0.6,
            "eval/gsm8k/errored": 0.0,
            "time/eval": 3,
        },
    )
    screen.write(10, "eval", {"eval/math/reward_mean": 0.1})
    assert (
        screen.look()
        == f"  eval at version 10: gsm8k 0.412 (pass@4 0.600)\n  {PASS}\n  eval at version 10: "
        "math 0.100\n"
    )
    screen.write(20, "eval", {"eval/gsm8k/reward_mean": 0.5, "eval/gsm8k/pass@4": 0.7})
    assert screen.look() == "  eval at version 20: gsm8k 0.500 (pass@4 0.700)\n"


def test_the_time_left_ends_with_the_recorded_rollouts(tmp_path):
    """Regression: `left 16 min` of a file with two batches."""
    screen = Screen(tmp_path, "--max_steps 100")
    write_status(screen.run_dir.status("trainer"), RoleStatus(phase=Phase.TRAINING, max_steps=100))
    write_status(
        screen.run_dir.status("orchestrator"), RoleStatus(phase=Phase.FILLING_BATCH, max_steps=3)
    )
    for step in (1, 2):
        screen.step(step)
    seconds = TRAINER["time/step"]
    assert f" {seconds:.0f} s" in screen.look().splitlines()[-1]


def test_the_column_of_evaluations_is_one_of_them(tmp_path):
    """A mean over the evaluations of a version would rise whenever only the easy one, with the
    shorter interval, ran."""
    evals = tmp_path / "evals.toml"
    evals.write_text(
        '[[orchestrator.eval]]\nname = "hard"\ninterval = 3\n[[orchestrator.eval]]\nname = '
        '"easy"\ninterval = 2\n'
    )
    screen = Screen(tmp_path, "--orchestrator.show_rollout_every 0 @", str(evals))
    screen.write(0, "eval", {"eval/hard/reward_mean": 0.125, "eval/easy/reward_mean": 0.5})
    shown = []
    for step in range(1, 5):
        if step % 2 == 0:
            screen.write(step, "eval", {"eval/easy/reward_mean": 0.75})
        if step == 3:
            screen.write(step, "eval", {"eval/hard/reward_mean": 0.25})
        screen.step(step)
        shown.append(screen.look().splitlines()[-1].split()[:3])
    assert shown == [
        ["1", "0.500", "0.125"],
        ["2", "0.500", "0.125"],
        ["3", "0.500", "0.250"],
        ["4", "0.500", "0.250"],
    ]
    screen.open()
    assert screen.console.evals == {3: 0.25}
    screen.console.introduce()
    assert (
        screen.out.getvalue().splitlines()[-1] == "  column eval: hard, the first of 2 evaluations"
    )


def test_what_is_waited_for_is_said_when_it_changes(tmp_path):
    screen = Screen(tmp_path, QUIET)

    def enter(name, phase, step=None, detail=""):
        write_status(
            screen.run_dir.status(name),
            RoleStatus(phase=phase, step=step, detail=detail, since=0.0),
        )

    enter("inference", Phase.LOADING_MODEL)
    enter("trainer", Phase.WAITING_FOR_BATCH, 1, "loading environments")
    assert (
        screen.look()
        == "  inference: loading the model\n  trainer: waiting for batch 1: loading environments\n"
    )
    enter("trainer", Phase.WAITING_FOR_BATCH, 1, "filling batch 1")
    assert screen.look() == ""
    enter("trainer", Phase.WAITING_FOR_BATCH, 2)
    assert screen.look() == ""
    enter("inference", Phase.SERVING)
    assert screen.look() == "  inference: serving\n"
    screen.step(1)
    screen.look()
    enter("inference", Phase.STARTING)
    assert screen.look() == ""


def test_a_rollout_is_shown_in_full(tmp_path):
    screen = Screen(tmp_path, "--orchestrator.show_rollout_every 2")
    skipped = {
        "env": "e",
        "group_id": 7,
        "rollout_id": 0,
        "reward": 0.0,
        "advantage": 0.0,
        "trained": False,
    }
    skipped |= {"messages": [{"role": "user", "content": "no line ends here:\u2028 \x85 \x0c"}]}
    messages = [
        {"role": "user", "content": "1+1?\nBe brief. [bold]"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": [{"type": "text", "text": "\x1b]0;title\x07\r2\u202e"}]},
        {"role": "assistant", "content": "x" * 20_000},
    ]
    shown = skipped | {
        "rollout_id": 3,
        "messages": messages,
        "reward": 1.0,
        "advantage": 0.5,
        "trained": True,
        "why": None,
    }
    for step in (1, 2, 3):
        screen.run_dir.rollouts(step).parent.mkdir(exist_ok=True, parents=True)
        screen.run_dir.rollouts(step).write_text(jsonl.text(skipped, shown))
        screen.step(step)
    said = screen.look()
    assert said.count("--- a rollout of step") == 2 and "step 3," not in said
    assert said.endswith(
        "  --- a rollout of step 2, e, group 7, rollout 3\n"
        "    reward 1.000, advantage +0.500, trained\n"
        "    finished\n"
        "  user: 1+1?\n      Be brief. [bold]\n"
        '  assistant: calls add({"a": 1})\n'
        "  tool: \\x1b]0;title\\x07\\r2\\u202e\n"
        f"  assistant: {'x' * 489}[... 19,011 characters ...]{'x' * 500}\n"
        "  ---\n" + said.splitlines(keepends=True)[-1]
    )
    screen.run_dir.rollouts(4).write_text("no JSON\n")
    screen.step(4)
    assert f"warning: {screen.run_dir.rollouts(4)}:1: not JSON" in screen.look()


def test_of_a_long_prompt_the_question_is_shown_and_what_followed():
    """Worked examples are also assistant messages: a mark shows where the policy's own output
    begins."""
    examples = [
        {"role": role, "content": f"example {i}"}
        for i in range(6)
        for role in ("user", "assistant")
    ]
    own = [
        {"role": role, "content": f"own {i}"} for i in range(5) for role in ("assistant", "user")
    ]
    said = messages_text(
        [*examples, {"role": "user", "content": "the question"}, *own], 13, is_short=True
    )
    assert said.splitlines() == [
        "user: example 0",
        "[... 11 messages ...]",
        "user: the question",
        "[the prompt ends here]",
        "assistant: own 0",
        "user: own 0",
        "assistant: own 1",
        "user: own 1",
        "[... 2 messages ...]",
        "assistant: own 3",
        "user: own 3",
        "assistant: own 4",
        "user: own 4",
    ]


def test_failed_rollouts_are_said_on_the_line_of_their_step(tmp_path):
    screen = Screen(tmp_path, QUIET)
    one = {
        "reward/mean": 0.5,
        "reward/e/mean": 0.5,
        "rollouts/e/finished": 8,
        "rollouts/e/trained": 4,
        "rollouts/e/failed_reward": 2,
    }
    more = {
        "rollouts/f/finished": 4,
        "rollouts/f/trained": 0,
        "rollouts/f/failed_worker": 4,
        "rollouts/g/finished": 0,
    }
    more |= {"rollouts/g/trained": 0, "env/g/quarantined": 1}
    for step, metrics in ((1, one), (2, one | more)):
        screen.write(step, "orchestrator", metrics)
        screen.write(step, "trainer", TRAINER)
    lines = screen.look().splitlines()
    assert lines[1].endswith("4.1 wait_for_batch  25% failed")
    assert lines[2].endswith(
        "4.1 wait_for_batch  e 0.50, 25% failed  f -, 100% failed, none trained  g -, lost"
    )
    screen.write(2, "eval", {"eval/e/reward_mean": 0.25, "eval/e/errored": 0.5})
    assert screen.look() == "  eval at version 2: e 0.250, 50% failed\n"


def test_short_batches_and_lengths_that_end_many_rollouts_are_said_on_the_line_and_explained_once(
    tmp_path,
):
    screen = Screen(
        tmp_path,
        "--orchestrator.show_rollout_every 0 --orchestrator.sampling.max_tokens 4",
    )
    for step, missing, cut, long in ((1, 0, 0.2, 0.0), (2, 48, 1.0, 0.0), (3, 8, 0.5, 0.25)):
        more = {
            "rollouts/missing": missing,
            "rollouts/finished": 192,
            "rollouts/truncated": cut,
            "rollouts/overlong": long,
        }
        screen.step(step, **more)
    lines = screen.look().splitlines()
    assert lines[1].endswith("4.1 wait_for_batch")
    assert lines[2].endswith("  short: 16 of 64  100% cut off")
    assert len(lines) == 7
    limit = "orchestrator.sampling.max_tokens = 4"
    assert (
        lines[3]
        == f"  step 2: 100% of its rollouts had an answer cut off at {limit} (rollouts/truncated)"
    )
    assert lines[4].startswith("  step 2 trained a short batch: too few of the 192 rollouts")
    assert lines[4].endswith("(max_lag = 1)")
    assert "orchestrator.max_refill = 3" in lines[4]
    assert lines[5].endswith("  short: 56 of 64  50% cut off  25% overlong")
    assert lines[6].startswith("  step 3: 25% of its rollouts ended")
    assert "model.max_model_len = " in lines[6]


def test_the_first_lines_say_what_the_run_is(tmp_path, monkeypatch):
    def said(*args):
        screen = Screen(tmp_path, *args)
        screen.console.introduce()
        return screen.out.getvalue().splitlines()

    monkeypatch.chdir(tmp_path)
    model = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert said() == [
        f"r: {model} on e",
        "  9 steps of 64 rollouts (8 groups of 8), max_lag 1, in r",
    ]
    assert said("--orchestrator.batch_size 60")[1] == (
        "  9 steps of 64 rollouts (8 groups of 8; batch_size = 60 is rounded up to whole "
        "groups), max_lag 1, in r"
    )
    monkeypatch.chdir("/")
    envs = "[{id = 'e'}, {id = 'f', group_size = 4}]"
    assert said("--orchestrator.environment", envs) == [
        f"r: {model} on e, f",
        "  9 steps of 64 rollouts or a few more (groups of 4, 8; batch_size = 64 is rounded "
        "up to whole groups), max_lag 1, in " + str(tmp_path / "r").removeprefix("/"),
    ]
    assert said("--sft.dataset x.jsonl --sft.epochs 2")[1].startswith(
        "  2 epochs of 64 examples a step, in "
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def terminal(tmp_path, monkeypatch, width, height=24, *args):
    monkeypatch.setitem(os.environ, "COLUMNS", str(width))
    monkeypatch.setitem(os.environ, "LINES", str(height))
    screen = Screen(tmp_path, QUIET, *args, out=Terminal())
    since = time.time() - 90
    statuses = {
        "inference": RoleStatus(phase=Phase.SERVING, since=since),
        "orchestrator": RoleStatus(
            phase=Phase.FILLING_BATCH, step=13, since=since, batch=13, batch_done=24, batch_size=64
        ),
        "trainer": RoleStatus(
            phase=Phase.WAITING_FOR_BATCH, step=13, detail="filling\x1b batch 13", since=since
        ),
    }
    for name, status in statuses.items():
        write_status(screen.run_dir.status(name), status)
    return screen


@pytest.mark.parametrize("width", [60, *range(74, 201, 21)])
def test_everything_fits_a_terminal_of_any_width(tmp_path, monkeypatch, width):
    screen = terminal(tmp_path, monkeypatch, width, 24, "--max_steps 40")
    screen.console.introduce()
    for step in (11, 12):
        rewards = {f"reward/environment-{name}/mean": 0.25 for name in "abc"}
        screen.write(
            step,
            "orchestrator",
            {"reward/mean": 0.5, "lag/mean": 1.5, "rollouts/missing": 48, **rewards},
        )
        screen.write(step, "trainer", TRAINER)
    screen.write(12, "eval", {f"eval/environment-{name}/reward_mean": 0.5 for name in "abcdefgh"})
    said = ANSI.sub("", screen.look())
    # a path is not cut
    table = [line for line in said.splitlines() if line != "  " + str(tmp_path / "r")]
    assert all(len(line) <= width for line in table), max(table, key=len)
    heading, row = (
        next(line for line in table if line.startswith(start)) for start in ("  step", "    12")
    )
    shown = heading.removesuffix("of that waiting").split()
    assert shown[:3] == ["step", "reward", "eval"]
    assert {"time", "left"} <= set(shown)
    assert len(row.split()) >= len(shown)
    assert ("mismatch" in shown) == (width >= 82) and ("loss" in shown) == (width >= 109)
    assert "  4.1 wait_for_batch" in row
    assert "short: 16 of 64" in said
    assert "environment-c 0.25" in said
    assert "…" not in said
    assert "batch 13 24/64" in said and "orchestrator: filling batch 13 (90 s)" in said
    assert "trainer: waiting for batch 13: filling\\x1b batch 13 (90 s)" in said
    assert "━" in said and "step 12/40" in said  # the bar
    screen.console.close()
    screen.console.say("plain again")
    assert screen.out.getvalue().endswith("plain again\n") and "\x1b[?25h" in screen.out.getvalue()


def test_the_time_that_is_left_is_by_the_pace_without_the_first_step(tmp_path):
    screen = Screen(tmp_path, "--orchestrator.show_rollout_every 0 --max_steps 1000")
    for step, seconds in enumerate([300.0, 10.0, 10.0, 40.0], start=1):
        screen.write(step, "orchestrator", {"reward/mean": 0.5})
        screen.write(step, "trainer", {"time/step": seconds})
    ends = [line.split()[-3:] for line in screen.look().splitlines()[1:]]
    assert [" ".join(words) for words in ends[1:]] == [
        "10.0 2.8 h",
        "10.0 2.8 h",
        "40.0 2.8 h",
    ]
    assert ends[0][1:] == ["300.0", "-"]


@pytest.mark.parametrize("width", [1, 7, 20, 40])
def test_a_tiny_terminal_does_not_end_the_run(tmp_path, monkeypatch, width):
    screen = terminal(tmp_path, monkeypatch, width, 2)
    screen.console.introduce()
    for step in (1, 2):
        screen.write(step, "orchestrator", {"reward/mean": 0.5, "rollouts/missing": 8})
        screen.write(step, "trainer", TRAINER)
    assert "     2" in screen.look()


def test_costly_checkpoints_are_warned_of_once_where_their_interval_is_the_users(tmp_path):
    screen = Screen(tmp_path, "--trainer.checkpoint.interval 10")
    screen.write(
        1, "trainer", TRAINER | {"time/checkpoint_cost": 30.5, "time/checkpoint_fraction": 0.05}
    )
    assert "warning" not in screen.look()
    costly = TRAINER | {"time/checkpoint_cost": 305.2, "time/checkpoint_fraction": 0.312}
    for step in (2, 3):
        screen.write(step, "trainer", costly)
    assert screen.look() == (
        "warning: step 2: checkpoints are being written 31% of the time (305 s each): "
        "trainer.checkpoint.interval = 10 is obeyed; "
        "a larger one, or none (trainer.checkpoint.interval_s), costs less\n"
    )
    by_seconds = Screen(tmp_path)
    by_seconds.write(4, "trainer", costly)
    assert "warning" not in by_seconds.look()


def test_a_disagreement_over_truncation_that_the_trainer_does_not_know_of_is_told_as_that(tmp_path):
    line = TRAINER | {f"parity/{name}": 0.1 for name in ("tokens", "mean", "max", "kl")}
    for kept, is_told in ((0, True), (512, False)):
        screen = Screen(
            tmp_path / str(kept), f"--orchestrator.sampling.top_p 0.8 --trainer.max_kept {kept}"
        )
        screen.write(1, "trainer", line | {"parity/agrees": 0.0})
        warning = screen.look()
        assert warning.startswith("warning: step 1: trainer and inference disagree on 0 tokens")
        assert ("; sampling is truncated, which the trainer does not know of" in warning) == is_told


def test_a_full_disk_behind_the_output_costs_lines_and_not_the_run(tmp_path):
    """Regression: `rl > log` ended with an OSError."""

    class Full(io.StringIO):
        full = True

        def write(self, text):
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    screen = Screen(tmp_path, out=Full())
    screen.console.say("lost")
    screen.console.say("lost")
    screen.out.full = False
    screen.console.say("back")
    assert screen.out.getvalue().splitlines() == [
        "(2 lines could not be written here; is the disk full?)",
        "back",
    ]


def test_each_server_of_a_cluster_and_the_machines_that_a_trainer_waits_for_are_shown(tmp_path):
    screen = Screen(tmp_path, "--cluster.nodes 4 --cluster.trainer_nodes 1")
    now = time.time()
    phases = {1: Phase.SERVING, 2: Phase.LOADING_MODEL, 3: Phase.SERVING}
    statuses = {
        f"inference-node{index}": RoleStatus(phase=phase, since=now - 10 * index)
        for index, phase in phases.items()
    }
    statuses["trainer-launcher"] = RoleStatus(phase=Phase.WAITING_FOR_RANKS, detail="machines 0")
    for name, status in statuses.items():
        write_status(screen.run_dir.status(name), status)
    assert screen.look().splitlines() == [
        "  inference-node1: serving",
        "  inference-node2: loading the model",
        "  inference-node3: serving",
        "  trainer: waiting for the other ranks of the trainer: machines 0",
    ]
    shown = [phase_text(name, status, now) for name, status in alike(statuses).items()]
    assert shown[:2] == [
        "inference-node1, 3: serving (10 s)",
        "inference-node2: loading the model (20 s)",
    ]


@pytest.mark.parametrize("value", [131250.438, 1e30, None])
def test_numbers_never_run_into_their_neighbours(value):
    """Regression: five digits before the point filled their column, and joined the one before."""
    for column in COLUMNS:
        text = cell({column.source: {column.metric: value}}, column) if column.spec else " -"
        assert text[0] == " " and len(text) <= column.width + 2, column
        if value and column.spec:
            assert float(text) == pytest.approx(value, rel=0.4), column
