"""The base of every config class, and the types that several of them use."""

import math
import os
import re
import unicodedata
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Settings(BaseModel):
    """A section of the configuration: unknown keys are errors, a field's docstring is its help
    text, and numbers are finite unless the field's type is Unbounded."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def not_nan(value: float) -> float:
    """Returns the number. Raises ValueError for nan."""
    if math.isnan(value):
        raise ValueError("give a number; nan is not allowed")
    return value


Unbounded = Annotated[float, Field(allow_inf_nan=True), AfterValidator(not_nan)]
"""A bound that `inf` switches off."""


def switch(value: object) -> object:
    """Maps `true` to an empty table (the section's defaults) and `false` to None (off); returns
    other values unchanged."""
    return {} if value is True else None if value is False else value


def default_type(kind: str) -> BeforeValidator:
    """Validator for a union discriminated by `type`: a table without one gets `kind`, or
    "custom" if it has a `function`."""
    return BeforeValidator(
        lambda value: (
            {"type": "custom" if "function" in value else kind, **value}
            if isinstance(value, dict)
            else value
        )
    )


def parse_pair(value: object) -> object:
    """Splits `0.9,0.99` into a list; returns a list of two unchanged. Raises ValueError for
    anything else."""
    numbers = value.split(",") if isinstance(value, str) else value
    if not isinstance(numbers, (list, tuple)) or len(numbers) != 2:
        raise ValueError("give two numbers: [0.5, 0.9] or 0.5,0.9")
    return numbers


def check_host(host: str) -> str:
    """Returns an address that a process binds. Raises ValueError for what is none."""
    if not re.fullmatch(r"[\w.:%-]+", host):
        raise ValueError(
            "is not a valid address; give 127.0.0.1, an address or name of this machine, "
            "or 0.0.0.0 for all interfaces"
        )
    return host


def check_address(address: str) -> str:
    """Returns the address of a server. Raises ValueError for what is none."""
    if not re.match(r"https?://[^/]", address):
        raise ValueError("give an address like http://host:8000")
    return address


Host = Annotated[str, AfterValidator(check_host)]
Address = Annotated[str, AfterValidator(check_address)]
PAIR = BeforeValidator(parse_pair)
"""Validator for a setting of two numbers."""


def parse_names(value: object) -> object:
    """Splits comma-separated names into a list; returns a value that is not a string unchanged."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


NAMES = BeforeValidator(parse_names)
"""Validator for a list of names that may be given separated by commas."""
REQUIREMENTS = BeforeValidator(
    lambda value: (
        re.split(r", *(?=[a-zA-Z])(?![^[]*\])", value) if isinstance(value, str) else value
    )
)
"""Validator for a list of packages; commas separate them, but not their extras and bounds of
their versions."""


def parse_stops(value: object) -> object:
    """Splits a text at its commas and reads `\\n` in it as a newline; returns a list unchanged.
    Raises ValueError for an empty string."""
    texts = re.split(", *", value.replace("\\n", "\n")) if isinstance(value, str) else value
    if isinstance(texts, list) and "" in texts:
        raise ValueError(
            "an empty text would end every answer at once; leave it out, or give a text with a "
            """comma in a list: '[","]'"""
        )
    return texts


STOPS = BeforeValidator(parse_stops)
"""Validator for a list of strings that end answers."""


def path_setting(absolute: Callable[[str], str]) -> AfterValidator:
    """Validator for a setting that holds a path: `RLConfig.with_absolute_paths` applies
    `absolute` to it."""
    return AfterValidator(
        lambda value, info: (
            absolute(value) if value is not None and info.context == ABSOLUTE_PATHS else value
        )
    )


def absolute(path: str) -> str:
    """Returns the absolute path; `~` is the user's home, and relative paths start at the current
    directory."""
    return os.path.abspath(os.path.expanduser(path))


def absolute_if_written_as_path(value: str) -> str:
    """Makes ./x, ., ~/x, x.jsonl, x.csv, x.py:function and .venvs/x/bin/python absolute; returns a
    plain name unchanged."""
    files = r".*\.(py|jsonl|csv|parquet|arrow)(:|$)"
    if not re.match(r"(\.{0,2}|~)/|(\.{1,2}|~)$|\.venv|" + files, value):
        return value
    path, colon, name = value.partition(":")
    return absolute(path) + colon + name


def absolute_if_exists(value: str) -> str:
    """Makes a path absolute if it exists or is written as a path; returns anything else
    unchanged."""
    value = absolute_if_written_as_path(value)
    return absolute(value) if os.path.exists(value) else value


BUILT_IN_TEMPLATE = "chatml"
"""Value of model.chat_template that selects the built-in template instead of a file."""
ABSOLUTE_PATHS = "absolute paths"
"""The validation context in which paths are made absolute."""
PATH = path_setting(lambda path: path and absolute(path))
TEMPLATE = path_setting(lambda path: path if path in ("", BUILT_IN_TEMPLATE) else absolute(path))
PATH_IF_WRITTEN_AS_ONE = path_setting(absolute_if_written_as_path)
PATH_IF_EXISTS = path_setting(absolute_if_exists)


class FunctionConfig(Settings):
    """A user-defined function."""

    function: Annotated[str, PATH_IF_WRITTEN_AS_ONE]
    """The function, as `file.py:function` or `module:function`."""
    args: dict[str, Any] = {}
    """Arguments that the function reads as `config.args`."""


def parse_devices(value: object) -> object:
    """Parses the text `2` as a count and `0,1` as a list of ids; returns other types unchanged.
    Raises ValueError for other text."""
    if isinstance(value, str):
        ids = [part.strip() for part in value.split(",")]
        if not all(part.isascii() and part.isdigit() for part in ids):
            raise ValueError('give a count (2) or a list of ids ("0,1")')
        return [int(part) for part in ids] if len(ids) > 1 else int(ids[0])
    return value


Devices = Annotated[int | list[int] | None, BeforeValidator(parse_devices)]
"""A number of devices, a list of device ids, or None to let the launcher choose."""


def as_ids(devices: int | list[int] | None) -> list[int]:
    """Returns the device ids of a setting; empty for a count or None."""
    return devices if isinstance(devices, list) else []


Fault = tuple[str, object, str]
"""(key of a setting, its value, the remedy)."""


MAX_RUN_NAME, MAX_LABEL = 200, 100
"""Bytes. File names may have 255, and rl adds prefixes and suffixes."""


def name_fault(name: str, longest: int) -> str | None:
    """Returns why a name cannot be one component of a path, or None if it can. `longest` is in
    bytes."""
    if not name or name in (".", ".."):
        return "is not a valid file name"
    if "/" in name or name.startswith("."):
        return "must not contain a slash or start with a dot"
    if "\\" in name or name.startswith("-") or name != name.strip():
        return "must not contain a backslash, start with a dash, or start or end with a space"
    if not name.isprintable() or unicodedata.normalize("NFKC", name) != name:
        return "must not contain control characters or look-alikes of other characters"
    if (size := len(name.encode(errors="replace"))) > longest:
        return f"is {size} bytes long; at most {longest} are allowed"
    return None


def text_fault(text: str) -> str | None:
    """Returns why a text cannot be written to a file, or None if it can."""
    if "\0" in text:
        return "contains a NUL character; remove it"
    return (
        "is not valid UTF-8; encode it as UTF-8"
        if text.encode(errors="ignore").decode() != text
        else None
    )
