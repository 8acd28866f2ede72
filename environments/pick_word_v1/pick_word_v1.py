"""Say which word stands at a place: a single-turn taskset of the verifiers v1 API, in one
module."""

import random
import re
from typing import Literal

import verifiers.v1 as vf

WORD_LIST = """
river stone cloud tiger plant house bread chair light music paper table water green sugar horse
lemon grape knife shirt clock truck beach storm piano apple spoon field ocean glass sheep smile
wheel brush crown night coast queen radio flame
"""
WORDS = WORD_LIST.split()
PLACES = ["first", "second", "third", "last"]
NUM_EXAMPLES = 4
"""Worked examples, as turns before the question: a small model follows these far better than
examples in one text."""


def draw(source: random.Random, place: str, num_words: int) -> tuple[str, str]:
    """A question and its answer."""
    row = source.sample(WORDS, num_words)
    return f"{place.capitalize()} word: {' '.join(row)}", row[
        -1 if place == "last" else PLACES.index(place)
    ]


def questions(count: int, seed: int, num_words: int) -> list[tuple[str, str]]:
    """Different questions and their answers, the places in turn."""
    source, found = random.Random(seed), dict[str, str]()
    while len(found) < count:
        question, answer = draw(source, PLACES[len(found) % len(PLACES)], num_words)
        found.setdefault(question, answer)
    return list(found.items())


class PickData(vf.TaskData):
    """A question and its answer."""

    answer: str
    row: list[str]


class PickTask(vf.Task[PickData, vf.State, vf.TaskConfig]):
    """Scores the reply, which has to be the word alone."""

    def said(self, trace: vf.Trace) -> list[str]:
        return re.findall(r"[a-z]+", trace.last_reply.lower())

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.said(trace) == [self.data.answer])

    @vf.metric
    async def one_of_the_row(self, trace: vf.Trace) -> float:
        said = self.said(trace)
        return float(len(said) == 1 and said[0] in self.data.row)

    @vf.metric
    async def words_written(self, trace: vf.Trace) -> float:
        return float(len(self.said(trace)))


class PickConfig(vf.TasksetConfig):
    """What `--env.taskset.*` or a trainer's arguments for the taskset may set."""

    split: Literal["train", "eval"] = "train"
    """A v1 taskset has no second data set: a trainer loads it once with each value. The two have
    no question in common."""
    count: int = 300
    eval_count: int = 60
    seed: int = 0
    """Must be the same for both splits."""
    num_words: int = 4
    """Words to choose from, at least four."""


class PickWord(vf.Taskset[PickTask, PickConfig]):
    """Which word is first, second, third or last; reward `right` (0 or 1), metrics
    `one_of_the_row` and `words_written`."""

    def load(self) -> list[PickTask]:
        own = self.config
        if not len(PLACES) <= own.num_words <= len(WORDS):
            raise ValueError(
                f"num_words = {own.num_words}: there are {len(PLACES)} places and "
                f"{len(WORDS)} words"
            )
        drawn = questions(NUM_EXAMPLES + own.eval_count + own.count, own.seed, own.num_words)
        examples, held_out = drawn[:NUM_EXAMPLES], NUM_EXAMPLES + own.eval_count
        chosen = drawn[NUM_EXAMPLES:held_out] if own.split == "eval" else drawn[held_out:]
        return [
            self.task(i, question, answer, examples) for i, (question, answer) in enumerate(chosen)
        ]

    def task(
        self, index: int, question: str, answer: str, examples: list[tuple[str, str]]
    ) -> PickTask:
        shown = [
            message
            for asked, told in examples
            for message in (vf.UserMessage(content=asked), vf.AssistantMessage(content=told))
        ]
        data = PickData(
            idx=index,
            name=question,
            system_prompt="Answer with one word only.",
            prompt=[*shown, vf.UserMessage(content=question)],
            answer=answer,
            row=question.split(": ")[1].split(),
        )
        return PickTask(data, self.config.task)


__all__ = ["PickWord"]
