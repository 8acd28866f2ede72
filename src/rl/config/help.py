"""Prints `--help` from the docstrings of config fields: the keys that most runs set, and any
section in full on demand."""

import re
import textwrap
import typing
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl.config.faults import hint
from rl.config.fields import default_text, field_tree, models_in, tags, type_name
from rl.config.run import RLConfig
from rl.run_dir.metrics import METRICS
from rl.system.errors import ConfigError

COMMAND_LINES = (
    "recipe rl.commands.recipe:main list recipes, copy one to start from, or check that one still "
    "gives its curve",
    "sft rl.commands.train:sft supervised fine-tuning on examples, or on a run's best rollouts",
    "train rl.commands.train:train train on recorded rollouts, without environments and inference",
    "serve rl.commands.serve:main serve the Tinker API: train and sample adapters of a model from "
    "other programs",
    "eval rl.commands.evaluate:main evaluate a model, a run's version or an endpoint, and compare "
    "two of them",
    "collect rl.commands.collect:main play an environment's tasks without training and save the "
    "rollouts as JSONL",
    "export rl.commands.export:main write a run's weights as a Hugging Face model or a peft "
    "adapter",
    "branch rl.commands.branch:main start a new run from a run's checkpoint with other settings",
    "replay rl.commands.replay:main retrain a run from its batches and compare every version bit "
    "for bit",
    "doctor rl.commands.doctor.main:main check a machine or a configuration, or diagnose a run, "
    "alive or dead",
    "show rl.commands.show:main print a run's rollouts, by step, environment, task, reward, or "
    "reason for being dropped",
    "view rl.view.main:main show runs in a browser: curves, rollouts token by token, tasks over "
    "time, timeline, health",
    "compare rl.commands.compare:main compare two runs: differing settings, curves, evaluations",
    "watch rl.commands.follow:watch show a run as `rl` does, from any machine that sees its "
    "directory",
    "logs rl.commands.follow:logs print or follow the logs of a run's processes",
    "stop rl.commands.stop:main end a run from any machine, on a cluster all of it",
    "node rl.cluster.node:main run one machine's part of a run on several machines",
    "env rl.commands.environment:main inspect an environment, play it, or export its tasks",
)
COMMANDS: dict[str, tuple[str, str]] = {
    name: (path, text) for name, path, text in (line.split(" ", 2) for line in COMMAND_LINES)
}
"""Subcommand -> (its function of arguments and Children, its description)."""

SETTINGS = """  @ run.toml                  settings from a file; several files merge left to right
  --SECTION.KEY VALUE         any setting; flags override variables (RL__SECTION__KEY=VALUE), which
                              override files
  --quick                     a tiny version of the run, to check that everything works
  --dry-run, --schema         print the resolved configuration, or the JSON schema of all settings,
                              and exit
  --help [SECTION]            the settings of a section, such as model; all of them: all; all
                              metrics: metrics
"""
RESUME = """\
  --resume [STEP]             continue the run from its newest complete checkpoint, or from STEP
  --clean                     delete the run directory and start over
"""
VIEW = (
    "  --view                      show the run in a browser while it is running (rl view --help)\n"
)
USAGE = f"""usage: {{program}} [@ FILE] [--SECTION @ FILE] [--KEY VALUE] ...

{SETTINGS}\
  --trainer @ t.toml          one section from its own file (also --orchestrator, --inference)
  --trainer-gpus, --inference-gpus, --trainer-cpus, --inference-cpus
                              divide the machine (counts or ids)
  --strict-parity             end the run, instead of warning, when trainer and inference disagree
{VIEW}{RESUME}  --version                   print the version
"""
PROCESS_USAGE = f"""usage: {{program}} @ FILE [--KEY VALUE] ...

Starts one process of a run by hand on its own node (docs/clusters.md); `rl` starts all of them.

{SETTINGS}"""

WIDTH, INDENT, COLUMN = 120, 6 * " ", 63

COMMON = (
    "name output_dir max_steps seed max_lag wandb model.name model.dtype model.max_model_len "
    "trainer.gpus trainer.optim.lr trainer.optim.warmup_steps trainer.optim.schedule trainer.loss "
    "trainer.loss.kl_coefficient trainer.lora trainer.micro_batch_tokens "
    "trainer.activation_checkpointing trainer.checkpoint.interval orchestrator.environment.id "
    "orchestrator.environment.args orchestrator.environment.weight orchestrator.eval.interval "
    "orchestrator.eval.num_examples orchestrator.batch_size orchestrator.group_size "
    "orchestrator.sampling.max_tokens orchestrator.sampling.temperature orchestrator.credit "
    "inference.gpus inference.vllm sft.dataset sft.epochs sft.batch_size sft.min_reward "
    "sft.validation sft.validation_fraction"
)
"""Settings that most runs set."""


