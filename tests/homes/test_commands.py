"""`rl env install | list | remove | freeze`."""

import subprocess
import sys
from contextlib import asynccontextmanager

from rl.commands import environment, evaluate
from rl.commands.environment import several
from rl.config.command_line import build, parse_args, write_config
from rl.homes.home import read
from rl.homes.make import building, ensure
from rl.homes.request import Request
from rl.homes.resolve import homes_of, record
from rl.system.errors import RunError
from tests.commands.driver import called
from tests.homes.index import CLASSIC


def played_in(monkeypatch):
    """The versions of the package that commands play from now on; nothing is played."""
    versions = []

    @asynccontextmanager
    async def arena(config, homes, *rest):
        versions.extend(home.version for home in homes.values())
        raise RunError("enough")
        yield

    for command in (environment, evaluate):
        monkeypatch.setattr(command, "play_session", arena)
    return versions


def test_requirements_have_commas_of_their_own(capsys):
    text = "sympy>=1.13,<2 , nltk[all,more]>=3,"
    assert several(text) == ("sympy>=1.13,<2", "nltk[all,more]>=3")
    code, _, err = called(capsys, "env", "install", "pypi:x", "--requirements", "<2")
    assert code == 1 and "--requirements: '<2' is not a requirement" in err


def test_what_a_killed_removal_has_left_is_deleted(index, said, tmp_path):
    """And a home that is half made."""
    code = "import os; from rl.homes.home import *; shutil.rmtree = lambda *_, **__: os._exit(9)"
    home = ensure(Request("rows", None), said.append)
    command = [sys.executable, "-c", f"{code}; delete(Path({str(home.place)!r}))"]
    subprocess.run(command, check=False)
    left = [path for path in (tmp_path / "homes").iterdir() if path.name != "requests"]
    assert len(left) == 1 and left[0].name[0] == "." and not read(home.place)
    with building(Request("rows", None), said.append):
        assert [path.name for path in (tmp_path / "homes").iterdir()] == ["requests"]


def test_installed_listed_frozen_and_removed(index, said, tmp_path, monkeypatch, capsys):
    def rl(*words, code=0):
        found, out, err = called(capsys, *words)
        assert found == code, err
        return out if code == 0 else err

    monkeypatch.chdir(tmp_path)
    index.publish("ada/hello", CLASSIC)
    text = "ada/hello: installed from the Environments Hub at the start, unless already present\n"
    assert rl("env", "install", "ada/hello", "--dry-run") == text
    assert not (tmp_path / "homes").exists()
    why = "classic, verifiers 0.3.1 (0.4 has no classic API), Python 3."
    assert rl("env", "install", "ada/hello").startswith(f"ada/hello 1.0: {why}")

    flags = ["--orchestrator.environment.id", "hello", "--output_dir", str(tmp_path / "outputs")]
    config = build(parse_args(flags))
    run = f"outputs/{config.name}"  # as a start names it that says nothing else
    homes = homes_of(config, said.append, recorded=False)  # a bare name means what is installed
    assert said == [] and homes["hello"].id == "ada/hello"
    write_config(config.run_dir.config, config)
    config.run_dir.status_dir.mkdir()
    record(config, homes)
    frozen = rl("env", "freeze", run)
    assert frozen.splitlines()[-3:] == ["# own = hello==1.0", "helper==1.0", "verifiers==0.3.1"]

    index.publish("ada/hello", CLASSIC, "1.1")
    assert rl("env", "install", "ada/hello").startswith("ada/hello 1.1: ")
    second = config.run_dir.environments / "second.txt"
    second.write_text(frozen)
    fault = f"which environment? rl env freeze {run} NAME, one of hello, second"
    assert fault in rl("env", "freeze", run, code=1)
    assert rl("env", "freeze", run, "hello") == frozen
    second.unlink()
    (tmp_path / "both.txt").write_text(2 * frozen)
    fault = "both.txt: not an environment record; a run has one file per environment in"
    assert fault in rl("env", "install", "both.txt", code=1)
    versions = played_in(monkeypatch)
    for words in (["env", "hello"], ["eval", *flags], ["env", "@", f"{run}/config.toml"]):
        called(capsys, *words)
    called(capsys, "eval", "@", f"{run}/config.toml")  # its environment has another name there
    assert versions == ["1.1", "1.1", "1.0", "1.0"], "who names a run gets what that played with"

    newest, earlier = rl("env", "list").splitlines()
    assert "  ada/hello 1.1: " in newest and earlier.startswith("earlier")
    assert "ada/hello 1.0: " in earlier and earlier.endswith(" KiB)")
    old = homes["hello"]
    sleeping = subprocess.Popen([old.interpreter, "-c", "import time; time.sleep(60)"])
    fault = f"rl env: {old.place}: in use by processes {sleeping.pid}; end them first\n"
    assert rl("env", "remove", old.place.name, code=1) == fault
    sleeping.kill()
    sleeping.wait()
    assert rl("env", "remove", "earlier") == f"removed {old.place.name}\n"
    assert rl("env", "remove", "earlier") == "", "there are none any more"
    out = rl("env", "install", f"{run}/environments/hello.txt")
    assert out.startswith("ada/hello 1.0: ") and old.place.is_dir()
    again = homes_of(config, said.append, recorded=False)
    assert again == homes, "and from now on it is what the id means"

    assert rl("env", "remove", old.place.name) == "removed ada/hello\n"
    assert not old.place.exists()
    for owner in ("ada", "bob"):
        index.publish(f"{owner}/hello", CLASSIC, "2.0")
        rl("env", "install", f"{owner}/hello")
    for name, fault in (
        ("carol/hello", "no such home"),
        ("./hello", "no such home"),
        ("hello", "hello is ambiguous: ada/hello or bob/hello"),
    ):
        assert fault in rl("env", "remove", name, code=1)
    recorded = homes_of(config, said.append, recorded=True)
    assert recorded["hello"].id == "ada/hello", "a record knows what was meant"
    rl("env", "remove", "bob/hello")
    assert rl("env", "remove", "hello") == "removed ada/hello\n"
    assert "hello: no such home in " in rl("env", "remove", "hello", code=1)
    assert "usage: rl env install ID|FILE.txt" in rl("env", "install", code=2)
    assert "outputs/nope" in rl("env", "freeze", "outputs/nope", code=2)
