"""What the user sees, line by line, from a run directory that is written here."""

import io
import json
import os

from rl.config.command_line import build, parse_args
from rl.launch.console import Console
from rl.run_dir.metrics import MetricsLog, MetricsReader
from rl.run_dir.status import Phase, RoleStatus, write_status

TRAINER = {
    "loss/mean": -0.01234,
    "entropy/mean": 1.25,
    "mismatch_kl/mean": 1.2e-5,
    "optim/grad_norm": 0.4567,
    "perf/tokens_per_s": 1234.4,
    "time/step": 12.34,
    "time/wait_for_batch": 4.06,
    "time/publish_weights": 0.3,
}


class Screen:
    """A console over a run directory that the test writes as the processes would."""

    def __init__(self, tmp_path, *args: str, out=None):
        base = ["--orchestrator.environment.id", "e", "--name", "r", "--output_dir", str(tmp_path), "--max_steps", "9"]
        self.config = build(parse_args([*base, *args]))
        self.run_dir = self.config.run_dir
        self.out = out or io.StringIO()
        self.reader = MetricsReader(self.run_dir.metrics)
        self.open()

    def open(self) -> None:
        self.console = Console(self.config, self.run_dir, self.out)
        self.reader.new()

    def write(self, step: int, source: str, metrics: dict) -> None:
        MetricsLog(self.run_dir.metrics, source).write(step, metrics)

    def look(self) -> str:
        """What this look prints."""
        start = self.out.tell()
        self.console.update(self.reader.new())
        self.out.seek(start)
        return self.out.read()


def test_a_step_appears_when_both_sides_have_reported(tmp_path):
    screen = Screen(tmp_path, "--orchestrator.show_rollout_every", "0")
    screen.write(1, "orchestrator", {"reward/mean": 0.21875, "lag/mean": 0.5})
    assert screen.look() == ""
    screen.write(1, "trainer", TRAINER)
    assert screen.look() == (
        "  step  reward    eval      loss  entropy  mismatch    grad   lag   tok/s    time  of that waiting\n"
        "     1   0.219       -   -0.0123    1.250   1.2e-05   0.457  0.50    1234    12.3  4.1 wait_for_batch\n"
    )
    screen.write(2, "trainer", {"loss/mean": float("nan")})
    screen.write(0, "eval", {"eval/e/reward_mean": 0.25})
    screen.write(2, "orchestrator", {"reward/mean": 1.0, "lag/mean": 0})
    assert screen.look().endswith("     2   1.000   0.250         -        -         -       -  0.00       -       -\n")
    assert screen.look() == ""


def test_a_repeated_line_is_not_printed_again(tmp_path):
    screen = Screen(tmp_path, "--orchestrator.show_rollout_every", "0")
    for _ in range(2):
        screen.write(1, "orchestrator", {"reward/mean": 0.5})
        screen.write(1, "trainer", TRAINER)
    assert screen.look().count("\n") == 2
    screen.write(1, "trainer", TRAINER | {"loss/mean": 9.0})
    assert screen.look() == ""
    assert screen.console.lines[1, "trainer"]["loss/mean"] == 9.0


def test_after_a_resume_only_new_steps_are_printed(tmp_path):
    screen = Screen(tmp_path, "--orchestrator.show_rollout_every", "0")
    for step in (1, 2):
        screen.write(step, "orchestrator", {"reward/mean": 0.5})
        screen.write(step, "trainer", TRAINER)
    screen.write(0, "eval", {"eval/e/reward_mean": 0.5})
    screen.write(3, "orchestrator", {"reward/mean": 0.75})
    screen.open()
    screen.write(2, "trainer", TRAINER)  # replayed
    screen.write(3, "trainer", TRAINER)
    assert [line.split()[:2] for line in screen.look().splitlines()] == [["step", "reward"], ["3", "0.750"]]


