"""`orchestrator`: starts environments' workers, waits for inference, runs the loops. One per run, fenced by a lock."""

import asyncio
import logging
import signal
import sys
from pathlib import Path

from rl.access import AccessError, run_token
from rl.cli import load_config, to_toml
from rl.config import RLConfig
from rl.files import CorruptFileError, clean_leftovers, write_file
from rl.models import ModelError, resolve_model
from rl.orchestrator.clock import StepClock
from rl.orchestrator.config import EnvSource
from rl.orchestrator.env_ids import EnvLoadError, check_installed
from rl.orchestrator.errors import RunError
from rl.orchestrator.evaluation import EvalEnv, Evaluator
from rl.orchestrator.inference_client import InferenceLostError, InferenceServers, TokenRefusedError
from rl.orchestrator.orchestrator import Orchestrator
from rl.orchestrator.rollouts import EnvSpec, PolicySpec, Ready, WorkerSetup
from rl.orchestrator.served import ServedPolicy
from rl.orchestrator.tasks import EnvTasks, TaskSource
from rl.orchestrator.teacher import TeacherError, make_teachers
from rl.orchestrator.workers import WorkerError, WorkerPool
from rl.processes import DAMAGED, GIVE_UP, LASTING, die_with_parent
from rl.standby import leave
from rl.status import AlreadyRunningError, Status, hold_role
from rl.transport import TrainerServer

log = logging.getLogger("rl.orchestrator")

GIVES_UP = (RunError, WorkerError, EnvLoadError, TeacherError, ModelError, AccessError, TokenRefusedError)
"""A diagnosis that another start does not change."""
TOLD = (*GIVES_UP, CorruptFileError, InferenceLostError, AlreadyRunningError, OSError)
"""Errors whose message is all there is to say."""
ROLE_WAIT_S = 60.0
"""How long a predecessor may take to end."""


def eval_workers(config: RLConfig) -> dict[str, str]:
    """The worker environment of each eval, by its label: a training environment's workers if they hold the same environment."""
    shared = {}
    for entry in config.orchestrator.eval:
        same = [env.label for env in config.orchestrator.environment if env.source == entry.source]
        shared[entry.label] = same[0] if same else f"eval-{entry.label}"
    return shared


