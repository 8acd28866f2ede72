"""Files, variables and flags as sources that pydantic-settings merges. Imported only for
loading, because the import takes 0.2 s."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from rl.config.faults import Spelled, below, setting_text
from rl.config.orchestrator import as_list
from rl.config.run import RLConfig

LISTS = ("orchestrator.environment", "orchestrator.eval")
"""Sections that can be lists of tables."""

Edit = Callable[[dict[str, Any]], None]
"""A change of the merged tables."""


class Layer(PydanticBaseSettingsSource):
    """Settings of the files, the variables or the flags. Adds a fault for each key that cannot
    be placed."""

    def __init__(self, names: list[str], settings: Spelled, faults: dict[str, str]):
        super().__init__(Loaded)
        self.names, self.settings, self.faults = names, settings, faults

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("a layer gives all fields at once")

    def __call__(self) -> dict[str, Any]:
        return self.place({})

    def place(self, tables: dict[str, Any]) -> dict[str, Any]:
        """Places the settings in `tables` and returns them. Skips `true` for a section (a
        switch) if any layer sets keys of it."""
        for name in self.names:
            value, place = self.settings[name]
            if value is True and any(key.startswith(f"{name}.") for key in self.settings):
                continue
            try:
                check_number(name, self.settings)
                place_value(tables, name.split("."), copy.deepcopy(value))
            except KeyError as error:
                self.faults.setdefault(
                    name, f"{setting_text(name, value)} ({place})\n    {error.args[0]}"
                )
        return tables


class Elements(Layer):
    """The last source: keys of list elements from all layers, then edits of the merged tables."""

    edits: Sequence[Edit] = ()

    def __call__(self) -> dict[str, Any]:
        tables = self.place(self.current_state)
        if isinstance(section := tables.get("orchestrator"), dict):
            section |= {
                key: as_list(value)
                for key, value in section.items()
                if f"orchestrator.{key}" in LISTS
            }
        for edit in self.edits:
            edit(tables)
        return {}


# pydantic merges both `model_config`
class Loaded(RLConfig, BaseSettings):  # ty: ignore[incompatible-attribute-override]
    """A configuration loaded from sources. RLConfig itself is not a BaseSettings, which would
    lose the validation context."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_unused: object,
        **_named: object,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        assert isinstance(init_settings, InitSettingsSource)
        return init_settings.init_kwargs["sources"]


def load(layers: list[Spelled], faults: dict[str, str], edits: Sequence[Edit]) -> RLConfig:
    """Loads the configuration from files, variables and flags. Adds faults by key; raises
    pydantic's ValidationError."""
    settings = together(layers)
    sources = [
        Layer([name for name in layer if not list_of(name)], settings, faults)
        for layer in reversed(layers)
    ]
    elements = Elements([name for name in settings if list_of(name)], settings, faults)
    elements.edits = edits
    # for settings_customise_sources
    loaded = Loaded(sources=(*sources, elements))  # ty: ignore[unknown-argument]
    return RLConfig.model_construct(loaded.model_fields_set, **dict(loaded))


def together(layers: list[Spelled]) -> Spelled:
    """Merges the settings of all layers; later layers win."""
    return {name: given for layer in layers for name, given in layer.items()}


def without_replaced(layers: list[Spelled]) -> list[Spelled]:
    """Returns the layers without settings that a later layer replaces: keys of a section by a
    value for the whole section (a list, `false`, `{}`; `true` only switches it on), and such a
    value by a key in another layer."""
    kept: list[Spelled] = []
    later: Spelled = {}
    for layer in reversed(layers):
        left, of_other_layers = {}, list(later)
        for name, (value, place) in reversed(layer.items()):
            whole = any(
                below(name, key) and (name == key or other is not True)
                for key, (other, _) in later.items()
            )
            is_table = value is True or isinstance(value, (dict, list))
            if not whole and (
                is_table or not any(key.startswith(f"{name}.") for key in of_other_layers)
            ):
                left[name] = value, place
            later.setdefault(name, (value, place))
        kept.insert(0, dict(reversed(left.items())))
    return kept


def list_of(name: str) -> str:
    """Returns the list section that a key lies in; empty for any other key."""
    return next((key for key in LISTS if name.startswith(f"{key}.")), "")


def check_number(name: str, settings: Spelled) -> None:
    """Raises KeyError for a key with an element's index where no list is given."""
    section = list_of(name)
    number, _, rest = name.removeprefix(f"{section}.").partition(".")
    if section and number.isdigit() and not isinstance(settings.get(section, ("",))[0], list):
        raise KeyError(
            f"there is no list with an element {number}; for one: --{section}.{rest}, for "
            f"several: [[{section}]] in a file"
        )


def place_value(table: Any, keys: list[str], value: Any) -> None:
    """Sets a dotted key in nested tables. A number selects a list's element; a list of one needs
    none. Raises KeyError."""
    first, *rest = keys
    if isinstance(table, list):
        if first.isdigit() and int(first) < len(table):
            element, keys = table[int(first)], rest
        elif len(table) == 1:
            element = table[0]
        else:
            raise KeyError(
                f"which of the {len(table)} entries? Put its number before `{first}`: 0 to "
                f"{len(table) - 1}"
            )
        if not (keys and isinstance(element, dict)):
            raise KeyError(
                "only elements that are tables have keys; to change another element, give "
                "the whole list"
            )
        return place_value(element, keys, value)
    if not rest:
        if not (value is True and isinstance(table.get(first), dict)):
            table[first] = value
        return None
    if table.get(first) is True or first not in table:
        table[first] = {}
    if not isinstance(table[first], (dict, list)):
        raise KeyError(f"`{first}` is a value, not a table")
    return place_value(table[first], rest, value)


def take_out(table: Any, keys: list[str]) -> None:
    """Removes a setting from nested tables, if present; an element of a list of values, such as
    betas, with the whole list."""
    first, *rest = keys
    if isinstance(table, list) and first.isdigit() and int(first) < len(table):
        return take_out(table[int(first)], rest) if rest else table.clear()
    if isinstance(table, list) and len(table) == 1:
        return take_out(table[0], keys)
    if isinstance(table, dict):
        inner = table.get(first)
        holds_tables = isinstance(inner, dict) or (
            isinstance(inner, list) and any(isinstance(one, dict) for one in inner)
        )
        if not rest or (all(part.isdigit() for part in rest) and not holds_tables):
            table.pop(first, None)
        else:
            take_out(inner, rest)
    return None
