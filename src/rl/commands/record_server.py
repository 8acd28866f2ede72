"""`python -m rl.commands.record_server`: the inference server of a policy for `rl.record`, until
standard input ends.

It is a process of its own because what starts servers belongs into a main thread, and adopts
orphans and handles signals there.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from rl.commands.options import POLICY, load
from rl.commands.play_session import POLL_S, run, start_server
from rl.commands.policy_spec import resolve
from rl.config.command_line import write_config
from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.system.errors import RunError

OPTIONAL = ("orchestrator.environment",)
"""Settings that nothing is played with."""


def main() -> None:
    children = Children()
    children.stop_on_signals()
    config, _, values = load("rl.record", sys.argv[1:], (POLICY,), "", optional=OPTIONAL)
    raise SystemExit(run("rl.record", children, serve(config, values, children)))


async def serve(config: RLConfig, values: dict[str, Any], children: Children) -> int:
    """Starts the server and prints the path of its configuration; ends it with standard input,
    or raises RunError if it ends itself."""
    source = resolve(values["policy"], config, None, None)
    if source.endpoint:
        raise RunError(
            f"{source.label} is an endpoint that returns no token ids: give a model or a run, or "
            "the addresses of servers of rl (orchestrator.inference_urls)"
        )
    with tempfile.TemporaryDirectory(prefix="rl-record-") as folder:
        config, server, path = config.with_absolute_paths(), None, Path(folder) / "config.toml"
        try:
            if source.model:
                server = await start_server(
                    config, source.model, Path(folder), children, source.adapter
                )
                await server.ready()
                config, path = server.config, server.config.run_dir.config
            else:
                write_config(path, config)
            print(path, flush=True)
            ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
            while not ended.done():
                if server:
                    server.check()
                await asyncio.wait({ended}, timeout=POLL_S)
        finally:
            if server:
                await server.end()
    return 0


if __name__ == "__main__":
    main()
