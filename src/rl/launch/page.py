"""The browser page beside a run (`--view`): a process of the lowest priority that the run does not know of, and that ends with it."""

import os
import re
import sys
from collections.abc import Callable

from rl.launch.children import Children
from rl.run_dir.logs import last_lines
from rl.run_dir.paths import RunDir
from rl.run_dir.token import PAGE_VARIABLE, page_token
from rl.system.children import Child

ADDRESS = re.compile(r"http://\S+/")


class Page:
    """Starts `rl view` on the run, and says its address once it is there. `poll` never waits."""

    def __init__(self, run_dir: RunDir, children: Children, say: Callable[[str], None]):
        self.children, self.say, self.token = children, say, page_token(run_dir.status_dir)
        command = [sys.executable, "-m", "rl.main", "view", str(run_dir.root), "--beside"]
        self.child: Child | None = children.start("view", command, os.environ | {PAGE_VARIABLE: self.token}, run_dir.logs)
        self.told = False

    def poll(self) -> None:
        """Says the address, or that the page has ended; the run goes on without it."""
        if self.child is None:
            return
        if not self.told and (found := ADDRESS.search("\n".join(last_lines(self.child.log)))):
            self.told = True
            self.say(f"view      {found[0]}?token={self.token}")
        if self.child.exit_code is not None:
            self.say(f"warning: the page of --view has ended, the run goes on (log: {self.child.log})")
            self.children.kill_tree(self.child)
            self.child = None

    def close(self) -> None:
        """Deletes the log of a page that ended with the run."""
        if self.child:
            self.child.log.unlink(missing_ok=True)
            self.child = None
