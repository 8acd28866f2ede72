"""Processes beside a run, which continues without them: the browser page (`--view`) and the
drawing of curves.png."""

import re
from collections.abc import Callable

from rl.launch.children import Children
from rl.run_dir.access_token import PAGE_VARIABLE, link, page_secret
from rl.run_dir.logs import last_lines
from rl.run_dir.paths import RunDir
from rl.system.children import PYTHON, Child

LINK = re.compile(r"(http://\S+/) (\w+)$", re.M)
"""Matches the address and the number of a link in the page's log."""


class Beside:
    """A process that ends with the run, and whose end is no more than a warning. `poll` never
    waits."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        env: dict[str, str],
        run_dir: RunDir,
        children: Children,
        say: Callable[[str], None],
        loss: str,
    ):
        """`arguments`: those of Python. `loss`: what the user is told when it ends early."""
        self.children, self.say, self.loss = children, say, loss
        self.child: Child | None = None
        try:
            self.child = children.start(name, [*PYTHON, *arguments], env, run_dir.logs)
        except OSError as error:
            say(f"warning: {loss} ({error})")

    def poll(self) -> None:
        """Reports an early end."""
        if self.child and self.child.exit_code is not None:
            self.say(
                f"warning: {self.loss} (exit code {self.child.exit_code}, log: {self.child.log})"
            )
            self.children.kill_tree(self.child)
            self.child = None

    def close(self) -> None:
        """Deletes the log of a process that ended with the run."""
        if self.child:
            self.child.log.unlink(missing_ok=True)
            self.child = None


class Page(Beside):
    """`rl view` on the run. Prints each link that admits a browser."""

    def __init__(self, run_dir: RunDir, children: Children, say: Callable[[str], None]):
        self.secret, self.told = page_secret(run_dir.status_dir), ""
        arguments, env = (
            ["-m", "rl.main", "view", str(run_dir.root), "--beside"],
            {PAGE_VARIABLE: self.secret},
        )
        super().__init__(
            "view",
            arguments,
            env,
            run_dir,
            children,
            say,
            "the page of --view has ended, the run continues",
        )

    def poll(self) -> None:
        """Prints a new link, or that the page has ended."""
        links = LINK.findall("\n".join(last_lines(self.child.log))) if self.child else []
        if links and self.told != (newest := link(self.secret, *links[-1])):
            self.say(
                f"view      {newest}"
                + ("  (a browser has used the link before)" if self.told else "")
            )
            self.told = newest
        super().poll()


def curves(run_dir: RunDir, title: str, children: Children, say: Callable[[str], None]) -> Beside:
    """Starts the process that keeps curves.png up to date, see rl.launch.curves.main."""
    loss = (
        f"{run_dir.curves} is out of date: drawing it failed; it is drawn again when the run ends"
    )
    return Beside(
        "curves",
        ["-m", "rl.launch.curves", str(run_dir.root), title],
        {},
        run_dir,
        children,
        say,
        loss,
    )
