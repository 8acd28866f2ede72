"""Homes from a package index and a Hub with real uv: what is installed, which verifiers, and what
is said when it cannot be."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rl.config.environment_id import homes_root, read_id
from rl.homes import make, uv
from rl.homes.home import difference, home_of, is_of_package, outside, read, read_record, text_of
from rl.homes.make import ensure
from rl.homes.request import Request
from rl.homes.resolve import settled
from rl.orchestrator.workers.pool_worker import likely_reason
from rl.system.errors import RunError
from tests.homes.index import CLASSIC, V1, make_source, make_wheel

ROWS = Request("rows", None)


def request(env_id, api=None):
    return Request(str(env_id), read_id(str(env_id)), api)


def made(env_id, said, api=None, **options):
    return ensure(request(env_id, api), said.append, **options)


def ran(home, code):
    command = [home.interpreter, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def site_file(home, name):
    return next(home.place.glob(f"lib/python3*/site-packages/{name}"))


def is_empty():
    """No virtual environment, finished or not, and no link to one."""
    return not [*homes_root().rglob("pyvenv.cfg"), *homes_root().glob("requests/*/home")]


def test_a_package_of_the_hub(index, said):
    """Its owner's index is asked for that package alone; a home that is there asks nobody."""
    for version in ("0.3.0", "0.4.0"):
        index.publish("ada/say-hello", f"{CLASSIC}VERSION = '{version}'\n", version)
    index.publish("ada/verifiers", "STOLEN = 1", "0.3.9")
    index.publish("ada/helper", "STOLEN = 1", "9.9")
    home = made("ada/say-hello@0.3.0", said)
    assert (home.module, home.api, home.version) == ("say_hello", "classic", "0.3.0")
    assert home.packages == ["helper==1.0", "say-hello==0.3.0", "verifiers==0.3.1"]
    assert {path for path in index.asked if path.startswith("/ada/")} == {"/ada/simple/say-hello/"}
    code = "import say_hello, helper, sys; print(say_hello.VERSION, helper.VALUE, sys.prefix)"
    assert ran(home, code) == f"0.3.0 7 {home.place}"
    what = "environment ada/say-hello@0.3.0: ada/say-hello@0.3.0"
    assert len(said) == 2 and said[0].startswith(f"{what} from the Environments Hub (http://127.0")
    why = "classic, verifiers 0.3.1 (0.4 has no classic API)"
    assert said[1].startswith(f"{what}: {why}, Python {sys.version.split()[0]}; made in ")
    assert said[1].endswith(f" s ({home.place})")

    num_asked, said[:] = len(index.asked), []
    assert made("ada/say-hello@0.3.0", said) == home
    assert (said, len(index.asked)) == ([], num_asked)
    newest = made("ada/say-hello", said)
    assert newest.version == "0.4.0" and newest.place != home.place and home.place.is_dir()


def test_packages_of_one_name_and_version_from_two_owners(index, said, tmp_path):
    for owner in ("ada", "bob"):
        index.publish(f"{owner}/hello", f"{CLASSIC}OWNER = '{owner}'\n")
    homes = {owner: made(f"{owner}/hello@1.0", said) for owner in ("ada", "bob")}
    for owner, home in homes.items():
        assert ran(home, "import hello; print(hello.OWNER)") == owner
    home = msgspec.structs.replace(homes["bob"], code="c")
    text = f"{text_of('hello', home)}-e /folder\n"  # as earlier versions wrote folders
    (tmp_path / "hello.txt").write_text(f"# digest = of before\n{text}")
    lines = (tmp_path / "hello.txt").read_text().splitlines()
    assert "# own = hello==1.0" in lines and "hello==1.0" not in lines, (
        "uv and pip would ask the usual index for it"
    )
    packages = ["-e file:///folder", *home.packages]
    expected = msgspec.structs.replace(home, packages=packages)
    assert read_record(tmp_path / "hello.txt") == expected


