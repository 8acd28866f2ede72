"""The browser page beside a run (`--view`): a process of lowest priority, independent of the run except that it ends with it."""

import os
import re
import sys
from collections.abc import Callable

from rl.launch.children import Children
from rl.run_dir.access_token import PAGE_VARIABLE, link, page_secret
from rl.run_dir.logs import last_lines
from rl.run_dir.paths import RunDir
from rl.system.children import Child

LINK = re.compile(r"(http://\S+/) (\w+)$", re.M)
"""Matches the address and the number of a link in the page's log."""


class Page:
    """Starts `rl view` on the run, and prints each link that admits a browser. `poll` never waits."""

    def __init__(self, run_dir: RunDir, children: Children, say: Callable[[str], None]):
        self.children, self.say, self.secret = children, say, page_secret(run_dir.status_dir)
        command = [sys.executable, "-m", "rl.main", "view", str(run_dir.root), "--beside"]
        self.child: Child | None = children.start("view", command, os.environ | {PAGE_VARIABLE: self.secret}, run_dir.logs)
        self.told = ""

    def poll(self) -> None:
        """Prints a new link, or that the page has ended; the run continues without it."""
        if self.child is None:
            return
        found = LINK.findall("\n".join(last_lines(self.child.log)))
        if found and self.told != (newest := link(self.secret, *found[-1])):
            self.say(f"view      {newest}" + ("  (a browser has used the link before)" if self.told else ""))
            self.told = newest
        if self.child.exit_code is not None:
            self.say(f"warning: the page of --view has ended, the run continues (log: {self.child.log})")
            self.children.kill_tree(self.child)
            self.child = None

    def close(self) -> None:
        """Deletes the log of a page that ended with the run."""
        if self.child:
            self.child.log.unlink(missing_ok=True)
            self.child = None