@dataclass(frozen=True)
class Reads:
    """The sections and keys that a program reads, except those in `without`."""

    keys: str
    without: str = ""
    usual: bool = True
    """Whether its help lists the settings that most runs set."""

    def __contains__(self, key: str) -> bool:
        def within(sections: str) -> bool:
            return any(f"{key}.".startswith(f"{section}.") for section in sections.split())

        return within(self.keys) and not within(self.without)


def keys_in(section: str, names: str) -> str:
    """Returns dotted keys, separated by spaces."""
    return " ".join(f"{section}.{name}" for name in names.split())


RUN = "name output_dir max_steps seed model"
EVERYTHING = " ".join(RLConfig.model_fields)
TRACKED = f"{RUN} renderer supervisor wandb tensorboard prometheus cost trainer"
OF_TRAINING = keys_in("orchestrator.environment", "weight group_size credit difficulty teacher")
PLAYING = "name output_dir seed model renderer inference " + keys_in(
    "orchestrator",
    "environment sampling inference_urls rollout_timeout_s rollout_retries worker_memory_gib "
    "worker_silence_s worker_timeout_s",
)
OF_BATCHES = keys_in(
    "orchestrator",
    "batch_size credit filter sampling.temperature sampling.max_tokens max_off_policy_steps "
    "replace_no_signal mask_truncated trainer_timeout_s host port batches rollouts "
    "show_rollout_every",
)
READS = {
    "rl sft": Reads(f"{TRACKED} sft", "trainer.data trainer.strict_parity"),
    "rl train": Reads(f"{TRACKED} max_lag recorded {OF_BATCHES}", "trainer.data"),
    "rl serve": Reads(
        "name output_dir seed model supervisor trainer inference serve",
        keys_in("trainer", "data optim loss checkpoint token_log strict_parity"),
    ),
    "rl eval": Reads(
        f"{PLAYING} orchestrator.eval",
        f"{OF_TRAINING} orchestrator.eval.interval orchestrator.eval.target",
    ),
    "rl collect": Reads(PLAYING, OF_TRAINING),
    "rl env": Reads(PLAYING, f"name output_dir {OF_TRAINING}"),
    "rl doctor": Reads(EVERYTHING, usual=False),
    "rl node": Reads("name output_dir cluster", usual=False),
    "trainer": Reads(f"{RUN} renderer trainer sft"),
    "orchestrator": Reads(f"{RUN} renderer max_lag orchestrator recorded"),
    "inference": Reads(f"{RUN} inference", "max_steps"),
}
EVERYTHING_BUT_SFT = Reads(EVERYTHING, "sft recorded serve")


def fit(text: str) -> str:
    """Wraps the paragraphs of a text; the description of a flag continues on indented lines."""
    lines = []
    for line in re.sub(r"(?<=\S)\n(?: {10,})?(?=\S)", " ", text).splitlines():
        flag = re.match(r"(  \S.*?  +)?", line)
        lines += textwrap.wrap(
            line, WIDTH, subsequent_indent=" " * (flag.end() if flag else 0), break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)


def print_help(program: str, usage: str, topic: str = "") -> None:
    """Prints the program's usage, common keys and sections; or every key of a topic with type,
    default and docstring.

    Raises ConfigError for a topic that is neither a section, a key, `all` nor `metrics`.
    """
    defaults = RLConfig.model_validate({"sft": {"dataset": ""}} if program == "rl sft" else {})
    tree = field_tree(RLConfig)
    if topic == "all":
        print_fields(RLConfig, "", defaults)
    elif topic == "metrics":
        for name, what in METRICS.items():
            wrapped(f"{name}  {what}", "", INDENT)
    elif topic in tree:
        print_key(topic, tree[topic], defaults)
    elif topic:
        raise ConfigError(f"--help {topic}: no such section or key; {hint(topic)}")
    else:
        print(fit(usage.replace("{program}", program)) + "\n")
        if program == "rl":
            print("without a command, `rl` trains; the commands, each with its own --help:")
            for name, (_, what) in COMMANDS.items():
                print(f"  rl {name:<10} {what}")
            print()
        read = READS.get(program, EVERYTHING_BUT_SFT)
        tree = {key: info for key, info in tree.items() if key in read}
        common = [key for key in COMMON.split() if key in tree and read.usual]
        for key in common:
            flag = (
                f"  {signature(key, tree[key], value_at(defaults, key, tree[key])):<{COLUMN - 2}}"
            )
            what = re.split("[.:;] ", description(tree[key]))[0].rstrip(".")
            room = max(0, WIDTH - len(flag) - 1)
            print(f"{flag} {textwrap.shorten(what, room, placeholder=' ...')}".rstrip())
        if common:
            print()
        sections = [key for key, info in tree.items() if models_in(info.annotation)]
        wrapped(f"sections for --help SECTION: {', '.join(sections)}", "", "  ")


