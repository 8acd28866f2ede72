"""docs/models.md: what it says of a family of each kind is measured again, and none of its
families is trained wrong in silence."""

import time

import pytest
from model_parity import sample_all
from models import APART, PAGE, Found, measure, page


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("qwen2", "blocks"),
        ("codegen", "eager"),
        ("falcon_h1", "unpacked"),
        ("falcon_mamba", "unpacked"),
        ("cpmant", "refused"),
    ],
)
def test_a_family_of_each_kind(family, way, world, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    row = measure(family, world)
    assert row.mode == way and not row.is_wrong, row
    if way != "refused":
        assert row.logprobs < 1e-4 and row.gradient < 1e-4 and row.targets
    assert Found().rows[family].mode == way


def test_the_page_is_that_of_what_was_found():
    found = Found()
    assert page(found) == PAGE.read_text() and not found.wrong
    compared = [
        row for row in (*found.rows.values(), *found.ropes.values()) if row.vllm is not None
    ]
    assert len(compared) >= 40 and {row.mode for row in compared} == {"blocks", "eager", "unpacked"}
    same = [row for row in compared if not row.is_apart]
    assert {row.family for row in compared if row.is_apart} == APART.keys() and len(same) >= 60
    assert max(row.vllm_kl for row in same if row.vllm_dtype == "float32") <= 1e-5


SAMPLER = """
import pathlib, sys, time

for folder in map(pathlib.Path, sys.argv[2:]):
    if folder.name == "raises":
        raise ValueError("no such\\n  layer")
    if folder.name == "dies":
        sys.exit(3)
    time.sleep(60 * (folder.name == "hangs"))
    (folder / "parity.batch").touch()
"""


def test_a_model_that_ends_or_stops_vllm_costs_no_other(tmp_path, monkeypatch):
    (tmp_path / "sampler.py").write_text(SAMPLER)
    monkeypatch.setattr("model_parity.SAMPLER", tmp_path / "sampler.py")
    monkeypatch.setattr("model_parity.LIMIT_S", 3.0)
    names = ["first", "raises", "second", "hangs", "dies", "last"]
    for name in names:
        (tmp_path / name).mkdir()
    since = time.monotonic()
    found = {
        folder.name: fault for folder, fault in sample_all([tmp_path / name for name in names], 256)
    }
    assert list(found) == names and time.monotonic() - since < 30
    assert found == dict.fromkeys(names, "") | {
        "raises": "ValueError: no such layer",
        "hangs": "nothing within 3 s",
        "dies": "ended with exit code 3",
    }
