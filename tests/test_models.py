"""docs/models.md: what it says of a family of each kind is measured again, and none of its families is trained wrong in silence."""

import re
import time

import pytest
from model_parity import sample_all
from models import APART, MOST_DIFFERENCE, PAGE, Found, measure, page


def rows() -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {row[0]: row for row in cells if len(row) == 7 and row[0] != "family"}


@pytest.mark.parametrize(
    ("family", "way"),
    [("qwen2", "blocks"), ("codegen", "eager"), ("falcon_h1", "unpacked"), ("falcon_mamba", "unpacked"), ("cpmant", "refused")],
)
def test_a_family_of_each_kind(family, way, world, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    row = measure(family, world)
    assert row.mode == way and not row.is_wrong, row
    if way != "refused":
        assert row.logprobs < 1e-4 and row.gradient < 1e-4 and row.targets
    assert rows()[family][1] == way


def test_the_page_is_that_of_what_was_found():
    found = Found()
    assert page(found) == PAGE.read_text() and not found.wrong
    compared = [row for row in (*found.rows.values(), *found.ropes.values()) if row.vllm is not None]
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
    found = {folder.name: fault for folder, fault in sample_all([tmp_path / name for name in names], 256)}
    assert list(found) == names and time.monotonic() - since < 30
    assert found == dict.fromkeys(names, "") | {
        "raises": "ValueError: no such layer",
        "hangs": "nothing within 3 s",
        "dies": "ended with exit code 3",
    }


def test_the_page_has_no_model_that_is_wrong_in_silence():
    trained = {family: row for family, row in rows().items() if row[1] in ("blocks", "eager", "unpacked")}
    assert len(trained) >= 40
    assert {row[1] for row in trained.values()} == {"blocks", "eager", "unpacked"}
    for family, row in trained.items():
        assert max(float(row[2]), float(row[3])) <= MOST_DIFFERENCE, family
    assert re.search(rf"^{len([row for row in rows().values() if row[1] != '-'])} families measured", PAGE.read_text(), re.M)
