"""Homes from a package index and a Hub with real uv: what is installed, which verifiers, and
what is said when it cannot be."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from rl.config.environment_id import homes_root, read_id
from rl.homes import hub, make, uv
from rl.homes.build import outside
from rl.homes.home import Pointer, home_of, is_of_package, read, write_pointer
from rl.homes.make import ensure
from rl.homes.records import Record, difference, read_record, text_of, write_record
from rl.homes.request import Request
from rl.homes.resolve import settled
from rl.orchestrator.workers.pool_worker import likely_reason
from rl.system.errors import RunError
from tests.homes.index import CLASSIC, V1, make_source, make_wheel


def made(env_id, said, api=None, **more):
    label = env_id.split("@")[0].split("/")[-1]
    return ensure(Request(label, read_id(env_id), api), said.append, **more)


def prints(home, code):
    return subprocess.run(
        [home.interpreter, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def nothing_half_made():
    """No virtual environment, finished or not, and no pointer."""
    root = homes_root()
    left = [path.name for path in root.iterdir()] if root.exists() else []
    return not [
        name for name in left if name not in ("locks", "logs", "requests", "sources")
    ] and not list(root.glob("requests/*"))


def test_a_package_of_the_hub(index, said):
    make_wheel(
        index.folder / "ada", "say-hello", "0.3.0", {"say_hello.py": CLASSIC}, ["verifiers>=0.1"]
    )
    make_wheel(
        index.folder / "ada",
        "say-hello",
        "0.4.0",
        {"say_hello.py": CLASSIC + "NEW = 1\n"},
        ["verifiers>=0.1"],
    )
    make_wheel(index.folder / "ada", "verifiers", "0.3.9", {"verifiers/__init__.py": "STOLEN = 1"})
    make_wheel(index.folder / "ada", "helper", "9.9", {"helper.py": "STOLEN = 1"})
    home = made("ada/say-hello@0.3.0", said)
    assert (home.module, home.api, home.version) == ("say_hello", "classic", "0.3.0")
    # the owner's index is asked for its package alone
    assert home.packages == ["helper==1.0", "say-hello==0.3.0", "verifiers==0.3.1"]
    assert not [
        path for path in index.asked if path.startswith("/ada/") and "say-hello" not in path
    ]
    assert (
        prints(home, "import say_hello, helper, sys; print(helper.VALUE, sys.prefix)")
        == f"7 {home.place}"
    )
    assert len(said) == 2 and said[0].startswith(
        "environment say-hello: ada/say-hello@0.3.0 from the Environments Hub (http://127.0.0.1:"
    )
    reason = "0.4 has no classic API"
    text = (
        f"ada/say-hello@0.3.0: classic, verifiers 0.3.1 ({reason}), Python "
        f"{sys.version.split()[0]}; made in "
    )
    assert text in said[1] and said[1].endswith(f" s ({home.place})")

    asked, said[:] = len(index.asked), []
    assert made("ada/say-hello@0.3.0", said) == home and (said, len(index.asked)) == ([], asked)
    newest = made("ada/say-hello", said)
    assert newest.version == "0.4.0" and newest.digest != home.digest and home.place.is_dir()


def test_packages_of_one_name_and_version_are_told_apart_by_what_they_hold(index, said, tmp_path):
    """Whoever owns them."""
    for owner in ("ada", "bob"):
        make_wheel(
            index.folder / owner,
            "hello",
            "1.0",
            {"hello.py": f"{CLASSIC}OWNER = '{owner}'\n"},
            ["verifiers<0.4"],
        )
    code = "import hello; print(hello.OWNER)"
    homes = {owner: made(f"{owner}/hello@1.0", said) for owner in ("ada", "bob")}
    assert {owner: prints(home, code) for owner, home in homes.items()} == {
        "ada": "ada",
        "bob": "bob",
    }
    assert made("bob/hello", said).digest == homes["bob"].digest, (
        "with a version or without, it is the same package"
    )
    make_wheel(index.folder / "simple", "say-it", "1.0", {"say_it.py": CLASSIC}, ["verifiers<0.4"])
    assert made("pypi:say-it", said).digest == made("pypi:Say_It", said).digest
    said.clear()
    made("pypi:Say_It", said)
    assert said == [], "one that is spelt in another way is not made at each start"
    request = Request("hello", read_id("bob/hello@1.0"))
    write_pointer(request.pointer, Pointer(id=request.id, home=homes["ada"].digest, made=0.0))
    assert ensure(request, said.append) == homes["bob"]
    text = text_of("hello", Record("k", homes["bob"]))
    assert (
        "`rl env install` of this file installs it, too.\n# own = hello==1.0\n" in text
        and "\nhello==1.0" not in text
    ), "uv and pip would ask the usual index for it"
    (tmp_path / "hello.txt").write_text(text)
    assert read_record(tmp_path / "hello.txt") == Record("k", homes["bob"])


def test_what_was_written_into_a_package_is_told_where_it_is_installed_again(index, said):
    first = ensure(Request("rows", None), said.append)
    with next(first.place.glob("lib/python3*/site-packages/helper.py")).open("a") as file:
        file.write("VALUE = 8\n")
    assert not any("warning" in line for line in said)
    make_wheel(index.folder / "simple", "sums", "1.0", {"sums.py": "A = 1\n"})
    second = ensure(Request("more", None, requirements=("sums",)), said.append)
    assert prints(second, "import helper; print(helper.VALUE)") == "8"
    remedy = "`uv cache clean helper`, `rl env remove` of this home, then again"
    text = (
        "helper.py of helper differs from its package's record: something wrote into uv's "
        f"cache; {remedy}"
    )
    assert said[-1] == f"warning: environment more: {text}"
    subprocess.run(["rm", "-r", str(first.place)], check=True)
    settled(Request("rows", None), Record(Request("rows", None).key, first), said.append)
    assert said[-1] == f"warning: environment rows: {text}"


def test_installing_again_downloads_only_what_may_have_changed(index, said):
    make_wheel(index.folder / "ada", "hello", "1.0", {"hello.py": CLASSIC}, ["verifiers<0.4"])
    request = Request("hello", read_id("ada/hello"))
    ensure(request, said.append)
    index.asked.clear()
    make_wheel(
        index.folder / "ada", "hello", "1.0", {"hello.py": CLASSIC + "NEW = 1\n"}, ["verifiers<0.4"]
    )
    make_wheel(index.folder / "simple", "helper", "2.0", {"helper.py": "VALUE = 8\n"})
    assert (
        prints(
            ensure(request, said.append, fresh=True),
            "import hello, helper; print(hello.NEW, helper.VALUE)",
        )
        == "1 8"
    )
    files = {
        path.rpartition("/")[2]
        for path in index.asked
        if path.startswith("/files/") and path.endswith(".whl")
    }
    assert files == {"hello-1.0-py3-none-any.whl", "helper-2.0-py3-none-any.whl"}


def test_a_package_that_is_no_environment_is_refused_by_its_text_before_anything_else_is_fetched(
    index, said
):
    """Where its text leaves open what it is, and where its kind is given, it is believed."""
    make_wheel(
        index.folder / "simple", "library", "1.0", {"library.py": "A = 1\n"}, ["verifiers<0.4"]
    )
    make_wheel(index.folder / "ada", "library", "1.0", {"library.py": "A = 1\n"}, ["verifiers<0.4"])
    make_wheel(
        index.folder / "simple",
        "shows-nothing",
        "1.0",
        {"shows_nothing.py": "from elsewhere import *\n"},
        ["verifiers<0.4"],
    )
    for env_id in ("pypi:library", "ada/library"):
        with pytest.raises(RunError) as error:
            made(env_id, said)
        assert str(error.value) == (
            f"environment {env_id}: its package is not an environment: library has neither a "
            "function load_environment nor a v1 Taskset or "
            "Env in `__all__`; check the name; if it is one nevertheless, set kind = "
            '"classic" or "v1"'
        )
        assert nothing_half_made()
    assert {
        path.split("/")[-1].partition("-")[0] for path in index.asked if path.endswith(".whl")
    } == {"library"}
    assert (
        made("pypi:library", said, api="classic").api
        == made("pypi:shows-nothing", said).api
        == "classic"
    )


def test_requirements_are_looked_at_before_anything_is_made(index, said):
    with pytest.raises(RunError, match="environment rows: requirements: '<2' is not valid"):
        ensure(Request("rows", None, requirements=("<2",)), said.append)
    assert nothing_half_made()


@pytest.mark.parametrize(
    ("requires", "code", "version", "why"),
    [
        ("verifiers>=0.1", V1, "0.4.0", ""),
        ("verifiers<0.4", V1, "0.3.1", ""),
        (
            "verifiers>=0.3",
            V1 + "from verifiers.legacy import Rubric\n",
            "0.3.1",
            "0.4.0 lacks verifiers.legacy",
        ),
        (
            "verifiers==0.1.9",
            CLASSIC,
            "0.3.1",
            "two-words asks for verifiers==0.1.9 and got 0.3.1, the nearest supported version",
        ),
        (
            "verifiers==0.2.0",
            V1,
            "0.3.1",
            "two-words asks for verifiers==0.2.0 and got 0.3.1, the nearest supported version",
        ),
        (
            "verifiers>=0.1,<0.2",
            V1,
            "0.3.1",
            "two-words asks for verifiers<0.2,>=0.1 and got 0.3.1, the nearest supported version",
        ),
        (
            "verifiers>=0.5",
            V1,
            "0.4.0",
            "two-words asks for verifiers>=0.5 and got 0.4.0, the nearest supported version",
        ),
    ],
)
def test_which_verifiers(index, said, requires, code, version, why):
    make_wheel(
        index.folder / "simple", "two-words", "1.0", {"two_words/__init__.py": code}, [requires]
    )
    home = made("pypi:two-words", said)
    assert (
        f"verifiers=={version}" in home.packages
        and home.why == f"{home.api}, verifiers {version}" + (f" ({why})" if why else "")
    )
    likely = (
        f"\nThe likely reason: {why}; use a version of the package that was written for it"
        if "asks for" in why
        else ""
    )
    raised = "importing it raised AttributeError: module 'verifiers' has no attribute 'Rubric'"
    assert likely_reason(str(home.interpreter), raised) == likely, (
        "what the error says of one that does not load"
    )
    possible = likely.replace("The likely reason", "If it is not that, a possible reason")
    assert (
        likely_reason(
            str(home.interpreter), "its load_environment raised ValueError: URL is required"
        )
        == possible
    )


def test_both_apis_in_one_package_and_the_switch_between_them(index, said):
    make_wheel(index.folder / "simple", "both", "1.0", {"both.py": CLASSIC + V1}, ["verifiers"])
    assert made("pypi:both", said).api == "v1"
    classic = made("pypi:both", said, api="classic")
    assert classic.api == "classic" and "verifiers==0.3.1" in classic.packages
    make_wheel(index.folder / "simple", "one", "1.0", {"one.py": CLASSIC}, ["verifiers"])
    with pytest.raises(
        RunError,
        match='kind = "v1", but it does not have a v1 Taskset or Env in `__all__`; leave kind out',
    ):
        made("pypi:one", said, api="v1")


def test_a_module_of_another_name_is_found_by_what_is_installed(index, said):
    files = {"maths/__init__.py": CLASSIC, "helpers_of_it.py": "A = 1\n"}
    make_wheel(index.folder / "simple", "ada-environment", "1.0", files, ["verifiers"])
    assert made("pypi:ada-environment", said).module == "maths"
    make_wheel(index.folder / "simple", "none-of-all", "1.0", {"nothing.py": "A = 1\n"})
    with pytest.raises(
        RunError,
        match=r"is not an environment: no module is called none_of_all, and each has neither .* "
        r"\(it has nothing\)",
    ):
        made("pypi:none-of-all", said)
    make_wheel(index.folder / "simple", "several", "1.0", {"one.py": CLASSIC, "two.py": CLASSIC})
    with pytest.raises(RunError, match="several environments, one, two; it must have one"):
        made("pypi:several", said)


def test_folders(index, said, tmp_path):
    """A package is installed as it lies there, a folder without one is on the import path: child
    processes find both."""
    plain = tmp_path / "my_words"
    plain.mkdir()
    (plain / "my_words.py").write_text(V1)
    home = made(str(plain), said)
    assert home.module == "my_words" and home.version == ""
    found = "import importlib.util; print(importlib.util.find_spec('my_words').origin)"
    child = (
        'import subprocess, sys; print(subprocess.check_output([sys.executable, "-c", '
        f'"{found}"], text=True))'
    )
    assert prints(home, child) == str(plain / "my_words.py")
    assert is_of_package(str(home.interpreter)) and home_of(str(home.interpreter)) == home.digest
    assert not is_of_package("/usr/bin/python3") and home_of(str(homes_root())) == home_of("") == ""
    (plain / "my_words.py").write_text(V1 + "\nimport helper\n")
    assert made(str(plain), said) == home


def test_further_requirements_and_rows(index, said, tmp_path, monkeypatch):
    make_wheel(index.folder / "simple", "sums", "2.0", {"sums.py": "A = 1\n"})
    rows = ensure(Request("rows", None), said.append)
    assert (rows.id, rows.module, rows.packages) == (
        "classic",
        "",
        ["helper==1.0", "verifiers==0.3.1"],
    )
    more = ensure(Request("other", None, requirements=("sums>=2",)), said.append)
    assert (
        more.packages == ["helper==1.0", "sums==2.0", "verifiers==0.3.1"]
        and more.digest != rows.digest
    )
    (tmp_path / "alone.py").write_text(CLASSIC)
    monkeypatch.chdir(tmp_path)
    # a module has no needs of its own
    assert ensure(Request("alone", read_id("alone")), said.append) == rows
    assert not is_of_package(str(rows.interpreter))


@pytest.mark.parametrize(
    ("env_id", "text"),
    [
        (
            "ada/nope",
            r"environment ada/nope: http://127.0.0.1:\d+/hub/ada/nope/@latest answered 404; "
            r"check owner, name and version",
        ),
        (
            "pypi:nope",
            "environment pypi:nope: a package is not in the index; check the name\nuv says:\n",
        ),
        ("pypi:clash", "its dependencies conflict; fix them"),
        (
            "pypi:future",
            r"its packages want Python >=3.99, this is 3\.\d+\.\d+, and uv finds no other "
            r"that matches; install one",
        ),
    ],
)
def test_what_cannot_be_installed(index, said, env_id, text, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # no prime
    make_wheel(index.folder / "simple", "clash", "1.0", {"clash.py": CLASSIC}, ["helper<1"])
    make_wheel(index.folder / "simple", "future", "1.0", {"future.py": CLASSIC}, python=">=3.99")
    with pytest.raises(RunError, match=text):
        ensure(Request(env_id, read_id(env_id)), said.append)
    assert nothing_half_made()


def test_nobody_answers(index, said):
    """A home that is there is used, and it is said; without one it is an error."""
    make_wheel(index.folder / "ada", "hello", "1.0", {"hello.py": CLASSIC}, ["verifiers<0.4"])
    make_wheel(index.folder / "simple", "hello2", "1.0", {"hello2.py": CLASSIC}, ["verifiers<0.4"])
    first, second = made("ada/hello", said), made("pypi:hello2", said)
    index.up = False
    said.clear()
    assert made("ada/hello", said, fresh=True) == first
    assert "the Environments Hub answered 503" in said[0] and f"({first.place})" in said[0]
    with pytest.raises(RunError, match="environment ada/other: the Environments Hub answered 503"):
        made("ada/other", said)
    assert made("pypi:hello2", said) == second


def test_private_packages_come_by_prime(index, said, tmp_path, monkeypatch):
    index.private.add("ada/secret")
    with pytest.raises(RunError, match="`uv tool install prime`, `prime login`"):
        monkeypatch.setenv("PATH", "/nowhere")
        made("ada/secret", said)
    wheel = make_wheel(tmp_path / "wheels", "secret", "1.0", {"secret.py": CLASSIC})
    tool = tmp_path / "bin" / "prime"
    tool.parent.mkdir()
    asked = (
        '[ "$1 $2 $3 $4" = "env pull ada/secret --target" ] || { echo "not logged in"; exit 3; }'
    )
    tool.write_text(f'#!/bin/sh\n{asked}\n/bin/mkdir -p "$5"\n/bin/cp {wheel} "$5"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    # it brought no package
    with pytest.raises(RunError, match="`prime env pull` ended with code 0"):
        made("ada/secret", said)
    with pytest.raises(
        RunError,
        match=r"`prime env pull` ended with code 3; .*`prime login`. prime says:\n  not logged in",
    ):
        made("ada/secret@2.0", said)


def test_a_damaged_home_is_made_anew(index, said):
    home = ensure(Request("rows", None), said.append)
    for damage in (
        lambda: (home.interpreter.unlink(), home.interpreter.symlink_to("/nowhere/python3")),
        lambda: (home.place / "home.json").write_text("{"),
        lambda: next(home.place.glob("lib/python3*/site-packages/helper.py")).unlink(),
    ):
        said.clear()
        damage()
        assert ensure(Request("rows", None), said.append) == home and read(home.digest) == (
            home,
            "",
        )
        assert said[0].startswith("environment rows: its home is damaged: ")
    subprocess.run(["rm", "-r", str(home.place)], check=True)
    assert ensure(Request("rows", None), said.append) == home
    lost = next(home.place.glob("lib/python3*/site-packages/verifiers/v1/__init__.py"))
    lost.unlink()
    # what `rl env install` does
    assert ensure(Request("rows", None), said.append, fresh=True) == home and lost.exists()


def test_two_that_want_the_same_home(index, said):
    """One makes it, the other waits for that and says so."""
    with make.building(
        Request("rows", None), "environment other", said.append, time.monotonic() + 60
    ):
        code = "from rl.homes import make, request; request.WORKER = ('helper>=1',)"
        code += "; print(make.ensure(request.Request('rows', None), print).digest)"
        waiting = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert (
            waiting.stdout.readline()
            == f"environment rows: waiting for process {os.getpid()}, which is making its home\n"
        )
    out, _ = waiting.communicate(timeout=60)
    assert read(out.split()[-1])[0] and waiting.returncode == 0
    with (
        make.building(
            Request("rows", None), "environment other", said.append, time.monotonic() + 60
        ),
        pytest.raises(
            RunError, match=rf"process {os.getpid()} has been making its home for 1800 s \(lock: "
        ),
        make.building(Request("rows", None), "environment other", said.append, time.monotonic()),
    ):
        pass


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (
            "echo 'error: failed to copy: No space left on device (os error 28)'; exit 2",
            "no space left on the disk of .*/homes, or of uv's own cache; free some: `uv "
            "cache clean`",
        ),
        (
            "echo 'error: failed to write to file `/small/c/simple-v28/x.rkyv`: No space "
            "left on device (os error 28)'; exit 2",
            "no space left on the disk of /small/c/simple-v28/x.rkyv; free some: `uv cache "
            "clean` .* UV_CACHE_DIR and RL_ENVIRONMENTS",
        ),
        (
            "echo 'error: build failed: this package requires Python>=3.8 and a Fortran "
            "compiler'; exit 1",
            "uv could not install it; fix the package.*\nuv says:\n  error: build failed: "
            "this package requires",
        ),
        (
            "echo one; echo 'error: build failed'; exit 1",
            "uv could not install it; fix the package.*\nuv says:\n  one\n  error: build failed",
        ),
        (
            "echo 'error: Failed to initialize cache at `/h/.cache/uv`'; echo '  cause: "
            "Read-only file system (os error 30)'; exit 2",
            "uv cannot write to its cache; set UV_CACHE_DIR to a folder that can be "
            "written\nuv says:",
        ),
        (
            "echo 'error: No solution found'; echo 'hint: Packages were unavailable because "
            "the network was disabled.'; exit 1",
            "a package is not in uv's cache, and uv may not use the network; unset "
            "UV_OFFLINE, or `offline` in uv's configuration",
        ),
        ("sleep 60", r"not made after \d+ s; uv said nothing"),
    ],
)
def test_uv_fails(index, said, tmp_path, monkeypatch, script, text):
    tool = tmp_path / "uv-that-fails"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(uv, "uv_binary", lambda: str(tool))
    monkeypatch.setattr(make, "DEADLINE_S", 0.5 if "sleep" in script else 60.0)
    with pytest.raises(RunError, match=text):
        ensure(Request("rows", None), said.append)
    assert nothing_half_made()


def test_no_uv(monkeypatch):
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match=r"uv, .* is not installed: `pip install uv`"):
        uv.uv_binary()


def test_a_place_that_cannot_be_written(index, said, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with (
        monkeypatch.context() as patch,
        pytest.raises(RunError, match="set RL_ENVIRONMENTS to a folder that can be written"),
    ):
        patch.setenv("RL_ENVIRONMENTS", str(tmp_path / "file" / "x"))
        ensure(Request("rows", None), said.append)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        RunError,
        match=f"environment rows: {homes_root()}: No space left on device; set RL_ENVIRONMENTS to "
        ".* or free some space",
    ):
        ensure(Request("rows", None), said.append)

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(
        RunError,
        match="No locks available; set RL_ENVIRONMENTS to a folder on a local disk, since this one "
        "has no locks",
    ):
        ensure(Request("rows", None), said.append)
    assert nothing_half_made()


@pytest.mark.parametrize(
    "error, is_of_the_homes",
    [
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/source/pyproject.toml"),
            False,
        ),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), False),
        (PermissionError(errno.EACCES, "Permission denied", "HOMES/x"), True),
        (OSError(errno.ENOSPC, "No space left on device", "/somewhere/x"), True),
    ],
)
def test_only_a_fault_of_the_folder_of_homes_is_blamed_on_it(index, said, error, is_of_the_homes):
    error.filename = error.filename and error.filename.replace("HOMES", str(homes_root()))
    building = make.building(
        Request("rows", None), "environment rows", said.append, time.monotonic() + 60
    )
    with pytest.raises(RunError) as raised, building:
        raise error
    assert error.strerror in str(raised.value) and (error.filename or "") in str(raised.value)
    assert ("RL_ENVIRONMENTS" in str(raised.value)) == is_of_the_homes, raised.value


def test_a_record_is_played_with_the_same_packages(index, said, tmp_path):
    make_wheel(index.folder / "ada", "hello", "1.0", {"hello.py": CLASSIC}, ["verifiers<0.4"])
    request = Request("hello", read_id("ada/hello"))
    first = settled(request, None, said.append)
    write_record(tmp_path / "records", "hello", first)
    assert read_record(tmp_path / "records" / "hello.txt") == first
    make_wheel(index.folder / "simple", "helper", "2.0", {"helper.py": "VALUE = 8\n"})
    edited = msgspec.structs.replace(
        first.home, packages=["hello==1.0", "helper==2.0", "verifiers==0.3.1"]
    )
    assert (
        prints(ensure(request, said.append, recorded=edited), "import helper; print(helper.VALUE)")
        == "8"
    )
    (index.folder / "simple" / "helper-2.0-py3-none-any.whl").unlink()
    make_wheel(index.folder / "ada", "hello", "1.1", {"hello.py": CLASSIC}, ["verifiers<0.4"])
    newer = ensure(Request("hello", read_id("ada/hello")), said.append, fresh=True)
    assert newer.version == "1.1"
    # the run goes on with what it had
    assert settled(request, first, said.append).home == first.home
    subprocess.run(["rm", "-r", str(first.home.place)], check=True)
    # made again, exactly
    assert settled(request, first, said.append).home == first.home and first.home.place.is_dir()

    subprocess.run(["rm", "-r", str(first.home.place)], check=True)
    (index.folder / "ada" / "hello-1.0-py3-none-any.whl").unlink()
    subprocess.run(["rm", "-r", str(Path(os.environ["UV_CACHE_DIR"]))], check=True)
    said.clear()
    assert settled(request, first, said.append).home == newer
    assert "its home cannot be made as it was recorded" in said[-2]
    assert (
        said[-1]
        == "warning: environment hello is played with different packages than before: hello 1.0 "
        "-> 1.1"
    )
    other = Record("another", first.home)
    assert settled(request, other, said.append).home == newer


def test_what_changes_behind_an_address_makes_another_home_and_the_record_means_it(
    index, said, tmp_path
):
    """A dependency in a repository is recorded with its commit, one in a folder told from what
    it was by its content."""
    repository, folder = (
        make_source(tmp_path / "fromgit", "VALUE = 1\n"),
        make_source(tmp_path / "fromfolder", "VALUE = 1\n"),
    )
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]

    def commit(text):
        (repository / "fromgit.py").write_text(text)
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
            subprocess.run([*git, *words], check=True)
        return subprocess.run(
            [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
        ).stdout.strip()

    first_commit = commit("VALUE = 1\n")
    needs = [
        f"fromgit @ git+{repository.as_uri()}",
        f"fromfolder @ {folder.as_uri()}",
        "verifiers<0.4",
    ]
    request = Request("needy", read_id(str(make_source(tmp_path / "needy", CLASSIC, needs))))
    values = "import fromgit, fromfolder; print(fromgit.VALUE, fromfolder.VALUE)"
    first = ensure(request, said.append)
    assert (
        f"fromgit @ git+{repository.as_uri()}@{first_commit}" in first.packages
        and prints(first, values) == "1 1"
    )
    commit("VALUE = 2\n")
    second = ensure(request, said.append, fresh=True)
    (folder / "fromfolder.py").write_text("VALUE = 2\n")
    # `rl env remove`, or a pyproject.toml that was changed as well: no home tells what uv remembers
    request.pointer.unlink()
    third = ensure(request, said.append, fresh=True)
    assert [prints(home, values) for home in (first, second, third)] == ["1 1", "2 1", "2 2"]
    assert len({first.digest, second.digest, third.digest}) == 3
    subprocess.run(["rm", "-r", str(first.place)], check=True)
    said.clear()
    again = settled(request, Record(request.key, first), said.append).home
    assert prints(again, values) == "1 2", "the folder has no other content any more"
    assert (
        said[-1]
        == "warning: environment needy cannot be made exactly as it was recorded: the content "
        "of fromfolder"
    )


def test_a_home_of_several_folders_is_made_again_with_all_of_them(index, said, tmp_path):
    make_source(tmp_path / "ahelper", "VALUE = 3\n")
    source = '[tool.uv.sources]\nahelper = { path = "../ahelper", editable = true }\n'
    request = Request(
        "edited",
        read_id(
            str(make_source(tmp_path / "edited", CLASSIC, ["ahelper", "verifiers<0.4"], source))
        ),
    )
    home = ensure(request, said.append)
    assert [line for line in home.packages if line.startswith("-e ")] == [
        f"-e {tmp_path / 'ahelper'}",
        f"-e {tmp_path / 'edited'}",
    ]
    subprocess.run(["rm", "-r", str(home.place)], check=True)
    assert settled(request, Record(request.key, home), said.append).home == home
    assert (
        prints(home, "import edited, ahelper; print(ahelper.VALUE)") == "3"
        and "warning" not in said[-1]
    )


def test_what_a_package_needs_may_stand_beside_its_pyproject(index, said, tmp_path):
    folder = make_source(tmp_path / "dyn", CLASSIC)
    (folder / "pyproject.toml").write_text('[project]\nname = "dyn"\ndynamic = ["dependencies"]\n')
    (folder / "requirements.txt").write_text("one\n")
    request = [Request("dyn", read_id(str(folder))).key]
    (folder / "requirements.txt").write_text("two\n")
    assert Request("dyn", read_id(str(folder))).key not in request


def test_a_folder_that_is_a_package_is_on_the_import_path_alone(index, said, tmp_path):
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "__init__.py").write_text(CLASSIC)
    (tmp_path / "secret.py").write_text("")
    home = made(str(folder), said)
    assert outside(home.place) == [folder]
    find = "import importlib.util as u; print(u.find_spec('whole').origin, u.find_spec('secret'))"
    assert (
        prints(home, find)
        == f"{home.place}/lib/python3.{sys.version_info[1]}/site-packages/whole/__init__.py None"
    )
    subprocess.run(["rm", "-r", str(home.place)], check=True)
    assert ensure(Request("whole", read_id(str(folder))), said.append, recorded=home) == home


def test_what_differs():
    assert (
        difference(["a==1", "b @ file:///x", "-e /y"], ["a==2", "c==1", "-e /y"])
        == "a 1 -> 2, b file:///x -> none, c none -> 1"
    )


def test_addresses_of_the_hub():
    for good in ("https://hub/x/simple/", "http://127.0.0.1:1/x"):
        assert hub.web_address(good) == good
    for bad in (
        None,
        3,
        "file:///etc",
        "https://me:pw@hub/x",
        "ftp://x/y",
        "https:// x/y",
        "http://hub/x/simple/",
        "",
    ):
        assert hub.web_address(bad) == ""
