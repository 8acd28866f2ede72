"""`rl env install | list | remove | freeze`."""

import subprocess

from rl.config.command_line import build, parse_args, write_config
from rl.homes.settle import homes_of, record
from tests.commands.driver import called
from tests.homes.index import CLASSIC, make_wheel


def test_installed_listed_frozen_and_removed(index, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_wheel(index.folder / "ada", "hello", "1.0", {"hello.py": CLASSIC}, ["verifiers<0.4"])
    code, out, err = called(capsys, "env", "install", "ada/hello", "--dry-run")
    assert (code, out) == (0, "ada/hello: a start installs it from the Environments Hub, unless it is there\n") and not (
        tmp_path / "homes"
    ).exists()
    code, out, err = called(capsys, "env", "install", "ada/hello")
    assert code == 0 and out.startswith("ada/hello 1.0: classic, verifiers 0.3.1, Python 3.") and "making its home" in err

    config = build(parse_args(["--orchestrator.environment.id", "hello", "--name", "r", "--output_dir", str(tmp_path / "outputs")]))
    found = homes_of(config, said.append, recorded=False)  # a bare name means what is installed
    assert said == [] and found["hello"].home.id == "ada/hello"
    write_config(config.run_dir.config, config)
    config.run_dir.status_dir.mkdir()
    record(config, found)
    code, frozen, _ = called(capsys, "env", "freeze", "outputs/r")
    assert code == 0 and frozen.splitlines()[-3:] == ["hello==1.0", "helper==1.0", "verifiers==0.3.1"]

    make_wheel(index.folder / "ada", "hello", "1.1", {"hello.py": CLASSIC}, ["verifiers<0.4"])
    assert called(capsys, "env", "install", "ada/hello")[1].startswith("ada/hello 1.1: ")
    newest, earlier = called(capsys, "env", "list")[1].splitlines()
    assert "  ada/hello 1.1: " in newest and earlier.startswith("earlier") and "ada/hello 1.0: " in earlier
    old = found["hello"].home
    sleeping = subprocess.Popen([old.interpreter, "-c", "import time; time.sleep(60)"])
    code, _, err = called(capsys, "env", "remove", old.digest)
    assert code == 1 and err == f"rl env: {old.digest}: processes {sleeping.pid} run in it; end them first\n"
    sleeping.kill()
    sleeping.wait()
    assert called(capsys, "env", "remove", old.digest)[:2] == (0, f"removed {old.digest}\n")
    code, out, _ = called(capsys, "env", "install", "outputs/r/environments/hello.txt")
    assert code == 0 and out.startswith("ada/hello 1.0: ") and old.place.is_dir()  # and from now on it is what the id means
    assert homes_of(config, said.append, recorded=False) == found

    assert called(capsys, "env", "remove", "hello")[:2] == (0, "removed ada/hello\n")
    code, _, err = called(capsys, "env", "remove", "hello")
    assert code == 1 and "hello: there is no such home in " in err
    code, _, err = called(capsys, "env", "install")
    assert code == 2 and "usage: rl env install ID|FILE.txt" in err
    code, _, err = called(capsys, "env", "freeze", "outputs/nope")
    assert code != 0 and "outputs/nope" in err
