"""`rl show`: which rollouts it prints, what it says where there are none, and the pager."""

import os
import pty

import pytest

from rl.commands import show
from rl.run_dir.files import write_file
from rl.run_dir.paths import RunDir
from rl.wire.batch_file import write_rollouts
from rl.wire.rollouts import Group, Rollout, encoded
from tests import jsonl
from tests.commands.driver import called
from tests.diagnosis import test_rollouts
from tests.orchestrator.made import turn


def row(step, group, reward, why=None):
    said = [{"role": "assistant", "content": f"\x1b[1mgroup {group}"}]
    about = {"step": step, "env": "adder", "task": group, "messages": said}
    return test_rollouts.row(group, reward, why, **about, metrics={"m": -reward})


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The directory of a run of two steps, under outputs/ of the current one."""
    root = tmp_path / "outputs" / "x"
    run_dir = RunDir(root, root / "weights")
    for step, rows in {
        1: [row(1, 0, 0.5), row(1, 1, 0.0, "no_signal")],
        2: [row(2, 2, 1.0), row(2, 3, 0.25)],
    }.items():
        write_rollouts(run_dir.rollouts(step), jsonl.text(*rows).encode())
    waiting = Rollout(
        turns=[turn()], reward=0.75, metrics={"m": -0.75}, text=row(2, 4, 0.75)["messages"]
    )
    write_file(
        run_dir.pending, encoded([Group(group_id=4, env="adder", task=4, rollouts=[waiting])])
    )
    run_dir.config.touch()
    monkeypatch.chdir(tmp_path)
    return root


@pytest.fixture
def rl(capsys):
    """The exit code, the groups that were printed, and the errors of a command line."""

    def call(*args):
        code, out, err = called(capsys, "show", *args)
        return (
            code,
            [
                int(line.split()[-1])
                for line in out.splitlines()
                if line.startswith("assistant: \\x1b[1mgroup")
            ],
            err,
        )

    return call


def test_rollouts_of_a_run_by_step_reason_and_order(run, rl):
    assert rl("x") == rl(str(run)) == rl("outputs/x") == (0, [4, 2, 3, 0, 1], "")
    assert rl("x", "--step 1") == (0, [0, 1], "")
    assert rl("x", "--why no_signal")[1] == [1]
    assert rl("x", "--task 0")[1] == [0]
    assert rl("x", "--sort reward")[1] == [2, 4, 0, 3, 1]
    assert rl("x", "--sort reward --reverse --limit 2")[1] == [1, 3]
    assert rl("x", "--sort m --limit 1")[1] == [1]
    assert rl("x", "--limit 3")[1] == [
        4,
        2,
        3,
    ]
    assert rl("x", "--env adder --why trained --sort reward")[1] == [2, 0, 3]
    assert rl(str(run / "rollouts" / "000002.jsonl")) == (0, [2, 3], "")


def test_a_failed_rollout_has_no_reward(tmp_path, capsys):
    """It is the lowest there is in no order."""
    file = tmp_path / "rollouts.jsonl"
    failed = row(1, 7, 0.0, "environment") | {
        "error": "boom",
        "reward": None,
        "advantage": None,
        "metrics": {},
    }
    file.write_text(jsonl.text(failed, row(1, 0, 0.5)))
    code, out, _ = called(capsys, "show", str(file))
    assert code == 0 and out.splitlines()[1] == "  no reward, not trained: environment"
    assert "group 7" not in called(capsys, f"show {file} --sort reward --reverse")[1]


def test_where_nothing_fits_it_says_what_there_is(run, rl):
    assert rl("x", "--why nosignal") == (
        1,
        [],
        "rl show: --why nosignal: no rollout matches; existing values: trained (3), pending "
        "(1), no_signal (1)\n",
    )
    assert rl("x", "--step 7")[2].endswith("steps with rollouts: 1-2\n")
    assert rl("x", "--sort best")[2].startswith(
        "rl show: --sort best: the rollouts have no such number; they have: advantage, episode, group_id, m,"
    )
    assert rl("x", "--why pending --task 0")[2] == "rl show: x: no rollout matches all filters\n"
    code, _, err = rl("y")
    assert code == 2 and "outputs contains the runs x" in err and rl("x", "--reverse")[0] == 1
    assert rl()[0] == rl("x", "y")[0] == rl("x", "--limit 0")[0] == 2
    assert rl(str(run / "rollouts" / "000002.jsonl"), "--step 2")[0] == 1


def test_a_damaged_file_is_named_after_the_others(run, rl):
    path = run / "rollouts" / "000002.jsonl"
    path.write_text("{}\n")
    code, groups, err = rl("x")
    assert (code, groups) == (1, [4, 0, 1])
    assert err.startswith(f"rl show: outputs/x/rollouts/{path.name}: damaged")
    for other in [*(run / "rollouts").iterdir(), *(run / "batches").iterdir()]:
        other.unlink()
    assert rl("x") == (
        1,
        [],
        "rl show: x: no finished rollouts; `rl doctor x` shows what the run is waiting for\n",
    )


class Read:
    """Texts that are made when they are asked for."""

    def __init__(self):
        self.made = 0

    def __iter__(self):
        while self.made < 100_000:
            self.made += 1
            yield f"text {self.made} \ud800"


@pytest.mark.parametrize(
    ("command", "most"),
    [("head -n 2", 20_000), ("no-such-pager", None), ('less "', None), ("", None)],
)
def test_on_a_terminal_a_pager_reads_as_much_as_it_wants(monkeypatch, command, most):
    """`head` closes its input after two lines; without a pager, and where there is no terminal,
    all is printed."""
    master, slave = pty.openpty()
    texts = Read() if most else ["text 1 \ud800", "text 2"]
    if command:
        monkeypatch.setenv("PAGER", command)
    saved = os.dup(1)
    read, write = os.pipe()
    try:
        os.dup2(slave if command else write, 1)
        with open(1, "w", encoding="utf-8", closefd=False) as out:
            monkeypatch.setattr(show.sys, "stdout", out)
            show.page(texts)
    finally:
        os.dup2(saved, 1)
        for fd in (saved, slave, write):
            os.close(fd)
    said = ""
    while said.count("\n") < 2:
        said += os.read(master if command else read, 4096).decode().replace("\r\n", "\n")
    assert said == ("text 1 \\ud800\ntext 2 \\ud800\n" if most else "text 1 \\ud800\ntext 2\n")
    assert not most or texts.made < most
