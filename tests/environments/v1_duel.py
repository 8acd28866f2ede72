"""Test environment of the v1 API with two agents: a solver is judged by an agent that is not
trained, against a group reward."""

import verifiers.v1 as vf


class DuelTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class DuelSet(vf.Taskset[DuelTask, vf.TasksetConfig]):
    def load(self):
        return [DuelTask(vf.TaskData(idx=i, prompt=f"solve {i}")) for i in range(2)]


class DuelConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig(
        sampling=vf.SamplingConfig(temperature=0.0, max_tokens=3)
    )
    fail: str = ""


class DuelEnv(vf.Env[DuelConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        solution = await agents.solver.run(task)
        if self.config.fail == "run":
            raise RuntimeError("nobody came")
        await agents.judge.run(vf.Task(vf.TaskData(prompt=f"judge {solution.last_reply}")))

    async def finalize(self, task, episode):
        if self.config.fail == "finalize":
            raise ValueError("no verdict")
        judge = next(trace for trace in episode.traces if trace.agent.name == "judge")
        for trace in episode.traces:
            if trace.agent.name == "solver":
                trace.record_reward("verdict", float("y" in judge.last_reply), 10.0)


__all__ = ["DuelEnv", "DuelSet"]
