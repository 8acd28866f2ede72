"""Makes the setup of each environment worker and the source of training tasks from the
configuration."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.orchestrator import EnvSource, EvalConfig
from rl.config.run import RLConfig
from rl.homes.resolve import entries, workers
from rl.models.folder import vocab_size
from rl.orchestrator.tasks.task_source import EnvTasks, TaskSource
from rl.wire.worker_messages import EnvSpec, PolicySpec, Ready, WorkerSetup

log = logging.getLogger("rl.orchestrator")


@dataclass(frozen=True)
class EvalEnv:
    """The workers that play an evaluation: those of a training environment with the same source,
    else its own."""

    worker_env: str
    num_tasks: int
    """Number of tasks to play."""


def eval_workers(config: RLConfig) -> dict[str, str]:
    """Returns the worker environment of each eval, by label: a training environment with the
    same source if there is one."""
    num_trained = len(config.orchestrator.environment)
    return {entry.label: name for name, entry in workers(config)[num_trained:]}


def env_spec(entry: EnvSource, name: str, config: RLConfig, worker: int = 0) -> EnvSpec:
    """Returns the spec for one worker of an environment, by its number. Limits are for all
    workers together, so each gets its part, and the first ones what is left over."""
    fields: dict[str, Any] = {
        key: value
        for key, value in entry.source.items()
        if key in EnvSpec.__struct_fields__ and value is not None
    }
    for key in ("max_generating", "max_scoring"):
        fields[key] = (
            -1
            if fields[key] < 0
            else max(1, fields[key] // entry.workers + (worker < fields[key] % entry.workers))
        )
    fields["timeout_s"] = entry.timeout_s or config.orchestrator.rollout_timeout_s
    return EnvSpec(name=name, **fields)


def policy_spec(config: RLConfig, model_path: str) -> PolicySpec:
    """Returns the policy served by the run's inference servers, for the model in the folder
    `model_path`."""
    return PolicySpec(
        model_path=model_path,
        max_model_len=config.model.max_model_len,
        vocab_size=vocab_size(Path(model_path)),
        trust_remote_code=config.model.trust_remote_code,
        renderer=config.renderer.model_dump(),
        inference_urls=config.orchestrator.inference_urls,
        inference_status=str(config.run_dir.status("inference").absolute()),
        routes=config.trainer.router_replay == "engine",
        max_kept=0 if config.is_remote else config.trainer.max_kept,
    )


def worker_setups(config: RLConfig, policy: PolicySpec, address: str) -> list[WorkerSetup]:
    """Returns the setups of all worker processes of the run; `address` is the pool's."""
    return [
        WorkerSetup(
            env=env_spec(entry, name, config, i),
            policy=policy,
            orchestrator=address,
            worker_id=f"{name}-{i}",
            max_tokens=entry.sampling.max_tokens or config.orchestrator.sampling.max_tokens,
            retries=config.orchestrator.rollout_retries,
            python=entry.python or "",
            sandbox=entry.isolation == "sandbox",
            network=bool(entry.network),
            keys=entry.keys,
            read=entry.read,
        )
        for name, entry in entries(config).items()
        for i in range(entry.workers)
    ]


def smallest(*limits: int | None) -> int | None:
    """Returns the smallest of some limits on the number of tasks. None and negative values mean
    no limit; None if there is no limit."""
    return min((limit for limit in limits if limit is not None and limit >= 0), default=None)


def eval_fault(entry: EvalConfig, num_tasks: int | None) -> str:
    """Returns why an evaluation cannot be played on an environment with `num_tasks` tasks (None:
    endless); empty if it can."""
    size = smallest(num_tasks, entry.num_examples)
    if size is None:
        return (
            f"eval {entry.label}: its tasks are endless; limit them with num_examples "
            "(`rl eval --limit`)"
        )
    if num_tasks == 0:
        return (
            f"eval {entry.label} has no examples, because its environment has none for it: "
            "give it held-out ones (its args, eval_dataset), evaluate on another, or leave the "
            "evaluation out"
        )
    if size == 0:
        return (
            f"eval {entry.label} has no examples, because its num_examples is 0: raise it, or "
            "leave the evaluation out"
        )
    return ""


def task_faults(config: RLConfig, ready: dict[str, Ready]) -> list[str]:
    """Returns the reasons why the tasks of the run's environments cannot be used, one sentence
    each."""
    faults = [
        f"environment {env.label} has no training examples; check its arguments (args) and "
        "max_samples"
        for env in config.orchestrator.environment
        if smallest(ready[env.label].num_train, env.max_samples) == 0
    ]
    workers = eval_workers(config)
    for entry in config.orchestrator.eval:
        faults.append(eval_fault(entry, ready[workers[entry.label]].num_eval))
    return [*filter(None, faults)]


def eval_envs(config: RLConfig, ready: dict[str, Ready]) -> dict[str, EvalEnv]:
    """Returns by label which workers play each evaluation, and how many tasks. Requires that
    `task_faults` found no faults."""
    workers = eval_workers(config)
    sizes = {
        entry.label: smallest(ready[workers[entry.label]].num_eval, entry.num_examples)
        for entry in config.orchestrator.eval
    }
    return {label: EvalEnv(workers[label], size) for label, size in sizes.items() if size}


def task_source(config: RLConfig, ready: dict[str, Ready]) -> TaskSource:
    """Returns the source of training tasks. Requires that `task_faults` found no faults."""
    envs = {}
    for env in config.orchestrator.environment:
        size = smallest(ready[env.label].num_train, env.max_samples)
        if size is None and env.difficulty:
            log.warning(
                "environment %s has endless tasks: difficulty has no effect since none "
                "repeats; set max_samples",
                env.label,
            )
        envs[env.label] = EnvTasks(
            size, env.weight, env.group_size or config.orchestrator.group_size, env.difficulty
        )
    return TaskSource(envs, config.seed)
