"""What a run cost: tokens, seconds of machines, money. All of it is in metrics.jsonl."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rl.config.run import CostConfig, RLConfig
from rl.diagnosis.state import read_machines
from rl.run_dir.metrics import COST, matching
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Staleness
from rl.system.terminal import digits

if TYPE_CHECKING:
    from rl.run_dir.numbers import Numbers


def totals(numbers: "Numbers") -> dict[str, float]:
    """Returns the sum over all steps of each metric `tokens/...`, and the newest value of each
    metric `cost/...`, in the order of docs/metrics.md."""
    order = [*COST]
    names = [name for name in numbers.names if matching(name)[0] in COST]
    names.sort(key=lambda name: order.index(matching(name)[0]))
    return {
        name: float(values.sum() if name.startswith("tokens/") else values[-1])
        for name in names
        if len(values := numbers.curve(name)[1])
    }


def price(settings: CostConfig, spent: Mapping[str, float]) -> float:
    """Returns the price of `totals`, evaluations included."""
    prices = {
        "prefilled": settings.per_million_prompt / 1e6,
        "cached": settings.per_million_prompt / 1e6,
        "sampled": settings.per_million_sampled / 1e6,
        "batch": settings.per_million_trained / 1e6,
        "machine_s": settings.per_hour / 3600,
    }
    return sum(prices.get(name.rpartition("/")[2], 0.0) * spent[name] for name in spent)


def gpus_up(run_dir: RunDir, config: RLConfig, heartbeats: Staleness) -> dict[int, int]:
    """Returns the number of GPUs of each machine of a cluster that gives signs of life, by index.
    `heartbeats`: see RunState."""
    machines = read_machines(run_dir, config, heartbeats, time.time())
    return {m.index: m.status.gpus for m in machines if m.status and m.is_up}


def cost_lines(numbers: "Numbers") -> list[str]:
    """Returns what a run cost as lines of its report."""
    texts: dict[str, list[str]] = {}
    for name, value in totals(numbers).items():
        if "/eval/" in name and not name.endswith("/sampled"):
            continue
        kind, _, what = name.partition("/")
        texts.setdefault(kind, []).append(f"{digits(value, 4)} {what}")
    return [f"{kind:<9} {', '.join(parts)}" for kind, parts in texts.items()]
