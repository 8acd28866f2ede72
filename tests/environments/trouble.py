"""Test environment whose task 1 does something that no environment should; its other tasks
answer at once."""

import os
import threading
import time

import verifiers as vf
from datasets import Dataset


def misbehave(how: str) -> None:
    if how == "exit":
        exit()
    if how in ("crash", "poison"):
        os.abort()
    if how == "sleep":
        time.sleep(1e6)
    if how == "thread":
        threading.Thread(target=threading.Event().wait).start()
    if how == "memory":
        hoard.append(bytearray(2 * 2**30))
        time.sleep(1)


hoard: list[bytearray] = []


def load_environment(how: str = "") -> vf.Environment:
    def reward(answer) -> float:
        if answer == "1" or how == "poison":
            misbehave(how)
        return float(answer)

    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(6)]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        rubric=vf.Rubric(funcs=[reward]),
    )
