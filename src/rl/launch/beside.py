"""The browser page beside a run (`--view`), which continues without it."""

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
    """`rl view` on the run. Prints each link that admits a browser, and a warning if it ends early. `poll` never waits."""

    def __init__(self, run_dir: RunDir, children: Children, say: Callable[[str], None]):
        self.children, self.say = children, say
        self.secret, self.told = page_secret(run_dir.status_dir), ""
        self.child: Child | None = None
        command, env = [sys.executable, "-m", "rl.main", "view", str(run_dir.root), "--beside"], {PAGE_VARIABLE: self.secret}
        try:
            self.child = children.start("view", command, os.environ | env, run_dir.logs)
        except OSError as error:
            say(f"warning: there is no page of --view ({error}), the run continues")

    def poll(self) -> None:
        """Prints a new link, or that the page has ended."""
        found = LINK.findall("\n".join(last_lines(self.child.log))) if self.child else []
        if found and self.told != (newest := link(self.secret, *found[-1])):
            self.say(f"view      {newest}" + ("  (a browser has used the link before)" if self.told else ""))
            self.told = newest
        if self.child and self.child.exit_code is not None:
            ended = f"exit code {self.child.exit_code}, log: {self.child.log}"
            self.say(f"warning: the page of --view has ended, the run continues ({ended})")
            self.children.kill_tree(self.child)
            self.child = None

    def close(self) -> None:
        """Deletes the log of a page that ended with the run."""
        if self.child:
            self.child.log.unlink(missing_ok=True)
            self.child = None
