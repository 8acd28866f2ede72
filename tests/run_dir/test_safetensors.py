import json

import pytest

from rl.run_dir.files import CorruptFileError
from rl.run_dir.safetensors import (
    INDEX,
    TensorEntry,
    digest,
    model_files,
    read_header,
    tensor_digests,
)


def content(header, data=b""):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(start, end, shape=(2,)):
    return {"dtype": "U8", "shape": shape, "data_offsets": [start, end]}


def test_header_and_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        content({"__metadata__": {"format": "pt"}, "b": entry(2, 4), "a": entry(0, 2)}, b"1234")
    )
    start = path.stat().st_size - 4
    assert read_header(path) == {
        "b": TensorEntry("U8", (2,), start + 2, start + 4),
        "a": TensorEntry("U8", (2,), start, start + 2),
    }
    assert list(tensor_digests(path).items()) == [("b", digest(b"34")), ("a", digest(b"12"))]
    assert model_files(tmp_path) == [path]
    path.write_bytes(content({}))
    assert read_header(path) == {}
    (tmp_path / "y.safetensors").touch()
    with pytest.raises(
        CorruptFileError, match=r"lacks an index .* of model.safetensors, y.safetensors; add it"
    ):
        model_files(tmp_path)
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "y.safetensors"}})
    )
    assert model_files(tmp_path) == [path, tmp_path / "y.safetensors"]
    for names, fault in (
        ("model y z", "lacks z.safetensors"),
        ("y", "lacks model.safetensors in its index"),
        ("", "not readable as an index"),
    ):
        index = {"weight_map": {name: f"{name}.safetensors" for name in names.split()}}
        (tmp_path / INDEX).write_text(json.dumps(index if names else []))
        with pytest.raises(CorruptFileError, match=fault):
            model_files(tmp_path)


def test_digests_have_the_slices_of_others(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content({"a": entry(0, 4, (4,))}, b"1234"))
    cut = [[0, 1, digest(b"1")], [1, 4, digest(b"234")]]
    assert tensor_digests(path, {"a": cut, "b": cut}) == {"a": cut}
    # no cuts of four bytes
    for other in ([[0, 1, "x"], [2, 4, "x"]], [[0, 5, "x"]], [[1, 4, "x"]], [], "x"):
        assert tensor_digests(path, {"a": other}) == {"a": digest(b"1234")}


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", r"not a safetensors file \(a header of 0 bytes in a file of 0\)"),
        (b"\xff" * 100, r"a header of 18446744073709551615 bytes in a file of 100"),
        (content({"a": entry(0, 2)}, b"1"), r"has \d+ bytes, its header says \d+"),
        (content({"a": {"dtype": "U8"}}), "not readable as safetensors: 'data_offsets'"),
        (content({"a": entry(0, "2")}), "not readable as safetensors"),
        (content({"a": entry(2, 0)}), r"not readable as safetensors: bytes \[2, 0\]"),
        (
            content({"a": entry(0, 2, shape=[[2]])}, b"12"),
            "not readable as safetensors: an invalid shape",
        ),
        ((99_990).to_bytes(8, "little") + b'{"a":' * 19_998, "not readable as safetensors"),
    ],
)
def test_every_fault_has_a_message(tmp_path, data, fault):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match=f"x.safetensors: .*{fault}"):
        tensor_digests(path)


def test_a_header_of_a_million_tensors_is_not_parsed(tmp_path):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((90_000_000).to_bytes(8, "little"))
        file.truncate(90_000_008)
    with pytest.raises(
        CorruptFileError,
        match=r"x.safetensors: not read: its header has 90,000,000 bytes, and no model needs "
        r"33,554,432",
    ):
        read_header(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(CorruptFileError, match=r"not readable as safetensors: .*No such file"):
        read_header(tmp_path / "x.safetensors")