def test_installing_again_looks_for_newer_packages(index, said):
    """What cannot have changed is not downloaded. A home in use is neither deleted nor changed, nor
    is what an earlier run names."""
    index.publish("ada/hello", CLASSIC)
    first = made("ada/hello", said)
    index.asked.clear()
    index.publish("ada/hello", CLASSIC + "NEW = 1\n")
    index.publish("simple/helper", "VALUE = 8\n", "2.0")
    second = made("ada/hello", said, fresh=True)
    assert ran(second, "import hello, helper; print(hello.NEW, helper.VALUE)") == "1 8"
    wheels = {path.rpartition("/")[2] for path in index.asked if path.endswith(".whl")}
    assert wheels == {"hello-1.0-py3-none-any.whl", "helper-2.0-py3-none-any.whl"}
    assert made("ada/hello", said) == second and first.place.is_dir()
    site_file(second, "helper.py").unlink()
    sleeping = subprocess.Popen([second.interpreter, "-c", "input()"], stdin=subprocess.PIPE)
    assert made("ada/hello", said, fresh=True) == second
    assert f": processes {sleeping.pid} run in {second.place}, which has these" in said[-2]
    sleeping.communicate(b"\n")
    made("ada/hello", said, fresh=True)
    assert site_file(second, "helper.py").is_file()


def test_a_package_that_is_no_environment_is_refused_before_anything_else_is_fetched(index, said):
    for owner in ("simple", "ada"):
        index.publish(f"{owner}/library", "A = 1\n", requires=["helper"])
    for env_id in ("pypi:library", "ada/library"):
        with pytest.raises(RunError) as error:
            made(env_id, said)
        assert str(error.value) == (
            f"environment {env_id}: its package is not an environment: library has neither a "
            "function load_environment nor a v1 Taskset or Env in `__all__`; check the name; "
            'if it is one nevertheless, set kind = "classic" or "v1"'
        )
        assert is_empty()
    wheels = {path.split("/")[-1] for path in index.asked if path.endswith(".whl")}
    assert wheels == {"library-1.0-py3-none-any.whl"}
    assert made("pypi:library", said, "classic").api == "classic"


@pytest.mark.parametrize(
    ("requires", "code", "version", "why"),
    [
        ("verifiers>=0.1", CLASSIC, "0.3.1", "0.4 has no classic API"),
        ("verifiers>=0.1", V1, "0.4.0", ""),
        ("verifiers<0.4", V1, "0.3.1", ""),
        ("verifiers", V1 + "import verifiers.legacy\n", "0.3.1", "0.4 has no verifiers.legacy"),
        ("verifiers==0.1.9", CLASSIC, "0.3.1", "verifiers==0.1.9 and got 0.3.1"),
        ("verifiers==0.2.0", V1, "0.3.1", "verifiers==0.2.0 and got 0.3.1"),
        ("verifiers>=0.5", V1, "0.4.0", "verifiers>=0.5 and got 0.4.0"),
    ],
)
def test_which_verifiers(index, said, requires, code, version, why):
    index.publish("simple/two-words", code, requires=[requires])
    home = made("pypi:two-words", said)
    is_unmet = "got" in why
    reason = f"two-words asks for {why}, the nearest supported version" if is_unmet else why
    assert f"verifiers=={version}" in home.packages
    assert home.why == f"{home.api}, verifiers {version}" + (f" ({reason})" if reason else "")
    for fault, likely in (
        ("AttributeError: module 'verifiers' has no attribute 'Rubric'", "The likely reason"),
        ("ValueError: URL is required", "If it is not that, a possible reason"),
    ):
        text = f"\n{likely}: {reason}; use a version of the package that was written for it"
        assert likely_reason(str(home.interpreter), fault) == (text if is_unmet else "")


def test_which_api_and_which_module(index, said):
    simple = index.folder / "simple"
    index.publish("simple/both", CLASSIC + V1)
    assert made("pypi:both", said).api == "v1"
    classic = made("pypi:both", said, "classic")
    assert classic.api == "classic" and "verifiers==0.3.1" in classic.packages
    files = {"maths/__init__.py": CLASSIC, "helpers_of_it.py": "A = 1\n"}
    make_wheel(simple, "ada-environment", "1.0", files, ["verifiers"])
    assert made("pypi:ada-environment", said).module == "maths"
    make_wheel(simple, "none-of-all", "1.0", {"nothing.py": "A = 1\n"})
    make_wheel(simple, "several", "1.0", {"a.py": CLASSIC, "b.py": CLASSIC})
    for env_id, api, fault in (
        (
            "pypi:ada-environment",
            "v1",
            "does not have a v1 Taskset or Env in `__all__`; leave kind",
        ),
        ("pypi:none-of-all", None, "none_of_all, and of nothing none have an"),
        ("pypi:several", None, "is called several, and of a, b a and b have an environment; check"),
    ):
        with pytest.raises(RunError, match=fault):
            made(env_id, said, api)


