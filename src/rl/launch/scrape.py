"""`/metrics` of `rl`: the newest value of each metric of a live run in Prometheus' text format."""

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rl.config.run import PrometheusConfig
from rl.run_dir.access_token import is_loopback
from rl.run_dir.metrics import ALWAYS, LEFT_OUT, METRICS, matching
from rl.run_dir.status import reachable
from rl.system.linux import bind
from rl.wire.serving import Gate, QuietServer


def series(name: str) -> tuple[str, dict[str, str]]:
    """Returns Prometheus' name of a metric, and its labels: the words that docs/metrics.md has in
    angle brackets. The user's own metrics have one name, and their own as a label."""
    _, pattern, labels = matching(name)
    if not pattern:
        return "rl_other", {"name": name}
    words = re.findall(r"[a-z0-9]+", re.sub(r"<\w+>", "", pattern))
    return "_".join(["rl", *words]), labels


class Scrape:
    """Keeps the newest values, and serves them. Thread-safe."""

    def __init__(self, run: str):
        self.run, self.lock = run, threading.Lock()
        self.newest: dict[tuple[str, str], tuple[int, float | None]] = {}
        """By source and metric: step and value."""

    def note(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes lines of metrics.jsonl."""
        with self.lock:
            for line in lines:
                source, step = line["source"], line["step"]
                values = {name: value for name, value in line.items() if name not in ALWAYS}
                if step > self.newest.get((source, "step"), (step,))[0]:
                    known = {name for of, name in self.newest if of == source}
                    zeros = {name for name in known if matching(name)[1] in LEFT_OUT}
                    values = dict.fromkeys(zeros, 0.0) | values
                for name, value in {"step": step, **values}.items():
                    if step >= self.newest.get((source, name), (step,))[0]:
                        self.newest[source, name] = step, value

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics as prometheus_client's registries do."""
        with self.lock:
            newest = sorted(self.newest.items())
        families: dict[str, Metric] = {}
        for (source, name), (_, value) in newest:
            if name == "step":
                family, labels, what = "rl_step", {}, "The newest step of a source."
            else:
                family, labels = series(name)
                what = METRICS.get(matching(name)[1], "A metric of the user's own.")
            metric = families.setdefault(family, Metric(family, what, "gauge"))
            labels = {"run": self.run, "source": source, **labels}
            metric.add_sample(family, labels, float("nan") if value is None else value)
        yield from families.values()

    def page(self, _: Request) -> Response:
        return Response(generate_latest(self), headers={"content-type": CONTENT_TYPE_LATEST})

    def serve(self, settings: PrometheusConfig, token: str) -> str:
        """Serves in a thread as long as this process lives. Returns the address. Raises RunError
        if the port is taken."""
        is_local = is_loopback(settings.host)
        app = Gate(Starlette(routes=[Route("/metrics", self.page)]), token, is_local)
        sock = bind(settings.host, settings.port, "prometheus.port")
        parser = "auto" if is_local else "h11"  # as in rl.wire.serving
        config = uvicorn.Config(app, http=parser, log_config=None, access_log=False, lifespan="off")
        server = QuietServer(config)
        threading.Thread(
            target=server.run, kwargs={"sockets": [sock]}, name="metrics", daemon=True
        ).start()
        host, port = reachable(settings.host), sock.getsockname()[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
