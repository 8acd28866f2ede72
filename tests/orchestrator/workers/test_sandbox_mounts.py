"""Which of this machine's files a worker's sandbox shows, depending on settings. Each sandbox is
inspected with a shell in it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl.orchestrator.workers.worker_sandbox import sandbox_of, view
from rl.system import sandbox
from rl.wire.worker_messages import PolicySpec
from tests.orchestrator.made import worker_setup
from tests.raised import run_error

needs_bwrap = pytest.mark.skipif(bool(sandbox.fault()), reason=sandbox.fault())


def setup_of(python="", model="", read=(), **env):
    place = {"read": [*read], "orchestrator": "/nowhere/pool"}
    return worker_setup(
        "env", policy=PolicySpec(model_path=model), python=python, sandbox=True, **place, **env
    )


def box_of(run_dir, *arguments, **given):
    return sandbox_of(
        setup_of(*arguments, **given), write(Path.home().parent / "setup.json"), run_dir
    )


def inside(box, script):
    return subprocess.run(
        box.wrap(["/bin/sh", "-c", script]), capture_output=True, text=True, timeout=30
    ).stdout


def write(path, text="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The working directory, in a home directory with a secret and a sibling; `run` is the run
    directory."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name in (
        "home/secret",
        "home/work/secret",
        "home/data/rows",
        "home/work/outputs/run/status/token",
    ):
        write(tmp_path / name)
    monkeypatch.chdir(tmp_path / "home/work")
    return tmp_path / "home/work"


@pytest.fixture
def run(work):
    return work / "outputs/run"


@needs_bwrap
def test_what_read_names_is_seen_and_nothing_else_that_a_setting_says(work, run):
    """A string in the arguments may look like a path but mean something else, so none of them
    makes a path visible."""
    write(work / "corpus/one")
    write(work / "rows.jsonl")
    (work / "way").symlink_to(work.parent / "data")
    texts = [
        "//",
        "/",
        "../",
        "~/",
        "/tmp",
        "/etc",
        "/proc/1/environ",
        f"{work.parent}",
        f"{run}/status",
        "corpus/one",
    ]
    before = box_of(run, args={"texts": [*texts, "x/" * 3000, "a\0/b"]})
    assert before.read == box_of(run).read
    box = box_of(
        run,
        read=("corpus/one", "./way", "../data/rows", f"/{work}/corpus//one"),
        dataset="rows.jsonl",
        eval_dataset="owner/rows",
    )
    assert box.read - before.read == {
        work / "corpus/one",
        work / "way",
        work.parent / "data/rows",
        work / "rows.jsonl",
    }
    found = inside(
        box,
        f"cat corpus/one way/rows ../data/rows; ls {work} {work.parent} //etc/shadow; echo x "
        "> /tmp/mine && echo written",
    )
    assert "text" * 3 in found
    assert "secret" not in found
    assert "shadow" not in found
    assert found.endswith("written\n")
    told = view(setup_of(read=("corpus/one",)), run)
    assert f"{work}/corpus/one" in told and str(Path(sys.prefix)) in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing", "read names 'nothing', but .*/home/work/nothing does not exist: correct it"),
        ("//", "'//' cannot be shown in a sandbox, in which / is its own: name files in it"),
        ("/tmp/", "in which /tmp is its own"),
        ("/proc/1", "in which /proc/1 is its own"),
        ("/dev", "in which /dev is its own"),
        ("outputs/run/status", "is a part of the run directory, which is always hidden"),
        ("linked", "is a part of the run directory, which is always hidden"),
    ],
)
def test_what_cannot_be_shown_is_told(work, run, text, said):
    (work / "linked").symlink_to(run)
    with run_error(said):
        box_of(run, read=(text,))


@needs_bwrap
def test_modules_of_the_working_directory_are_seen_and_what_read_names_beside_them(work, run):
    for name in ("words.py", "helper.py", "unused.py", "package/__init__.py", "package/part.py"):
        write(work / name)
    without = box_of(run).read
    assert box_of(run, id="words").read - without == {work / "words.py"}
    assert box_of(run, id="package").read - without == {work / "package"}
    for reward in (f"{work}/words.py:score", "words:score"):
        assert box_of(run, dataset="rows", reward=reward).read - without == {work / "words.py"}
    found = inside(box_of(run, id="words", read=("helper.py", "package")), "ls; ls package").split()
    assert found == ["helper.py", "outputs", "package", "words.py", "__init__.py", "part.py"]


@needs_bwrap
def test_of_an_interpreter_that_is_a_link_the_link_is_seen_and_not_what_lies_beside_it(work, run):
    """Directly, and as the base interpreter of a virtual environment."""
    home, real = work.parent, Path(sys.executable).resolve()
    (home / "bin").mkdir()
    (home / "bin/python3").symlink_to(real)
    (home / "bin/other").symlink_to("python3")
    write(home / "made/pyvenv.cfg", f"home = {home}/bin\n")
    (home / "made/bin").mkdir()
    (home / "made/lib/python3.11/site-packages").mkdir(parents=True)
    (home / "made/bin/python").symlink_to(home / "bin/other")
    shutil.copytree(home / "made", home / "copied", symlinks=True)
    (home / "copied/bin/python").unlink()
    shutil.copy(real, home / "copied/bin/python")
    (home / "copied/pyvenv.cfg").write_text(f"home = {real.parent}\n")
    for python in ("bin/python3", "bin/other", "made/bin/python", "copied/bin/python"):
        box = box_of(run, str(home / python))
        found = inside(
            box, f"{home / python} -c 'import json, sys; print(sys.prefix)'; ls {home}"
        ).split()
        top = python.split("/")[0]
        assert found[1:] == sorted({"work", top} | ({"bin"} if top == "made" else set())), found
        assert found[0] == str(real.parents[1] if top == "bin" else home / top)
    (home / "bin/python3").unlink()
    write(home / "bin/python3").chmod(0o755)
    with run_error(f"belongs to {home}, all of which would be visible"):
        box_of(run, str(home / "bin/other"))


@needs_bwrap
def test_a_run_directory_is_hidden_by_whatever_way_it_would_be_seen(work, run, monkeypatch):
    """When reached through a link; when inside a visible directory, itself or through a link;
    and sibling runs, too."""
    disk = work.parent / "disk"
    write(disk / "runs/one/status/token")
    write(disk / "runs/two/status/token")
    write(disk / "runs/none/rows")
    (work / "linked").symlink_to(disk / "runs")
    (work / "other").symlink_to(disk)
    for run_dir, seen in (
        (work / "linked/one", disk),
        (work / "linked/one", work / "other"),
        (disk / "runs/one", work / "other"),
    ):
        monkeypatch.setenv("PYTHONPATH", f"{seen}")
        kept = (
            f"cat {run_dir}/status/token {disk}/runs/one/status/token; echo x > {run_dir}/x; ls "
            f"{run_dir}"
        )
        found = inside(box_of(run_dir), f"find -L {seen} -type f; {kept}")
        assert found.split() == [], (run_dir, seen)
    monkeypatch.delenv("PYTHONPATH")
    assert inside(box_of(run, id="."), "ls outputs/run; cat secret") == "text", (
        "its own folder is seen"
    )
    assert inside(box_of(work / "linked/one", id="./"), "ls linked/one; cat secret") == "text"
    rows = f"{disk}/runs/none/rows"
    assert inside(
        box_of(disk / "runs/one", read=(f"{disk}", rows)), f"find {disk} -type f"
    ).split() == [rows]


@needs_bwrap
def test_a_run_that_starts_later_is_hidden_too(work, run):
    box = box_of(run, id=".")
    assert inside(box, "cat secret; ls -A outputs") == "text"
    write(work / "outputs/later/status/token")
    assert inside(box, "cat secret; cat outputs/later/status/token; ls -A outputs") == "text"


def test_the_folder_of_all_runs_is_hidden_whole(work, run):
    """By any way it would be seen: runs that start later are below it."""
    (work.parent / "link").symlink_to(work)
    outer = box_of(run, read=(f"{work.parent}/link", str(work)))
    assert outer.hidden >= {work / "outputs", work.parent / "link/outputs"}
    assert not outer.hidden & outer.read
    assert box_of(run, id="./folder").hidden == {run}, "what is not seen needs no mount"


def test_a_folder_of_runs_that_a_sandbox_would_show_is_refused(work, run):
    for given in ({"id": "./outputs"}, {"id": ".", "read": ("outputs/",)}):
        with run_error(f"{work}/outputs .*output_dir"):
            box_of(run, **given)


@needs_bwrap
def test_links_in_what_is_seen_show_what_they_lead_to_and_nothing_beside_it(work, run):
    """Links in a model's folder, and links that are named."""
    write(work.parent / "blobs/1")
    write(work.parent / "blobs/2")
    (work / "model/part").mkdir(parents=True)
    (work / "model/config.json").symlink_to("../../blobs/1")
    (work / "model/part/config.json").symlink_to(work.parent / "blobs/1")
    (work / "model/again.json").symlink_to("part/config.json")
    read = "cat model/config.json model/part/config.json model/again.json; ls ../blobs"
    assert inside(box_of(run, model=f"{work}/model"), read) == "text" * 3 + "1\n"
    assert (
        inside(box_of(run, read=("model/", "model/part/config.json")), read) == "text" * 3 + "1\n"
    )
