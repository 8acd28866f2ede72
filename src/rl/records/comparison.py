"""Compares runs: the settings that differ, and their evaluations. Lists are in the order of the
runs."""

from collections.abc import Sequence
from typing import Any

import msgspec

from rl.config.fields import changed_keys
from rl.config.run import RLConfig
from rl.records.run import Run
from rl.system.credentials import hidden

PLACE_KEYS = ("name", "output_dir")
"""Settings that say where a run is, not what it does; left out of the comparison."""
DIGITS = 6
"""Significant digits of shown numbers; a computed learning rate has sixteen."""


class SettingDiff(msgspec.Struct, kw_only=True, frozen=True):
    """A setting that differs; a value is null if the setting is not set."""

    key: str
    values: list[str | None]


class EvalPoint(msgspec.Struct, kw_only=True, frozen=True):
    """An evaluation of one version in each run; errors are one standard error over examples."""

    name: str
    version: int
    means: list[float | None]
    errors: list[float | None]


def setting_diffs(configs: Sequence[RLConfig | None]) -> list[SettingDiff]:
    """The settings that differ, without PLACE_KEYS and secrets. None in `configs` is a
    configuration that could not be read."""
    known = {i: config for i, config in enumerate(configs) if config}
    first = next(iter(known.values()), None)
    changes: dict[str, list[Any]] = {}
    for i, config in known.items():
        for key, before, after in changed_keys(first or config, config):
            empty = before in (None, []) and after in (None, [])  # tables of a list: separate keys
            if key not in PLACE_KEYS and not empty:
                values = [before if config else None for config in configs]
                changes.setdefault(key, values)[i] = after
    return [
        SettingDiff(key=key, values=texts(hidden(key, values))) for key, values in changes.items()
    ]


def texts(values: Sequence[Any]) -> list[str | None]:
    """Values of a setting as text: numbers have DIGITS digits, or all if they would look equal
    otherwise."""
    short = [
        float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value for value in values
    ]
    shown = short if len(set(map(repr, short))) == len(set(map(repr, values))) else values
    return [None if value is None else str(value) for value in shown]


def eval_points(runs: Sequence[Run]) -> list[EvalPoint]:
    """Every evaluation of every version in any of the runs."""
    means = [run.eval_values("reward_mean") for run in runs]
    errors = [run.eval_values("reward_mean_stderr") for run in runs]
    points = {(name, version) for evals in means for name in evals for version in evals[name]}
    return [
        EvalPoint(
            name=name,
            version=version,
            means=[evals.get(name, {}).get(version) for evals in means],
            errors=[evals.get(name, {}).get(version) for evals in errors],
        )
        for name, version in sorted(points)
    ]
