"""What an environment's worker sees in its sandbox, and nothing else of this machine's: its
interpreter, its packages, the files that its settings name, the tokenizer, the sockets of the pool
and the inference proxy, the environment variables that it needs, and the keys
that its settings name.

Sandboxed workers are not forked from a copy (see pool_worker.py): an orphan in a pid namespace
becomes a child of that namespace's first process, never of the orchestrator, and the namespace ends
with the worker. So each worker starts cold.

The inference proxy gives these workers, which have neither network nor the run's credential, a
Unix socket on which they may ask the run's inference servers for completions, and nothing else. It
adds the run's credential to requests, so no environment ever has it.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rl.config.environment_id import module_file, module_name
from rl.homes.home import interpreter_fact, is_of_package, outside
from rl.system.credentials import REFERENCE, strings
from rl.system.errors import RunError
from rl.system.process_table import MARKER
from rl.system.sandbox import OWN, SYSTEM, Sandbox, fault, reap_ended
from rl.wire.http import AwayError
from rl.wire.inference_client import InferenceLostError, InferenceServers
from rl.wire.messages import MAX_BODY_BYTES
from rl.wire.worker_messages import EnvSpec, WorkerSetup

PATH = "/generate"
RELAYED = "http://inference"
"""Stands for any of the run's servers."""
CLOSE_S = 1.0


class InferenceProxy:
    """Forwards requests for completions to the servers at `urls`, or to those with status files
    next to `status`."""

    def __init__(
        self,
        path: Path,
        urls: list[str],
        status: Path,
        watch: Callable[[Coroutine[Any, Any, None]], None],
    ):
        """`watch` runs a coroutine in the background."""
        self.path = path
        self.servers = InferenceServers(urls, status, 0.0)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))  # now, because the sandbox that is made next shows the socket
        self.socket.listen()
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post(PATH, self._pass_on)
        self.runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S
        )
        watch(self._serve())

    async def _serve(self) -> None:
        await self.runner.setup()
        await web.SockSite(self.runner, self.socket).start()

    async def _pass_on(self, request: web.Request) -> web.Response:
        urls = self.servers.find()
        by_host = {url.partition("://")[2]: url for url in reversed(urls)}
        url = (
            next(iter(urls), None)
            if f"http://{request.host}" == RELAYED
            else by_host.get(request.host)
        )
        if url is None:
            return web.Response(
                status=502, text=f"{request.host} is not an inference server of this run"
            )
        try:
            status, content = await self.servers.send(
                "POST", url, PATH, msgspec.Raw(await request.read())
            )
        except (AwayError, InferenceLostError, OSError) as error:
            return web.Response(status=502, text=f"{url}: {error}")
        return web.Response(status=status, body=content, content_type="application/json")

    async def close(self) -> None:
        """Stops the inference proxy; requests in progress are not answered."""
        await self.runner.cleanup()
        await self.servers.close()


log = logging.getLogger(__name__)


# The sandbox --------------------------------------------------------------------------------------


VARIABLES = (
    "PATH",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TERM",
    "PYTHONUNBUFFERED",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    MARKER,
)
PREFIXES = ("LC_",)


class WorkerSandbox:
    """The sandboxes of a pool's workers, and their inference proxy. `directory` is the pool's
    own; `run_dir` is hidden from all of them."""

    def __init__(
        self, directory: Path, run_dir: Path, watch: Callable[[Coroutine[Any, Any, None]], None]
    ):
        """`watch` runs a coroutine in the background."""
        self.directory, self.run_dir, self.watch = directory, run_dir, watch
        self.inference_proxy: InferenceProxy | None = None
        self.told: set[str] = set()
        """Environments whose view was logged already."""

    def enter(self, setup: WorkerSetup, setup_path: Path) -> tuple[WorkerSetup, Sandbox | None]:
        """Returns the setup to write to `setup_path` for the worker, and the worker's sandbox,
        if it is to have one. Raises RunError."""
        if not setup.sandbox:
            return setup, None
        if problem := fault():
            raise RunError(f'environment {setup.env.name}, isolation = "sandbox": {problem}')
        if unset := [key for key in setup.keys if key not in os.environ]:
            raise RunError(
                f"environment {setup.env.name}: keys names {', '.join(unset)}, not set in "
                "the shell; set it, or leave it out"
            )
        policy = setup.policy
        if self.inference_proxy is None and policy.endpoint is None:
            status = Path(policy.inference_status)
            self.inference_proxy = InferenceProxy(
                self.directory / "inference", policy.inference_urls, status, self.watch
            )
        reap_ended()  # the sandboxes of dead workers
        setup = confined(setup, str(self.inference_proxy.path) if self.inference_proxy else "")
        try:
            sandbox = sandbox_of(setup, setup_path, self.run_dir)
        except RunError as error:
            raise RunError(
                f'environment {setup.env.name}, isolation = "sandbox": {error}'
            ) from None
        if setup.env.name not in self.told:
            self.told.add(setup.env.name)
            log.info("%s", view(setup, self.run_dir))
        return setup, sandbox

    async def close(self) -> None:
        if self.inference_proxy:
            await self.inference_proxy.close()


