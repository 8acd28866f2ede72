"""Files written past the page cache: the same bytes as through it, wherever it is possible and wherever not."""

import errno
import fcntl
import os
import random
import re

import pytest
from blake3 import blake3

from rl.run_dir import direct
from rl.run_dir.direct import DirectFile

SIZES = (0, 1, 4095, 4096, 4097, direct.PIECE_BYTES - 1, direct.PIECE_BYTES, direct.PIECE_BYTES + 1, 3 * direct.PIECE_BYTES)


def is_direct(file: DirectFile) -> bool:
    return bool(fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_in_parts_is_there_with_its_checksum(tmp_path, size):
    rng, data = random.Random(size), random.Random(size).randbytes(size)
    path, place = tmp_path / "file", 0
    path.write_bytes(b"what was there before" * 1000)
    with DirectFile(path, hashed=True) as file:
        while place < size:
            part = data[place : place + rng.choice((1, 700, 4096, 3_000_000, size))]
            assert file.write(memoryview(part)) == len(part)
            place += len(part)
            assert file.tell() == place
    assert path.read_bytes() == data
    assert file.checksum() == {"size": size, "blake3": blake3(data).hexdigest()}
    file.close()  # again: nothing


def refuse_to_open(monkeypatch):
    opened = os.open

    def refusing(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)


def refuse_to_write(monkeypatch):
    write = os.write

    def refusing(fd, data):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data[:5_000_001])  # and not all at once

    monkeypatch.setattr(os, "write", refusing)


@pytest.mark.parametrize("refuse", [refuse_to_open, refuse_to_write])
def test_a_file_system_that_knows_no_such_writing_gets_the_same_bytes(tmp_path, monkeypatch, refuse):
    data = random.Random(1).randbytes(direct.PIECE_BYTES + 12_345)
    refuse(monkeypatch)
    with DirectFile(tmp_path / "file") as file:
        file.write(data)
        assert not is_direct(file)
    assert (tmp_path / "file").read_bytes() == data


def test_a_write_that_is_wrong_for_another_reason_is_raised(tmp_path, monkeypatch):
    def refusing(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "write", refusing)
    with pytest.raises(OSError, match="Invalid argument"), DirectFile(tmp_path / "file") as file:
        file.write(b"x")


def test_a_full_disk_is_said_and_the_file_closed(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    before = os.listdir("/proc/self/fd")
    file = DirectFile(tmp_path / "full")
    said = rf"No space left on device: '{re.escape(str(tmp_path / 'full'))}'"
    with pytest.raises(OSError, match=said):
        file.write(bytes(direct.PIECE_BYTES))
    with pytest.raises(OSError, match=said):
        file.close()
    assert file.closed and os.listdir("/proc/self/fd") == before
    with pytest.raises(FileNotFoundError):
        DirectFile(tmp_path / "nowhere" / "file")
