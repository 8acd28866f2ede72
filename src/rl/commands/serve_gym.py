"""`rl env ID --serve-gym PORT`: an environment as an agent of NeMo Gym, whose programs play it
over HTTP."""

import asyncio
import itertools
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml
from aiohttp import web
from aiohttp.typedefs import Handler

from rl.commands.play_session import (
    CONCURRENCY,
    PlaySession,
    play_session,
    run,
    scratch,
    write_lines,
)
from rl.config.run import RLConfig
from rl.envs.nemo_gym.serving import TASK, agent_entry, aggregate, sampling_of, task_row, to_result
from rl.homes.resolve import Homes
from rl.launch.children import Children
from rl.run_dir.access_token import is_loopback
from rl.run_dir.files import write_file
from rl.system.errors import RunError
from rl.system.linux import bind
from rl.system.terminal import say
from rl.wire.serving import host_name

HOST = "127.0.0.1"
HEAD_SERVER = "http://127.0.0.1:11000"
FOLDER = Path("outputs/nemo_gym")
MAX_BODY_BYTES = 1 << 30
"""NeMo Gym sends the numbers of all rollouts of a collection at once."""


def main(
    config: RLConfig, values: dict[str, Any], homes: Callable[[], Homes], children: Children
) -> int:
    """Serves until a signal. The port is taken before the environment's home is made."""
    sock = bind(HOST, values["serve_gym"], "--serve-gym")
    sock.listen()
    with sock:
        return run("rl env", children, serve(config, homes(), values, sock, children))


async def serve(
    config: RLConfig, homes: Homes, values: dict[str, Any], sock: socket.socket, children: Children
) -> int:
    env = config.orchestrator.environment[0]
    if env.head_server:
        raise RunError(f"{env.label} is an environment of NeMo Gym already")
    head = values["head_server"] or HEAD_SERVER
    with scratch(env.label) as work:
        async with play_session(config, homes, None, work, children, head_server=head) as session:
            agent = GymAgent(session, env.label, values["concurrency"] or CONCURRENCY)
            folder = Path(values["export"] or FOLDER / env.label)
            await agent.write_rows(folder, values["limit"])
            text = yaml.safe_dump(agent_entry(env.label, sock.getsockname()[1]), sort_keys=False)
            write_file(folder / "agent.yaml", text.encode())
            app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[programs_only])
            app.router.add_post("/run", agent.run)
            app.router.add_post("/aggregate_metrics", agent.aggregate_metrics)
            runner = web.AppRunner(
                app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
            )
            await runner.setup()
            await web.SockSite(runner, sock).start()
            print(text, end="")
            say(
                f"serving {env.label} for the NeMo Gym of {head}: give its ng_run "
                f"{folder / 'agent.yaml'} (the lines above)"
            )
            try:
                await session.pool.failed
            finally:
                await runner.cleanup()
    return 0


class GymAgent:
    """The endpoints that NeMo Gym asks of an agent."""

    def __init__(self, session: PlaySession, label: str, concurrency: int):
        self.session, self.label, self.sizes = session, label, session.sizes(label)
        self.free_places, self.numbers = asyncio.Semaphore(concurrency), itertools.count()
        if session.ready[label].scores_groups:
            raise RunError(
                f"{label} scores the episodes of a task together, but NeMo Gym plays each "
                "alone: it cannot be served"
            )

    async def write_rows(self, folder: Path, limit: int | None) -> None:
        """Writes the tasks of each split, the first `limit` or all. Raises RunError for endless
        ones without limit."""
        for split in self.sizes:
            tasks = await self.session.tasks(self.label, split, limit)
            if tasks:
                path = folder / f"{split}.jsonl"
                write_lines(path, [task_row(self.label, split, *each) for each in enumerate(tasks)])
                say(f"{len(tasks)} {split} rows in {path}")

    async def run(self, request: web.Request) -> web.Response:
        """Plays the task of a row. A failed rollout is an answer as well, in the form that NeMo
        Gym stores apart."""
        try:
            row = json.loads(await request.read())
            sampling, split, index = await self.checked(row)
        except ValueError as error:
            return refused(422, f"not a row of {self.label}: {error}")
        except (LookupError, TypeError, AttributeError) as error:
            return refused(422, f"not a row of {self.label}: {type(error).__name__} {error}")
        except RunError as error:
            return refused(503, str(error))
        try:
            async with self.free_places:
                rollouts = await self.session.pool.play(
                    self.label, split, index, 1, sampling, next(self.numbers)
                )
        except RunError as error:  # the environment is lost, and the server ends
            return refused(503, str(error))
        trained = [rollout for rollout in rollouts if rollout.trainable] or rollouts
        rollout = trained[0]
        if len(trained) > 1:
            rollout.cause = "environment"
            rollout.error = f"it trains {len(trained)} agents, but a result of NeMo Gym shows one"
        if rollout.error:
            say(f"  task {index} failed ({rollout.cause}): {rollout.error.splitlines()[0]}")
        return web.json_response(body=msgspec.json.encode(to_result(row, rollout)))

    async def checked(self, row: dict[str, Any]) -> tuple[dict[str, Any], Any, int]:
        """Returns sampling, split and task of a row. Raises ValueError unless it shows the task
        as this environment has it."""
        params, name = row["responses_create_params"], (row.get("agent_ref") or {}).get("name")
        if name not in (None, self.label):
            raise ValueError(f"its agent_ref names {name}")
        if not (task_at := row.get(TASK)):
            raise ValueError(f"it has no {TASK}; give a file that `rl env --serve-gym` wrote")
        split, index = task_at["split"], int(task_at["index"])
        size = self.sizes[split]
        if index < 0 or (size is not None and index >= size):
            raise ValueError(f"there is no {split} task {index}, but {size}")
        [task] = (await self.session.describe(self.label, split, 1, index)).tasks
        known = task_row(self.label, split, index, task)["responses_create_params"]
        for key, value in known.items():
            if params.get(key) != value:
                raise ValueError(
                    f"the {key} of {split} task {index} differs: the environment or its "
                    "arguments changed, make the rows again"
                )
        return sampling_of(params), split, index

    async def aggregate_metrics(self, request: web.Request) -> web.Response:
        return web.json_response(aggregate(json.loads(await request.read())["verify_responses"]))


@web.middleware
async def programs_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses what a page in a browser of this machine may have sent: a request with its origin,
    or in DNS rebinding with its host name."""
    if "Origin" in request.headers or not is_loopback(
        host_name(request.headers.get("Host", "").encode())
    ):
        return refused(
            403, "it comes from a web page, or asks for another host than localhost or 127.0.0.1"
        )
    return await handler(request)


def refused(status: int, message: str) -> web.Response:
    """An answer without a result. It is printed as well, because NeMo Gym shows only the status."""
    say(f"  /run refused: {message}")
    return web.json_response({"error": message}, status=status)
