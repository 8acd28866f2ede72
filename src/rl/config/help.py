"""`--help`, from the docstrings of the config fields: the keys that most runs set, and any section in full on demand."""

import re
import textwrap

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rl.config.faults import did_you_mean
from rl.config.fields import field_tree, models_in, tags, type_name
from rl.config.run import RLConfig
from rl.system.errors import ConfigError

COMMANDS = {
    "sft": ("rl.commands.sft", "supervised fine-tuning on examples, or on a run's best rollouts"),
    "eval": ("rl.commands.evaluate", "evaluate a model, a run's version or an endpoint, and compare two of them"),
    "collect": ("rl.commands.collect", "play an environment's tasks without training and keep the rollouts as JSONL"),
    "export": ("rl.commands.export", "write a run's weights as a Hugging Face model or a peft adapter, out of any checkpoint or version"),
    "replay": ("rl.commands.replay", "train a run again from its batches and compare every version bit for bit"),
    "doctor": ("rl.commands.doctor.main", "check a machine or a configuration before a run, and say what a run waits for, alive or dead"),
    "show": ("rl.commands.show", "print a run's rollouts, by step, environment, task, reward, or why they were not trained"),
    "compare": ("rl.commands.compare", "two runs side by side: settings that differ, curves, evaluations"),
    "env": ("rl.commands.environment", "show what an environment is, play it, export its tasks"),
}
"""Subcommand -> (its module, what it does). A module has `main(args, children)`."""

SETTINGS = """  @ run.toml                  settings from a file; several files merge left to right
  --trainer @ t.toml          one section from its own file (also --orchestrator, --inference)
  --trainer.optim.lr 1e-6     any setting as a flag; flags win over environment variables (RL__TRAINER__OPTIM__LR=1e-6), those over files
  --trainer-gpus, --inference-gpus, --trainer-cpus, --inference-cpus   split a box (counts or ids)
  --strict-parity             end the run, instead of warning, when trainer and inference disagree on the same tokens and weights
  --quick                     the same, tiny: 2 steps of 2 groups of at most 4 rollouts of at most 32 tokens, evals of 4 examples
  --dry-run, --schema         print the resolved configuration, or the JSON schema of all settings, and exit
  --help [SECTION]            a section's settings, for example trainer.optim; or all of them: --help all
"""

USAGE = (
    """usage: {program} [@ FILE] [--SECTION @ FILE] [--KEY VALUE] ...

"""
    + SETTINGS
    + """  --resume [STEP]             continue the run at its newest complete checkpoint, or at STEP
  --clean                     delete the run directory and start over
"""
)

WIDTH, INDENT = 118, 6 * " "

COMMON = (
    "name", "output_dir", "max_steps", "seed", "max_lag", "wandb", "model.name", "model.dtype", "model.max_model_len",
    "trainer.gpus", "trainer.optim.lr", "trainer.optim.warmup_steps", "trainer.optim.schedule", "trainer.loss",
    "trainer.loss.kl_coefficient", "trainer.lora", "trainer.micro_batch_tokens", "trainer.activation_checkpointing",
    "trainer.checkpoint.interval", "orchestrator.environment.id", "orchestrator.environment.args", "orchestrator.environment.weight",
    "orchestrator.eval.interval", "orchestrator.eval.num_examples", "orchestrator.batch_size", "orchestrator.group_size",
    "orchestrator.sampling.max_tokens", "orchestrator.sampling.temperature", "orchestrator.credit", "inference.gpus", "inference.vllm",
    "sft.dataset", "sft.epochs", "sft.batch_size", "sft.min_reward", "sft.validation", "sft.validation_fraction",
)  # fmt: skip
"""The settings that most runs set."""


def commands_text() -> str:
    """The subcommands of `rl`, for its --help."""
    lines = [f"  rl {name:<10} {what}; see rl {name} --help" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["without a command, `rl` trains; the others:", *lines, ""])


OF_SFT, NOT_OF_SFT = ("sft",), ("max_lag", "orchestrator", "inference")
"""Keys that only supervised fine-tuning uses, and those that it does not use."""


def print_help(program: str, usage: str, topic: str = "") -> None:
    """Prints how the program is used with its common keys and sections; or every key of a topic with type, default and docstring.

    Raises ConfigError for a topic that is neither a section, a key nor `all`.
    """
    tree = field_tree(RLConfig)
    if topic == "all":
        print_fields(RLConfig.model_fields, "")
    elif topic in tree:
        print_key(topic, tree[topic])
    elif topic:
        raise ConfigError(f"--help {topic}: there is no such section or key; {did_you_mean(topic)}")
    else:
        print(usage.replace("{program}", program))
        if program == "rl":
            print(commands_text())
        unused = NOT_OF_SFT if program == "rl sft" else OF_SFT
        print(overview({key: info for key, info in tree.items() if key.split(".")[0] not in unused}))


def overview(tree: dict[str, FieldInfo]) -> str:
    """The common keys, each with the beginning of its docstring, and the names of all sections."""
    common = {key: tree[key] for key in COMMON if key in tree}
    lines = [f"  {signature(key, info):<63} {re.split('[.:;] ', description(info))[0].rstrip('.')}" for key, info in common.items()]
    sections = ", ".join(key for key, info in tree.items() if models_in(info.annotation))
    return "\n".join([*lines, "", *textwrap.wrap(f"sections, each for --help SECTION: {sections}", WIDTH, subsequent_indent="  ")])


def signature(key: str, info: FieldInfo) -> str:
    """A setting as a flag with its type and default; a section as the flag that switches it on, or that chooses its class."""
    if kinds := [tag for model in models_in(info.annotation) for tag in tags(model)]:
        return f"--{key}.type {'|'.join(kinds)}"
    if models_in(info.annotation):
        return f"--{key}"
    return f"--{key} {type_name(info.annotation)}" + (f" = {info.default!r}" if info.default not in (None, PydanticUndefined) else "")


def description(info: FieldInfo) -> str:
    """The docstring of a key, or of its class, in one line."""
    inner = models_in(info.annotation)
    return " ".join((info.description or (inner[0].__doc__ if inner else "") or "").split())


def print_key(key: str, info: FieldInfo) -> None:
    """A setting with its docstring, or a section with all its keys: of several classes what they share once, then what each adds."""
    models = models_in(info.annotation)
    if not models:
        print(f"  {signature(key, info)}")
        print(textwrap.fill(description(info), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))
        return
    print(f"\n[{key}]  {description(info)}")
    print_fields((models[0] if len(models) == 1 else models[0].__base__).model_fields, f"{key}.")
    for model in models if len(models) > 1 else ():
        print(f"  {key}.type = {tags(model)[0]!r}: {' '.join(model.__doc__.split())}")
        print_fields({name: model.model_fields[name] for name in model.__annotations__ if name != "type"}, f"{key}.")


def print_fields(fields: dict[str, FieldInfo], prefix: str) -> None:
    """Keys of a config class, then its sections with theirs."""
    for key, info in sorted(fields.items(), key=lambda item: bool(models_in(item[1].annotation))):  # stable: otherwise in order
        print_key(prefix + key, info)
