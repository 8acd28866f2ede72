"""Count a letter in a word: a single-turn taskset of the verifiers v1 API, in one module."""

import random
import re
from typing import Literal

import verifiers.v1 as vf

WORD_LIST = """
banana apple cherry orange lemon coffee butter pepper cheese tomato potato carrot cookie pizza salad bottle kitchen window garden flower
summer winter spring autumn yellow purple silver golden letter number pencil school teacher student mirror ladder hammer basket pillow
rabbit kitten puppy giraffe parrot beetle spider turtle dragon castle bridge tunnel island valley meadow river forest desert ocean
"""
WORDS = WORD_LIST.split()
HELD_OUT_EVERY = 5
EXAMPLES = [("l", "hello"), ("o", "dog"), ("e", "sleep"), ("z", "house"), ("p", "puppet")]
"""Worked examples, as turns before the question: a small model follows these far better than examples in one text."""


def questions() -> list[tuple[str, str]]:
    """Every word with each of its letters, and with one that it lacks, so that 0 is an answer too."""
    pairs = []
    for i, word in enumerate(WORDS):
        absent = [letter for letter in "aeiourstln" if letter not in word]
        pairs += [(letter, word) for letter in [*dict.fromkeys(word), absent[i % len(absent)]]]
    return pairs


def ask(letter: str, word: str) -> vf.UserMessage:
    return vf.UserMessage(content=f"How many '{letter}' are in {word}?")


def answer(letter: str, word: str) -> int:
    return word.count(letter)


class CountData(vf.TaskData):
    """A question and its answer."""

    answer: int


class CountTask(vf.Task[CountData, vf.State, vf.TaskConfig]):
    """Scores the last number of the reply."""

    def number_in(self, trace: vf.Trace) -> int | None:
        numbers = re.findall(r"\d{1,3}", trace.last_reply)
        return int(numbers[-1]) if numbers else None

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.number_in(trace) == self.data.answer)

    @vf.metric
    async def has_number(self, trace: vf.Trace) -> float:
        return float(self.number_in(trace) is not None)

    @vf.metric
    async def words_written(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.split()))


class CountConfig(vf.TasksetConfig):
    """What `--env.taskset.*` or a trainer's arguments for the taskset may set."""

    split: Literal["train", "eval"] = "train"
    """Which questions: "eval" is every fifth of the shuffled ones, "train" the others. A v1 taskset has no second data set:
    a trainer loads it once with each value."""
    count: int = 200
    """At most so many tasks."""
    seed: int = 0
    """Another seed shuffles differently and so holds out other questions; it must be the same for both splits."""


class CountLetters(vf.Taskset[CountTask, CountConfig]):
    """How often a letter occurs in a word; reward `right` (0 or 1), metrics `has_number` and `words_written`."""

    def load(self) -> list[CountTask]:
        pairs = questions()
        random.Random(self.config.seed).shuffle(pairs)
        held_out = self.config.split == "eval"
        chosen = [pair for i, pair in enumerate(pairs) if (i % HELD_OUT_EVERY == 0) == held_out]
        return [self.task(i, letter, word) for i, (letter, word) in enumerate(chosen[: self.config.count])]

    def task(self, index: int, letter: str, word: str) -> CountTask:
        prompt = [message for example in EXAMPLES for message in (ask(*example), vf.AssistantMessage(content=str(answer(*example))))]
        data = CountData(
            idx=index,
            name=f"{letter} in {word}",
            system_prompt="Count the letter in the word. Answer with the number only.",
            prompt=[*prompt, ask(letter, word)],
            answer=answer(letter, word),
        )
        return CountTask(data, self.config.task)


__all__ = ["CountLetters"]
