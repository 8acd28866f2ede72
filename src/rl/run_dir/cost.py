"""What a run cost: tokens, seconds of machines, money. All of it is in metrics.jsonl."""

from typing import TYPE_CHECKING

from rl.run_dir.metrics import COST, matching
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


def cost_lines(numbers: "Numbers") -> list[str]:
    """Returns what a run cost as lines of its report: of evaluations the sampled tokens alone, and
    all machines together."""
    texts: dict[str, list[str]] = {}
    for name, value in totals(numbers).items():
        kind, _, what = name.partition("/")
        is_part = "eval/" in what or (what.startswith("machine_") and what != "machine_s")
        if not is_part or what.endswith("/sampled"):
            texts.setdefault(kind, []).append(f"{digits(value, 4)} {what}")
    return [f"{kind:<9} {', '.join(counts)}" for kind, counts in texts.items()]
