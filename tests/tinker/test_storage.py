"""A log of calls: durable before it is acknowledged, readable after a kill."""

import asyncio
import threading

import pytest

from rl.run_dir.files import CorruptFileError
from rl.tinker.storage import CallAnswer, CallLog, ClientCall


def test_calls_and_answers_are_there_again_and_a_torn_record_is_not(tmp_path):
    async def fill(log):
        await asyncio.gather(
            *(log.add(ClientCall(number, "x", bytes([number]) * 9)) for number in (2, 1, 1, 3))
        )
        log.answer(CallAnswer(2, b"two"))
        log.answer(CallAnswer(2, b"again"))

    path = tmp_path / "calls.log"
    log = CallLog(path)
    asyncio.run(fill(log))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:30])
    again = CallLog(path)
    assert sorted(again.calls) == [1, 2, 3]
    assert again.answer_of(2).body == b"two"
    assert again.call_of(3).body == b"\3" * 9
    assert path.read_bytes() == whole
    path.write_bytes(whole[:40] + b"?" + whole[41:])
    with pytest.raises(CorruptFileError, match="damaged"):
        CallLog(path)


def test_calls_and_answers_that_two_threads_write_are_each_where_it_says(tmp_path):
    """Calls come in the event loop, answers from the trainer's thread. Regression: one was taken
    for the other, or for neither."""
    log = CallLog(tmp_path / "calls.log")

    def answers():
        for number in range(400):
            log.answer(CallAnswer(number, b"a" * (number % 7)))

    async def calls():
        for number in range(400):
            log._write(ClientCall(number, "k", b"c" * (number % 11)))

    thread = threading.Thread(target=answers)
    thread.start()
    asyncio.run(calls())
    thread.join()
    for found in (log, CallLog(tmp_path / "calls.log")):
        assert [len(found.answer_of(number).body) for number in range(400)] == [
            number % 7 for number in range(400)
        ]
        assert [len(found.call_of(number).body) for number in range(400)] == [
            number % 11 for number in range(400)
        ]
