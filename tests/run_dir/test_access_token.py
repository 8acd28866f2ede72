"""Access to a run: the token, where it is kept, and messages about sockets bound beyond
loopback."""

import os
import stat
import threading

import pytest

from rl.config.check import exposure
from rl.config.command_line import build, load_config_or_exit, parse_args
from rl.launch.prepare import prepare
from rl.run_dir import access_token as token
from rl.run_dir.access_token import authorization, is_loopback, read_token
from rl.run_dir.access_token import run_token as token_for
from rl.system.errors import RunError

TOKEN = "a-token-of-the-test-0123456789"


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("RL_TOKEN", raising=False)


def config(tmp_path, *args):
    base = ["--orchestrator.environment.id", "e", "--name", "r", "--output_dir", str(tmp_path)]
    return build(parse_args([*base, *args]))


def run_token(config):
    return token_for(config.run_dir.status_dir)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("127.0.0.1 127.0.1.1 localhost ::1 [::1]", True),
        ("0.0.0.0 :: 10.0.0.1 node-a localhost.evil.org 127.0.0.1.evil.org", False),
    ],
)
def test_is_loopback(hosts, expected):
    assert {is_loopback(name) for name in hosts.split()} == {expected} and not is_loopback("")


def test_every_run_has_a_token_that_only_its_owner_reads(tmp_path):
    path, run = tmp_path / "r" / "status" / "token", config(tmp_path)
    assert authorization(path.with_name("inference.json")) == {}
    token = run_token(run)
    assert token and len(token) >= 40 and path.read_text() == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert run_token(run) == read_token(path.parent) == token
    assert authorization(path.with_name("inference.json")) == {"Authorization": f"Bearer {token}"}
    assert os.listdir(path.parent) == ["token"]


def test_it_survives_a_resume_and_not_a_new_start_and_is_nowhere_else(tmp_path):
    run = config(tmp_path)
    prepare(run, resume=None, clean=False).lease.close()
    token = run_token(run)
    prepare(run, resume=-1, clean=False).lease.close()
    assert run_token(run) == token
    holding = [
        path
        for path in (tmp_path / "r").rglob("*")
        if path.is_file() and token.encode() in path.read_bytes()
    ]
    assert holding == [tmp_path / "r" / "status" / "token"]
    prepare(run, resume=None, clean=True).lease.close()
    assert not holding[0].exists() and run_token(run) != token


def test_processes_that_start_together_agree_on_one(tmp_path):
    run, found = config(tmp_path), []
    threads = [threading.Thread(target=lambda: found.append(run_token(run))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and len(set(found)) == 1


def test_rl_token_goes_before_the_kept_one(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_TOKEN", TOKEN)
    assert run_token(config(tmp_path)) == TOKEN
    assert (
        authorization(tmp_path / "status" / "x.json")
        == {"Authorization": f"Bearer {TOKEN}"}
        == authorization(tmp_path.parent / "")
    )
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "bad",
    [
        "short",
        "with spaces in it, but long",
        "x" * 257,
        "ünprintable-0123456789",
        "new\nline-0123456789",
    ],
)
def test_a_token_that_cannot_be_used_is_a_fault_that_does_not_show_it(
    tmp_path, monkeypatch, capsys, bad
):
    monkeypatch.setenv("RL_TOKEN", bad)
    with pytest.raises(RunError, match="RL_TOKEN must be 16 to 256 printable characters"):
        read_token(tmp_path)
    with pytest.raises(SystemExit):
        load_config_or_exit(["--orchestrator.environment.id", "e"])
    said = capsys.readouterr().err
    assert "RL_TOKEN = '(hidden)'" in said and bad not in said


def test_a_damaged_or_foreign_token_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "token").write_bytes(b"\x00\xff")
    with pytest.raises(
        RunError,
        match=f"{tmp_path}/token: does not hold a token; delete it and restart every process of "
        "the run",
    ):
        read_token(tmp_path)

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(token.Path, "read_text", refuse)
    with pytest.raises(
        RunError,
        match="token: Permission denied; run as the user who started the run, or set RL_TOKEN",
    ):
        read_token(tmp_path)


def test_what_is_exposed_is_said(tmp_path, capsys):
    args = ["--orchestrator.environment.id", "e", "--name", "r", "--output_dir", str(tmp_path)]
    load_config_or_exit([*args, "--inference.host", "0.0.0.0", "--orchestrator.host", "10.0.0.1"])
    first, second = (
        line.removeprefix("rl: warning: ") for line in capsys.readouterr().err.splitlines()
    )
    assert first.startswith("inference.host = 0.0.0.0: other machines that send the token in ")
    assert f"{tmp_path}/r/status/token" in first and "not encrypted" in first
    assert second.startswith(
        "orchestrator.host = 10.0.0.1: the orchestrator answers other machines that have the "
        "token in"
    )
    assert exposure(config(tmp_path, "--inference.host", "::1")) == []
