"""`/metrics` of `rl`: the newest value of each metric of a live run in Prometheus' text format."""

import math
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from rl.config.run import RLConfig
from rl.run_dir.access_token import is_loopback, run_token
from rl.run_dir.metrics import meaning, series
from rl.run_dir.paths import RunDir
from rl.system.linux import bind
from rl.wire.serving import Gate


class Scrape:
    """Keeps the newest values, and serves them in a thread as long as this process lives."""

    failures = ()

    def __init__(self, config: RLConfig, run_dir: RunDir, say: Callable[[str], None]):
        self.config, self.run_dir, self.say = config, run_dir, say
        self.registry, self.gauges = CollectorRegistry(), {}
        self.lock = threading.Lock()

    def start(self) -> None:
        """Raises RunError if the port is taken."""
        settings = self.config.prometheus
        assert settings
        gate = Gate(
            Starlette(routes=[Route("/metrics", self.page)]),
            run_token(self.run_dir.status_dir),
            is_loopback(settings.host),
        )
        # this parser limits lines and headers
        server = uvicorn.Server(uvicorn.Config(gate, http="h11", log_config=None))
        sock = bind(settings.host, settings.port, "prometheus.port")
        threading.Thread(target=server.run, args=([sock],), daemon=True).start()
        self.say(
            f"metrics   http://{settings.host}:{sock.getsockname()[1]}/metrics (with the token)"
        )

    def page(self, _: Any) -> Response:
        with self.lock:
            return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    def send(self, lines: list[dict[str, Any]]) -> None:
        """Takes lines of metrics.jsonl. What a batch leaves out is 0 or means nothing for it; of
        other sources the newest value stays."""
        with self.lock:
            for line in lines:
                for gauge in self.gauges.values() if line["source"] == "orchestrator" else ():
                    gauge.remove_by_labels({"source": "orchestrator"})
                for name in set(line) - {"time", "source"}:
                    key, words = series(name)
                    labels = {"run": self.config.name, "source": line["source"], **words}
                    if key not in self.gauges:
                        self.gauges[key] = Gauge(
                            key, meaning(name)[1], labels, registry=self.registry
                        )
                    value = math.nan if line[name] is None else line[name]
                    self.gauges[key].labels(**labels).set(value)

    def close(self, exit_code: int) -> None:
        """Keeps the page, which ends with this process."""
