"""`--help`, from the docstrings of the config fields."""

import types
import typing

from pydantic import BaseModel
from pydantic.fields import FieldInfo

COMMANDS = {
    "eval": ("rl.commands.evaluate", "evaluate a model, a run's version or an endpoint, and compare two of them"),
    "collect": ("rl.commands.collect", "play an environment's tasks without training and keep the rollouts as JSONL"),
    "env": ("rl.commands.environment", "show what an environment is, play it, export its tasks"),
}
"""Subcommand -> (its module, what it does). A module has `main(args, children)`."""

SETTINGS = """  @ run.toml                  settings from a file; several files merge left to right, flags win
  --trainer @ t.toml          one section from its own file (also --orchestrator, --inference)
  --trainer.optim.lr 1e-6     any key below as a flag; --learning_rate and --steps are aliases of trainer.optim.lr and max_steps
  --trainer-gpus, --inference-gpus, --trainer-cpus, --inference-cpus   split a box (counts or ids)
  --quick                     the same, tiny: 2 steps of 2 groups of at most 4 rollouts of at most 32 tokens, evals of 4 examples;
                              the name gets -quick
  --dry-run                   print the resolved configuration and exit
  --schema                    print the JSON schema of the configuration and exit
"""

USAGE = (
    """usage: {program} [@ FILE] [--SECTION @ FILE] [--KEY VALUE] ...

"""
    + SETTINGS
    + """  --resume [STEP]             continue the run at its newest complete checkpoint, or at STEP
  --clean                     delete the run directory and start over
"""
)


def model_in(annotation: object) -> type[BaseModel] | None:
    """The config class inside an annotation such as `list[EnvConfig]` or `WandbConfig | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        found = model_in(inner)
        if found:
            return found
    return None


def field_tree(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key below a config class by its dotted name, sections included, in order."""
    tree: dict[str, FieldInfo] = {}
    for name, info in model.model_fields.items():
        tree[prefix + name] = info
        inner = model_in(info.annotation)
        if inner:
            tree |= field_tree(inner, f"{prefix}{name}.")
    return tree


def accepts_switch(annotation: object) -> bool:
    """Whether `--key` without a value can mean something: a bool, or a section that is switched on."""
    return annotation is bool or model_in(annotation) is not None or any(map(accepts_switch, typing.get_args(annotation)))


def type_name(annotation: object) -> str:
    """A type as a user would say it."""
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(str(value) for value in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return "|".join(type_name(arg) for arg in typing.get_args(annotation) if arg is not types.NoneType)
    return getattr(annotation, "__name__", str(annotation)) if not typing.get_args(annotation) else str(annotation)


def commands_text() -> str:
    """The subcommands of `rl`, for its --help."""
    lines = [f"  rl {name:<10} {what}; see rl {name} --help" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["without a command, `rl` trains; the others:", *lines, ""])


def print_help(program: str, model: type[BaseModel], usage: str = USAGE) -> None:
    """Prints the usage and every key with its type, default and docstring."""
    print(usage.replace("{program}", program))
    if program == "rl":
        print(commands_text())
    for name, info in field_tree(model).items():
        inner = model_in(info.annotation)
        text = " ".join((info.description or (inner.__doc__ if inner else "") or "").split())
        if inner:
            print(f"\n[{name}]  {text}")
        else:
            default = "" if info.is_required() else f" = {info.default!r}"
            print(f"  --{name} {type_name(info.annotation)}{default}\n      {text}")
