"""Test taskset of the v1 API: one turn, a weighted reward, a metric; switches make it misbehave."""

import asyncio
from typing import Literal

import verifiers.v1 as vf


class EchoData(vf.TaskData):
    answer: str = ""


class EchoTaskConfig(vf.TaskConfig):
    fail: str = ""


class EchoTask(vf.Task[EchoData, vf.State, EchoTaskConfig]):
    async def setup(self, trace, runtime) -> None:
        if self.config.fail == "setup":
            raise ZeroDivisionError("broken setup")
        if self.config.fail == "hang":
            await asyncio.sleep(60)

    async def finalize(self, trace, runtime) -> None:
        if self.config.fail == "finalize":
            raise KeyError("finalize")

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        if self.config.fail == "reward":
            raise ConnectionError("the judge is down")
        if self.config.fail == "exit":
            exit("bye")
        if self.config.fail == "nan":
            return float("nan")
        return 2.0 * float(self.data.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class EchoConfig(vf.TasksetConfig):
    task: EchoTaskConfig = EchoTaskConfig()
    split: Literal["train", "test"] = "train"
    """Which tasks."""
    num: int = 4
    """How many tasks there are."""
    system: str = ""
    shown: bool = False
    """Whether the prompt has a worked example."""


class EchoSet(vf.Taskset[EchoTask, EchoConfig]):
    def load(self):
        first = 0 if self.config.split == "train" else 100
        for i in range(first, first + self.config.num):
            example = [vf.UserMessage(content="say 9"), vf.AssistantMessage(content="9")]
            prompt = (
                [*example, vf.UserMessage(content=f"say {i}")] if self.config.shown else f"say {i}"
            )
            data = EchoData(
                idx=i, prompt=prompt, system_prompt=self.config.system or None, answer=str(i)
            )
            yield EchoTask(data, self.config.task)


__all__ = ["EchoSet"]
