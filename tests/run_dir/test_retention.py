"""The rule for which entries stay."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.run_dir.paths import numbers
from rl.run_dir.retention import NEVER, Retention


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "needed", "left"),
    [
        (0, 5, {"needed": {3}}, [3, 5, 10]),
        (3, 4, {"needed": {2, 3}, "needed_from": 10}, [2, 3, 4, 8, 9, 10]),
    ],
)
def test_files_and_directories_are_deleted(tmp_path, keep_last, keep_every, needed, left):
    for number in range(1, 11):
        (tmp_path / f"{number:06d}").mkdir()
        (tmp_path / f"{number:06d}.batch").touch()
    for suffix in ("", ".batch"):
        Retention(tmp_path, (suffix,), keep_last, keep_every).delete_old(10, **needed)
        assert numbers(tmp_path, suffix) == list(left)


def stays(
    there: set[int], keep_last: int, keep_every: int | None, needed: set[int], needed_from: int
) -> set[int]:
    """Applies the rule itself to all entries."""
    newest = set(sorted(there)[max(0, len(there) - keep_last) :])
    return {
        n
        for n in there
        if n in newest or n in needed or n >= needed_from or (keep_every and n % keep_every == 0)
    }


STEPS = st.lists(
    st.tuples(
        st.integers(1, 12), st.sets(st.integers(1, 12), max_size=2), st.none() | st.integers(0, 14)
    ),
    max_size=12,
)


@given(st.sets(st.integers(1, 8)), st.integers(0, 4), st.none() | st.integers(1, 4), STEPS)
def test_what_is_kept_in_mind_is_what_the_rule_says(before, keep_last, keep_every, steps):
    """Whatever is added, even an older number again, the result equals that of checking all
    entries each time."""
    with tempfile.TemporaryDirectory() as name:
        folder, expected = Path(name), set(before)
        for number in before:
            (folder / f"{number:06d}.batch").touch()
        retention = Retention(folder, (".batch",), keep_last, keep_every)
        for added, needed, needed_from in steps:
            limit = NEVER if needed_from is None else needed_from
            (folder / f"{added:06d}.batch").touch()
            retention.delete_old(added, needed, limit)
            expected = stays(expected | {added}, keep_last, keep_every, needed, limit)
            assert {*numbers(folder, ".batch")} == expected


def test_a_directory_is_listed_once(tmp_path, monkeypatch):
    listed = []
    list_directory = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or list_directory(path))
    retention = Retention(tmp_path, (".batch",), 2, None)
    for number in range(1, 8):
        (tmp_path / f"{number:06d}.batch").touch()
        retention.delete_old(number, needed_from=3)
    assert listed == [tmp_path] and numbers(tmp_path, ".batch") == [3, 4, 5, 6, 7]
