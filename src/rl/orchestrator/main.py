"""`orchestrator`: starts environment workers, waits for inference, runs the loops. One per run,
fenced by a lock."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from functools import partial

import msgspec

from rl.config.command_line import load_config_or_exit, write_config
from rl.config.help import PROCESS_USAGE
from rl.config.run import RLConfig
from rl.homes.resolve import Homes, homes_of, in_homes, record
from rl.models.folder import resolve_model
from rl.orchestrator.evals.evaluator import Evaluator
from rl.orchestrator.groups.group_credit import load_functions, metrics_function
from rl.orchestrator.groups.teacher import make_teachers
from rl.orchestrator.orchestrator import Orchestrator
from rl.orchestrator.policy.served_policy import ServedPolicy
from rl.orchestrator.progress import StepClock
from rl.orchestrator.recorded.run import run_recorded
from rl.orchestrator.workers.pool import WorkerPool
from rl.orchestrator.workers.setups import (
    eval_envs,
    policy_spec,
    task_faults,
    task_source,
    worker_setups,
)
from rl.run_dir import spans
from rl.run_dir.access_token import run_token
from rl.run_dir.files import clean_leftovers, write_file
from rl.run_dir.lease import ROLE_WAIT_S, check_fence, forget_dead_servers, hold_role
from rl.run_dir.metrics import merging
from rl.run_dir.status import Phase, RunEnd, RunWarning, Status
from rl.system.errors import DAMAGED, RunError, exit_code_of
from rl.system.linux import LAUNCHER, die_with_parent, raise_open_files
from rl.system.prefork import leave
from rl.wire.inference_client import Expected, InferenceServers
from rl.wire.transport import TrainerServer
from rl.wire.worker_messages import TEMPLATE_REMEDY

log = logging.getLogger("rl.orchestrator")


async def run(config: RLConfig, status: Status, model_path: str, homes: Homes) -> RunEnd:
    """Runs everything from the first worker to the last eval. SIGTERM and SIGINT cancel it, so
    that workers end with the orchestrator."""
    task = asyncio.current_task()
    assert task, "a coroutine runs in a task"
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    settings = config.orchestrator
    pool = WorkerPool(
        config.run_dir.logs,
        memory_gib=settings.worker_memory_gib,
        silence_s=settings.worker_silence_s,
    )
    pool.add_metrics = metrics_function(settings)
    server = TrainerServer(settings.host, settings.port, run_token(config.run_dir.status_dir))
    expected = Expected(config.model.name, config.model.max_model_len)
    servers = InferenceServers(
        settings.inference_urls,
        config.run_dir.status("inference"),
        settings.inference_timeout_s,
        expected,
    )
    teachers = make_teachers(settings)
    try:
        status.enter(Phase.LOADING_ENVIRONMENTS, address=server.address)
        setups = worker_setups(
            in_homes(config, homes), policy_spec(config, model_path), pool.address
        )
        for setup in setups:
            setup.spans = str(config.run_dir.spans.absolute())
        await pool.start_all(setups)
        ready = await pool.sizes(settings.worker_timeout_s)
        for fault in {sizes.template_fault for sizes in ready.values()} - {""}:
            status.warn(RunWarning("template", "", f"{fault}: {TEMPLATE_REMEDY}"))
        log.info(
            "environments are ready: %s",
            {env: (sizes.num_train, sizes.num_eval) for env, sizes in ready.items()},
        )
        if faults := task_faults(config, ready):
            raise RunError("\n".join(faults))
        for teacher in dict.fromkeys(teachers.values()):
            status.enter(Phase.WAITING_FOR_TEACHER, detail=teacher.url)
            for text in await teacher.check(config, model_path, ready):
                status.warn(RunWarning("template", "", text))
        status.enter(Phase.WAITING_FOR_INFERENCE)
        evaluator = Evaluator(config, pool, eval_envs(config, ready), StepClock())
        policy = ServedPolicy(servers, config.run_dir, model_path, evaluator, pool.tell)
        orchestrator = Orchestrator(
            config, pool, policy, task_source(config, ready), evaluator, status, teachers
        )
        status.follow(
            "playing",
            lambda: sum(play.episodes for play in orchestrator.admission.in_flight.values()),
        )
        await orchestrator.pipeline.restore()
        return RunEnd(await orchestrator.run(server), time.time(), orchestrator.progress.end_kind)
    finally:
        await pool.close()
        await servers.close()
        for teacher in teachers.values():
            await teacher.close()
        server.close()


def leaves(error: BaseException) -> list[BaseException]:
    """Flattens an exception group."""
    return (
        [leaf for inner in error.exceptions for leaf in leaves(inner)]
        if isinstance(error, BaseExceptionGroup)
        else [error]
    )


def import_hub() -> None:
    """Imports what `resolve_model` needs to query the hub's cache. Everything else is imported
    already."""
    from huggingface_hub import errors, snapshot_download  # noqa: F401


def run_all(config: RLConfig, closing: contextlib.ExitStack) -> None:
    """Takes the role and runs; what is to be closed at the end goes to `closing`."""
    load_functions(config)
    run_dir = config.run_dir
    closing.callback(hold_role(run_dir.lock("orchestrator"), ROLE_WAIT_S).close)
    run_dir.run_end.unlink(missing_ok=True)
    # another run's server may now answer at the port of a dead one
    forget_dead_servers(run_dir.status_dir)
    clean_leftovers(
        run_dir.batches, run_dir.rollouts_dir, run_dir.evals, *run_dir.evals.glob("*/"), ours=""
    )
    # started without `rl`: the run directory must be self-describing
    if not run_dir.config.exists():
        write_config(run_dir.config, config)
    spans.start(run_dir.spans, "orchestrator")
    status = Status(run_dir.status("orchestrator"), "orchestrator")
    closing.callback(status.close)
    model = resolve_model(
        config.model, needs_template=config.plays, needs_weights=not config.is_remote
    )
    if LAUNCHER not in os.environ:  # no `rl` above that would merge the metrics
        fence = partial(check_fence, run_dir.lock("orchestrator"))
        closing.enter_context(merging(run_dir.metrics, fence))
    if config.recorded:
        end = asyncio.run(run_recorded(config, status, model))
    else:
        status.enter(Phase.LOADING_ENVIRONMENTS)
        # Missing homes are made, which happens if `rl` runs on another machine or not at all:
        # while SIGTERM still ends this process immediately.
        homes = homes_of(config, log.info, recorded=True)
        record(config, homes)
        end = asyncio.run(run(config, status, model, homes))
    log.info("ended: %s", end.reason)
    with contextlib.suppress(OSError):  # informational only
        write_file(run_dir.run_end, msgspec.json.encode(end))


def main() -> None:
    die_with_parent()
    raise_open_files()
    leave(import_hub)
    # imported modules live on, and a collection that walked through them would block the event loop
    gc.freeze()
    config, _ = load_config_or_exit(sys.argv[1:], "orchestrator", usage=PROCESS_USAGE)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    code = 0
    with contextlib.ExitStack() as closing:
        try:
            run_all(config, closing)
        except* (RunError, OSError) as group:
            errors = leaves(group)
            print("orchestrator: " + "\n".join(dict.fromkeys(map(str, errors))), file=sys.stderr)
            code = max(map(exit_code_of, errors))
            if code == DAMAGED:
                print(
                    "orchestrator: resume the run with `rl` (--resume): it moves damaged files "
                    "away and continues before them",
                    file=sys.stderr,
                )
        except* asyncio.CancelledError:
            code = 143
    raise SystemExit(code)


if __name__ == "__main__":
    main()
