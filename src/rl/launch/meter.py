"""Counts the seconds for which the machines of a run are up, and what all of it costs: lines of the
source `rl` in metrics.jsonl, one for each step and one at the end.

Their values are totals so far, and each start of `rl` continues those of the newest line.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from rl.config.plan import plan
from rl.config.run import RLConfig
from rl.diagnosis.cost import price, totals
from rl.run_dir.lease import LEASE_S
from rl.run_dir.metrics import NEWEST_BYTES, MetricsLog, read_metrics
from rl.run_dir.nodes import Nodes
from rl.run_dir.numbers import Numbers
from rl.run_dir.paths import RunDir, first_step
from rl.run_dir.status import Staleness

LOOK_S = 2.0
"""Seconds between looks at the machines of a cluster."""


class Meter:
    def __init__(
        self,
        config: RLConfig,
        run_dir: RunDir,
        gpus: int,
        fence: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`gpus`: those of the run on this machine, if there are no others. `fence`: see
        MetricsLog."""
        self.settings, self.gpus, self.clock = config.cost, gpus, clock
        self.open_log = partial(MetricsLog, run_dir.metrics, "rl", fence)
        self.nodes = None if plan(config).is_one_machine else Nodes(run_dir)
        self.signs, self.looked = Staleness(clock), clock()
        before = read_metrics(run_dir.metrics, "rl", NEWEST_BYTES)
        self.step, _ = newest = max(before, default=(first_step(run_dir), "rl"))
        """The step that the next line belongs to."""
        self.spent: dict[str, float] = {
            name: value
            for name, value in before.get(newest, {}).items()
            if name.startswith("cost/") and name.endswith("_s")
        }
        prices = self.settings.model_dump(exclude={"per_hour"})
        self.numbers = Numbers(run_dir.metrics) if any(prices.values()) else None
        """What has the run's tokens, if they have a price."""

    def note(self, lines: Iterable[Mapping[str, Any]], is_last: bool = False) -> None:
        """Takes new lines of metrics.jsonl, and writes one of its own after a step. Call it
        several times a second. Raises RunError if another `rl` has taken over."""
        if is_last or self.clock() - self.looked >= LOOK_S:
            self._look()
        steps = [line["step"] for line in lines if line["source"] == "trainer"]
        if steps or is_last:
            self.step = max([self.step, *steps])
            with contextlib.suppress(OSError):  # the next line has it, too
                self._write()

    def _look(self) -> None:
        """Adds the time since the last look for each machine that is up."""
        now = self.clock()
        passed_s, self.looked = now - self.looked, now
        if not self.nodes:
            self._add(passed_s, self.gpus)
        for index, status in self.nodes.statuses().items() if self.nodes else ():
            unchanged_s = self.signs.look(str(index), status.heartbeat)
            if self.signs.moved(str(index)) and unchanged_s < LEASE_S:
                self._add(passed_s, status.gpus, f"cost/machine_{index}_s")

    def _add(self, seconds: float, gpus: int, *names: str) -> None:
        for name, count in {
            "cost/machine_s": 1,
            "cost/gpu_s": gpus,
            **dict.fromkeys(names, 1),
        }.items():
            if count:
                self.spent[name] = self.spent.get(name, 0.0) + count * seconds

    def _write(self) -> None:
        values = dict(self.spent)
        if any(self.settings.model_dump().values()):
            if self.numbers:
                self.numbers.refresh()
            spent = totals(self.numbers) if self.numbers else {}
            values["cost/total"] = price(self.settings, spent | self.spent)
        log = self.open_log()  # each time: a repair replaces the file
        try:
            log.write(self.step, values)
        finally:
            os.close(log.file)
