"""Test taskset of the v1 API that never ends."""

import random

import verifiers.v1 as vf


class NumbersTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def one(self, trace: vf.Trace) -> float:
        return 1.0


class NumbersConfig(vf.TasksetConfig):
    seed: int = 0
    split: str = "train"


class NumbersSet(vf.Taskset[NumbersTask, NumbersConfig]):
    INFINITE = True

    def load(self):
        numbers = random.Random(f"{self.config.seed} {self.config.split}")
        while True:
            yield NumbersTask(vf.TaskData(prompt=f"say {numbers.randrange(10**6)}"))


__all__ = ["NumbersSet"]
