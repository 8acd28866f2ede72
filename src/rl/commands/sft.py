"""`rl sft`: supervised fine-tuning, with only the trainer, in an ordinary run directory."""

import os

from rl.cluster.submit import dry_run, start
from rl.config.command_line import load_config_or_exit
from rl.config.help import RESUME, SETTINGS, VIEW
from rl.launch.children import Children
from rl.launch.run import resume_command

HELP = f"""Trains on examples: JSONL or a Hugging Face data set with prompts and completions or with
conversations, or the best rollouts of a run. Reinforcement learning can start from the weights it
writes. See docs/sft.md.

usage: rl sft [@ FILE] [--KEY VALUE] ...

{SETTINGS}  --trainer-gpus, --trainer-cpus   devices (counts or ids)
{VIEW}{RESUME}"""


def main(args: list[str], children: Children) -> int:
    preset = {"sft": (True, "rl sft")}
    config, line = load_config_or_exit(
        args, "rl sft", variables=os.environ, usage=HELP, given=preset, dry_run=dry_run
    )
    return start(config, line, children, resume_command(args, "rl sft"))
