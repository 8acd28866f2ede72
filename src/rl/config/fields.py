"""Inspects the config classes: the keys below a class, each key's type in user terms, and the
settings in which two configurations differ."""

import json
import types
import typing
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

UNIONS = (typing.Union, types.UnionType)


def members(annotation: object) -> list[Any]:
    """Returns the classes and fixed words that a setting or its elements may be, without None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return members(arguments[0])
    if origin is typing.Literal:
        return list(arguments)
    if origin in (*UNIONS, list):
        return [
            member
            for argument in arguments
            if argument is not types.NoneType
            for member in members(argument)
        ]
    return [annotation]


def models_in(annotation: object) -> list[type[BaseModel]]:
    """Returns the config classes in an annotation such as `list[EnvConfig]`, `WandbConfig |
    None` or a union discriminated by `type`."""
    return [
        member
        for member in members(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    ]


def tags(model: type[BaseModel]) -> tuple[str, ...]:
    """Returns the values of `type` that select this class in a union; empty for a class outside
    unions."""
    kind = model.model_fields.get("type")
    return typing.get_args(kind.annotation) if kind else ()


@cache
def field_tree(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Returns every key below a config class by dotted name, including sections. In a union, the
    first class with a key describes it."""
    tree: dict[str, FieldInfo] = {}
    for name, info in model.model_fields.items():
        tree[prefix + name] = info
        for inner in models_in(info.annotation):
            for key, below in field_tree(inner, f"{prefix}{name}.").items():
                tree.setdefault(key, below)
    return tree


def default_text(value: Any) -> str:
    """Returns a default as written in a file; empty for None, an empty string, a section, and a
    default made by a factory."""
    if value is None or value == "" or value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(default_text, value))}]"
    return json.dumps(value) if isinstance(value, (bool, str, dict)) else repr(value)


def accepts_switch(annotation: object) -> bool:
    """Returns whether true or false is accepted: for a bool, or for a section that can be
    switched on."""
    return bool in members(annotation) or bool(models_in(annotation))


def takes_text_alone(annotation: object) -> bool:
    """Returns whether a setting of this type accepts only strings, fixed words, or lists of
    them: no numbers, true or false."""
    return all(member is str or isinstance(member, str) for member in members(annotation))


def type_name(annotation: object) -> str:
    """Returns a type in user notation: `int|list[int]`, `bfloat16|float32`, `[float, float]`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is tuple:
        return f"[{', '.join(map(type_name, arguments))}]"
    if origin is typing.Literal:
        return "|".join(map(str, arguments))
    if origin in UNIONS:
        return "|".join(
            type_name(argument) for argument in arguments if argument is not types.NoneType
        )
    if origin is list:
        return f"list[{type_name(arguments[0])}]"
    return "table" if origin is dict else getattr(annotation, "__name__", str(annotation))


def without_none(value: Any) -> Any:
    """Removes None values: TOML has no null, and every None in the configuration is a default."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


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


def changed_keys(old: BaseModel, new: BaseModel) -> list[tuple[str, Any, Any]]:
    """Returns (key, old value, new value) of each setting that differs; the value of an unset
    setting is None."""
    before, after = leaves(without_none(old)), leaves(without_none(new))
    both = ((key, before.get(key), after.get(key)) for key in {**before, **after})
    # repr: nan != nan
    return [(key, old, new) for key, old, new in both if old != new and repr(old) != repr(new)]
