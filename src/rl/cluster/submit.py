"""`rl` with [cluster]: prepares the run directory, has the engine start `rl node` on every
machine, and follows the run."""

import contextlib
import importlib
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, cast

from rl.cluster.lead import with_open_hosts
from rl.config.base import Fault
from rl.config.command_line import CommandLine, to_toml
from rl.config.faults import raise_all, setting_text
from rl.config.plan import cluster_of
from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.launch.prepare import prepare
from rl.launch.run import check_ports, launch
from rl.launch.watch import watch
from rl.models.folder import resolve_model
from rl.run_dir.nodes import Jobs, Nodes
from rl.run_dir.paths import RunDir
from rl.system.errors import RunError


class Engine(Protocol):
    """A module that has machines start `rl node`: slurm, kubernetes or ray.

    One that always stays has no `submit`, `active` and `cancel`; one that never does has no `run`.
    """

    def faults(self, config: RLConfig) -> Iterator[Fault]:
        """Yields what can be known to fail before anything is queued."""

    def render(self, config: RLConfig, run_dir: RunDir) -> str:
        """Returns the text that is submitted."""

    def stays(self, config: RLConfig) -> bool:
        """Whether the run ends with this process, which calls `run` then. Otherwise it is
        submitted."""

    def run(self, config: RLConfig, run_dir: RunDir, children: Children) -> int:
        """Runs everything to its end. Returns the exit code. Raises RunError."""

    def submit(self, config: RLConfig, run_dir: RunDir) -> list[str]:
        """Returns the names of the jobs. Raises RunError with the engine's message and a remedy."""

    def active(self, jobs: list[str], config: RLConfig) -> list[str]:
        """Returns those of the jobs that are queued or running. Raises RunError."""

    def cancel(self, jobs: list[str], config: RLConfig) -> None:
        """Removes jobs. Does nothing for those that have ended. Raises RunError."""


def engine_of(config: RLConfig) -> Engine | None:
    """Returns the module of the run's engine; None if the user starts `rl node`."""
    name = config.cluster.engine if config.cluster else "none"
    return None if name == "none" else engine_named(name)


def engine_named(name: str) -> Engine:
    return cast(Engine, importlib.import_module(f"rl.cluster.{name}"))


def dry_run(config: RLConfig) -> str:
    """Returns what a command would submit; without an engine, the configuration. Prints that the
    model is not to be found. Raises RunError if a start would find a port in use."""
    check_ports(config)
    if config.cluster is None:
        tell_model(config)
        return to_toml(config)
    config = with_open_hosts(config.with_absolute_paths())
    engine = engine_of(config)
    return engine.render(config, config.run_dir) if engine else to_toml(config)


def tell_model(config: RLConfig) -> None:
    """Prints why the model is not to be found, if so."""
    try:
        resolve_model(config.model, needs_template=config.plays, needs_weights=False)
    except RunError as fault:
        print(f"rl: {fault}", file=sys.stderr)


def start(config: RLConfig, line: CommandLine, children: Children, again: str) -> int:
    """Runs a configuration on this machine or on a cluster, and returns the exit code. Raises
    RunError, OSError and Stopped."""
    if config.cluster is None:
        return launch(config, line, children, again)
    return submit(config, line, children)


