import asyncio

import pytest
import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import AssistantMessage

from tests.environments.playing import on_path

on_path("pick_word_v1")


def config(**args):
    return vf.resolve_env_config({"taskset": {"id": "pick-word-v1", **args}})


def tasks(**args):
    return list(vf.load_taskset(config(**args).taskset))


def scored(task, reply):
    """The trace of one answer, scored by the task."""
    node = MessageNode(message=AssistantMessage(content=reply), sampled=True)
    trace = vf.Trace(
        task=TraceTask(type="PickTask", data=task.data),
        agent=AgentInfo(config=config().agent),
        nodes=[node],
    )
    asyncio.run(task.score(trace))
    return trace


def test_the_word_alone_counts():
    task = tasks()[0]
    right = task.data.answer
    other = next(word for word in task.data.row if word != right)
    for reply, reward, one_of_the_row, words in [
        (right, 1.0, 1.0, 1.0),
        (f" {right.upper()}.\n", 1.0, 1.0, 1.0),
        (f"It is {right}", 0.0, 0.0, 3.0),
        (other, 0.0, 1.0, 1.0),
        (f"{right} {other}", 0.0, 0.0, 2.0),
        ("nothing", 0.0, 0.0, 1.0),
        ("", 0.0, 0.0, 0.0),
    ]:
        trace = scored(task, reply)
        assert trace.reward == reward, reply
        assert trace.metrics == {"one_of_the_row": one_of_the_row, "words_written": words}


def test_the_package_exports_one_taskset_and_its_answers_are_right():
    import pick_word_v1

    assert pick_word_v1.__all__ == ["PickWord"]
    place = {"First": 0, "Second": 1, "Third": 2, "Last": -1}
    for task in tasks(split="eval", num_words=6):
        asked = [message.content for message in task.data.prompt]
        question = asked[-1].partition(" word: ")
        assert len(asked) == 9 and task.data.row == question[2].split() and len(task.data.row) == 6
        assert task.data.answer == task.data.row[place[question[0]]]
        assert asked.count(asked[-1]) == 1  # no worked example gives the answer away


def test_splits():
    train, held_out = (
        [task.data.name for task in tasks(split=split)] for split in ("train", "eval")
    )
    assert (len(train), len(held_out)) == (300, 60) and len(set(train) | set(held_out)) == 360
    assert [task.data.name for task in tasks(count=50)] == train[:50]
    assert [task.data.name for task in tasks(seed=1, split="eval")] != held_out
    with pytest.raises(Exception, match="split"):
        config(split="test")
    with pytest.raises(ValueError, match="4 places"):
        tasks(num_words=3)