def test_evals_are_printed_as_they_come(tmp_path):
    screen = Screen(tmp_path)
    screen.write(10, "eval", {"eval/gsm8k/reward_mean": 0.4123, "eval/gsm8k/pass@4": 0.6, "eval/gsm8k/errored": 0.0, "time/eval": 3})
    screen.write(10, "eval", {"eval/math/reward_mean": 0.1})
    assert screen.look() == "  eval at version 10: gsm8k 0.412 (pass@4 0.600)\n  eval at version 10: math 0.100\n"
    assert {"eval/gsm8k/reward_mean", "eval/math/reward_mean"} < set(screen.console.lines[10, "eval"])


def test_what_is_waited_for_is_said_when_it_changes(tmp_path):
    screen = Screen(tmp_path, "--orchestrator.show_rollout_every", "0")

    def enter(name: str, phase: Phase, step: int | None = None, detail: str = "") -> None:
        write_status(screen.run_dir.status(name), RoleStatus(phase=phase, step=step, detail=detail, since=0.0))

    enter("inference", Phase.LOADING_MODEL)
    enter("trainer", Phase.WAITING_FOR_BATCH, 1, "loading environments")
    assert screen.look() == "  inference: loading the model\n  trainer: waiting for batch 1: loading environments\n"
    enter("trainer", Phase.WAITING_FOR_BATCH, 1, "filling batch 1")
    assert screen.look() == ""
    enter("trainer", Phase.WAITING_FOR_BATCH, 2)
    assert screen.look() == ""
    enter("inference", Phase.SERVING)
    assert screen.look() == "  inference: serving\n"
    screen.write(1, "orchestrator", {"reward/mean": 0.5})
    screen.write(1, "trainer", TRAINER)
    screen.look()
    enter("inference", Phase.STARTING)
    assert screen.look() == ""


def test_a_rollout_is_shown_in_full(tmp_path):
    screen = Screen(tmp_path, "--orchestrator.show_rollout_every", "2")
    skipped = {
        "env": "e",
        "group_id": 7,
        "rollout_id": 0,
        "messages": [{"role": "user", "content": "no line ends here:\u2028 \x85 \x0c"}],
        "reward": 0.0,
        "advantage": 0.0,
        "stop": "length",
        "trained": False,
    }
    messages = [
        {"role": "user", "content": "1+1?\nBe brief. [bold]"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": [{"type": "text", "text": "2"}]},
    ]
    shown = skipped | {"rollout_id": 3, "messages": messages, "reward": 1.0, "advantage": 0.5, "stop": "stop", "trained": True}
    for step in (1, 2, 3):
        screen.run_dir.rollouts(step).parent.mkdir(exist_ok=True, parents=True)
        screen.run_dir.rollouts(step).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (skipped, shown)))
        screen.write(step, "orchestrator", {"reward/mean": 0.5})
        screen.write(step, "trainer", TRAINER)
    said = screen.look()
    assert said.count("--- a rollout of step") == 2 and "step 3 (" not in said
    assert said.endswith(
        "  --- a rollout of step 2 (e, group 7, rollout 3): reward 1.000, advantage +0.500, stop: stop\n"
        "  user: 1+1?\n      Be brief. [bold]\n"
        '  assistant: [{"name": "add"}]\n'
        '  tool: [{"type": "text", "text": "2"}]\n'
        "  ---\n" + said.splitlines(keepends=True)[-1]
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_lines_scroll_above_a_bar(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "COLUMNS", "150")
    screen = Screen(tmp_path, "--orchestrator.show_rollout_every", "0", out=Terminal())
    status = RoleStatus(phase=Phase.FILLING_BATCH, step=2, since=0.0, batch=2, batch_done=24, batch_size=64)
    write_status(screen.run_dir.status("orchestrator"), status)
    screen.write(1, "orchestrator", {"reward/mean": 0.5})
    screen.write(1, "trainer", TRAINER)
    said = screen.look()
    assert "     1   0.500       -   -0.0123" in said and "step 1/9, batch 2 24/64" in said and "orchestrator: filling batch 2" in said
    screen.console.close()
    screen.console.say("plain again")
    assert screen.out.getvalue().endswith("plain again\n") and "\x1b[?25h" in screen.out.getvalue()
