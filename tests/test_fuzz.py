"""Whatever arrives on the wire or lies on the disk, only the foreseen errors come: what the
fuzzer kept, and a few thousand new inputs."""

import random

import pytest

from tests.proofs import fuzz


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_what_was_kept_is_taken_or_refused(name, tmp_path):
    target = fuzz.TARGETS[name]
    kept = fuzz.saved(name)
    assert kept and all(len(data) <= 4096 for data in kept)
    for data in [*target.examples, *kept]:
        _, fault = fuzz.outcome(target, data, tmp_path)
        assert fault is None, (data, fault)
    assert any(
        fuzz.outcome(target, data, tmp_path)[0] == "fine" for data in target.examples
    ) or name in ("state", "manifest")


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_mutations_of_it_too(name, tmp_path):
    on_disk = name in (
        "pending",
        "status",
        "events",
        "metrics",
        "manifest",
        "digests",
        "safetensors",
        "config",
    )
    count, faults = fuzz.fuzz(
        name, tmp_path, random.Random(0), lambda done: done < (60 if on_disk else 600)
    )
    assert count >= 60 and not faults, faults


def test_the_fuzzer_finds_what_is_not_foreseen(tmp_path):
    """Of a decoder that lets one kind of error through."""

    def take(data, _folder):
        data.decode()
        if b"\0" in data:
            raise KeyError("of the test")

    target = fuzz.Target(take, (UnicodeDecodeError,), [b"hello", b"world"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fuzz.TARGETS, "of_the_test", target)
        count, faults = fuzz.fuzz(
            "of_the_test", tmp_path, random.Random(0), lambda done: done < 2000
        )
    assert count == 2000
    assert len(faults) == 1
    assert faults[0].startswith("of_the_test: KeyError at test_fuzz.py:")