def wrapped(text: str, first: str, further: str) -> None:
    """Prints a paragraph, whose first and further lines are indented."""
    lines = textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=further, break_on_hyphens=False
    )
    print(lines)


def value_at(config: BaseModel | None, key: str, info: FieldInfo) -> Any:
    """Returns a key's value in a configuration; the field's default if that is empty or the key
    is in a list or a disabled section."""
    value: Any = config
    for part in key.split("."):
        if not (isinstance(value, BaseModel) and part in type(value).model_fields):
            return info.default
        value = getattr(value, part)
    return info.default if info.default in (None, "") else value


def signature(key: str, info: FieldInfo, default: Any) -> str:
    """Formats a setting as a flag with type and default, or a section as the flag that switches
    it on or selects its class."""
    models = models_in(info.annotation)
    if kinds := [tag for model in models for tag in tags(model)]:
        return f"--{key}.type {'|'.join(kinds)}"
    if models:
        return f"--{key}"
    is_word = typing.get_origin(info.annotation) is typing.Literal
    text = "" if info.is_required() else str(default) if is_word else default_text(default)
    return f"--{key} {type_name(info.annotation)}" + (f" = {text}" if text else "")


def description(info: FieldInfo) -> str:
    """Returns the docstring of a key, or of its class, on one line."""
    models = models_in(info.annotation)
    return " ".join((info.description or (models[0].__doc__ if models else "") or "").split())


def print_key(key: str, info: FieldInfo, defaults: RLConfig) -> None:
    """Prints a setting with its docstring, or a section with its keys; for a union, the shared
    keys first, then those of each class."""
    models = models_in(info.annotation)
    if not models:
        for kinds, variant in variants(key) or [([], info)]:
            default = variant.default if kinds else value_at(defaults, key, info)
            names = f"  ({', '.join(kinds)})" if kinds else ""
            print(f"  {signature(key, variant, default)}{names}")
            wrapped(description(variant), INDENT, INDENT)
        return
    print()
    wrapped(f"[{key}]  {description(info)}", "", "  ")
    if len(models) == 1:
        print_fields(models[0], f"{key}.", defaults)
        return
    shared = models[0].__base__
    assert shared and issubclass(shared, BaseModel)
    print_fields(shared, f"{key}.", defaults)
    for model in models:
        doc = " ".join((model.__doc__ or "").split())
        wrapped(f"{key}.type = {tags(model)[0]!r}: {doc}", "  ", "    ")
        for name in model.model_fields:
            if name == "type" or name in shared.model_fields:
                continue
            field = model.model_fields[name]
            print(f"  {signature(f'{key}.{name}', field, field.default)}")
            wrapped(description(field), INDENT, INDENT)


def variants(key: str) -> list[tuple[list[str], FieldInfo]]:
    """Returns (types, field) for each differing declaration of a key in a union's classes; empty
    if all declarations agree."""
    section, _, name = key.rpartition(".")
    info = field_tree(RLConfig).get(section)
    by_look: dict[tuple[str, str], tuple[list[str], FieldInfo]] = {}
    for model in models_in(info.annotation) if info and name != "type" else ():
        if tags(model) and (field := model.model_fields.get(name)):
            look = default_text(field.default), description(field)
            by_look.setdefault(look, ([], field))[0].append(tags(model)[0])
    return list(by_look.values()) if len(by_look) > 1 else []


def print_fields(model: type[BaseModel], prefix: str, defaults: RLConfig) -> None:
    """Prints the keys of a config class, then its sections."""
    for key, info in in_order(model):
        print_key(prefix + key, info, defaults)


def in_order(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """Returns the fields of a config class, sections last."""
    # the sort is stable
    return sorted(model.model_fields.items(), key=lambda item: bool(models_in(item[1].annotation)))
