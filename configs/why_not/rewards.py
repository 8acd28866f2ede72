"""Reward functions of docs/why_not.md. Two of them are wrong on purpose."""

import re


def boxed(completion: list, answer: str) -> float:
    """Wrong: no prompt asks for a box, so the model never writes one."""
    found = re.findall(r"\\boxed\{(.*?)\}", completion[-1]["content"])
    return float(bool(found) and found[-1] == answer)


def present(completion: list) -> float:
    """Wrong: a completion is a list of messages, which is never empty."""
    return 0.5 if completion else 0.0


def last_line(completion: list, answer: str) -> float:
    """1.0 if the last line of the reply is the answer."""
    return float(completion[-1]["content"].strip().rpartition("\n")[2] == answer)
