"""The base of every config class, and the types that several of them use."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Settings(BaseModel):
    """A section of the configuration: unknown keys are errors, a field's docstring is its help text."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True, validate_default=True)


def switch(value: object) -> object:
    """For a section that is off unless it is there: `true` means its defaults, `false` means off."""
    return {} if value is True else None if value is False else value


def parse_devices(value: object) -> object:
    """`2` is a count; `"0,1"`, `[0, 1]` are ids; None leaves the choice to the launcher."""
    if isinstance(value, str):
        ids = [part.strip() for part in value.split(",")]
        if not all(part.isascii() and part.isdigit() for part in ids):
            raise ValueError('give a count (2) or a list of ids ("0,1")')
        return [int(part) for part in ids] if len(ids) > 1 else int(ids[0])
    return value


Devices = Annotated[int | list[int] | None, BeforeValidator(parse_devices)]
"""A count of devices, or their ids, or None for the launcher's choice."""
