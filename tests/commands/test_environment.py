"""`rl env`: its arguments, and what it shows."""

import os
import re
import signal
import tempfile
import time

import pytest

from rl.commands.environment import (
    environment_given,
    print_description,
    scratch,
)
from rl.system.errors import RunError
from rl.system.linux import pid_scope
from rl.wire.worker_messages import Description
from tests import jsonl
from tests.commands.driver import CODE, rl, start
from tests.commands.servers import Endpoint
from tests.web import serving


def test_what_failed_calls_have_left_goes_with_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    here = pid_scope()
    others = [
        tmp_path / name for name in (f".rl-env-e.{here}-1-1.tmp", ".rl-env-e.0123abcd-1-1-1.tmp")
    ]
    for left in (*others, tmp_path / f".rl-env-e.{here}-99999999-1.tmp"):
        left.mkdir()
    with scratch("e") as first, scratch("e") as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second, *others])
    assert sorted(tmp_path.iterdir()) == sorted(others)
    with pytest.raises(RunError), scratch("e") as first:
        raise RunError("see a log in it")
    assert sorted(tmp_path.iterdir()) == sorted([first, *others])


SLOW_UV = "import rl.homes.uv; rl.homes.uv.find_uv_bin = lambda: 'slow-uv'; "


@pytest.mark.parametrize("during", ["a rollout", "the making of a home"])
def test_an_interrupt_ends_it_at_once_and_leaves_nothing(tmp_path, during):
    made = during == "a rollout"
    (tmp_path / "slow-uv").write_text("#!/bin/sh\nsleep 60\n")
    (tmp_path / "slow-uv").chmod(0o755)
    (tmp_path / "tmp").mkdir()
    more = (
        {}
        if made
        else {
            "RL_ENVIRONMENTS": str(tmp_path / "homes"),
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
        }
    )
    with serving(Endpoint("good", delay_s=60.0)) as server:
        flags = ("--rollouts", "1", "--policy", server.url, "--split", "train")
        code = CODE if made else SLOW_UV + CODE
        process = start(
            tmp_path, "env", "say-digit", *flags, code=code, TMPDIR=str(tmp_path / "tmp"), **more
        )
        line = "" if made else process.stderr.readline()
        assert ("making its home" in line) is not made
        while made and not server.asked:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        process.communicate(timeout=60)
    assert process.returncode == 130 and time.monotonic() - began < 50
    assert list((tmp_path / "tmp").glob(".rl-env-*")) == []
    assert not list(tmp_path.glob("homes/.home*"))


def test_the_environment_and_its_arguments(capsys):
    entry = {"id": "a/x", "args": {}}
    assert environment_given(["a/x", "--split", "eval"]) == (
        {"orchestrator.environment": ([entry], "rl env")},
        ["--split", "eval"],
    )
    given, rest = environment_given(["x", "--args", '{"a": {"b": null}, "c": 1}', "--seed", "1"])
    assert given["orchestrator.environment"][0] == [{"id": "x", "args": {"a": {"b": None}, "c": 1}}]
    assert rest == ["--seed", "1"]
    assert environment_given(["x", '--args={"a": 1}'])[0]["orchestrator.environment"][0][0][
        "args"
    ] == {"a": 1}
    assert environment_given(["x", "--args.n", "3"])[1] == [
        "--orchestrator.environment.args.n",
        "3",
    ]
    assert environment_given(["@", "run.toml", "--args", '{"n": 3}']) == (
        {"orchestrator.environment.args.n": (3, "--args")},
        ["@", "run.toml"],
    )
    for text, fault in (
        (" {n: 3}", ": not JSON"),
        (" [1]", ": give an object"),
        ("", " is empty: it needs a value"),
    ):
        with pytest.raises(SystemExit):
            environment_given(["x", "--args", text.strip()])
        assert f"rl env: --args{text}{fault}" in capsys.readouterr().err


def test_what_an_environment_says_does_not_act_on_the_terminal(capsys):
    description = Description(
        about={"kind": "classic", "tools": {"add": "\x1b[2J"}},
        tasks=[{"prompt": "\x1b", "answer": "\r"}],
    )
    print_description("e", {"train": 1}, description, "train")
    shown = [
        "environment e",
        "  kind: classic",
        "  tasks: train 1",
        "  tools:",
        "    add: \\x1b[2J",
    ]
    shown += ["  the first train task:", "    \\x1b", "    answer: \\r"]
    assert capsys.readouterr().out.splitlines() == shown


def test_shown_without_any_model(tmp_path):
    code, out, err = rl(
        tmp_path,
        "env say-digit --args.tasks 3 --export t.jsonl --limit 2 --split train",
    )
    assert code == 0, err
    for text in (
        "kind: classic",
        "tasks: train 3, eval 2",
        "tasks: int = 3 (default: 4)",
        "turns: int = 1",
        "reward: 1.0",
        "the first train task:\n    user: say 0",
    ):
        assert text in out
    lines = jsonl.read(tmp_path / "t.jsonl")
    assert [(one["split"], one["task"], one["answer"]) for one in lines] == [
        ("train", 0, "0"),
        ("train", 1, "1"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_rollouts_in_full(tmp_path):
    with serving(Endpoint("good")) as server:
        code, out, err = rl(
            tmp_path,
            "env say-digit --rollouts 2 --split eval --policy",
            server.url,
            "--args.turns 2",
        )
    assert code == 0, err
    assert re.search(r"--- eval task 1\n  reward 1\.000 \(.*\)\n  finished, 6 tokens\n", out)
    assert "user: and again" in out and out.count("assistant: ") == 4
