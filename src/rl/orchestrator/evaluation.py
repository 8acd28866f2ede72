"""Evaluations: when one is due, playing it, and which version was the best."""

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rl.config import RLConfig
from rl.files import write_file
from rl.metrics import MetricsLog, read_metrics
from rl.orchestrator.clock import StepClock
from rl.orchestrator.config import EvalConfig
from rl.orchestrator.evals import Results, eval_metrics, write_eval
from rl.orchestrator.inference_client import InferenceLostError
from rl.orchestrator.rollouts import Rollout
from rl.orchestrator.workers import EnvLostError, WorkerError, WorkerPool
from rl.run_dir import RunDir

log = logging.getLogger(__name__)

MAX_PLAYS = 20
"""So often what was sampled by another version is played again before the evaluation gives up: a server that dies once a minute."""


@dataclass(frozen=True)
class EvalEnv:
    """Where the pool plays an evaluation: a training environment's workers if they hold the same environment, else its own."""

    worker_env: str
    size: int | None


class Evaluator:
    """Plays the configured evaluations at the version that inference holds, and remembers each one's best version."""

    def __init__(self, config: RLConfig, pool: WorkerPool, envs: dict[str, EvalEnv], clock: StepClock):
        self.config = config
        self.run_dir: RunDir = config.run_dir
        self.pool = pool
        self.envs = envs
        self.clock = clock
        self.metrics = MetricsLog(self.run_dir.metrics, "eval")
        self.best: dict[str, tuple[float, int]] = {}
        """By label: (mean reward, policy version); of equal ones the first."""
        self.passed_over: set[int] = set()
        """Versions that inference cannot hold any more."""
        for entry in config.orchestrator.eval:
            if self.num_tasks(entry) == 0:
                raise WorkerError(f"eval {entry.label} has no examples: its environment has no eval dataset, or num_examples is 0")
        self._find_best()

    def num_tasks(self, entry: EvalConfig) -> int:
        size = self.envs[entry.label].size
        if size is None and entry.num_examples < 0:
            raise WorkerError(f"eval {entry.label}: its tasks are endless; say how many with num_examples")
        return min(entry.num_examples if entry.num_examples >= 0 else 2**62, size if size is not None else 2**62)

    def _find_best(self) -> None:
        for (version, source), values in sorted(read_metrics(self.run_dir.metrics).items()):
            if source == "eval":
                for entry in self.config.orchestrator.eval:
                    if (reward := values.get(f"eval/{entry.label}/reward_mean")) is not None:
                        self._note(entry.label, version, reward)

    def _note(self, label: str, version: int, reward: float) -> None:
        if label not in self.best or reward > self.best[label][0]:
            self.best[label] = (reward, version)
            content = {name: {"policy_version": version, "reward_mean": reward} for name, (reward, version) in self.best.items()}
            write_file(self.run_dir.evals / "best.json", json.dumps(content, indent=2).encode())

    def best_versions(self) -> list[int]:
        """The versions that an evaluation found best: their weights are kept."""
        return sorted({version for _, version in self.best.values()})

    def due(self, version: int, final: int) -> list[EvalConfig]:
        """Evals run at version 0, every `interval` versions, and at the last one; a finished one is not run again."""
        return [
            entry
            for entry in self.config.orchestrator.eval
            if (version % entry.interval == 0 or version == final)
            and not (self.run_dir.eval(version, entry.label).exists() or version in self.passed_over)
            and self.envs[entry.label].worker_env not in self.pool.lost
        ]

    def reached(self) -> str | None:
        """What to say when an evaluation has reached its target, be it before a restart."""
        for entry in self.config.orchestrator.eval:
            reward, version = self.best.get(entry.label, (-math.inf, 0))
            if reward >= entry.target:
                return f"eval {entry.label} reached {reward:.3f} at version {version}; its target is {entry.target:g}"
        return None

    async def evaluate(self, entry: EvalConfig, version: int, settle: Callable[[], Awaitable[object]]) -> None:
        """Plays an evaluation at the loaded version and writes its result; training goes on beside it.

        `settle` has inference hold the version again after a server came back with another one. Its line comes before its file: one of
        which only the line is there is played again.
        """
        began = time.monotonic()
        try:
            with self.clock.busy():
                results = await self._play(entry, version, settle)
        except EnvLostError as error:
            log.warning("eval %s is left out from now on: %s", entry.label, error)
            return
        metrics = eval_metrics(entry.label, results)
        self.metrics.write(version, metrics | {"time/eval": time.monotonic() - began})
        write_eval(self.run_dir.eval(version, entry.label), version, entry.label, results)
        reward = metrics[f"eval/{entry.label}/reward_mean"]
        self._note(entry.label, version, reward)
        log.info("eval %s at version %d: %.3f", entry.label, version, reward)

    async def _play(self, entry: EvalConfig, version: int, settle: Callable[[], Awaitable[object]]) -> Results:
        """All rollouts of an evaluation, every token of them sampled by `version`."""
        training = self.config.orchestrator.sampling.model_dump(exclude_none=True)
        sampling = training | entry.sampling.model_dump(exclude_none=True)

        async def one(task: int) -> tuple[int, list[Rollout]]:
            return task, await self.pool.play(self.envs[entry.label].worker_env, "eval", task, entry.samples, sampling, task)

        results: dict[int, list[Rollout]] = {}
        todo = list(range(self.num_tasks(entry)))
        for _ in range(MAX_PLAYS):
            await settle()
            results |= dict(await asyncio.gather(*(one(task) for task in todo)))
            todo = [task for task in todo if sampled_by(results[task]) - {version}]
            if not todo:
                return sorted(results.items())
            others = sorted(set().union(*(sampled_by(results[task]) for task in todo)) - {version})
            log.warning("eval %s: %d examples were sampled by version %s, not %d: played again", entry.label, len(todo), others, version)
        raise InferenceLostError(
            f"eval {entry.label}: inference did not hold version {version} for long enough in {MAX_PLAYS} attempts; see logs/inference*.log"
        )


def sampled_by(rollouts: list[Rollout]) -> set[int]:
    """The versions that sampled a token."""
    return {span.policy_version for rollout in rollouts for turn in rollout.turns for span in turn.policy_versions}
