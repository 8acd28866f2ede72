"""Add two numbers of one digit. All hundred pairs; every fifth is held out for evaluation."""

import re

import verifiers as vf
from datasets import Dataset

HELD_OUT_EVERY = 5


def rows(held_out: bool) -> list[dict[str, str]]:
    """The pairs a + b with 7a + b divisible by five are held out: each digit then occurs in
    training on both sides."""
    return [
        {"question": f"What is {a} + {b}? Answer with just the number.", "answer": str(a + b)}
        for a in range(10)
        for b in range(10)
        if ((7 * a + b) % HELD_OUT_EVERY == 0) == held_out
    ]


def last_number_is_right(completion: list, answer: str) -> float:
    """1.0 if the last number in the reply is the sum."""
    numbers = re.findall(r"\d+", completion[-1]["content"])
    return float(bool(numbers) and numbers[-1] == answer)


def load_environment() -> vf.Environment:
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows(held_out=False)),
        eval_dataset=Dataset.from_list(rows(held_out=True)),
        rubric=vf.Rubric(funcs=[last_number_is_right]),
    )
