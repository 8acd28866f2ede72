"""`--help`, from the docstrings of the config fields."""

import types
import typing
from collections.abc import Collection

from pydantic import BaseModel
from pydantic.fields import FieldInfo

COMMANDS = {
    "sft": ("rl.commands.sft", "supervised fine-tuning on examples, or on a run's best rollouts"),
    "eval": ("rl.commands.evaluate", "evaluate a model, a run's version or an endpoint, and compare two of them"),
    "collect": ("rl.commands.collect", "play an environment's tasks without training and keep the rollouts as JSONL"),
    "export": ("rl.commands.export", "write a run's weights as a Hugging Face model or a peft adapter, out of any checkpoint or version"),
    "replay": ("rl.commands.replay", "train a run again from its batches and compare every version bit for bit"),
    "doctor": ("rl.commands.doctor", "check a machine or a configuration before a run, and say what a run waits for, alive or dead"),
    "env": ("rl.commands.environment", "show what an environment is, play it, export its tasks"),
}
"""Subcommand -> (its module, what it does). A module has `main(args, children)`."""

SETTINGS = """  @ run.toml                  settings from a file; several files merge left to right, flags win
  --trainer @ t.toml          one section from its own file (also --orchestrator, --inference)
  --trainer.optim.lr 1e-6     any key below as a flag; --learning_rate and --steps are aliases of trainer.optim.lr and max_steps
  --trainer-gpus, --inference-gpus, --trainer-cpus, --inference-cpus   split a box (counts or ids)
  --strict-parity             end the run, instead of warning, when trainer and inference disagree on the same tokens and weights
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


def models_in(annotation: object) -> list[type[BaseModel]]:
    """The config classes inside an annotation such as `list[EnvConfig]`, `WandbConfig | None` or a union told apart by `type`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in models_in(inner)]


def tags(model: type[BaseModel]) -> tuple[str, ...]:
    """What tells a class of a union apart from the others: the values of its `type`."""
    return typing.get_args(model.model_fields["type"].annotation) if "type" in model.model_fields else ()


def field_tree(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key below a config class by its dotted name, sections included. Of classes told apart by `type`, the first that has a key."""
    tree: dict[str, FieldInfo] = {}
    for name, info in model.model_fields.items():
        tree[prefix + name] = info
        for inner in models_in(info.annotation):
            for key, below in field_tree(inner, f"{prefix}{name}.").items():
                tree.setdefault(key, below)
    return tree


def accepts_switch(annotation: object) -> bool:
    """Whether `--key` without a value can mean something: a bool, or a section that is switched on."""
    return annotation is bool or bool(models_in(annotation)) or any(map(accepts_switch, typing.get_args(annotation)))


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


NOT_SHOWN = {"rl": ("sft",), "rl sft": ("max_lag", "orchestrator", "inference")}
"""Keys that a program's --help leaves out, because another program's has them or because they do nothing there."""


def print_help(program: str, model: type[BaseModel], usage: str = USAGE) -> None:
    """Prints the usage and every key with its type, default and docstring."""
    print(usage.replace("{program}", program))
    if program == "rl":
        print(commands_text())
    print_section(model, "", skip=NOT_SHOWN.get(program, ()))


def print_section(model: type[BaseModel], prefix: str, skip: Collection[str] = ()) -> None:
    """The keys of a config class, then its sections with theirs."""
    fields = {key: info for key, info in model.model_fields.items() if key not in skip}
    for key, info in sorted(fields.items(), key=lambda item: bool(models_in(item[1].annotation))):  # stable: otherwise in order
        inner = models_in(info.annotation)
        text = " ".join((info.description or (inner[0].__doc__ if inner else "") or "").split())
        if inner:
            print(f"\n[{prefix}{key}]  {text}")
            print_classes(inner, f"{prefix}{key}.")
        else:
            default = "" if info.is_required() else f" = {info.default!r}"
            print(f"  --{prefix}{key} {type_name(info.annotation)}{default}\n      {text}")


def print_classes(models: list[type[BaseModel]], prefix: str) -> None:
    """A section that is one class, or one of several: what they share once, then what each adds."""
    if len(models) == 1:
        return print_section(models[0], prefix)
    common = models[0].__base__
    assert common is not None
    print_section(common, prefix)
    for model in models:
        print(f"  {prefix}type = {tags(model)[0]!r}: {' '.join((model.__doc__ or '').split())}")
        print_section(model, prefix, skip=[*common.model_fields, "type"])
    return None