def confined(setup: WorkerSetup, inference_proxy: str) -> WorkerSetup:
    """The setup for a worker in a sandbox: it gets tokens through the inference proxy without
    the credential, and writes no spans."""
    policy = setup.policy
    if policy.endpoint is None:
        policy = msgspec.structs.replace(
            policy, inference_urls=[RELAYED], inference_status="", inference_proxy=inference_proxy
        )
    return msgspec.structs.replace(setup, policy=policy, spans="")


def sandbox_of(setup: WorkerSetup, setup_path: Path, run_dir: Path) -> Sandbox:
    """Returns the sandbox for a confined setup, which is in the file `setup_path`; it hides
    `run_dir`. Raises RunError."""
    interpreter, links = interpreter_places(Path(setup.python or sys.executable))
    read = {Path(setup.orchestrator), Path(__file__).parents[2], *interpreter, *listed()}
    if setup.policy.inference_proxy:
        read.add(Path(setup.policy.inference_proxy))
    if setup.policy.model_path:
        read |= set(with_targets(Path(setup.policy.model_path)))
    read |= named_files(setup.env, setup.python, setup.read, run_dir)
    existing = followed({straight(path) for path in read if path.exists()})
    existing = {
        path
        for path in existing
        if str(path.resolve()) not in OWN and not path.is_relative_to("/proc")
    } | {setup_path.absolute()}
    return Sandbox(
        frozenset(existing),
        frozenset(hidden_places(run_dir, existing)),
        Path.cwd(),
        setup.network,
        links,
    )


