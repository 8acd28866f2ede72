"""`rl doctor --parity MODEL`: whether trainer and inference compute the same for a model."""

from rl.commands.options import Option, load, usage
from rl.processes import Children

OPTIONS = (
    Option("parity", "MODEL", "compare trainer and inference on this model (a folder, or an id on the hub)"),
    Option("tokens", "N", "tokens of each sample; default: 64"),
    Option("dtype", "NAME", "float32 or bfloat16 alone; default: first the one, then the other"),
)
HELP = usage(
    "usage: rl doctor --parity MODEL [--dtype NAME] [--KEY VALUE] ...\n\n"
    "Samples from the model through inference, at two temperatures, scores the same tokens as the trainer does and prints how far apart\n"
    "they are, and what a difference points to. Exit code 1 if it is more than rounding explains.",
    OPTIONS,
)


def main(args: list[str], children: Children) -> int:
    """The command."""
    given = {"orchestrator.environment.id": ("none", "rl doctor")}
    config, _, values = load("rl doctor", args, OPTIONS, HELP, given=given, optional=("orchestrator.sampling.max_tokens",))
    from rl.commands.parity import examine
    from rl.commands.playing import run

    return run("rl doctor", children, examine(config, values, children))
