"""docs/settings.md, metrics.md and migrating.md say what the code does."""

import ast
import re
from pathlib import Path

from reference import pages

from rl.run_dir.metrics import METRICS

SRC = Path(__file__).parents[1] / "src" / "rl"
WRITERS = [
    *(SRC / "orchestrator").rglob("*.py"),
    *(SRC / "trainer").rglob("*.py"),
    SRC / "wire" / "parity.py",
    SRC / "launch" / "meter.py",
]


def in_the_table(metric):
    """Whether a name out of a metrics.jsonl is one of the table's."""
    return any(re.fullmatch(re.sub(r"<\w+>", "[^/]+", re.escape(name)), metric) for name in METRICS)


def test_the_pages_are_current():
    stale = [
        path.name for path, text in pages().items() if not path.exists() or path.read_text() != text
    ]
    assert not stale, "uv run scripts/reference.py"


def written_names(path):
    """Patterns of the strings in a file that may be names of metrics, and of parts of a step
    that it times; what is filled in is `.*`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "lap"
        ):
            found |= {f"time/{part.value}" for part in node.args if isinstance(part, ast.Constant)}
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts = [
            re.escape(part.value)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
            else ".*"
            for part in parts
        ]
        text = "".join(texts).replace(r"\{\}", ".*")
        if re.fullmatch(r"[a-z_]+/[^ ]+", text) and not text.endswith("/"):
            found.add(text)
    return found


def test_every_metric_that_the_code_writes_is_in_the_table_and_no_other():
    written = {name for path in WRITERS for name in written_names(path)}
    unknown = {
        name for name in written if not any(re.fullmatch(name, metric) for metric in METRICS)
    }
    assert unknown <= {"application/json", "tokens/dropped_", "cost/machine_"}
    # without a slash, or made of parts
    other = {"quarantined", "epoch", "masked_fraction", "masked_fraction/<env>"}
    other |= {"tokens/prefilled", "tokens/cached"}
    stale = {
        metric
        for metric in METRICS
        if metric not in other and not any(re.fullmatch(name, metric) for name in written)
    }
    assert stale == set() and len(METRICS) > 80
