"""`rl sft`: supervised fine-tuning, with only the trainer. `rl train --from FILE`: a run whose
rollouts were recorded before, without environments and inference."""

import os

from rl.cluster.submit import dry_run, start
from rl.config.command_line import fail, load_config_or_exit, option_lines, options, take
from rl.config.help import RESUME, SETTINGS, VIEW
from rl.launch.children import Children
from rl.launch.run import resume_command

SFT_HELP = f"""Trains on examples: JSONL or a Hugging Face data set with prompts and completions or
with conversations, or the best rollouts of a run. Reinforcement learning can start from the weights
it writes. See docs/sft.md.

usage: rl sft [@ FILE] [--KEY VALUE] ...

{SETTINGS}  --trainer-gpus, --trainer-cpus   devices (counts or ids)
{VIEW}{RESUME}"""
OPTIONS = options("""
from FILE: a JSONL file of rollouts, or a pattern ("data/*.jsonl"): recorded.rollouts
""")
TRAIN_HELP = f"""Trains on recorded rollouts: of `rl collect --tokens`, of rl.record in Python, of
verifiers' saved results, or in the form that docs/recorded.md describes. The file is checked row by
row; then it is a run like any other.

usage: rl train --from FILE [@ FILE] [--KEY VALUE] ...

{option_lines(OPTIONS)}
{SETTINGS}  --trainer-gpus, --trainer-cpus   devices (counts or ids)
{VIEW}{RESUME}"""


def sft(args: list[str], children: Children) -> int:
    preset = {"sft": (True, "rl sft")}
    config, line = load_config_or_exit(
        args, "rl sft", variables=os.environ, usage=SFT_HELP, given=preset, dry_run=dry_run
    )
    return start(config, line, children, resume_command(args, "rl sft"))


def train(args: list[str], children: Children) -> int:
    values, rest = take("rl train", args, OPTIONS)
    preset = {"recorded.rollouts": (values["from"], "--from")} if values["from"] else None
    optional = ("orchestrator.environment",)  # without which `fail` below says what is missing
    config, line = load_config_or_exit(
        rest,
        "rl train",
        variables=os.environ,
        usage=TRAIN_HELP,
        given=preset,
        optional=optional,
        dry_run=dry_run,
    )
    if not config.recorded:
        fail(
            "rl train",
            "on which rollouts? Name the file: rl train --from rollouts.jsonl; without a "
            "file, `rl` plays environments",
        )
    return start(config, line, children, resume_command(args, "rl train"))
