"""Faults of what a configuration names outside of itself (data sets, and the user's functions), and of what it hands to environments.
Nothing is imported.

They are looked for where a configuration is made, not where that of a run is read: a run can be replayed and exported without them.
"""

import math
import re
from collections.abc import Iterator
from datetime import date, time
from pathlib import Path
from typing import Any

from rl.config.check import Fault
from rl.config.loss import CustomConfig
from rl.config.orchestrator import CustomCreditConfig
from rl.config.run import RLConfig
from rl.system.functions import find_fault
from rl.system.user_function import find_call_fault

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:.+)?")


def outside_faults(config: RLConfig) -> Iterator[Fault]:
    """Every data set and function that is not there, or takes other arguments; one that several environments or evaluations name, once."""
    seen = set()
    for kind, entries in (("environment", config.orchestrator.environment), ("eval", config.orchestrator.eval)):
        for i, entry in enumerate(entries if not config.sft else ()):
            # The rows of a NeMo Gym server are made with it, and may be made later than the configuration.
            named = {} if entry.head_server else {"dataset": rows_fault, "eval_dataset": rows_fault}
            elsewhere = entry.python or entry.requirements  # there may be modules that we have not
            if not elsewhere or ".py:" in (entry.reward or ""):
                named["reward"] = find_fault
            for key, find in named.items():
                value = getattr(entry, key)
                if value and value not in seen and (fault := find(value)):
                    yield f"orchestrator.{kind}.{i}.{key}", value, fault
                seen.add(value)
            for key, table in (("args", entry.args), ("set_kwargs", entry.set_kwargs)):
                for name, value in table.items():
                    if fault := argument_fault(value):
                        yield f"orchestrator.{kind}.{i}.{key}.{name}", value, fault
    for key, name, arguments in own_functions(config):
        if fault := find_call_fault(name, arguments):
            yield key, name, fault


def argument_fault(value: Any) -> str:
    """Why an environment cannot be given an argument as it is: arguments travel as JSON, which has neither numbers that are not finite nor
    dates. Empty if it can."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"an environment is given its arguments as JSON, which has no such number; leave it out, or write a text: '\"{value}\"'"
    if isinstance(value, (date, time)):
        return f'an environment is given its arguments as JSON, which has no dates and times; write a text: "{value}"'
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next(filter(None, map(argument_fault, inner)), "")


def rows_fault(source: str) -> str:
    """What is wrong with the name of a data set, as far as it shows without the network; empty if nothing is."""
    path = Path(source).expanduser()
    if path.is_file():
        return "" if path.stat().st_size else "is empty; write one JSON object a line"
    if path.suffix in (".jsonl", ".json") or not HUB_ID.fullmatch(source):
        return f"is no file ({path.absolute()}); give a JSONL file, or owner/name of a Hugging Face dataset"
    return ""


def own_functions(config: RLConfig) -> Iterator[tuple[str, str, str]]:
    """(key, name, arguments of a call) of the user's functions for loss, credit, filter and metrics."""
    if isinstance(config.trainer.loss, CustomConfig):
        yield "trainer.loss.function", config.trainer.loss.function, "inputs, config"
    settings = config.orchestrator
    environments = {f"orchestrator.environment.{i}": env for i, env in enumerate(settings.environment)}
    for key, place in {"orchestrator": settings, **environments}.items():
        if isinstance(place.credit, CustomCreditConfig):
            yield f"{key}.credit.function", place.credit.function, "group, config"
    if settings.filter:
        yield "orchestrator.filter.function", settings.filter.function, "group, config"
    if settings.metrics:
        yield "orchestrator.metrics.function", settings.metrics.function, "rollout, config"
