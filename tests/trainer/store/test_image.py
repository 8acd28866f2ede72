"""Tensors in a file in memory that others read as safetensors."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rl.run_dir.in_memory import opened
from rl.run_dir.safetensors import read_header
from rl.trainer.store import image as image_module
from rl.trainer.store.image import PAGE, header
from tests.trainer.store.images import fill, image_like

TENSORS = {
    "a": torch.arange(15.0).view(3, 5).bfloat16(),
    "b": 100 + torch.arange(7.0),
    "c": torch.tensor(200),
    "d": 300 + torch.arange(8.0).view(4, 2).bfloat16(),
    "none": torch.empty(0, 5),
}


@pytest.fixture
def image():
    return fill(image_like(TENSORS), TENSORS)


def test_a_filled_image_is_a_safetensors_file_for_others(image):
    with opened(image.file) as path:
        assert read_header(path).keys() == TENSORS.keys()
        os.close(image.file.fd)  # as its maker does with the last of it; the reader goes on
        with opened(image.file) as late:
            assert late is None
        with safe_open(path, framework="pt") as weights:
            found = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in TENSORS.items()
    )
    os.open("/dev/null", os.O_RDONLY)  # takes the number, which the image closes at its end


def test_without_a_file_in_memory_there_is_room_but_nothing_for_others(monkeypatch, capsys):
    """A trainer that the system gives no such file ended at its first step."""
    monkeypatch.setattr(os, "ftruncate", lambda *_: os.open("/nowhere", os.O_RDONLY))
    num_files = len(os.listdir("/proc/self/fd"))
    image = fill(image_like(TENSORS), TENSORS)
    before = image.memory.data_ptr()
    fill(image, TENSORS)
    assert (image.file, image.is_shared) == (None, False) and image.memory.data_ptr() == before
    assert capsys.readouterr().err.count("servers read each version from its folder") == 1
    # garbage of other tests may be collected meanwhile
    assert len(os.listdir("/proc/self/fd")) <= num_files


def test_a_file_of_another_place_process_or_descriptor_is_not_opened(image):
    file = image.file
    for other in (
        {"place": "elsewhere"},
        {"pid": 2**22 + 1},
        {"fd": 0},
        {"name": "rl-" + "0" * 32},
    ):
        changed = type(file)(
            **{name: getattr(file, name) for name in file.__struct_fields__} | other
        )
        before = len(list(Path("/proc/self/fd").iterdir()))
        with opened(changed) as path:
            assert path is None
        # garbage of other tests may be collected meanwhile
        assert len(list(Path("/proc/self/fd").iterdir())) <= before
    with opened(None) as path:
        assert path is None


def test_its_memory_is_used_again_once_nobody_reads_it(image):
    file, pages = image.file, image.memory.data_ptr()
    image.claim()
    assert image.file.fd == file.fd and image.memory.data_ptr() == pages
    # of what it held, and of what it does not hold yet
    with opened(file) as before, opened(image.file) as unfinished:
        assert before is None and unfinished is None
    image.write_header()
    assert image.file.name != file.name
    with opened(file) as before, opened(image.file) as now:
        assert before is None and read_header(now).keys() == TENSORS.keys()


def test_memory_that_somebody_reads_is_left_to_him(image):
    file, pages = image.file, image.memory.data_ptr()
    with opened(file) as path:
        fill(image, {name: tensor + 1 for name, tensor in TENSORS.items()})
        with safe_open(path, framework="pt") as weights:
            assert torch.equal(weights.get_tensor("b"), TENSORS["b"])
        assert image.file.fd != file.fd and image.memory.data_ptr() != pages
        with opened(file) as late, opened(image.file) as now:
            assert late is None and read_header(now).keys() == TENSORS.keys()


@pytest.mark.parametrize("way", ["past the cache", "refused", "in the cache"])
def test_whole_pages_are_written_past_the_page_cache(tmp_path, monkeypatch, way):
    """New pages of the cache took the processor of a second each step from the sampling of the
    next batch."""
    tensors = {
        f"t{size}": torch.randint(0, 255, (size,), dtype=torch.uint8)
        for size in (3, 5 * PAGE + 1, 0, 2 * PAGE, 100)
    }
    image, tried, write = fill(image_like(tensors), tensors), [], image_module.write_at

    def write_at(fd, data, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            tried.append(len(data))
            if way == "refused":
                raise OSError(errno.EOPNOTSUPP, "no such writing here")
        write(fd, data, offset)

    monkeypatch.setattr(image_module, "write_at", write_at)
    # a second rank begins within a page
    path = tmp_path / "file"
    path.write_bytes(header(image.tensors) + bytes(image.tensors[-1].end))
    slices = image.slices
    for image.slices in (slices[:2], slices[2:]):
        image.write_slices(path, way != "in the cache")
    written = load_file(path)
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        way = "in the cache"
    assert sum(tried) == (0 if way == "in the cache" else 6 * PAGE)
