"""Sort items over several turns: each turn brings new ones and asks for everything so far,
merged and sorted."""

import random
import re

import verifiers as vf
from datasets import Dataset

WORD_LIST = """
apple arrow badge bread cabin chalk daisy eagle earth fence flame glove grape hazel honey ivory
jelly kayak knife lemon light maple mouse night north ocean olive pearl piano queen quilt river
robin salad stone tiger torch uncle under vapor viola wagon whale yacht yield zebra bird cake desk
fish gold hand iron jump king lamp moon nest oven park rain sand tree vase wolf
"""
WORDS = WORD_LIST.split()
EXAMPLE = {
    "words": (("pig", "bus", "hat"), ("cow", "sun", "art")),
    "numbers": (("52", "8", "31"), ("17", "64", "40")),
}
Turns = tuple[tuple[str, ...], ...]
"""The new items of every turn."""
WORD_OR_NUMBER = re.compile(r"[a-z]+|\d+")


def in_order(items: list[str]) -> list[str]:
    """Numbers by value, words by the alphabet."""
    return sorted(items, key=lambda item: (int(item) if item.isdigit() else 0, item))


def random_turns(rng: random.Random, kind: str, num_turns: int, items_per_turn: int) -> Turns:
    """Different items for every turn."""
    pool = WORDS if kind == "words" else [str(number) for number in range(1, 100)]
    drawn = rng.sample(pool, num_turns * items_per_turn)
    return tuple(
        tuple(drawn[turn * items_per_turn : (turn + 1) * items_per_turn])
        for turn in range(num_turns)
    )


def distinct_tasks(
    number: int, kind: str, num_turns: int, items_per_turn: int, seed: int
) -> list[Turns]:
    """So many tasks, of which no two begin alike."""
    rng = random.Random(seed)
    tasks: dict[tuple[str, ...], Turns] = {}
    for _ in range(20 * number):
        turns = random_turns(rng, kind, num_turns, items_per_turn)
        tasks.setdefault(turns[0], turns)
        if len(tasks) == number:
            return list(tasks.values())
    raise ValueError(
        f"only {len(tasks)} of {number} different tasks were found; lower count or "
        "eval_count, or raise items_per_turn"
    )


def questions(kind: str, turns: Turns) -> list[str]:
    how = "in alphabetical order" if kind == "words" else "from small to large"
    first = f"Sort these {kind} {how}: {', '.join(turns[0])}"
    return [
        first,
        *(f"Add these and sort all {kind} {how}: {', '.join(items)}" for items in turns[1:]),
    ]


def answers(turns: Turns) -> list[str]:
    """The sorted list after every turn."""
    return [
        ", ".join(in_order([item for turn in turns[: i + 1] for item in turn]))
        for i in range(len(turns))
    ]


def example(kind: str, num_turns: int) -> list[dict[str, str]]:
    """A solved task of at most two turns, as messages of the prompt."""
    turns = EXAMPLE[kind][:num_turns]
    return [
        {"role": role, "content": content}
        for question, answer in zip(questions(kind, turns), answers(turns), strict=True)
        for role, content in (("user", question), ("assistant", answer))
    ]


def row(kind: str, turns: Turns) -> dict:
    """A data set row: `answers` has the sorted list after every turn, `later` the questions
    after the first."""
    first, *later = questions(kind, turns)
    return {
        "question": first,
        "answer": answers(turns)[-1],
        "info": {"later": later, "answers": answers(turns)},
    }


def common_length(first: list[str], second: list[str]) -> int:
    """Length of the longest subsequence of items that both have."""
    lengths = [0] * (len(second) + 1)
    for item in first:
        above_left = 0
        for i, other in enumerate(second, start=1):
            above = lengths[i]
            lengths[i] = above_left + 1 if item == other else max(above, lengths[i - 1])
            above_left = above
    return lengths[-1]


def turn_score(reply: str, answer: str) -> float:
    """1.0 for exactly the items of the answer in their order; missing, misplaced and additional
    items cost."""
    got, wanted = WORD_OR_NUMBER.findall(reply.lower()), WORD_OR_NUMBER.findall(answer)
    return 2 * common_length(wanted, got) / (len(wanted) + len(got))


def turn_scores(completion: list, info: dict) -> list[float]:
    """A score for every turn that should have been played, 0.0 for those that were not."""
    replies = [message["content"] or "" for message in completion if message["role"] == "assistant"]
    scores = [
        turn_score(reply, answer) for reply, answer in zip(replies, info["answers"], strict=False)
    ]
    return scores + [0.0] * (len(info["answers"]) - len(scores))


def sortedness(completion: list, info: dict) -> float:
    """The mean score of the turns."""
    scores = turn_scores(completion, info)
    return sum(scores) / len(scores)


def share_exact(completion: list, info: dict) -> float:
    """The share of turns without any fault."""
    scores = turn_scores(completion, info)
    return sum(score == 1.0 for score in scores) / len(scores)


def last_turn(completion: list, info: dict) -> float:
    """The score of the longest list, the last."""
    return turn_scores(completion, info)[-1]


class SortWords(vf.MultiTurnEnv):
    """Asks the prepared questions one after the other, whatever the answers are."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        return [vf.UserMessage(content=state["info"]["later"][len(state["trajectory"]) - 1])]


def load_environment(
    num_turns: int = 2,
    items_per_turn: int = 3,
    kind: str = "words",
    count: int = 160,
    eval_count: int = 40,
    seed: int = 0,
) -> vf.Environment:
    """Sort and merge lists; reward `sortedness` (0 to 1, the mean over turns), metrics
    `share_exact` and `last_turn`.

    Args:
        num_turns: questions of a rollout, at least 1.
        items_per_turn: new items that each question brings.
        kind: "words" or "numbers".
        count: number of tasks to train on.
        eval_count: number of tasks held out for evaluation; no training task begins with the same items in the same order.
        seed: another seed gives other tasks.
    """
    if kind not in EXAMPLE:
        raise ValueError(f"kind = {kind!r}; use one of {', '.join(EXAMPLE)}")
    tasks = [
        row(kind, turns)
        for turns in distinct_tasks(eval_count + count, kind, num_turns, items_per_turn, seed)
    ]
    rubric = vf.Rubric(funcs=[sortedness])
    rubric.add_metric(share_exact)
    rubric.add_metric(last_turn)
    return SortWords(
        dataset=Dataset.from_list(tasks[eval_count:]),
        eval_dataset=Dataset.from_list(tasks[:eval_count]),
        rubric=rubric,
        few_shot=example(kind, num_turns),
        max_turns=num_turns,
    )