def listed() -> set[Path]:
    """Returns the directories that PYTHONPATH lists."""
    return {Path(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part}


def view(setup: WorkerSetup, run_dir: Path) -> str:
    """Describes in one line which of this machine's files the sandbox shows because of the
    user's settings."""
    named = named_files(setup.env, setup.python, setup.read, run_dir)
    shown = sorted(
        {*named, *interpreter_places(Path(setup.python or sys.executable))[0], *listed()}
    )
    text = (
        f"environment {setup.env.name}: besides programs, libraries and model, its sandbox "
        f"shows, read-only, {', '.join(map(str, shown))}"
    )
    return f"{text}; add anything else it needs with `read`"


def variables_of(setup: WorkerSetup, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that a confined worker gets; its HOME is its /tmp."""
    tables: list[dict[str, Any]] = [setup.env.args, setup.env.set_kwargs]
    named = {
        match[1]
        for table in tables
        for _, text in strings(table)
        if (match := REFERENCE.fullmatch(text))
    }
    named |= {*setup.keys, *VARIABLES}
    if setup.policy.endpoint:
        named.add(setup.policy.endpoint.api_key_var)
    kept = {
        name: value
        for name, value in variables.items()
        if name in named or name.startswith(PREFIXES)
    }
    return kept | {"HOME": "/tmp"}


# Files --------------------------------------------------------------------------------------------


def named_files(env: EnvSpec, python: str, read: Collection[str], run_dir: Path) -> set[Path]:
    """Returns the absolute paths that an environment's settings name: its module or folder, its
    rows, its reward, and `read`.

    Raises RunError for paths that do not exist, and for paths that no sandbox shows.
    """
    rows = [text for text in (env.dataset, env.eval_dataset) if text and straight(text).exists()]
    for text in (*rows, *read):
        path = straight(text)
        real, run = path.resolve(), run_dir.resolve()
        if not path.exists():
            raise RunError(
                f"read names {text!r}, but {path} does not exist: correct it, or leave it out"
            )
        hidden = f"{text!r} cannot be shown in a sandbox, in which {path} is"
        if real.is_relative_to(run):
            raise RunError(f"{hidden} a part of the run directory, which is always hidden")
        if str(real) in OWN or is_below(real, ("/proc", "/sys", "/dev")):
            raise RunError(f"{hidden} its own: name files in it")
    return {straight(text) for text in (*rows, *read)} | set(modules(env, python))


def is_below(path: Path, folders: Iterable[str | Path]) -> bool:
    """Whether a path is one of some folders, or in one."""
    return any(path.is_relative_to(folder) for folder in folders)


def straight(text: str | Path) -> Path:
    """Returns an absolute path without `~` and `..`, and with a single leading slash."""
    return Path("/", os.path.abspath(os.path.expanduser(text)).lstrip("/"))


def modules(env: EnvSpec, python: str) -> Iterator[Path]:
    """Yields the environment's own folder, or the file or package folder of its module, and
    those of its reward function. If the home is a package's, the environment's module is not
    looked for in the working directory."""
    if env.id and env.id.startswith((".", "/", "~")):
        yield straight(env.id)
    elif (
        env.id
        and not is_of_package(python)
        and (file := module_file(Path.cwd(), module_name(env.id)))
    ):
        yield whole(file)
    source = env.reward.rpartition(":")[0] if env.reward else ""
    if source.endswith(".py"):
        yield straight(source)
    elif source and (file := module_file(Path.cwd(), source.partition(".")[0])):
        yield whole(file)


def whole(file: Path) -> Path:
    """Returns a module's file, or for a package its folder."""
    return file.parent if file.name == "__init__.py" else file


# Interpreters -------------------------------------------------------------------------------------


def interpreter_places(python: Path) -> tuple[set[Path], dict[Path, Path]]:
    """Returns the directories of an interpreter (its virtual environment, its base installation,
    packages elsewhere), and a map from the links outside of these by which it is started to
    their targets. Raises RunError if one of them contains the home directory."""
    python = straight(python)
    home, started = python.parent.parent, [python]
    shown, packages = set[Path](), set[Path]()
    if (home / "pyvenv.cfg").is_file():
        shown, packages = {home}, set(outside(home))
        if base := interpreter_fact(home, "home"):
            folders = {python.resolve().parents[1]}
            if (real := Path(base, python.resolve().name)).exists():
                started.append(real)
                folders.add(real.resolve().parents[1])
            if Path(base).resolve().parent in folders:
                shown.add(Path(base).parent)  # the same directory by another name
    shown |= {path.resolve().parents[1] for path in started}
    for folder in shown - {Path("/")}:
        if Path.home().resolve().is_relative_to(folder.resolve()) and not is_below(folder, SYSTEM):
            raise RunError(
                f"the interpreter {python} belongs to {folder}, all of which would be visible "
                "in its sandbox; use one that has a directory of its own, such as a virtual "
                "environment"
            )
    shown |= packages
    return shown, {
        link: path.resolve()
        for path in started
        for link in hops(path)
        if link != path.resolve() and not is_below(link, {*SYSTEM, *shown} - {Path("/")})
    }


def hops(path: Path) -> Iterator[Path]:
    """Yields a path and, as long as it is a link, its target."""
    for _ in range(40):  # the kernel's limit
        yield path
        if not path.is_symlink():
            return
        path = Path(os.path.normpath(path.parent.resolve() / os.readlink(path)))


def with_targets(folder: Path) -> Iterator[Path]:
    """Yields a model's folder and the links in it: the hub's cache keeps the content elsewhere."""
    yield folder
    yield from (path for path in folder.rglob("*") if path.is_symlink())


def followed(paths: set[Path]) -> set[Path]:
    """Returns the paths; one that is reached through a link in a visible directory is replaced
    by its target, since the link is visible."""
    shown = set()
    for path in paths:
        holders = [holder for holder in paths if path != holder and path.is_relative_to(holder)]
        if any(path.resolve() != holder.resolve() / path.relative_to(holder) for holder in holders):
            shown |= {path.resolve(), *(hop for hop in hops(path) if not is_below(hop, holders))}
        else:
            shown.add(path)
    return shown


# The run directory --------------------------------------------------------------------------------


def hidden_places(run_dir: Path, seen: set[Path]) -> set[Path]:
    """Returns every path at which the run directory, or the folder of all runs, would be visible in
    `seen`, through any link or mount.

    Raises RunError if that folder itself is to be seen: runs that start later will have their
    tokens there.
    """
    real = run_dir.resolve()
    hidden = {path for path in (run_dir.absolute(), real) if not is_below(path, seen)}
    hidden |= set(places_of(real, seen))
    runs = set(places_of(real.parent, seen))
    if runs & seen:
        raise RunError(
            f"its sandbox would show {min(runs & seen)} with the tokens of all runs in it: set "
            "output_dir (`rl eval`, `rl collect`: TMPDIR) to a folder that holds only runs"
        )
    return {path for path in hidden if not is_below(path, runs)} | runs


def places_of(directory: Path, seen: set[Path]) -> Iterator[Path]:
    """Yields the paths at which a directory is visible in `seen`. `directory` must not contain
    links."""
    for folder in filter(Path.is_dir, seen):
        for i in range(1, len(directory.parts) + 1):
            rest = directory.parts[i:]
            inner = folder.resolve().joinpath(*rest)
            if inner.is_dir() and inner.resolve() == inner and inner.samefile(directory):
                yield folder.joinpath(*rest)
