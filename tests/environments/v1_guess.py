"""Test taskset of the v1 API with an environment of its own that plays the user: three
questions, one talk."""

import verifiers.v1 as vf


class GuessTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessSet(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        return [
            GuessTask(vf.TaskData(idx=i, prompt=f"guess {i}", system_prompt="short"))
            for i in range(2)
        ]


class GuessEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    asks: int = 2
    """How often the user asks again."""


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for at in range(self.config.asks):
                if segment.terminated:
                    return
                segment = await talk.turn(f"you said {segment.last_reply}, guess again {at}")


__all__ = ["GuessEnv", "GuessSet"]
