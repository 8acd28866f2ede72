"""Files, variables and flags as sources of pydantic-settings. Imported only for loading, because
the import takes 0.2 s."""

import copy
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from rl.config.faults import Spelled, setting_text
from rl.config.run import RLConfig

LISTS = ("orchestrator.environment", "orchestrator.eval")
"""Sections that can be lists of tables."""


class Layer(PydanticBaseSettingsSource):
    """Settings of the files, the variables or the flags, which replace those of the layers
    before. Adds a fault for each key that cannot be placed."""

    def __init__(self, settings: Spelled, faults: dict[str, str]):
        super().__init__(Loaded)
        self.settings, self.faults = settings, faults

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("a layer gives all fields at once")

    def __call__(self) -> dict[str, Any]:
        for key, (value, origin) in self.settings.items():
            try:
                for other, (whole, _) in self.settings.items():
                    is_table = whole is True or isinstance(whole, (dict, list))
                    if key.startswith(f"{other}.") and not is_table:
                        raise ValueError(f"`{other}` is a value, not a table")
                place_value(self.current_state, key.split("."), "", copy.deepcopy(value))
            except ValueError as error:
                self.faults[key] = f"{setting_text(key, value)} ({origin})\n    {error}"
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


def load(layers: list[Spelled], faults: dict[str, str]) -> RLConfig:
    """Loads the configuration from files, variables and flags. Adds faults by key; raises
    pydantic's ValidationError."""
    sources = tuple(Layer(layer, faults) for layer in layers)
    # for settings_customise_sources
    loaded = Loaded(sources=sources)  # ty: ignore[unknown-argument]
    return RLConfig.model_construct(loaded.model_fields_set, **dict(loaded))


def place_value(table: Any, keys: list[str], section: str, value: Any) -> None:
    """Sets a key in the nested tables of a section; `true` for a table only switches it on. A
    number selects a list's element, and a list of one needs none. Raises ValueError."""
    first, *rest = keys
    if isinstance(table, list):
        if first.isdigit() and int(first) < len(table):
            element, keys = table[int(first)], rest
        elif len(table) == 1:
            element = table[0]
        else:
            raise ValueError(
                f"which of the {len(table)} entries? Put its number before `{first}`: 0 to "
                f"{len(table) - 1}"
            )
        if not (keys and isinstance(element, dict)):
            raise ValueError(
                "only elements that are tables have keys; to change another element, give "
                "the whole list"
            )
        place_value(element, keys, "", value)
    elif section in LISTS and first.isdigit():
        raise ValueError(
            f"there is no list with an element {first}; for one: --{section}.{'.'.join(rest)}, "
            f"for several: [[{section}]] in a file"
        )
    elif rest:
        if not isinstance(table.get(first), (dict, list)):
            table[first] = {}
        place_value(table[first], rest, f"{section}.{first}".lstrip("."), value)
    elif not (value is True and isinstance(table.get(first), dict)):
        table[first] = value