def test_folders(index, said, tmp_path):
    """A package is installed as it lies there, a folder without one is on the import path: child
    processes find both. One that is itself a package is there without its neighbours."""
    plain, whole = tmp_path / "my_words", tmp_path / "whole"
    for file, code in ((plain / "my_words.py", V1), (whole / "__init__.py", CLASSIC)):
        file.parent.mkdir()
        file.write_text(code)
    home = made(plain, said)
    assert home.module == "my_words" and home.version == ""
    spec = "import importlib.util as u; print([u.find_spec(name) and u.find_spec(name).origin for"
    find = f"{spec} name in ('my_words', 'whole')])"
    child = (
        f'import subprocess, sys; print(subprocess.check_output([sys.executable, "-c", "{find}"]'
    )
    assert ran(home, f"{child}, text=True))") == str([str(plain / "my_words.py"), None])
    assert is_of_package(str(home.interpreter)) and home_of(str(home.interpreter)) == home.place
    assert not is_of_package("/usr/bin/python3")
    assert home_of(str(homes_root())) is home_of("") is None
    (plain / "my_words.py").write_text(V1 + "\nimport helper\n")
    assert made(plain, said) == home
    other = made(whole, said)
    assert outside(other.place) == [whole]
    assert ran(other, find) == str([None, str(site_file(other, "whole") / "__init__.py")])
    shutil.rmtree(other.place)
    assert made(whole, said, recorded=other) == other


def test_a_package_in_a_folder_with_another_beside_it(index, said, tmp_path):
    make_source(tmp_path / "ahelper", "VALUE = 3\n")
    source = '[tool.uv.sources]\nahelper = { path = "../ahelper", editable = true }\n'
    folder = make_source(tmp_path / "edited", CLASSIC, ["ahelper", "verifiers<0.4"], source)
    before = request(str(folder))
    home = ensure(before, said.append)
    folders = [tmp_path / "ahelper", folder]
    assert home.version == "1.0"
    assert home.packages[:2] == [f"-e {path.as_uri()}" for path in folders]
    assert set(outside(home.place)) == {*folders}
    shutil.rmtree(home.place)
    assert settled(before, home, said.append) == home
    assert ran(home, "import edited, ahelper; print(ahelper.VALUE)") == "3"
    assert "warning" not in said[-1]
    (folder / "requirements.txt").write_text("two\n")
    assert request(str(folder)).key != before.key, "what it needs may stand beside its project"


def test_further_requirements_and_rows(index, said, tmp_path, monkeypatch):
    index.publish("simple/sums", "A = 1\n", "2.0")
    rows = ensure(ROWS, said.append)
    packages = ["helper==1.0", "verifiers==0.3.1"]
    assert (rows.id, rows.module, rows.packages) == ("classic", "", packages)
    more = ensure(Request("other", None, requirements=("sums>=2",)), said.append)
    assert more.packages == ["helper==1.0", "sums==2.0", "verifiers==0.3.1"]
    assert ran(more, "import helper; print(helper.VALUE)") == "7"
    (tmp_path / "alone.py").write_text(CLASSIC)
    monkeypatch.chdir(tmp_path)
    assert made("alone", said) == rows  # a module has no needs of its own
    assert not is_of_package(str(rows.interpreter))