def submit(config: RLConfig, line: CommandLine, children: Children) -> int:
    """Starts a run on its machines, and follows it. Returns the exit code. Raises RunError and
    OSError."""
    is_given = "dtype" in config.model.model_fields_set  # the next line makes every key a given one
    config = with_open_hosts(config.with_absolute_paths())
    run_dir, nodes, engine = config.run_dir, Nodes(config.run_dir), engine_of(config)
    if queued := active(run_dir, config):  # others would compete with them
        remedy = f"`rl watch {run_dir.root}` shows the run, `rl stop {run_dir.root}` ends it"
        raise RunError(
            f"jobs {', '.join(queued)} of {run_dir.root} are queued or running: {remedy}"
        )
    faults = engine.faults(config) if engine else ()
    raise_all([f"{setting_text(key, value)}\n    {remedy}" for key, value, remedy in faults])
    if config.model.dtype == "float32" and not is_given:
        note(
            "model.dtype = float32, because this machine does not multiply bfloat16; set "
            "bfloat16 if the run's machines do"
        )
    kubernetes = (
        cluster_of(config).kubernetes if cluster_of(config).engine == "kubernetes" else None
    )
    sees_directory = not kubernetes or Path(kubernetes.mount).is_dir()
    if sees_directory:
        if is_done(config, line):
            return 0
        nodes.jobs_path.unlink(missing_ok=True)
        # pods tell by START whether an end concerns them: some of an earlier start may still be
        # there
        if not kubernetes:
            nodes.over_path.unlink(missing_ok=True)
    elif line.resume is not None or "clean" in line.switches:
        raise RunError(
            f"{config.output_dir} is not on this machine, so --resume and --clean cannot look at "
            "the run: leave it out, and an existing run is continued; give it where the volume is "
            "mounted"
        )
    if engine and engine.stays(config):
        threading.Thread(target=watch, args=(run_dir, config), name="watch", daemon=True).start()
        code = engine.run(config, run_dir, children)
        over = nodes.over()
        return over.exit_code if over else code  # machines end with 0 also if the run was stopped
    if engine:
        with contextlib.ExitStack() as undo:
            jobs = engine.submit(config, run_dir)
            undo.callback(engine.cancel, jobs, config)
            if sees_directory:
                # of a command that has submitted the run at the same moment: `rl stop` ends these,
                # too
                others = nodes.jobs()
                recorded = Jobs(
                    cluster_of(config).engine, [*(others.jobs if others else []), *jobs]
                )
                nodes.write(nodes.jobs_path, recorded)
            undo.pop_all()
        note(f"submitted {', '.join(jobs)}")
    else:
        note("\n".join(["start on each machine, with its index:", *commands(config)]))
    if not sees_directory:
        note(
            f"{run_dir.root} is not on this machine; `rl stop` with the same files and flags ends "
            "the run"
        )
        return 0
    return watch(
        run_dir, config, children, waits=True, is_queued=lambda: is_queued(run_dir, config)
    )


def is_done(config: RLConfig, line: CommandLine) -> bool:
    """Prepares the run's directory. Returns whether there is nothing left to do, and says so."""
    root = config.run_dir.root
    prepared = prepare(config, resume=line.resume, clean="clean" in line.switches)
    prepared.lease.close()
    for text in prepared.notes:
        note(text)
    if prepared.why_over:
        note(f"{root}: {prepared.why_over}")
    elif "view" in line.switches:
        note(f"--view has no effect on a cluster; see the run with: rl view {root}")
    return bool(prepared.why_over)


def note(text: str) -> None:
    print(text, flush=True)


def commands(config: RLConfig) -> list[str]:
    """Returns the commands for machines that no engine starts."""
    path = shlex.quote(str(config.run_dir.config))
    return [
        f"  rl node @ {path} --cluster.index {index}" for index in range(cluster_of(config).nodes)
    ]


def cancel(run_dir: RunDir, config: RLConfig) -> None:
    """Removes a run's jobs from the queue of its engine. Raises RunError."""
    if jobs := Nodes(run_dir).jobs():
        engine_named(jobs.engine).cancel(jobs.jobs, config)


def active(run_dir: RunDir, config: RLConfig) -> list[str]:
    """Returns the jobs of a run that are queued or running. Raises RunError if its engine does
    not say."""
    jobs = Nodes(run_dir).jobs()
    return engine_named(jobs.engine).active(jobs.jobs, config) if jobs else []


def is_queued(run_dir: RunDir, config: RLConfig) -> bool | None:
    """Returns whether an engine has jobs of a run; None if none was asked for them, or if it
    does not answer."""
    try:
        return bool(active(run_dir, config)) if Nodes(run_dir).jobs() else None
    except RunError:
        return None
