"""`rl sft`: supervised fine-tuning. The trainer alone, in a run directory like any other."""

import os

from rl.config.command_line import load_config
from rl.config.help import RESUME, SETTINGS, VIEW
from rl.launch.children import Children
from rl.launch.run import launch, resume_command

HELP = (
    "Trains on examples: JSONL or a Hugging Face data set with prompts and completions or with conversations, or the best\n"
    "rollouts of a run. The weights it writes are a model to start reinforcement learning from. docs/sft.md shows it.\n\n"
    f"usage: rl sft [@ FILE] [--KEY VALUE] ...\n\n{SETTINGS}  --trainer-gpus, --trainer-cpus   devices (counts or ids)\n{VIEW}{RESUME}"
)


def main(args: list[str], children: Children) -> int:
    config, line = load_config(args, "rl sft", variables=os.environ, usage=HELP, given={"sft": (True, "rl sft")})
    return launch(config, line, children, resume_command(args, "rl sft"))
