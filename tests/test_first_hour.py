"""A new user's first hour: from a clone to an environment, functions, a resume, a branch and a
model of their own, with real processes.

What is typed and what is written into files stands in README and docs of the clone; only the names
that a page leaves open are put in.
"""

import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import statistics
import subprocess
import sys
import termios
import time
from collections import defaultdict
from pathlib import Path

import pytest

from rl.run_dir.metrics import read_metrics
from tests.test_docs import block_commands, blocks, spans
from tests.test_integration import ours

ROOT = Path(__file__).parents[1]
DEADLINE_S = 900
UV = shutil.which("uv") or sys.executable.replace("python", "uv")


class User:
    """Someone with a terminal in the clone who types nothing but what the pages show."""

    def __init__(self, clone):
        self.clone = clone
        self.env = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PY", "VIRTUAL_ENV", "RL_"))
        }
        self.env |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "120"}

    def page(self, name):
        return self.clone / ("" if name == "README.md" else "docs") / name

    def shown(self, page, beginning, names=None):
        """The first command of a page that begins so; `names` are for what it leaves open."""
        texts = [
            *block_commands(self.page(page)),
            *(span.removeprefix("uv run ") for span in spans(self.page(page))),
        ]
        found = next(
            (text for text in texts if text.removeprefix("uv run ").startswith(beginning)), None
        )
        assert found, f"{page} shows no command `{beginning}`"
        for placeholder, name in (names or {}).items():
            assert placeholder in found, found
            found = found.replace(placeholder, name)
        return found if found.startswith("uv tool ") else "uv run " + found.removeprefix("uv run ")

    def flag(self, page, flag):
        """A flag that a page shows, to be typed behind a command."""
        assert flag.strip() in self.page(page).read_text(), f"{page} does not show {flag}"
        return flag

    def name(self, run):
        """A run as it is typed in the clone."""
        return run.relative_to(self.clone).as_posix()

    def write(self, page, language, part, path):
        """Puts the block of the page in which `part` stands into the file that the page names."""
        text = self.page(page).read_text()
        assert Path(path).name in text, f"{page} does not say what to call {path}"
        (self.clone / path).write_text(
            next(block for block in blocks(text, language) if part in block)
        )

    def types(self, command, code=0):
        """What a command prints, which ends with this exit code."""
        words = shlex.split(command)
        assert words[0] == "uv"
        done = subprocess.run(
            [UV, *words[1:]],
            cwd=self.clone,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def interrupts(self, command, moment):
        """What a command prints in a terminal in which Ctrl-C is pressed at that moment."""
        screen, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (40, 120))
        process = subprocess.Popen(
            [UV, *shlex.split(command)[1:]],
            cwd=self.clone,
            env=self.env,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(terminal)
        printed, pressed, deadline = b"", False, time.monotonic() + DEADLINE_S
        while (more := read_screen(screen)) is not None:
            printed += more
            if not pressed and moment():
                pressed = bool(os.write(screen, b"\x03"))
            if time.monotonic() > deadline:
                process.terminate()  # uv hands it on
                break
        code = process.wait(60)
        os.close(screen)
        text = printed.decode(errors="replace").replace("\r", "")
        assert pressed and code == 130, (
            f"{command}: pressed {pressed}, exit code {code}, and last on the "
            f"screen\n{text[-3000:]}"
        )
        return text


def read_screen(screen):
    """What has come within a moment; None when no process has the terminal open any more."""
    if not select.select([screen], [], [], 0.1)[0]:
        return b""
    try:
        return os.read(screen, 65536)
    except OSError:  # EIO: closed on the other side
        return None


def lines(path):
    # not by splitlines: an answer may have separators of lines that JSON does not escape
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def weights(folder):
    """Tensors by name, as transformers loads them."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def trained_steps(run):
    return sorted(
        step for step, source in read_metrics(run / "metrics.jsonl") if source == "trainer"
    )


@pytest.mark.proof
@pytest.mark.timeout(2400)  # a CPU without bfloat16 takes a quarter of an hour
def test_first_hour(tmp_path):
    clone = tmp_path / "rl"
    shutil.copytree(
        ROOT,
        clone,
        ignore=shutil.ignore_patterns(
            ".git", *(ROOT / ".gitignore").read_text().replace("/", "").split()
        ),
    )
    user = User(clone)
    run = an_environment_of_its_own(user)
    functions_of_its_own(user)
    what_a_run_left(user, run)
    a_branch(user, run)
    assert ours(clone) == []


def an_environment_of_its_own(user):
    """From vf-init to a run that is interrupted and goes on. Returns its directory."""
    user.types(user.shown("environments.md", "uv tool run --from"))
    user.write("environments.md", "python", "def load_environment", "environments/my_env/my_env.py")
    user.write("environments.md", "toml", "./environments/my_env", "my_run.toml")
    described = user.types(user.shown("environments.md", "rl env ./environments/my_env"))
    assert "tasks: train 80, eval 20" in described
    assert "exact" in described
    assert "Which number comes after 0?" in described
    run = user.clone / "outputs" / "my_env-SmolLM2-135M-Instruct-quick"
    quick = user.shown("environments.md", "rl @ my_run.toml --quick") + user.flag(
        "resume.md", " --trainer.checkpoint.interval 1"
    )
    printed = user.interrupts(quick, (run / "batches" / "000001.batch").exists)
    (again,) = re.findall(r"^resume with: (rl .*)$", printed, re.MULTILINE)
    batch = (run / "batches" / "000001.batch").read_bytes()
    assert ours(user.clone) == [] and not (run / "weights" / "000002").exists()
    printed = user.types(f"uv run {again}")
    assert re.search(r"^verdict   trained 2 steps; my_env: .*rewards", printed, re.MULTILINE), (
        printed
    )
    assert trained_steps(run) == [1, 2] and (run / "batches" / "000001.batch").read_bytes() == batch
    evaluations = {step for step, source in read_metrics(run / "metrics.jsonl") if source == "eval"}
    assert evaluations == {0, 2}
    return run


def functions_of_its_own(user):
    """Reward, loss, credit, filter and metrics of docs/functions.md in one run; what they did
    stands in its rollouts."""
    for file in re.findall(
        r"^# (my_\w+\.py)$", user.page("functions.md").read_text(), re.MULTILINE
    ):
        user.write("functions.md", "python", f"# {file}\n", file)
    user.write("functions.md", "toml", "my_credit.py:advantages", "run.toml")
    user.write("environments.md", "json", '"prompt"', "tasks.jsonl")
    user.types(user.shown("functions.md", "rl @ run.toml"))
    run = user.clone / "outputs" / "tasks-SmolLM2-135M-Instruct"
    assert trained_steps(run) == [1, 2]
    groups = defaultdict(list)
    for rollout in [
        *lines(run / "rollouts" / "000001.jsonl"),
        *lines(run / "rollouts" / "000002.jsonl"),
    ]:
        groups[rollout["group_id"]].append(rollout)
        text = rollout["messages"][-1]["content"].strip()
        assert rollout["reward"] == (1.0 if text == "12" else 0.5 if "12" in text else 0.0)
        assert (rollout["metrics"]["characters"], rollout["metrics"]["number"]) == (
            len(text),
            text.isdigit(),
        )
    for group in groups.values():
        rewards = [rollout["reward"] for rollout in group]
        gaps = [reward - statistics.median(rewards) for reward in rewards]
        assert [rollout["advantage"] for rollout in group] == [
            gap if gap > 0 else 0.5 * gap for gap in gaps
        ]
        answers = [rollout["messages"][-1]["content"] for rollout in group]
        # the filter's rule
        assert not any(
            rollout["trained"] for i, rollout in enumerate(group) if answers[i] in answers[:i]
        )
    metrics = read_metrics(run / "metrics.jsonl")
    assert any(metrics[step, "trainer"].get("optim/grad_norm", 0) > 0 for step in (1, 2))
    assert "EQUAL: versions 1-2," in user.types(
        user.shown("commands.md", "rl replay", {"outputs/x": user.name(run)})
    )


def what_a_run_left(user, run):
    """The run that was interrupted: its rollouts, its state, its weights."""
    shown = user.types(user.shown("environments.md", "rl show", {"RUN": user.name(run)}))
    assert shown.count("Which number comes after") >= 16 and "reward" in shown
    state = user.types(
        user.shown("commands.md", "rl doctor outputs/x", {"outputs/x": user.name(run)})
    )
    assert "ok    the run ended well: 2 steps done" in state
    assert "the model of step 2" in user.types(
        user.shown("lora.md", "rl export", {"outputs/x": user.name(run)})
    )
    exported, published = (
        weights(folder) for folder in (user.clone / "model", run / "weights" / "000002")
    )
    assert exported.keys() == published.keys()
    assert all((exported[name] == published[name]).all() for name in published)


def a_branch(user, run):
    """From the first step on with another learning rate."""
    user.types(user.shown("resume.md", "rl branch", {"outputs/x@40": f"{user.name(run)}@1"}))
    branch = user.clone / "outputs" / "y"
    assert trained_steps(branch) == [2]
    assert read_metrics(branch / "metrics.jsonl")[2, "trainer"]["optim/lr"] == 1e-6
    both = {"outputs/x": user.name(run)}
    assert re.search(
        r"trainer.optim.lr +2e-05 +1e-06", user.types(user.shown("commands.md", "rl compare", both))
    )
    assert f"branch of {run} at step 1; trainer.optim.lr: 2e-05 -> 1e-06" in user.types(
        user.shown("resume.md", "rl doctor outputs/y")
    )
