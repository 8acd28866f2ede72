"""Test environment with a dense reward that even a random model can climb: the share of the
reply that is letters a to m."""

import verifiers as vf
from datasets import Dataset


def share(completion) -> float:
    text = completion[0]["content"]
    return sum("a" <= letter <= "m" for letter in text) / max(8, len(text))


def load_environment() -> vf.Environment:
    rows = [{"question": f"write {i}"} for i in range(16)]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]),
        rubric=vf.Rubric(funcs=[share]),
    )