def env_spec(entry: EnvSource, name: str, config: RLConfig) -> EnvSpec:
    """What one worker of an environment gets to know of it; limits hold over all workers, so each gets its part of them."""
    given = {key: value for key, value in entry.source.items() if key in EnvSpec.__struct_fields__ and value is not None}
    for key in ("max_generating", "max_scoring"):
        given[key] = -1 if given[key] < 0 else max(1, given[key] // entry.workers)
    given["timeout_s"] = entry.timeout_s or config.orchestrator.rollout_timeout_s
    return EnvSpec(**given | {"name": name})


def policy_spec(config: RLConfig, model_path: str) -> PolicySpec:
    """The policy that our servers serve."""
    return PolicySpec(
        model_path=model_path,
        max_model_len=config.model.max_model_len,
        chat_template=config.model.chat_template,
        renderer=config.renderer.model_dump(),
        inference_urls=config.orchestrator.inference_urls,
        inference_status=str(config.run_dir.status("inference").absolute()),
        enforce_monotonicity=config.orchestrator.enforce_monotonicity,
    )


def worker_setups(config: RLConfig, policy: PolicySpec, address: str) -> list[WorkerSetup]:
    """One setup for every worker process of the run."""
    evals = eval_workers(config)
    wanted: list[tuple[str, EnvSource]] = [(env.label, env) for env in config.orchestrator.environment]
    wanted += [(evals[entry.label], entry) for entry in config.orchestrator.eval if evals[entry.label].startswith("eval-")]
    return [
        WorkerSetup(
            env=env_spec(entry, name, config),
            policy=policy,
            orchestrator=address,
            worker_id=f"{name}-{i}",
            max_tokens=entry.sampling.max_tokens or config.orchestrator.sampling.max_tokens,
            retries=config.orchestrator.rollout_retries,
            python=entry.python or "",
        )
        for name, entry in wanted
        for i in range(entry.workers)
    ]


def task_source(config: RLConfig, ready: dict[str, Ready]) -> TaskSource:
    """The source of training tasks. Raises WorkerError for an environment without any."""
    envs = {}
    for env in config.orchestrator.environment:
        sizes = [size for size in (ready[env.label].num_train, env.max_samples) if size is not None and size >= 0]
        size = min(sizes, default=None)
        if size == 0:
            raise WorkerError(f"environment {env.label} has no training examples; check its arguments (args) and max_samples")
        if size is None and env.difficulty:
            log.warning("environment %s makes ever new tasks: difficulty has no effect, for none comes twice; set max_samples", env.label)
        envs[env.label] = EnvTasks(size, env.weight, env.group_size or config.orchestrator.group_size, env.difficulty)
    return TaskSource(envs, config.seed)


async def run(config: RLConfig, status: Status, model_path: str) -> str:
    """Everything from the first worker to the last eval."""
    settings = config.orchestrator
    pool = WorkerPool(config.run_dir.logs, memory_gib=settings.worker_memory_gib, silence_s=settings.worker_silence_s)
    server = TrainerServer(config.orchestrator.host, config.orchestrator.port, run_token(config))
    urls, inference_status = config.orchestrator.inference_urls, config.run_dir.status("inference")
    servers = InferenceServers(urls, Path(inference_status), config.orchestrator.inference_timeout_s)
    teachers = make_teachers(settings.teacher, {env.label: env.teacher for env in settings.environment})
    receiver = asyncio.create_task(pool.receive())
    try:
        status.doing("loading environments", address=server.address)
        for setup in worker_setups(config, policy_spec(config, model_path), pool.address):
            await pool.start(setup)
        ready = await pool.sizes(config.orchestrator.worker_timeout_s)
        log.info("environments are ready: %s", {env: (sizes.num_train, sizes.num_eval) for env, sizes in ready.items()})
        for teacher in dict.fromkeys(teachers.values()):
            status.doing(f"waiting for the teacher at {teacher.url}")
            await teacher.check(model_path, config.model.max_model_len)
        status.doing("waiting for inference")
        evals = {label: EvalEnv(env, ready[env].num_eval) for label, env in eval_workers(config).items()}
        evaluator = Evaluator(config, pool, evals, StepClock())
        policy = ServedPolicy(servers, config.run_dir, model_path, evaluator)
        orchestrator = Orchestrator(config, pool, policy, task_source(config, ready), evaluator, status, teachers)
        status.gauges["playing"] = lambda: sum(play.episodes for play in list(orchestrator.in_flight.values()))
        orchestrator.restore()
        return await orchestrator.run(server)
    finally:
        receiver.cancel()
        await pool.close()
        await servers.close()
        for teacher in teachers.values():
            await teacher.close()
        server.close()


async def until_terminated(config: RLConfig, status: Status, model_path: str) -> str:
    """Runs; SIGTERM and SIGINT cancel, so that workers end with the orchestrator."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    return await run(config, status, model_path)


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions in a group."""
    return [leaf for inner in error.exceptions for leaf in leaves(inner)] if isinstance(error, BaseExceptionGroup) else [error]


def exit_code(errors: list[BaseException]) -> int:
    """What `rl` is to do about them: repair, give up, or start again."""
    if any(isinstance(error, CorruptFileError) for error in errors):
        return DAMAGED
    if any(isinstance(error, GIVES_UP) for error in errors):
        return GIVE_UP
    return GIVE_UP if any(isinstance(error, OSError) and error.errno in LASTING for error in errors) else 1


def main() -> None:
    die_with_parent()
    leave(lambda: None)  # all is imported
    config, _ = load_config(sys.argv[1:], "orchestrator")
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    code, status = 0, None
    try:
        for entry in [*config.orchestrator.environment, *config.orchestrator.eval]:
            if entry.id and not entry.python:
                check_installed(entry.id)
        run_dir = config.run_dir
        _lock = hold_role(run_dir.lock("orchestrator"), "orchestrator", ROLE_WAIT_S)
        clean_leftovers(run_dir.batches, run_dir.rollouts(0).parent, run_dir.evals, *run_dir.evals.glob("*/"))
        if not config.run_dir.config.exists():  # started without `rl`: the run directory must say by itself what it is
            write_file(config.run_dir.config, to_toml(config).encode())
        status = Status(config.run_dir.status("orchestrator"), "orchestrator")
        log.info("ended: %s", asyncio.run(until_terminated(config, status, resolve_model(config.model))))
    except* TOLD as group:
        errors = leaves(group)
        print("orchestrator: " + "\n".join(dict.fromkeys(map(str, errors))), file=sys.stderr)
        code = exit_code(errors)
        if code == DAMAGED:
            print(
                "orchestrator: resume the run with `rl` (--resume): that moves damaged files away and goes on before them", file=sys.stderr
            )
    except* asyncio.CancelledError:
        code = 143
    finally:
        if status is not None:
            status.close()
    raise SystemExit(code)


if __name__ == "__main__":
    main()
