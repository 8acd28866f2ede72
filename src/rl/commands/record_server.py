"""`python -m rl.commands.record_server`: the inference server of a policy for `rl.record`, until
standard input ends.

It is a process of its own because what starts servers belongs into a main thread, and adopts
orphans and handles signals there.
"""

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from rl.commands.options import POLICY, load
from rl.commands.play_session import POLL_S, policy_server, run
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
    async with contextlib.AsyncExitStack() as on_exit:
        folder = Path(on_exit.enter_context(tempfile.TemporaryDirectory(prefix="rl-record-")))
        config, server, path = config.with_absolute_paths(), None, folder / "config.toml"
        if source.model:
            starting = policy_server(config, source.model, folder, children, source.adapter)
            server = await on_exit.enter_async_context(starting)
            await server.ready()
            path = server.config.run_dir.config
        else:
            write_config(path, config)
        print(path, flush=True)
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        while not ended.done():
            if server:
                server.check()
            await asyncio.wait({ended}, timeout=POLL_S)
    return 0


if __name__ == "__main__":
    main()
