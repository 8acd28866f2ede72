"""Records with checksums, and writes that happen completely or not at all."""

import os

import pytest

from rl.run_dir import files
from rl.run_dir.files import (
    CorruptFileError,
    decode_record,
    encode_record,
    make_durable,
    write_directory,
    write_file,
)


def test_damage_at_any_byte_is_noticed():
    record = encode_record(b"payload")
    for place in range(len(record)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(record)
            damaged[place] ^= flip
            with pytest.raises(CorruptFileError, match=r"000012.batch: "):
                decode_record(bytes(damaged), "000012.batch")


def test_one_record_means_one():
    for data in (b"", encode_record(b"a") * 2):
        with pytest.raises(CorruptFileError, match="records instead of one"):
            decode_record(data, "x")


def test_files_of_a_directory_have_the_permissions_of_the_umask(tmp_path):
    """safetensors makes its files for the owner alone; links to other files are not touched."""
    other = tmp_path / "other"
    other.touch(0o600)

    def fill(folder):
        (folder / "a").mkdir()
        for name in ("x.safetensors", "a/y"):
            (folder / name).touch(0o600)
        (folder / "link").symlink_to(other)
        (folder / "same").hardlink_to(other)

    for umask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(umask)
        try:
            write_directory(tmp_path / "d", fill)
        finally:
            os.umask(before)
        for name, expected in (
            ("x.safetensors", mode),
            ("a/y", mode),
            ("link", 0o600),
            ("same", 0o600),
        ):
            assert (tmp_path / "d" / name).stat().st_mode & 0o777 == expected


def test_what_is_made_durable_later_is_whole_at_once_and_synced_then(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("rl.run_dir.files.fsync_path", synced.append)
    monkeypatch.setattr("os.fsync", synced.append)
    version, record = tmp_path / "weights" / "000001", tmp_path / "weights" / "000001.json"
    version.parent.mkdir()

    def fill(directory):
        (directory / "sub").mkdir()
        (directory / "sub" / "a").write_text("1")

    write_directory(version, fill, durable=False)
    write_file(record, b"2", durable=False)
    assert (version / "sub" / "a").read_text() == "1"
    assert record.read_bytes() == b"2"
    assert synced == []
    make_durable(record)
    make_durable(version)
    inside = [version / "sub", version / "sub" / "a", version]
    assert synced == [record, version.parent, *inside, version.parent]


def test_pipes_devices_and_endless_lines_end(tmp_path, monkeypatch):
    """Of a stranger's run directory: a pipe is waited for, and a device read, for ever."""
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 25)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "device"):
        with pytest.raises(OSError, match="not a file"):
            files.LineReader(path).new()
        with (
            pytest.raises(CorruptFileError, match=r"is not a file; move it away"),
            files.reading(path),
        ):
            pass
    (tmp_path / "endless").touch()
    os.truncate(tmp_path / "endless", 1 << 27)
    with (tmp_path / "endless").open("ab") as file:
        file.write(b"\nwhole\n")
    reader, longest, found = files.LineReader(tmp_path / "endless"), 0, []
    while lines := reader.new():
        longest, found = (
            max(longest, *map(len, lines)),
            [*found, *(line for line in lines if line and line[0])],
        )
    assert longest <= (1 << 25) + files.PIECE_BYTES and found == [b"whole"]
