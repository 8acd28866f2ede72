"""Draws curves.png from time to time during a run, in a separate process, so that neither the loop of `rl` nor training waits."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rl.launch.children import Children
from rl.run_dir.paths import RunDir
from rl.system.children import Child
from rl.system.linux import die_with_parent

EVERY_S = 60.0
"""Minimum seconds between two pictures."""
SHARE = 0.02
"""Maximum share of one core's time spent on drawing."""
DEADLINE_S = 300.0
"""Seconds after which drawing is aborted."""


class Picture:
    """Has curves.png drawn when there are new steps and the last picture is old enough. `poll` never waits."""

    def __init__(self, run_dir: RunDir, title: str, children: Children, say: Callable[[str], None]):
        self.run_dir, self.title, self.children, self.say = run_dir, title, children, say
        self.child: Child | None = None
        self.next_at = time.monotonic() + EVERY_S
        self.news = False
        """Whether there are metrics that are not in the picture."""

    def poll(self, num_new: int) -> None:
        """Starts a drawing process, or checks the running one. `num_new`: number of lines of metrics.jsonl since the last call."""
        self.news = self.news or num_new > 0
        if self.child:
            if self.child.exit_code is not None or time.monotonic() - self.child.started > DEADLINE_S:
                self._finish(self.child)
        elif self.news and time.monotonic() >= self.next_at:
            command = [sys.executable, "-m", "rl.launch.picture", str(self.run_dir.root), self.title]
            try:
                self.child, self.news = self.children.start("curves", command, dict(os.environ), self.run_dir.logs), False
            except OSError as error:
                self._give_up(f"cannot be drawn: {error}")

    def close(self) -> None:
        """Forgets a drawing process, which was ended with all others at the end of the run. No further one is started."""
        if self.child:
            self.child.log.unlink(missing_ok=True)
        self.child, self.next_at = None, float("inf")

    def _finish(self, child: Child) -> None:
        """Cleans up after a process. After a failure its log is kept and no other is started until the run ends."""
        took, code = time.monotonic() - child.started, child.exit_code
        self.children.kill_tree(child)
        self.child, self.next_at = None, time.monotonic() + max(EVERY_S, took / SHARE)
        if code == 0:
            child.log.unlink(missing_ok=True)
        else:
            how = f"took more than {DEADLINE_S:.0f} s" if code is None else f"ended with exit code {code}"
            self._give_up(f"is out of date: drawing it {how} (log: {child.log})")

    def _give_up(self, why: str) -> None:
        self.next_at = float("inf")
        self.say(f"warning: {self.run_dir.curves} {why}; it is drawn again when the run ends")


def main() -> None:
    from rl.launch.curves import draw_curves
    from rl.run_dir.numbers import Numbers

    die_with_parent()
    os.nice(19)
    root, title = Path(sys.argv[1]), sys.argv[2]
    run_dir = RunDir(root, root / "weights")
    draw_curves(Numbers.read(run_dir.metrics), run_dir.curves, title)


if __name__ == "__main__":
    main()
