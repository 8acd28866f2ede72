"""`/metrics` of `rl`, for Prometheus."""

import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from rl.config.run import RLConfig
from rl.run_dir.access_token import is_loopback, run_token
from rl.run_dir.paths import RunDir
from rl.run_dir.prometheus import NewestValues
from rl.system.linux import bind
from rl.wire.serving import Gate


class Scrape(NewestValues):
    """A tracker that serves the newest values in a thread as long as this process lives."""

    failures = ()

    def __init__(self, config: RLConfig, run_dir: RunDir, say: Callable[[str], None]):
        super().__init__(config.name)
        self.settings, self.run_dir, self.say = config.prometheus, run_dir, say

    def start(self) -> None:
        """Raises RunError if the port is taken."""
        assert self.settings
        host, app = self.settings.host, Starlette(routes=[Route("/metrics", self.page)])
        gate = Gate(app, run_token(self.run_dir.status_dir), is_loopback(host))
        # this parser limits lines and headers
        server = uvicorn.Server(uvicorn.Config(gate, http="h11", log_config=None))
        sock = bind(host, self.settings.port, "prometheus.port")
        sock.listen()  # in the thread, nobody would see that another has begun to, meanwhile
        threading.Thread(target=server.run, args=([sock],), daemon=True).start()
        name = f"[{host}]" if ":" in host else host
        self.say(f"metrics   http://{name}:{sock.getsockname()[1]}/metrics (with the token)")

    def page(self, _: Any) -> Response:
        return Response(self.text(), media_type=CONTENT_TYPE_LATEST)

    def close(self, exit_code: int) -> None:
        """Keeps the page, which ends with this process."""
