"""`rl env install | list | remove | freeze`."""

import contextlib
import subprocess
import time
from contextlib import asynccontextmanager

import psutil
import pytest

from rl.commands import environment, evaluate
from rl.commands.homes import several
from rl.config.command_line import build, parse_args, write_config
from rl.homes.home import clean, hold
from rl.homes.make import ensure
from rl.homes.request import Request
from rl.homes.resolve import homes_of, record
from rl.run_dir import lease
from rl.system.errors import RunError
from tests.commands.driver import called
from tests.homes.index import CLASSIC, make_wheel
from tests.hosts import Host, permitted
from tests.waiting import until


@pytest.mark.skipif(not permitted(), reason="may not make pid namespaces")
@pytest.mark.parametrize("locks", [True, False])
def test_a_home_that_another_machine_plays_in_is_not_deleted(
    index, said, tmp_path, monkeypatch, capsys, locks
):
    """Where the file system's locks tell nothing of other machines, too. Once that machine is
    dead the home goes."""
    monkeypatch.setattr(lease, "RENEW_S", 0.1)
    monkeypatch.setattr(lease, "LEASE_S", 4.0)
    home = ensure(Request("rows", None), said.append)
    next(home.place.glob("lib/python3*/site-packages/helper.py")).unlink()
    if not locks:
        monkeypatch.setattr("fcntl.flock", lambda _fd, _how: None)

    def play():
        held = hold(home.digest)
        (tmp_path / "holds").write_text(str(held.path))
        time.sleep(120)

    with contextlib.closing(Host("far", play, tmp_path / "far.log")) as far:
        until((tmp_path / "holds").exists)
        player = far.process()
        code, _, err = called(capsys, "env", "remove", home.digest)
        assert (code, err.endswith(f" on far use {home.place}; end them first\n")) == (1, True), err
        with pytest.raises(
            RunError,
            match=f"its home {home.place} lacks files, and processes .* on far run in it; end them",
        ):
            ensure(Request("rows", None), said.append, fresh=True)
        assert home.interpreter.exists()
    until(lambda: not psutil.pid_exists(player.pid))  # with all its threads
    monkeypatch.setattr(lease, "LEASE_S", 0.5)
    assert (
        called(capsys, "env", "remove", home.digest) == (0, "removed classic\n", "")
        and not home.place.exists()
    )


def test_what_a_killed_removal_has_left_is_deleted(tmp_path, monkeypatch):
    """Regression: nothing looked for it under its last name."""
    monkeypatch.setenv("RL_ENVIRONMENTS", str(tmp_path))
    for name in (".0123456789abcdef.old", "0123456789abcde0"):
        (tmp_path / name / "bin").mkdir(parents=True)
    clean()
    assert [path.name for path in tmp_path.iterdir()] == ["0123456789abcde0"]


def played_in(monkeypatch):
    """The versions of the package that commands play from now on; nothing is played."""
    versions = []

    @asynccontextmanager
    async def arena(config, homes, *rest):
        versions.extend(one.home.version for one in homes.values())
        raise RunError("enough")
        yield

    for command in (environment, evaluate):
        monkeypatch.setattr(command, "play_session", arena)
    return versions


def test_requirements_have_commas_of_their_own():
    assert several("sympy>=1.13,<2 , nltk[all,more]>=3,") == ("sympy>=1.13,<2", "nltk[all,more]>=3")


