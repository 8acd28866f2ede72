"""Any task of reasoning-gym (https://github.com/open-thought/reasoning-gym): generated, and
scored by its own verifier."""

import re
from typing import Any

import reasoning_gym
import verifiers as vf
from datasets import Dataset

SYSTEM_PROMPT = "Answer with the result only."
MOST_DRAWS = 20
"""Questions to draw for each one that is needed: a task with small numbers repeats itself."""


def load_environment(
    task: str = "chain_sum",
    count: int = 400,
    eval_count: int = 40,
    shots: int = 3,
    seed: int = 0,
    any_order: bool = False,
    **config: Any,
) -> vf.Environment:
    """A single-turn environment of one reasoning-gym task.

    task: its name, such as chain_sum, spell_backward, letter_counting. count, eval_count: tasks to
    train on and held out. shots: worked examples, as turns before the question. seed: of the
    generator. any_order: whether questions with the same words in another order are the same, so
    that the divisor of 8 and 12 is not asked again as that of 12 and 8. config: the task's own
    settings, as min_terms = 2. Reward `score`: reasoning-gym's score of the whole answer, 0 to 1.
    Raises ValueError for an unknown task or setting, and if the task has too few different
    questions.
    """
    needed = shots + eval_count + count
    try:
        data = reasoning_gym.create_dataset(task, size=MOST_DRAWS * needed, seed=seed, **config)
    except TypeError as error:
        raise ValueError(f"reasoning-gym's task {task} does not take {config}: {error}") from None
    entries = different(data, needed, any_order)
    if len(entries) < needed:
        found = (
            f"{task} with {config} has {len(entries)} different questions, and {needed} are needed"
        )
        raise ValueError(
            f"{found} (shots + eval_count + count): lower count, or allow larger questions"
        )
    examples = [message for entry in entries[:shots] for message in turns(entry)]

    def score(completion: list[dict[str, Any]], info: dict[str, Any]) -> float:
        return float(
            data.score_answer(
                answer=completion[-1]["content"].strip(), entry=entries[info["entry"]]
            )
        )

    def exact(completion: list[dict[str, Any]], answer: str) -> float:
        return float(completion[-1]["content"].strip() == answer)

    rows = [
        {
            "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, *examples, turns(entry)[0]],
            "answer": str(entry["answer"]),
            "info": {"entry": i},
        }
        for i, entry in enumerate(entries)
    ]
    held_out = shots + eval_count
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows[held_out:]),
        eval_dataset=Dataset.from_list(rows[shots:held_out]),
        rubric=vf.Rubric(funcs=[score, exact], weights=[1.0, 0.0]),
    )


def different(data: Any, most: int, any_order: bool) -> list[dict[str, Any]]:
    """The first questions that differ, at most so many. `any_order`: questions with the same
    words in another order do not."""
    found = dict[str | tuple[str, ...], dict[str, Any]]()
    for entry in data:
        question = entry["question"]
        found.setdefault(
            tuple(sorted(re.findall(r"\w+", question))) if any_order else question, entry
        )
        if len(found) == most:
            break
    return list(found.values())


def turns(entry: dict[str, Any]) -> list[dict[str, str]]:
    """Question and answer."""
    return [
        {"role": "user", "content": entry["question"]},
        {"role": "assistant", "content": str(entry["answer"])},
    ]
