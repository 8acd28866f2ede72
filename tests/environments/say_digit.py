"""Test environment: say the digit. Rewards 1.0 for the task's digit anywhere in the reply; a few
switches make it misbehave."""

import asyncio
import os
import time

import verifiers as vf
from datasets import Dataset


def load_environment(
    tasks: int = 4,
    fail: str = "",
    turns: int = 1,
    constant: float | None = None,
    delay: float = 0.0,
    held_out: int = 2,
) -> vf.Environment:
    if fail == "load":
        raise KeyError("SOME_DATA_PATH")
    played: dict[str, int] = {}

    def reward(completion, answer, state) -> float:
        text = completion[0]["content"] if completion else ""
        return constant if constant is not None else float(answer in text)

    class Environment(vf.MultiTurnEnv):
        async def setup_state(self, state):
            played["n"] = played.get("n", 0) + 1
            await asyncio.sleep(delay)
            if fail == "first" and played["n"] == 1:
                raise OSError("flaky")
            if fail == "always":
                raise ZeroDivisionError("broken environment")
            if fail == "exit_once" and not os.path.exists(os.environ["EXIT_ONCE_MARK"]):
                open(os.environ["EXIT_ONCE_MARK"], "w").close()
                os._exit(7)
            if fail == "block":
                time.sleep(0.2)
            return state

        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": "and again"}]

    rows = [{"question": f"say {i % 10}", "answer": str(i % 10)} for i in range(tasks)]
    eval_dataset = Dataset.from_list(rows[:held_out]) if held_out else None
    return Environment(
        dataset=Dataset.from_list(rows),
        eval_dataset=eval_dataset,
        rubric=vf.Rubric(funcs=[reward]),
        max_turns=turns,
    )
