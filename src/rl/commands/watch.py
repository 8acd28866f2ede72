"""`rl watch`: follows a run from any machine that sees its directory."""

from rl.cluster.submit import is_queued
from rl.commands.options import open_run, runs_given
from rl.launch.children import Children
from rl.launch.watch import watch

HELP = """usage: rl watch RUN

Shows a run as `rl` does while it runs: steps, evaluations, deaths, warnings and, if nothing moves,
what everything waits for. It only reads, so it works on any machine that sees the run's directory,
any number of times; Ctrl-C ends it and not the run. A run on a cluster that has no machines is
waited for while it can come back: while its engine has jobs of it, or, where no engine tells that,
for cluster.join_timeout_s after the last sign of a machine that it has seen. RUN is the directory
of a run, or its name under outputs/. The exit code is that of the run.
"""


def main(args: list[str], children: Children) -> int:
    _, [root] = runs_given("rl watch", args, (), HELP)
    run_dir, config = open_run(root.resolve())
    return watch(run_dir, config, children, is_queued=lambda: is_queued(run_dir, config))
