"""What is wrong with a run, each finding with its evidence: the metrics, rollouts and files that say so."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl.diagnosis.waits import Diagnosis
from rl.run_dir.metric_names import METRICS

HINT = "  - "
"""Before each line of the diagnosis that says what may hold the reward down."""
METRIC = re.compile(r"[a-z_]+(?:/[\w@]+)?")
WHY = re.compile(r"rl show \S+ --why (\w+)")


@dataclass(frozen=True)
class Problem:
    """One finding."""

    text: str
    """What is wrong and its remedy, as `rl doctor RUN` says it."""
    serious: bool
    """Whether the run cannot go on with it; else it is what may hold the reward down."""
    metrics: tuple[str, ...]
    """The metrics whose curves show it."""
    why: str | None
    """The reason for which the rollouts were not trained that show it."""
    files: tuple[Path, ...]
    """The files that show it."""


def found_problems(diagnosis: Diagnosis, damaged: Mapping[Path, str], root: Path) -> list[Problem]:
    """The problems of a diagnosis, then damaged files of rollouts, then what may hold the reward down."""
    hints = [line.removeprefix(HINT) for line in diagnosis.lines if line.startswith(HINT)]
    heads = [line for line in diagnosis.lines if line.startswith("the reward does not rise") and not hints]
    serious = [*diagnosis.problems, *(text for text in damaged.values() if text not in diagnosis.problems)]
    return [*(problem(text, True, root) for text in serious), *(problem(text, False, root) for text in (*hints, *heads))]


def problem(text: str, serious: bool, root: Path) -> Problem:
    """A finding with the evidence that its sentence names."""
    metrics = tuple(dict.fromkeys(name for name in METRIC.findall(text) if ("/" in name and name in METRICS) or name == "masked_fraction"))
    words = (word.strip("`'\",;:().") for word in re.split(r"[\s:]", text))
    named = (Path(word) for word in words if word.startswith(str(root)) and word != str(root / "config.toml"))  # which remedies name
    files = tuple(dict.fromkeys(path for path in named if path.is_file()))
    shown = WHY.search(text)
    return Problem(text, serious, metrics, shown[1] if shown else None, files)
