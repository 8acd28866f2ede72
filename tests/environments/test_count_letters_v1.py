import asyncio

import pytest
import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import AssistantMessage

from tests.environments.playing import on_path

on_path("count_letters_v1")


def config(**args):
    return vf.resolve_env_config({"taskset": {"id": "count-letters-v1", **args}})


def tasks(**args) -> list[vf.Task]:
    return list(vf.load_taskset(config(**args).taskset))


def scored(task: vf.Task, reply: str) -> vf.Trace:
    """The trace of one answer, scored by the task."""
    node = MessageNode(message=AssistantMessage(content=reply), sampled=True)
    trace = vf.Trace(task=TraceTask(type="CountTask", data=task.data), agent=AgentInfo(config=config().agent), nodes=[node])
    asyncio.run(task.score(trace))
    return trace


def test_the_last_number_counts():
    task = next(task for task in tasks() if task.data.answer == 2)
    for reply, reward, has_number, words in [
        ("2", 1.0, 1.0, 1.0),
        ("There are 2.", 1.0, 1.0, 3.0),
        ("1, no, 2", 1.0, 1.0, 3.0),
        ("3", 0.0, 1.0, 1.0),
        ("12", 0.0, 1.0, 1.0),
        ("two", 0.0, 0.0, 1.0),
        ("", 0.0, 0.0, 0.0),
    ]:
        trace = scored(task, reply)
        assert trace.reward == reward, reply
        assert trace.metrics == {"has_number": has_number, "words_written": words}


def test_the_package_exports_one_taskset_and_its_answers_are_right():
    import count_letters_v1

    assert count_letters_v1.__all__ == ["CountLetters"]
    for task in tasks(split="eval"):
        letter, word = task.data.name.split(" in ")
        assert task.data.answer == word.count(letter)
        said = [message.content for message in task.data.prompt]
        assert said[:2] == ["How many 'l' are in hello?", "2"] and said[-1] == f"How many '{letter}' are in {word}?"
        assert said.count(said[-1]) == 1  # no worked example gives the answer away
    assert {task.data.answer for task in tasks()} >= {0, 1, 2}


def test_splits():
    train, held_out = ([task.data.name for task in tasks(split=split, count=1000)] for split in ("train", "eval"))
    assert len(train) > 200 and len(held_out) > 50 and len(set(train) | set(held_out)) == len(train) + len(held_out)
    assert [task.data.name for task in tasks()] == train[:200]
    assert [task.data.name for task in tasks(seed=1, split="eval", count=1000)] != held_out
    with pytest.raises(Exception, match="split"):
        config(split="test")
