"""Find a number: every wrong guess is answered with "higher" or "lower", and only a policy that
uses the answers finds it in time."""

import random
import re

import verifiers as vf
from datasets import Dataset

FOUND_WEIGHT = 0.6
"""Share of the reward for finding the number; the rest is for guesses that the answers so far
allow."""
EXAMPLE = (16, 8, 12, 14)
"""The guesses of a solved game in the prompt: each the middle of the numbers that are left. None
of them is held out."""


def first_question(most: int, max_guesses: int) -> str:
    return f"I think of a number from 1 to {most}. You have {max_guesses} guesses. Say one number."


def answer_to(guess: int | None, number: int) -> str:
    if guess is None:
        return "Say one number."
    return "correct" if guess == number else "higher" if guess < number else "lower"


def guess_in(text: str) -> int | None:
    """The first number in a reply; None without one."""
    found = re.search(r"\d{1,6}", text or "")
    return int(found.group()) if found else None


def guesses_of(completion: list) -> list[int | None]:
    return [
        guess_in(message["content"]) for message in completion if message["role"] == "assistant"
    ]


def share_allowed(guesses: list[int | None], number: int, most: int) -> float:
    """The share of the guesses that all answers before allowed: between the bounds that they
    left, and not said before."""
    low, high, allowed = 1, most, 0
    for guess in guesses:
        if guess is not None and low <= guess <= high:
            allowed += 1
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
    return allowed / len(guesses) if guesses else 0.0


def found(completion: list, info: dict) -> float:
    """1.0 if a guess was the number."""
    return float(info["number"] in guesses_of(completion))


def allowed(completion: list, info: dict) -> float:
    """The share of guesses that the answers before allowed."""
    return share_allowed(guesses_of(completion), info["number"], info["most"])


def num_guesses(completion: list, info: dict) -> float:
    return float(len(guesses_of(completion)))


class GuessNumber(vf.MultiTurnEnv):
    """Answers each guess, and ends with the number or with the last guess."""

    @vf.stop
    async def is_found(self, state: vf.State) -> bool:
        turns = state["trajectory"]
        return (
            bool(turns)
            and guess_in(turns[-1]["completion"][-1]["content"]) == state["info"]["number"]
        )

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        return [
            vf.UserMessage(
                content=answer_to(guess_in(messages[-1]["content"]), state["info"]["number"])
            )
        ]


def example(most: int, max_guesses: int) -> list[dict[str, str]]:
    """A solved game as turns of the prompt."""
    number, messages = EXAMPLE[-1], [{"role": "user", "content": first_question(most, max_guesses)}]
    for guess in EXAMPLE:
        messages += [
            {"role": "assistant", "content": str(guess)},
            {"role": "user", "content": answer_to(guess, number)},
        ]
    return messages[:-1]


def row(number: int, most: int, max_guesses: int) -> dict:
    return {
        "question": first_question(most, max_guesses),
        "answer": str(number),
        "info": {"number": number, "most": most},
    }


def load_environment(
    most: int = 31, max_guesses: int = 7, eval_count: int = 8, seed: int = 0
) -> vf.Environment:
    """Find a number; reward 0.6 for finding it and 0.4 times the share of guesses that the answers
    allowed.

    Args:
        most: the greatest number; at least 31, which five guesses always find by halves.
        max_guesses: guesses of a game, at least the four of the solved game in the prompt.
        eval_count: how many of the numbers are held out for evaluation.
        seed: another seed holds out other numbers.
    """
    if most < 31 or not 0 < eval_count <= most - len(EXAMPLE) or max_guesses < len(EXAMPLE):
        given = f"most = {most}, max_guesses = {max_guesses}, eval_count = {eval_count}"
        raise ValueError(
            f"{given}; most must be at least 31, max_guesses {len(EXAMPLE)}, and eval_count "
            f"from 1 to most - {len(EXAMPLE)}"
        )
    numbers = random.Random(seed).sample(range(1, most + 1), most)
    numbers.sort(key=EXAMPLE.__contains__)
    rows = [row(number, most, max_guesses) for number in numbers]
    rubric = vf.Rubric(funcs=[found, allowed], weights=[FOUND_WEIGHT, 1 - FOUND_WEIGHT])
    rubric.add_metric(num_guesses)
    return GuessNumber(
        dataset=Dataset.from_list(rows[eval_count:]),
        eval_dataset=Dataset.from_list(rows[:eval_count]),
        rubric=rubric,
        few_shot=example(most, max_guesses),
        max_turns=max_guesses,
    )
