"""Counts the seconds for which the machines of a run are up, and what all of it costs: lines of the
source `rl` in metrics.jsonl, one for each step and one at the end.

Their values are totals so far, and each start of `rl` continues those of the newest line.
"""

import contextlib
import os
import time
from collections import Counter
from typing import Any

from rl.config.run import RLConfig
from rl.run_dir.cost import totals
from rl.run_dir.metrics import NEWEST_BYTES, MetricsLog, read_metrics
from rl.run_dir.nodes import Nodes
from rl.run_dir.numbers import Numbers
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Staleness
from rl.system.machine import machine

LOOK_S = 2.0
"""Seconds between looks at the machines of a cluster."""


class Meter:
    """What the run has cost so far."""

    def __init__(self, config: RLConfig, run_dir: RunDir):
        self.config, self.run_dir = config, run_dir
        self.numbers, self.here = Numbers(run_dir.metrics), {0: len(machine().gpus)}
        self.signs, self.looked = Staleness(), time.monotonic()
        _, line = max(read_metrics(run_dir.metrics, "rl", NEWEST_BYTES).items(), default=(0, {}))
        self.step = line.get("step", 0)
        """The step that the next line belongs to."""
        self.spent: Any = Counter({name: line[name] for name in line if name.endswith("_s")})
        """Seconds by metric."""
        # without a price now, a total of an earlier start's would stay
        self.is_priced = "cost/total" in line or any(config.cost.model_dump().values())

    def note(self, lines: list[dict[str, Any]]) -> None:
        """Takes new lines of metrics.jsonl, and writes one of its own after a step. Call it
        several times a second."""
        if steps := [line["step"] for line in lines if line["source"] == "trainer"]:
            self.step = max(self.step, *steps)
            self.write()
        elif time.monotonic() - self.looked >= LOOK_S:
            self._look()

    def _look(self) -> None:
        """Adds the time since the last look for each machine that is up."""
        up = Nodes(self.run_dir).gpus_up(self.signs) or self.here
        now = time.monotonic()
        passed_s, self.looked = now - self.looked, now
        for index, num_gpus in up.items():
            self.spent.update(
                {
                    f"cost/machine_{index}_s": passed_s,
                    "cost/machine_s": passed_s,
                    "cost/gpu_s": num_gpus * passed_s,
                }
            )

    def write(self) -> None:
        """Writes a line; if the disk fails, the next line has it, too."""
        self._look()
        values = dict(self.spent)
        with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
            if self.is_priced:
                self.numbers.refresh()
                values["cost/total"] = self.config.cost.price(totals(self.numbers) | values)
            log = MetricsLog(self.run_dir.metrics, "rl")  # a repair replaces the file
            closing.callback(os.close, log.file)
            log.write(self.step, values)
