"""`rl sft`: supervised fine-tuning. The trainer alone, in a run directory like any other."""

from rl.cli import load_config
from rl.cli_help import USAGE
from rl.main import launch, resume_command
from rl.processes import Children

HELP = (
    "Trains on examples: JSONL or a Hugging Face data set with prompts and completions or with conversations, or the best rollouts of a\n"
    "run. The weights it writes are a model to start reinforcement learning from. docs/sft.md shows it.\n\n" + USAGE
)


def main(args: list[str], children: Children) -> int:
    """The command."""
    config, line = load_config(args, "rl sft", usage=HELP, given={"sft": (True, "rl sft")})
    return launch(config, line, children, resume_command(args, "rl sft"))
