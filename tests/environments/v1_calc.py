"""Test taskset of the v1 API with a tool server that all tasks share."""

import os

import verifiers.v1 as vf


class CalcToolset(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = "calc"

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        if a == 666:
            os._exit(1)
        if a == 13:
            raise ValueError("unlucky")
        return str(a + b)


class CalcTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float("5" in trace.last_reply)


class CalcConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class CalcSet(vf.Taskset[CalcTask, CalcConfig]):
    def load(self):
        return [CalcTask(vf.TaskData(idx=i, prompt=f"what is {i} + 2?")) for i in (3, 13, 666)]

    @classmethod
    def toolsets(cls, config: CalcConfig) -> list[vf.Toolset]:
        return [CalcToolset(config.tools)]


__all__ = ["CalcSet"]

if __name__ == "__main__":
    CalcToolset.run()
