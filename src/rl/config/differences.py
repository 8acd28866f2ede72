"""Finds the settings in which two configurations differ."""

from typing import Any

from rl.config.fields import without_none
from rl.config.run import RLConfig


def leaves(value: Any, key: str = "") -> dict[str, Any]:
    """Returns every value by its dotted key. Unlike command_line.flatten, enters lists of
    tables, whose entries are keyed by index."""
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        items = ((str(i), item) for i, item in enumerate(value))
    else:
        return {} if value == {} else {key: value}
    flat: dict[str, Any] = {}
    for name, item in items:
        flat |= leaves(item, f"{key}.{name}" if key else name)
    return flat


def changed_keys(old: RLConfig, new: RLConfig) -> list[tuple[str, Any, Any]]:
    """Returns (key, old value, new value) of each setting that differs; the value of an unset
    setting is None."""
    before, after = leaves(without_none(old)), leaves(without_none(new))
    both = ((key, before.get(key), after.get(key)) for key in {**before, **after})
    # repr: nan != nan
    return [(key, old, new) for key, old, new in both if old != new and repr(old) != repr(new)]
