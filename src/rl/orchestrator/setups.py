"""From the configuration to the setup of each environment worker, and to the source of training tasks."""

import asyncio
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from rl.config.orchestrator import EnvSource
from rl.config.run import RLConfig
from rl.models.tokenizer_files import slim_tokenizer
from rl.orchestrator.tasks import EnvTasks, TaskSource
from rl.wire.worker_messages import EnvSpec, PolicySpec, Ready, WorkerSetup

log = logging.getLogger("rl.orchestrator")


@dataclass(frozen=True)
class EvalEnv:
    """The workers that play an evaluation: a training environment's if they hold the same environment, else its own."""

    worker_env: str
    num_tasks: int
    """Tasks that are played."""


def eval_workers(config: RLConfig) -> dict[str, str]:
    """The worker environment of each eval, by its label: a training environment's workers if they hold the same environment."""
    return {
        entry.label: next((env.label for env in config.orchestrator.environment if env.source == entry.source), f"eval-{entry.label}")
        for entry in config.orchestrator.eval
    }


def env_spec(entry: EnvSource, name: str, config: RLConfig) -> EnvSpec:
    """An environment as one of its workers plays it; limits are for all workers together, so each gets its part of them."""
    given = {key: value for key, value in entry.source.items() if key in EnvSpec.__struct_fields__ and value is not None}
    for key in ("max_generating", "max_scoring"):
        given[key] = -1 if given[key] < 0 or entry.workers == "auto" else max(1, given[key] // entry.workers)
    given["timeout_s"] = entry.timeout_s or config.orchestrator.rollout_timeout_s
    return EnvSpec(**given | {"name": name})


async def policy_spec(config: RLConfig, model_path: str) -> PolicySpec:
    """The policy of our inference servers, for the model in the folder `model_path`, whose tokenizer is converted if it was not yet."""
    tokenizer, unfit = await asyncio.to_thread(slim_tokenizer, model_path, trust_remote_code=config.model.trust_remote_code)
    if unfit:
        log.warning("workers load the model's tokenizer with transformers, which costs each seconds and hundreds of MB: %s", unfit)
    return PolicySpec(
        model_path=model_path,
        tokenizer=tokenizer,
        max_model_len=config.model.max_model_len,
        vocab_size=vocab_size(Path(model_path)),
        trust_remote_code=config.model.trust_remote_code,
        renderer=config.renderer.model_dump(),
        inference_urls=config.orchestrator.inference_urls,
        inference_status=str(config.run_dir.status("inference").absolute()),
        enforce_monotonicity=config.orchestrator.enforce_monotonicity,
    )


def vocab_size(model: Path) -> int:
    """Number of token ids of the model in a folder, by its config.json, where a model for more than text has a part for it; 0: not said."""
    config = model / "config.json"
    fields = json.loads(config.read_bytes()) if config.exists() else {}
    return int(fields.get("text_config", fields).get("vocab_size", 0))


def worker_setups(config: RLConfig, policy: PolicySpec, address: str) -> list[WorkerSetup]:
    """The setups of all worker processes of the run; `address` is the pool's."""
    evals = eval_workers(config)
    wanted: dict[str, EnvSource] = {env.label: env for env in config.orchestrator.environment}
    wanted |= {evals[entry.label]: entry for entry in config.orchestrator.eval if evals[entry.label] not in wanted}
    return [
        WorkerSetup(
            env=env_spec(entry, name, config),
            policy=policy,
            orchestrator=address,
            worker_id=f"{name}-{i}",
            max_tokens=entry.sampling.max_tokens or config.orchestrator.sampling.max_tokens,
            retries=config.orchestrator.rollout_retries,
            python=entry.python or "",
            sandbox=entry.isolation == "sandbox",
            network=bool(entry.network),
            keys=entry.keys,
            most=len(os.sched_getaffinity(0)) if entry.workers == "auto" else 0,
        )
        for name, entry in wanted.items()
        for i in range(1 if entry.workers == "auto" else entry.workers)
    ]


def smallest(*limits: int | None) -> int | None:
    """The smallest of some numbers of tasks. None and negative ones bound nothing; None: nothing does."""
    return min((limit for limit in limits if limit is not None and limit >= 0), default=None)


def task_faults(config: RLConfig, ready: dict[str, Ready]) -> list[str]:
    """What a run refuses about the tasks of its environments, a sentence each."""
    faults, workers = [], eval_workers(config)
    for env in config.orchestrator.environment:
        if smallest(ready[env.label].num_train, env.max_samples) == 0:
            faults.append(f"environment {env.label} has no training examples; check its arguments (args) and max_samples")
    for entry in config.orchestrator.eval:
        held_out = ready[workers[entry.label]].num_eval
        size = smallest(held_out, entry.num_examples)
        if held_out == 0:
            remedy = "give it some (its args, eval_dataset), evaluate on another environment, or leave the evaluation out"
            faults.append(f"eval {entry.label} has no examples, for its environment holds none out: {remedy}")
        elif size == 0:
            faults.append(f"eval {entry.label} has no examples, for its num_examples is 0: raise it, or leave the evaluation out")
        elif size is None:
            faults.append(f"eval {entry.label}: its tasks are endless; say how many with num_examples")
    return faults


def eval_envs(config: RLConfig, ready: dict[str, Ready]) -> dict[str, EvalEnv]:
    """Who plays each evaluation, by its label, and how many of its tasks; `task_faults` finds none in them."""
    workers = eval_workers(config)
    sizes = {entry.label: smallest(ready[workers[entry.label]].num_eval, entry.num_examples) for entry in config.orchestrator.eval}
    return {label: EvalEnv(workers[label], size) for label, size in sizes.items() if size}


def task_source(config: RLConfig, ready: dict[str, Ready]) -> TaskSource:
    """The source of training tasks, in which `task_faults` finds none."""
    envs = {}
    for env in config.orchestrator.environment:
        size = smallest(ready[env.label].num_train, env.max_samples)
        if size is None and env.difficulty:
            log.warning("environment %s makes ever new tasks: difficulty has no effect, for none comes twice; set max_samples", env.label)
        envs[env.label] = EnvTasks(size, env.weight, env.group_size or config.orchestrator.group_size, env.difficulty)
    return TaskSource(envs, config.seed)
