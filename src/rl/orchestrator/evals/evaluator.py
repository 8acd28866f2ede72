"""Evaluations: decides which are due, plays them, and remembers the best version."""

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial

from rl.config.orchestrator import EvalConfig
from rl.config.run import RLConfig
from rl.orchestrator.batches.contents import usage_metrics
from rl.orchestrator.evals.eval_metrics import Results, eval_metrics, write_eval
from rl.orchestrator.progress import StepClock
from rl.orchestrator.workers.pool import EnvLostError, PlayJob, WorkerPool, play_all
from rl.orchestrator.workers.setups import EvalEnv
from rl.run_dir.files import write_file
from rl.run_dir.lease import check_fence
from rl.run_dir.metrics import MetricsLog, read_metrics
from rl.run_dir.paths import RunDir, first_step
from rl.wire.inference_client import InferenceLostError
from rl.wire.rollouts import Rollout, at_least
from rl.wire.worker_messages import derived_seed

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 20
"""How often examples sampled by another version are replayed before an evaluation gives up:
enough if a server dies once a minute."""

MAX_ERRORED = 0.1
"""Share of failed episodes from which any other evaluation is better: they count as reward 0,
which may be more than the others have."""


class Evaluator:
    """Plays the configured evaluations at the version that inference holds, and remembers each
    one's best version."""

    def __init__(
        self, config: RLConfig, pool: WorkerPool, envs: dict[str, EvalEnv], clock: StepClock
    ):
        self.config = config
        self.run_dir: RunDir = config.run_dir
        self.pool = pool
        self.envs = envs
        self.clock = clock
        self.metrics = MetricsLog(
            self.run_dir.metrics, "eval", partial(check_fence, self.run_dir.lock("orchestrator"))
        )
        self.best: dict[str, tuple[bool, float, int]] = {}
        """By label: (whether few rollouts failed, mean reward, policy version); the first
        version wins ties."""
        self.first = first_step(self.run_dir)
        """The version before the run's first step."""
        self.skipped: set[int] = set()
        """Versions that inference can no longer load."""
        self.written = {*self.run_dir.evals.glob("*/*.jsonl")}
        """The files of finished evaluations: the event loop asks for them after every rollout,
        and does not wait for the disk."""
        for (version, _), values in sorted(read_metrics(self.run_dir.metrics, "eval").items()):
            for entry in config.orchestrator.eval:
                if f"eval/{entry.label}/reward_mean" in values:
                    self._update_best(entry.label, version, values)

    def _update_best(self, label: str, version: int, metrics: Mapping[str, float]) -> None:
        reward = metrics[f"eval/{label}/reward_mean"]
        errored = metrics.get(f"eval/{label}/errored", 0.0)
        is_sound = errored < MAX_ERRORED
        if not is_sound:
            log.warning(
                "eval %s at version %d: %.0f%% of its rollouts failed, so it reaches no target, "
                "and another one may be the best",
                label,
                version,
                100 * errored,
            )
        if label not in self.best or (is_sound, reward) > self.best[label][:2]:
            # a new dict: the event loop may be reading the old one
            self.best = self.best | {label: (is_sound, reward, version)}
            content = {
                name: {"policy_version": version, "reward_mean": reward}
                for name, (_, reward, version) in self.best.items()
            }
            write_file(self.run_dir.evals / "best.json", json.dumps(content, indent=2).encode())

    def due(self, version: int, final: int) -> list[EvalConfig]:
        """Returns the unfinished evaluations to play at a version: before the first step, every
        `interval` versions, and at the last version, `final`. A branch does not evaluate
        versions of the run that it was made from, such as the base model."""
        return [
            entry
            for entry in self.config.orchestrator.eval
            if version >= self.first
            and (version % entry.interval == 0 or version in (self.first, final))
            and version not in self.skipped
            and self.run_dir.eval(version, entry.label) not in self.written
            and self.envs[entry.label].worker_env not in self.pool.lost
        ]

    def reached_target(self) -> str | None:
        """Returns why the run ends if an evaluation has reached its target, even before a
        restart; else None."""
        for entry in self.config.orchestrator.eval:
            is_sound, reward, version = self.best.get(entry.label, (False, -math.inf, 0))
            if is_sound and at_least(reward, entry.target):
                return (
                    f"eval {entry.label} reached {reward:.3f} at version {version}; its target "
                    f"is {entry.target:g}"
                )
        return None

    async def evaluate(
        self, entry: EvalConfig, version: int, reconcile: Callable[[], Awaitable[object]]
    ) -> None:
        """Plays an evaluation at the loaded version and writes its result, while training
        continues.

        `reconcile` makes inference hold the version again after a server came back with another
        one. The line in metrics.jsonl is written before the file in evals/; an evaluation that has
        only the line is played again.
        """
        began = time.monotonic()
        try:
            with self.clock.busy():
                results = await self._play(entry, version, reconcile)
        except EnvLostError as error:
            log.warning("eval %s is skipped from now on: %s", entry.label, error)
            return
        reward = await asyncio.to_thread(self._record, entry.label, version, results, began)
        log.info("eval %s at version %d: %.3f", entry.label, version, reward)

    def _record(self, label: str, version: int, results: Results, began: float) -> float:
        """Writes a finished evaluation and returns its mean reward. Runs in a thread: many
        rollouts take a second."""
        metrics = eval_metrics(label, results)
        rollouts = (rollout for _, played in results for rollout in played)
        used = usage_metrics(f"tokens/eval/{label}", rollouts)
        self.metrics.write(version, metrics | used | {"time/eval": time.monotonic() - began})
        write_eval(path := self.run_dir.eval(version, label), version, label, results)
        self.written.add(path)
        self._update_best(label, version, metrics)
        return metrics[f"eval/{label}/reward_mean"]

    async def _play(
        self, entry: EvalConfig, version: int, reconcile: Callable[[], Awaitable[object]]
    ) -> Results:
        """Plays all rollouts of an evaluation with every token sampled by `version`, as many at
        once as may play in training."""
        settings, env = self.config.orchestrator, self.envs[entry.label]
        sampling = self.config.sampling_of(entry)
        jobs = [
            PlayJob(
                env.worker_env,
                "eval",
                task,
                entry.samples,
                sampling,
                # the same for every version, so that versions are compared on the same draws
                seed=derived_seed(self.config.seed, entry.label, task),
            )
            for task in range(env.num_tasks)
        ]
        results: dict[int, list[Rollout]] = {}
        for _ in range(MAX_ATTEMPTS):
            await reconcile()
            async with aclosing(play_all(self.pool, jobs, settings.max_in_flight)) as plays:
                async for job, rollouts in plays:
                    results[job.task] = rollouts
            jobs = [job for job in jobs if sampled_by(results[job.task]) - {version}]
            if not jobs:
                return sorted(results.items())
            log.warning(
                "eval %s: %d examples were sampled by version %s, not %d: played again",
                entry.label,
                len(jobs),
                sorted(set().union(*(sampled_by(results[job.task]) for job in jobs)) - {version}),
                version,
            )
        raise InferenceLostError(
            f"eval {entry.label}: inference did not hold version {version} for long enough in "
            f"{MAX_ATTEMPTS} attempts; see logs/inference*.log"
        )


def sampled_by(rollouts: list[Rollout]) -> set[int]:
    """Returns the policy versions that sampled any token of the rollouts."""
    return {version for rollout in rollouts for version in rollout.versions}