@pytest.mark.parametrize(
    ("env_id", "text"),
    [
        ("ada/nope", r"http://127.0.0.1:\d+/hub/ada/nope/@latest answered 404; check owner, name"),
        ("pypi:nope", "a package is not in the index; check the name\nuv says:\n"),
        ("pypi:clash", "its dependencies conflict; fix them"),
        ("pypi:future", "uv finds no such Python; install one with `uv python install VERSION`"),
    ],
)
def test_what_cannot_be_installed(index, said, env_id, text, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # no prime
    index.publish("simple/clash", CLASSIC, requires=["helper<1"])
    index.publish("simple/future", CLASSIC, python=">=3.99")
    with pytest.raises(RunError, match=f"environment {env_id}: {text}"):
        made(env_id, said)
    assert is_empty()
    wanted = "environment pypi:future: its packages want Python >=3.99"
    assert (wanted in said) is (env_id == "pypi:future")


def test_nobody_answers(index, said):
    """A home that is there is used, and it is said; without one it is an error."""
    index.publish("ada/hello", CLASSIC)
    home = made("ada/hello", said)
    index.up = False
    said.clear()
    assert made("ada/hello", said, fresh=True) == home
    assert "the Environments Hub answered 503" in said[0]
    assert said[0].endswith(f"using the home that is there ({home.place})")
    with pytest.raises(RunError, match="environment ada/other: the Environments Hub answered 503"):
        made("ada/other", said)


def test_private_packages_come_by_prime(index, said, tmp_path, monkeypatch):
    index.private.add("ada/secret")
    monkeypatch.setenv("PATH", "/nowhere")
    remedy = "has no public package of it; .*`uv tool install prime`, `prime login`"
    with pytest.raises(RunError, match=remedy):
        made("ada/secret", said)
    wheel = make_wheel(tmp_path / "wheels", "secret", "1.0", {"secret.py": CLASSIC})
    tool = tmp_path / "bin" / "prime"
    tool.parent.mkdir()
    expected = '[ "$1 $2 $3 $4" = "env pull ada/secret --target" ]'
    check = f'{expected} || {{ echo "not logged in"; exit 3; }}'
    tool.write_text(f'#!/bin/sh\n{check}\n/bin/mkdir -p "$5"\n/bin/cp {wheel} "$5"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    with pytest.raises(RunError, match="`prime env pull` ended with code 0"):  # without a package
        made("ada/secret", said)
    ending = r"`prime env pull` ended with code 3; .*`prime login`. prime says:\n  not logged in"
    with pytest.raises(RunError, match=ending):
        made("ada/secret@2.0", said)


def test_a_damaged_home_is_made_anew(index, said):
    home = ensure(ROWS, said.append)
    for damage in (
        lambda: (home.interpreter.unlink(), home.interpreter.symlink_to("/nowhere/python3")),
        lambda: (home.place / "home.txt").write_text("{"),
        lambda: shutil.rmtree(home.place),
    ):
        damage()
        assert ensure(ROWS, said.append) == home == read(home.place)


def test_two_that_want_the_same_home(index, said, monkeypatch):
    """One makes it, the other waits for that and says so. The lock of a dead process is free."""
    code = "from rl.homes import make, request; make.WORKER = request.WORKER = ('helper>=1',)"
    code += "; print(make.ensure(request.Request('rows', None), print).place)"
    with make.building(ROWS, said.append):
        command = [sys.executable, "-c", code]
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        text = f"waiting for process {os.getpid()}, which is making its home"
        assert waiting.stdout.readline() == f"environment rows: {text}\n"
    out, _ = waiting.communicate(timeout=60)
    assert read(Path(out.split()[-1])) and waiting.returncode == 0
    killed = "import os; from rl.homes.make import *\nwith building(Request('rows', None), print):"
    subprocess.run([sys.executable, "-c", f"{killed} os.kill(os.getpid(), 9)"], check=False)
    monkeypatch.setattr(make, "DEADLINE_S", 0.1)
    fault = rf"process {os.getpid()} has been making its home for 0 s \(lock: .*\); see what"
    with make.building(ROWS, said.append):
        assert said == []
        with pytest.raises(RunError, match=fault):
            ensure(ROWS, said.append, fresh=True)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (
            "echo 'error: failed to copy: No space left on device (os error 28)'; exit 2",
            "no space left for homes or for uv's cache; free some: .* UV_CACHE_DIR and RL_ENV",
        ),
        (
            "echo one; echo 'error: this package requires Python>=3.8 and Fortran'; exit 1",
            "uv could not install it; fix the .*\nuv says:\n  one\n  error: this package requires",
        ),
        (
            "echo 'error: Failed to initialize cache at `/h/.cache/uv`'; exit 2",
            "uv cannot write to its cache; set UV_CACHE_DIR to a folder that can be written\nuv sa",
        ),
        (
            "echo 'error: No solution found, because the network was disabled.'; exit 1",
            "a package is not in uv's cache, and uv may not use the network; unset UV_OFFLINE, or",
        ),
        (
            "echo 'error: error sending request for url'; exit 2",
            "a package index does not answer; check the network",
        ),
        ("sleep 60", "not made by the deadline\nuv says:\n  nothing"),
    ],
)
def test_uv_fails(index, said, tmp_path, monkeypatch, script, text):
    tool = tmp_path / "uv-that-fails"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(uv, "find_uv_bin", lambda: str(tool))
    monkeypatch.setattr(make, "DEADLINE_S", 0.5 if "sleep" in script else 60.0)
    with pytest.raises(RunError, match=f"environment rows: {text}"):
        ensure(ROWS, said.append)
    assert is_empty()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "/source/pyproject.toml"), ""),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), ""),
        (PermissionError(errno.EACCES, "Permission denied", "HOMES/x"), "that can be written"),
        (OSError(errno.ENOSPC, "No space left on device"), "or free some space"),
        (OSError(errno.ENOLCK, "No locks available"), "on a local disk"),
    ],
)
def test_only_a_fault_of_the_folder_of_homes_is_blamed_on_it(index, said, error, remedy):
    error.filename = error.filename and error.filename.replace("HOMES", str(homes_root()))
    with pytest.raises(RunError) as raised, make.building(ROWS, said.append):
        raise error
    text = str(raised.value)
    assert error.strerror in text and (error.filename or "") in text
    assert ("set RL_ENVIRONMENTS to a folder" in text) is bool(remedy) and remedy in text


