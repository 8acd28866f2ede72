"""Fault points: the right process dies at the right place, once; files under final names are
complete, and the rest is removed."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl.run_dir import files
from rl.run_dir.files import (
    CorruptFileError,
    append_file,
    clean_leftovers,
    decode_records,
    encode_record,
    write_directory,
    write_file,
)
from rl.system import faults
from rl.system.faults import FaultPlan
from rl.system.linux import pid_scope


def write_things(root):
    """Does each kind of durable write, both new and replacing something older."""
    write_file(root / "batches" / "000001.batch", b"one")
    write_file(root / "batches" / "000001.batch", b"other")
    for record in (b"first", b"second"):
        append_file(root / "batches" / "pending.log", encode_record(record))
    for text in ("old", "new"):
        write_directory(
            root / "weights" / "000001",
            lambda folder, text=text: [(folder / name).write_text(text) for name in "ab"],
        )
    files.remove_directory(root / "weights" / "000001")


def check_whole(root):
    """Checks that nothing incomplete has a final name."""
    batch, log, version = (
        root / "batches" / "000001.batch",
        root / "batches" / "pending.log",
        root / "weights" / "000001",
    )
    assert not batch.exists() or batch.read_bytes() in (b"one", b"other")
    found = []
    try:
        found += decode_records(log.read_bytes() if log.exists() else b"", "log")
    except CorruptFileError as error:
        assert "cut short" in str(error) or "damaged record at byte" in str(error)
    assert found in ([], [b"first"], [b"first", b"second"])
    if version.exists():
        assert [(version / name).read_text() for name in "ab"] in (["old"] * 2, ["new"] * 2)


FINAL = {"batches", "weights", "000001.batch", "pending.log", "000001", "a", "b"}


def names_below(root):
    return {path.name for path in root.rglob("*")}


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """The points of `write_things`, in order, without the statuses that threads of other tests
    may write meanwhile."""
    path = tmp_path / "trace"
    monkeypatch.setattr(faults, "plan", FaultPlan(trace=str(path), process="p"))
    write_things(tmp_path / "traced")
    monkeypatch.setattr(faults, "plan", None)
    points = [
        (name, int(count)) for _, name, count in map(str.split, path.read_text().splitlines())
    ]
    return [(name, count) for name, count in points if not name.startswith("status.")]


def test_a_death_at_any_point_leaves_nothing_half(tmp_path, trace):
    points = {
        "batch": "torn fsync rename fsync_dir done",
        "pending": "torn fsync",
        "weights": "fill fsync rename replaced done remove removed",
    }
    assert {f"{kind}.{point}" for kind, names in points.items() for point in names.split()} <= dict(
        trace
    ).keys()
    for number, (name, count) in enumerate(trace):
        root = tmp_path / str(number)
        if (child := os.fork()) == 0:
            faults.plan = FaultPlan(f"p:{name}:{count}", process="p")
            write_things(root)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, name
        check_whole(root)
        version = root / "weights" / "000001"
        clean_leftovers(root, root / "batches", root / "weights", ours="")
        assert names_below(root) <= FINAL, name
        if name == "weights.replaced":
            assert (version / "a").read_text() == "old"


def test_an_error_at_any_point_leaves_nothing_half_and_names_the_file(tmp_path, monkeypatch, trace):
    """The disk is full at every call, including in the middle of a write."""

    class Full(FaultPlan):
        def strike(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for number, (name, count) in enumerate(trace):
        if name.endswith(("done", "remove", "removed")):
            continue
        root = tmp_path / str(number)
        monkeypatch.setattr(faults, "plan", Full(f"p:{name}:{count}", process="p"))
        with pytest.raises(OSError) as error:
            write_things(root)
        assert error.value.errno == errno.ENOSPC
        if not name.startswith("weights"):
            assert error.value.filename in (
                str(root / "batches" / "000001.batch"),
                str(root / "batches" / "pending.log"),
            )
        check_whole(root)
        log = root / "batches" / "pending.log"
        # not even a torn record
        list(decode_records(log.read_bytes() if log.exists() else b"", "log"))
        assert names_below(root) <= FINAL, name


def test_only_the_named_process_dies_and_only_once(tmp_path):
    script = (
        "from rl.run_dir.files import write_file; from pathlib import Path; "
        "write_file(Path('{}') / 'config.toml', b'x')"
    )
    (tmp_path / "trainer").write_text(script.format(tmp_path))

    def run(fault):
        settings = {
            "RL_FAULT": fault,
            "RL_FAULT_MARK": str(tmp_path / "mark"),
            "RL_FAULT_TRACE": str(tmp_path / "trace"),
        }
        return subprocess.run(
            [sys.executable, tmp_path / "trainer"],
            env=os.environ | settings,
            capture_output=True,
            timeout=60,
        ).returncode

    assert run("orchestrator:config.rename:1") == 0
    assert run("trainer:config.rename:2") == 0
    assert run("trainer:config.rename:1") == -signal.SIGKILL
    assert run("trainer:config.rename:1") == 0  # the restarted process lives
    # or takes the next fault
    assert run("trainer:config.rename:1,trainer:config.fsync:1") == -signal.SIGKILL
    assert (tmp_path / "mark").read_text().split() == [
        "trainer:config.rename:1",
        "trainer:config.fsync:1",
    ]
    assert "trainer config.torn 1" in (tmp_path / "trace").read_text().splitlines()
    assert run("trainer") == 1


def test_leftovers_of_others_stay(tmp_path):
    stay = (".hidden.tmp", ".000001.partial", "000001", ".rl.lock")
    for name in stay:
        (tmp_path / name).touch()
    for name in (".data.old", ".000002.replaced"):
        (tmp_path / name).mkdir()
    dead, mine = (
        f".00000{i}.batch.{pid_scope()}-{pid}-1.tmp" for i, pid in ((5, 99999999), (6, os.getpid()))
    )
    others, elsewhere = (
        f".00000{i}.batch.0123abcd-4026531836-{pid}-1.tmp"
        for i, pid in ((7, os.getpid()), (8, 99999999))
    )
    for name in (dead, mine, others, elsewhere):
        (tmp_path / name).touch()
    assert [path.name for path in clean_leftovers(tmp_path)] == [dead]
    assert [path.name for path in clean_leftovers(tmp_path, ours="000008.batch")] == [elsewhere]
    assert len(clean_leftovers(tmp_path, ours="")) == 3
    assert names_below(tmp_path) == {*stay, "000002", mine}


def test_leftovers_of_another_user_end_no_command(tmp_path, monkeypatch):
    """Regression: in /tmp, where commands keep their folders, a file of another user ended them."""
    names = [f".{i}.{pid_scope()}-99999999-{i}.tmp" for i in (1, 2)]
    for name in names:
        (tmp_path / name).touch()
    unlink = Path.unlink

    def refuses(path, missing_ok):
        if path.name == names[0]:
            raise PermissionError(errno.EPERM, "not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuses)
    assert clean_leftovers(tmp_path) == [tmp_path / names[1]]
    assert names_below(tmp_path) == {names[0]}
