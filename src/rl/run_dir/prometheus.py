"""The newest value of each metric in Prometheus' text format."""

import math
import threading
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from rl.run_dir.metrics import meaning, series


class NewestValues:
    """Takes the lines of metrics.jsonl. Thread-safe."""

    def __init__(self, run: str):
        self.run, self.lock = run, threading.Lock()
        self.registry, self.gauges = CollectorRegistry(), {}

    def send(self, lines: list[dict[str, Any]]) -> None:
        """Takes lines. What a batch leaves out is 0 or means nothing for it; of other sources the
        newest value stays."""
        with self.lock:
            for line in lines:
                for gauge in self.gauges.values() if line["source"] == "orchestrator" else ():
                    gauge.remove_by_labels({"source": "orchestrator"})
                for name in set(line) - {"time", "source"}:
                    key, words = series(name)
                    labels = {"run": self.run, "source": line["source"], **words}
                    if key not in self.gauges:
                        self.gauges[key] = Gauge(
                            key, meaning(name)[1], labels, registry=self.registry
                        )
                    value = math.nan if line[name] is None else line[name]
                    self.gauges[key].labels(**labels).set(value)

    def text(self) -> bytes:
        with self.lock:
            return generate_latest(self.registry)