def test_a_record_is_played_with_the_same_packages(index, said):
    index.publish("ada/hello", CLASSIC)
    hello = request("ada/hello")
    first = settled(hello, None, said.append)
    index.publish("simple/helper", "VALUE = 8\n", "2.0")
    packages = ["hello==1.0", "helper==2.0", "verifiers==0.3.1"]
    edited = msgspec.structs.replace(first, packages=packages)
    home = ensure(hello, said.append, recorded=edited)
    assert ran(home, "import helper; print(helper.VALUE)") == "8"
    (index.folder / "simple" / "helper-2.0-py3-none-any.whl").unlink()
    index.publish("ada/hello", CLASSIC, "1.1")
    newer = ensure(hello, said.append, fresh=True)
    assert newer.version == "1.1"
    assert settled(hello, first, said.append).place == first.place  # what the run had
    shutil.rmtree(first.place)
    assert settled(hello, first, said.append).place == first.place and read(first.place)
    assert ensure(hello, said.append) == newer, "a new run gets the newest"

    shutil.rmtree(first.place)
    (index.folder / "ada" / "hello-1.0-py3-none-any.whl").unlink()
    shutil.rmtree(os.environ["UV_CACHE_DIR"])
    assert settled(hello, first, said.append) == newer
    assert "its home cannot be made as it was recorded; it gets a new one" in said[-2]
    changes = "is played with different packages than before: hello==1.0 -> hello==1.1"
    assert said[-1] == f"warning: environment ada/hello {changes}"
    other = msgspec.structs.replace(first, key="another")
    assert settled(hello, other, said.append) == newer


def test_what_changes_behind_an_address(index, said, tmp_path):
    """A dependency in a repository is recorded with its commit. `rl env install` finds what changed
    there, and in a folder, whatever uv's cache remembers."""
    repository = make_source(tmp_path / "fromgit", "VALUE = 1\n")
    folder = make_source(tmp_path / "fromfolder", "VALUE = 1\n")
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]

    def commit(text):
        (repository / "fromgit.py").write_text(text)
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"], ["rev-parse", "HEAD"]):
            done = subprocess.run([*git, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    first_commit = commit("VALUE = 1\n")
    address = f"git+{repository.as_uri()}"
    needs = [f"fromgit @ {address}", f"fromfolder @ {folder.as_uri()}", "verifiers<0.4"]
    needy = request(str(make_source(tmp_path / "needy", CLASSIC, needs)))
    values = "import fromgit, fromfolder; print(fromgit.VALUE, fromfolder.VALUE)"
    first = ensure(needy, said.append)
    assert f"fromgit @ {address}@{first_commit}" in first.packages and ran(first, values) == "1 1"
    commit("VALUE = 2\n")
    second = ensure(needy, said.append, fresh=True)
    (folder / "fromfolder.py").write_text("VALUE = 2\n")
    third = ensure(needy, said.append, fresh=True)
    assert ran(first, values) == "1 1" and ran(third, values) == "2 2"
    assert first.place != second.place == third.place, "a folder is recorded by its address alone"


def test_what_differs():
    old, new = ["a==1", "b @ file:///x", "-e file:///y"], ["a==2", "c==1", "-e file:///y"]
    assert difference(old, new) == "a==1, b @ file:///x -> a==2, c==1"
    assert difference([], ["a==1"]) == "none -> a==1" and difference(old, old) == ""


def test_addresses_of_the_hub():
    for good in ("https://hub/x/simple/", "http://127.0.0.1:1/x", "https://hub/x/@1.0/x.whl"):
        assert make.web_address(good) == good
    for bad in (None, 3, "file:///etc", "https://me:pw@hub/x", "ftp://x/y", "https:// x/y"):
        assert make.web_address(bad) == ""
    assert make.web_address("http://hub/x/simple/") == make.web_address("") == ""


def test_what_a_worker_imports_is_in_its_home():
    """Regression: no environment with a home could be loaded."""
    code = "import sys; sys.modules['psutil'] = None; import rl.envs.load"
    subprocess.run([sys.executable, "-c", code], check=True)
