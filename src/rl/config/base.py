"""The base of every config class, and the types that several of them use."""

import math
import os
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Settings(BaseModel):
    """A section of the configuration: unknown keys are errors, a field's docstring is its help text, and numbers are finite unless the
    field's type is Unbounded."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True, validate_default=True, allow_inf_nan=False
    )


def not_nan(value: float) -> float:
    """The number itself. Raises ValueError for nan."""
    if math.isnan(value):
        raise ValueError("give a number; nan is none")
    return value


Unbounded = Annotated[float, Field(allow_inf_nan=True), AfterValidator(not_nan)]
"""A bound that `inf` switches off."""


def switch(value: object) -> object:
    """The table of a section that is off by default: `true` switches it on with its defaults, `false` off."""
    return {} if value is True else None if value is False else value


def default_type(kind: str) -> BeforeValidator:
    """The mark of a union told apart by `type`: a table that names none is of this kind, or a custom one if it names a function."""
    return BeforeValidator(lambda value: {"type": "custom" if "function" in value else kind, **value} if isinstance(value, dict) else value)


def parse_pair(value: object) -> object:
    """Two numbers with a comma between them (`0.9,0.99`) as a list, a list of two as it is. Raises ValueError for all else."""
    numbers = value.split(",") if isinstance(value, str) else value
    if not isinstance(numbers, (list, tuple)) or len(numbers) != 2:
        raise ValueError("give two numbers: [0.5, 0.9] or 0.5,0.9")
    return numbers


PAIR = BeforeValidator(parse_pair)
"""The mark of a setting of two numbers."""


def parse_names(value: object) -> object:
    """Names with commas between them, as a list; what is no text as it is."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


NAMES = BeforeValidator(parse_names)
"""The mark of a list of names that may be given with commas between them."""
ONE_OR_MORE = BeforeValidator(lambda value: value if value is None or isinstance(value, list) else [value])
"""The mark of a list that may be given as its only element."""


def path_setting(absolute: Callable[[str], str]) -> AfterValidator:
    """The mark of a setting that holds a path: `RLConfig.with_absolute_paths` applies `absolute` to it."""
    return AfterValidator(lambda value, info: absolute(value) if value is not None and info.context == ABSOLUTE_PATHS else value)


def absolute(path: str) -> str:
    """The path from the root; `~` and relative paths mean the user's home and the current directory."""
    return os.path.abspath(os.path.expanduser(path))


def absolute_if_written_as_path(value: str) -> str:
    """./x, ., ~/x, x.jsonl, x.py:function and .venvs/x/bin/python from the root; a name stays as it is."""
    if not re.match(r"(\.{0,2}|~)/|(\.{1,2}|~)$|\.venv|.*\.(py|jsonl)(:|$)", value):
        return value
    path, colon, name = value.partition(":")
    return absolute(path) + colon + name


def absolute_if_folder(value: str) -> str:
    """A folder that exists from the root; anything else, such as an id on the hub, stays as it is."""
    return absolute(value) if value and Path(value).expanduser().is_dir() else value


def absolute_if_exists(value: str) -> str:
    """A file or folder that exists, or is written as a path, from the root; anything else stays as it is."""
    value = absolute_if_written_as_path(value)
    return absolute(value) if os.path.exists(value) else value


BUILT_IN_TEMPLATE = "chatml"
"""The value of model.chat_template that names no file."""
ABSOLUTE_PATHS = "absolute paths"
"""The validation context in which paths are made absolute."""
PATH, OPTIONAL_PATH = path_setting(absolute), path_setting(lambda path: path and absolute(path))
TEMPLATE = path_setting(lambda path: path if path in ("", BUILT_IN_TEMPLATE) else absolute(path))
PATH_IF_WRITTEN_AS_ONE = path_setting(absolute_if_written_as_path)
PATH_IF_FOLDER, PATH_IF_EXISTS = path_setting(absolute_if_folder), path_setting(absolute_if_exists)


class FunctionConfig(Settings):
    """A function of yours."""

    function: Annotated[str, PATH_IF_WRITTEN_AS_ONE]
    """The function, as `file.py:function` or `module:function`."""
    args: dict[str, Any] = {}
    """Arguments for the function, which reads them as `config.args`."""


def parse_devices(value: object) -> object:
    """A count (`2`) as it is, ids (`"0,1"`, `[0, 1]`) as a list, None for the launcher's choice. Raises ValueError for other text."""
    if isinstance(value, str):
        ids = [part.strip() for part in value.split(",")]
        if not all(part.isascii() and part.isdigit() for part in ids):
            raise ValueError('give a count (2) or a list of ids ("0,1")')
        return [int(part) for part in ids] if len(ids) > 1 else int(ids[0])
    return value


Devices = Annotated[int | list[int] | None, BeforeValidator(parse_devices)]
"""A count of devices, or their ids, or None for the launcher's choice."""


MAX_RUN_NAME, MAX_LABEL = 200, 100
"""Bytes. A file name has 255, and ours put something before and behind."""


def name_fault(name: str, longest: int) -> str | None:
    """What is wrong with a name as one part of a path, in words; None if nothing is."""
    if not name or name in (".", ".."):
        return "is no name for a file"
    if "/" in name or name.startswith("."):
        return "no slash, no leading dot"
    if "\\" in name or name.startswith("-") or name != name.strip():
        return "no backslash, no dash in front, no space at its ends"
    if not name.isprintable() or unicodedata.normalize("NFKC", name) != name:
        return "only letters that can be seen and told apart: no control characters, no look-alikes"
    if (size := len(name.encode(errors="replace"))) > longest:
        return f"{size} bytes long, {longest} are allowed"
    return None


def text_fault(text: str) -> str | None:
    """What makes a text unfit for any file of ours."""
    if "\0" in text:
        return "has a NUL character in it; remove it"
    return "is not valid UTF-8; spell it in UTF-8" if text.encode(errors="ignore").decode() != text else None
