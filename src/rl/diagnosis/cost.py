"""What a run cost: tokens, seconds of machines and GPUs, money. All of it is in metrics.jsonl."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rl.config.run import CostConfig
from rl.system.terminal import digits, span

if TYPE_CHECKING:
    from rl.run_dir.numbers import Numbers

DROPPED = "tokens/dropped_"


def totals(numbers: "Numbers") -> dict[str, float]:
    """Returns the sum over all steps of each metric `tokens/...`, and the newest value of each
    metric `cost/...`."""
    names = [name for name in numbers.names if name.startswith(("tokens/", "cost/"))]
    curves = {name: numbers.curve(name)[1] for name in names}
    return {
        name: float(values.sum() if name.startswith("tokens/") else values[-1])
        for name, values in curves.items()
        if len(values)
    }


def price(settings: CostConfig, spent: Mapping[str, float]) -> float:
    """Returns the price of `totals`, evaluations included."""

    def tokens(*ends: str) -> float:
        return sum(value for name, value in spent.items() if name.endswith(ends))

    millions = (
        settings.per_million_prompt * tokens("/prefilled", "/cached")
        + settings.per_million_sampled * tokens("/sampled")
        + settings.per_million_trained * spent.get("tokens/batch", 0.0)
    )
    return settings.per_hour * spent.get("cost/machine_s", 0.0) / 3600 + millions / 1e6


def cost_lines(numbers: "Numbers") -> list[str]:
    """Returns what a run cost as lines of its report; what was not measured is left out."""
    spent = totals(numbers)

    def counts(*names: str) -> str:
        known = {name.removeprefix(DROPPED).removeprefix("tokens/"): name for name in names}
        return ", ".join(f"{spent[known[x]]:,.0f} {x}" for x in known if known[x] in spent)

    dropped = [name for name in spent if name.startswith(DROPPED)]
    dropped.sort(key=lambda name: -spent[name])
    fates = [counts("tokens/sampled"), counts("tokens/trained", *dropped)]
    evals = [spent[name] for name in spent if re.fullmatch("tokens/eval/.*/sampled", name)]
    texts = {
        "": ": ".join(filter(None, fates)),
        "prompts: ": counts("tokens/prefilled", "tokens/cached"),
        "evaluations: ": f"{sum(evals):,.0f} sampled" if evals else "",
    }
    tokens = "; ".join(about + text for about, text in texts.items() if text)
    lines = [f"tokens    {tokens}"] if tokens else []
    if "cost/machine_s" in spent:
        parts = [f"{span(spent['cost/machine_s'])} of machines"]
        parts += [f"{span(spent['cost/gpu_s'])} of GPUs"] if "cost/gpu_s" in spent else []
        parts += [digits(spent["cost/total"], 4)] if "cost/total" in spent else []
        lines.append(f"cost      {', '.join(parts)}")
    return lines
