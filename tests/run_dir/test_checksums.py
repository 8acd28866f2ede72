"""Checksums by a hash that only a newer rl knows are distinguished from damage."""

import json
import os

import pytest

from rl.run_dir.checksums import (
    DIGESTS,
    MANIFEST,
    check_version,
    checksum,
    read_digests,
    verify_checkpoint,
)
from rl.run_dir.files import CorruptFileError
from rl.run_dir.safetensors import HASH
from rl.system.errors import RunError


@pytest.fixture
def checkpoint(tmp_path):
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / name).write_text(name)
    return tmp_path


def write_manifest(folder, **renamed):
    """Writes the manifest; `renamed`: the hash's name, for all files or by the prefix of a file
    name."""
    files = {name: checksum(folder / name) for name in (".metadata", "__0_0.distcp")}
    for begin, word in renamed.items():
        for name, entry in files.items():
            if begin == "all" or name.startswith(begin):
                files[name] = {"size": entry["size"], word: entry[HASH]}
    (folder / MANIFEST).write_text(
        json.dumps({"step": 1, "world_size": 1, "model": "m", "files": files})
    )


def test_a_checkpoint_of_a_newer_rl_is_not_damaged(checkpoint):
    write_manifest(checkpoint)
    assert verify_checkpoint(checkpoint)["step"] == 1
    write_manifest(checkpoint, all="blake9")
    with pytest.raises(
        RunError, match=r"manifest\.json: its hash is 'blake9'.*a newer rl wrote it"
    ) as error:
        verify_checkpoint(checkpoint)
    assert not isinstance(error.value, CorruptFileError)


def test_a_flipped_bit_in_a_name_of_a_hash_is_damage(checkpoint):
    write_manifest(checkpoint, __0="blake9")
    with pytest.raises(CorruptFileError, match=r"__0_0\.distcp: damaged"):
        verify_checkpoint(checkpoint)


def test_a_sparse_file_of_the_wrong_size_is_not_read(checkpoint):
    write_manifest(checkpoint)
    os.truncate(checkpoint / "__0_0.distcp", 1 << 40)
    with pytest.raises(CorruptFileError, match=r"__0_0\.distcp: damaged"):
        verify_checkpoint(checkpoint)  # a terabyte would take minutes


def test_digests_of_a_newer_rl_are_not_damaged(tmp_path):
    path = tmp_path / DIGESTS
    for content in ({"hash": "blake9", "tensors": {"w": "00"}}, {"hash": "blake9", "parts": []}):
        path.write_text(json.dumps(content))
        for check, argument in ((read_digests, path), (check_version, tmp_path)):
            with pytest.raises(
                RunError, match=r"digests\.json: its hash is 'blake9'.*a newer rl wrote it"
            ) as error:
                check(argument)
            assert not isinstance(error.value, CorruptFileError)


FILES = (["a"], "config.json", {"a": 1}, {"..": "00"}, {"": "00"}, {"a/b": "00"}, {"a" * 300: "00"})


@pytest.mark.parametrize(
    "content",
    [
        {"iash": HASH, "tensors": {}},
        {"hash": 9, "tensors": {}},
        {"hash": HASH},
        [1],
        1,
        *({"hash": HASH, "tensors": {}, "files": files} for files in FILES),
        *(
            {"hash": HASH, "tensors": tensors}
            for tensors in (["a"], {"a": 1}, {"a": ["0"]}, {"a": [[0, 1]]}, {"a": [[0, "1", "00"]]})
        ),
    ],
)
def test_what_no_rl_writes_is_damage(tmp_path, content):
    """For example, a flipped bit in the word `hash`."""
    (tmp_path / DIGESTS).write_text(json.dumps(content))
    with pytest.raises(CorruptFileError, match=r"digests\.json: missing or damaged"):
        read_digests(tmp_path / DIGESTS)
