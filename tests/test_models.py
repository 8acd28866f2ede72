"""docs/models.md: what it says of a family of each kind is measured again, and none of its families is trained wrong in silence."""

import re
from pathlib import Path

import pytest
from models import MOST_DIFFERENCE, measure

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


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


def test_the_page_has_no_model_that_is_wrong_in_silence():
    trained = {family: row for family, row in rows().items() if row[1] in ("blocks", "eager", "unpacked")}
    assert len(trained) >= 40
    assert {row[1] for row in trained.values()} == {"blocks", "eager", "unpacked"}
    for family, row in trained.items():
        assert max(float(row[2]), float(row[3])) <= MOST_DIFFERENCE, family
    assert re.search(rf"^{len([row for row in rows().values() if row[1] != '-'])} families measured", PAGE.read_text(), re.M)
