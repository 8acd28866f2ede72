import threading
import time

import pytest

from rl.system.errors import RunError
from rl.trainer.store.threads import SingleTaskThread


def test_what_a_disk_does_not_give_in_time_ends_the_wait():
    reading, answers = SingleTaskThread(), threading.Event()
    reading.start(answers.wait, 60)
    with pytest.raises(RunError, match=r"waited 0 s for x to be read") as late:
        reading.result("x to be read", 0.05)
    # a line in the log in place of a traceback, and another start
    assert reading.busy and late.value.exit_code == 1
    answers.set()


def test_a_result_or_an_error_comes_once():
    background = SingleTaskThread()
    assert not background.busy and background.result("nothing", 5) is None
    background.start(int, "7")
    assert background.busy and background.result("y", 5) == 7
    background.raise_errors()
    background.start(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        while True:
            background.raise_errors()
            time.sleep(0.01)
    background.raise_errors()
    assert not background.busy and background.result("y", 5) is None


def test_whose_result_is_not_taken_starts_nothing():
    background = SingleTaskThread()
    background.start(int, "7")
    with pytest.raises(AssertionError, match="work in progress"):
        background.start(int, "8")
