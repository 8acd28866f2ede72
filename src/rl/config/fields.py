"""Inspects the config classes: the keys below a class, and each key's type in user terms."""

import json
import types
import typing
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


def models_in(annotation: object) -> list[type[BaseModel]]:
    """Returns the config classes in an annotation such as `list[EnvConfig]`, `WandbConfig |
    None` or a union discriminated by `type`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in models_in(inner)]


def tags(model: type[BaseModel]) -> tuple[str, ...]:
    """Returns the values of `type` that select this class in a union; empty for a class outside
    unions."""
    return (
        typing.get_args(model.model_fields["type"].annotation)
        if "type" in model.model_fields
        else ()
    )


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
    return (
        annotation is bool
        or bool(models_in(annotation))
        or any(map(accepts_switch, typing.get_args(annotation)))
    )


def takes_text_alone(annotation: object) -> bool:
    """Returns whether a setting of this type accepts only strings, fixed words, or lists of
    them: no numbers, true or false."""
    if typing.get_origin(annotation) is typing.Annotated:
        return takes_text_alone(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return all(isinstance(word, str) for word in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        return all(
            takes_text_alone(arg)
            for arg in typing.get_args(annotation)
            if arg is not types.NoneType
        )
    return annotation is str


def type_name(annotation: object) -> str:
    """Returns a type in user notation: `int|list[int]`, `bfloat16|float32`, `[float, float]`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return type_name(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is tuple:
        return f"[{', '.join(map(type_name, typing.get_args(annotation)))}]"
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(str(value) for value in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return "|".join(
            type_name(arg) for arg in typing.get_args(annotation) if arg is not types.NoneType
        )
    if typing.get_origin(annotation) is dict:
        return "table"
    return (
        str(annotation)
        if typing.get_args(annotation)
        else getattr(annotation, "__name__", str(annotation))
    )