def test_installed_listed_frozen_and_removed(index, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_wheel(index.folder / "ada", "hello", "1.0", {"hello.py": CLASSIC}, ["verifiers<0.4"])
    code, out, err = called(capsys, "env", "install", "ada/hello", "--dry-run")
    assert (code, out) == (
        0,
        "ada/hello: installed from the Environments Hub at the start, unless already present\n",
    ) and not (tmp_path / "homes").exists()
    code, out, err = called(capsys, "env", "install", "ada/hello")
    assert (
        code == 0
        and out.startswith("ada/hello 1.0: classic, verifiers 0.3.1, Python 3.")
        and "making its home" in err
    )

    config = build(
        parse_args(
            ["--orchestrator.environment.id", "hello", "--output_dir", str(tmp_path / "outputs")]
        )
    )
    run = f"outputs/{config.name}"  # as a start names it that says nothing else
    found = homes_of(config, said.append, recorded=False)  # a bare name means what is installed
    assert said == [] and found["hello"].home.id == "ada/hello"
    write_config(config.run_dir.config, config)
    config.run_dir.status_dir.mkdir()
    record(config, found)
    code, frozen, _ = called(capsys, "env", "freeze", run)
    assert code == 0 and frozen.splitlines()[-3:] == [
        "# own = hello==1.0",
        "helper==1.0",
        "verifiers==0.3.1",
    ]

    make_wheel(index.folder / "ada", "hello", "1.1", {"hello.py": CLASSIC}, ["verifiers<0.4"])
    assert called(capsys, "env", "install", "ada/hello")[1].startswith("ada/hello 1.1: ")
    second = config.run_dir.environments / "second.txt"
    second.write_text(frozen)
    code, _, err = called(capsys, "env", "freeze", run)
    assert code == 1 and f"which environment? rl env freeze {run} NAME, one of hello, second" in err
    assert called(capsys, "env", "freeze", run, "hello")[1] == frozen
    second.unlink()
    (tmp_path / "both.txt").write_text(2 * frozen)
    code, _, err = called(capsys, "env", "install", "both.txt")
    assert (
        code == 1
        and "both.txt: not an environment record; a run has one file per environment in "
        "environments/"
        in err
    )
    versions = played_in(monkeypatch)
    for command in (
        ("env", "hello"),
        ("eval", "--orchestrator.environment.id", "hello"),
        ("env", "@", f"{run}/config.toml"),
    ):
        called(capsys, *command)
    # there the environment is an evaluation's, and has another name
    called(capsys, "eval", "@", f"{run}/config.toml")
    assert versions == ["1.1", "1.1", "1.0", "1.0"], (
        "only who names a run gets what that was played with"
    )
    newest, earlier = called(capsys, "env", "list")[1].splitlines()
    assert (
        "  ada/hello 1.1: " in newest
        and earlier.startswith("earlier")
        and "ada/hello 1.0: " in earlier
    )
    old = found["hello"].home
    sleeping = subprocess.Popen([old.interpreter, "-c", "import time; time.sleep(60)"])
    code, _, err = called(capsys, "env", "remove", old.digest)
    assert (
        code == 1
        and err == f"rl env: {old.digest}: in use by processes {sleeping.pid}; end them first\n"
    )
    sleeping.kill()
    sleeping.wait()
    assert earlier.endswith(" KiB)") and called(capsys, "env", "remove", "earlier")[:2] == (
        0,
        f"removed {old.digest}\n",
    )
    assert called(capsys, "env", "remove", "earlier") == (0, "", ""), "there are none any more"
    code, out, _ = called(capsys, "env", "install", f"{run}/environments/hello.txt")
    # and from now on it is what the id means
    assert code == 0 and out.startswith("ada/hello 1.0: ") and old.place.is_dir()
    assert homes_of(config, said.append, recorded=False) == found

    assert (
        called(capsys, "env", "remove", old.digest)[:2] == (0, "removed ada/hello\n")
        and not old.place.exists()
    )
    for owner in ("ada", "bob"):
        make_wheel(index.folder / owner, "hello", "2.0", {"hello.py": CLASSIC}, ["verifiers<0.4"])
        called(capsys, "env", "install", f"{owner}/hello")
    for name, fault in (
        ("carol/hello", "no such home"),
        ("./hello", "no such home"),
        ("hello", "hello is ambiguous: ada/hello or bob/hello"),
    ):
        code, _, err = called(capsys, "env", "remove", name)
        assert code == 1 and fault in err
    assert homes_of(config, said.append, recorded=True)["hello"].home.id == "ada/hello", (
        "a record knows what was meant"
    )
    called(capsys, "env", "remove", "bob/hello")
    assert called(capsys, "env", "remove", "hello")[:2] == (0, "removed ada/hello\n")
    code, _, err = called(capsys, "env", "remove", "hello")
    assert code == 1 and "hello: no such home in " in err
    code, _, err = called(capsys, "env", "install")
    assert code == 2 and "usage: rl env install ID|FILE.txt" in err
    code, _, err = called(capsys, "env", "freeze", "outputs/nope")
    assert code != 0 and "outputs/nope" in err
