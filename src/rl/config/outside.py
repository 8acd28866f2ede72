"""Finds faults in the data sets, user functions and packages that a configuration names, and in the
arguments of environments.

Nothing is imported. A stored run's configuration is not checked, because the run can be replayed
and exported without these files.
"""

import importlib.util
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import date, time
from pathlib import Path
from typing import Any

from rl.config.base import Fault
from rl.config.fields import leaves, without_none
from rl.config.loss import CustomConfig
from rl.config.orchestrator import CustomCreditConfig
from rl.config.rows import TABLES, task_rows
from rl.config.run import RLConfig
from rl.config.tinker import MISSING, PACKAGE
from rl.run_dir.files import matching
from rl.system import nixl
from rl.system.errors import RunError
from rl.system.functions import find_fault
from rl.system.terminal import nearest

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:.+)?")
REWARD_PARAMETERS = {"prompt", "completion", "state", "task", "parser"}
"""What a reward function can ask for, besides the columns of its row."""
GROUP_PARAMETERS = {"prompts", "completions", "answers", "states", "tasks", "infos"}
"""The same of all rollouts of a group. Asking for any of them makes the function one of groups."""


def outside_faults(config: RLConfig) -> Iterator[Fault]:
    """Yields data sets and functions that are missing; one named by several entries is reported
    once."""
    seen = set()
    for section, entry in config.orchestrator.entries.items() if config.plays else ():
        # The rows of a NeMo Gym server are made with it, possibly after the configuration.
        named: dict[str, Callable[[str], str]] = (
            {} if entry.head_server else {"dataset": rows_fault, "eval_dataset": rows_fault}
        )
        # that interpreter may have modules that this one lacks
        elsewhere = entry.python or entry.requirements
        if not elsewhere or ".py:" in (entry.reward or ""):
            named["reward"] = find_fault
        for key, find in named.items():
            value = getattr(entry, key)
            if value and (fault := find(value)) and (value, fault) not in seen:
                seen.add((value, fault))
                yield f"{section}.{key}", value, fault
        for key, table in (("args", entry.args), ("set_kwargs", entry.set_kwargs)):
            for name, value in table.items():
                if fault := argument_fault(value):
                    yield f"{section}.{key}.{name}", value, fault
    if config.recorded and not matching(config.recorded.rollouts):
        yield (
            "recorded.rollouts",
            config.recorded.rollouts,
            "there is no such file; give a JSONL file, or a pattern (data/*.jsonl)",
        )
    if (
        config.trainer.weights.transport == "nixl"
        and not config.sft
        and not importlib.util.find_spec(nixl.PACKAGE)
    ):
        yield "trainer.weights.transport", "nixl", nixl.MISSING
    if config.is_remote and not importlib.util.find_spec(PACKAGE):
        yield "trainer.backend", "tinker", MISSING
    for key, name, _ in own_functions(config):
        if fault := find_fault(name):
            yield key, name, fault


def argument_fault(value: Any) -> str:
    """Returns why an argument cannot be passed to an environment, or an empty text if it can.
    Arguments travel as JSON, which has neither non-finite numbers nor dates."""
    if isinstance(value, float) and not math.isfinite(value):
        return (
            "arguments are passed to environments as JSON, which has no such number; leave it "
            f"out, or use a string: '\"{value}\"'"
        )
    if isinstance(value, (date, time)):
        return (
            "arguments are passed to environments as JSON, which has no dates and times; use a "
            f'string: "{value}"'
        )
    inner = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return next(filter(None, map(argument_fault, inner)), "")


def rows_fault(source: str) -> str:
    """Returns what is wrong with the name of a data set, or with the rows of a file; empty if
    nothing."""
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix in TABLES:  # which take a moment to import
            return ""
        try:
            for _ in task_rows(path):
                pass
        except OSError as error:
            return f"cannot be read ({error.strerror}); give a file that you may read"
        except RunError as error:
            return str(error)
        return ""
    if path.suffix in (".jsonl", ".json") or not HUB_ID.fullmatch(source):
        files = {file.stem: file for file in path.parent.glob("*.json*")}
        near = nearest(path.stem, files)
        remedy = (
            f"did you mean {files[near]}?"
            if near
            else "give a JSONL, CSV or Parquet file, or owner/name of a Hugging Face dataset"
        )
        return f"is not a file ({path.absolute()}); {remedy}"
    return ""


def not_given(required: Iterable[str], columns: Collection[str], of_group: bool) -> list[str]:
    """Returns the parameters of a reward function without a default that get no value from a row
    with these columns."""
    known = REWARD_PARAMETERS | {*columns} | (GROUP_PARAMETERS if of_group else set())
    return [name for name in required if name not in known]


def not_a_column(name: str, source: str, columns: Collection[str], of_group: bool) -> str:
    """Returns the message about a parameter of a reward function that gets no value."""
    known = REWARD_PARAMETERS | {*columns} | (GROUP_PARAMETERS if of_group else set())
    also = "" if of_group else ", or for states, prompts, completions, ... of a whole group"
    return (
        f"asks for {name}, which is not a column of {source}; it can ask for "
        f"{', '.join(sorted(known))}{also}"
    )


def hub_data(config: RLConfig) -> Iterator[str]:
    """Yields a sentence for each data set that is not on this machine."""
    for key, name in leaves(without_none(config)).items():
        if key.endswith((".dataset", ".eval_dataset", ".validation")) and not matching(name):
            yield f"{key} = {name}: not on this machine; only the start looks for it elsewhere"


def own_functions(config: RLConfig) -> Iterator[tuple[str, str, str]]:
    """Yields (key, function, call arguments) of the user's functions for loss, credit, filter
    and metrics."""
    if isinstance(config.trainer.loss, CustomConfig):
        yield "trainer.loss.function", config.trainer.loss.function, "inputs, config"
    settings = config.orchestrator
    environments = {
        f"orchestrator.environment.{i}": env for i, env in enumerate(settings.environment)
    }
    for key, section in {"orchestrator": settings, **environments}.items():
        if isinstance(section.credit, CustomCreditConfig):
            yield f"{key}.credit.function", section.credit.function, "group, config"
    if settings.filter:
        yield "orchestrator.filter.function", settings.filter.function, "group, config"
    if settings.metrics:
        yield "orchestrator.metrics.function", settings.metrics.function, "rollout, config"
