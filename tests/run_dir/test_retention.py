"""The one rule for what stays."""

import pytest

from rl.run_dir.paths import numbered
from rl.run_dir.retention import delete_old


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "needed", "left"),
    [
        (None, None, {}, range(1, 11)),
        (0, 5, {"needed": {3}}, [3, 5, 10]),
        (2, 4, {}, [4, 8, 9, 10]),
        (3, 4, {"needed": {2, 3}, "needed_from": 10}, [2, 3, 4, 8, 9, 10]),
        (1, None, {"needed_from": 6}, [6, 7, 8, 9, 10]),
    ],
)
def test_files_and_directories_are_deleted(tmp_path, keep_last, keep_every, needed, left):
    for number in range(1, 11):
        (tmp_path / f"{number:06d}").mkdir()
        (tmp_path / f"{number:06d}.batch").touch()
    for suffix in ("", ".batch"):
        delete_old(numbered(tmp_path, suffix), keep_last, keep_every, **needed)
        assert list(numbered(tmp_path, suffix)) == list(left)
