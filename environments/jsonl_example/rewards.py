"""Reward functions for tasks.jsonl."""

from typing import Any


def exact(completion: list[dict[str, Any]], answer: str, **kwargs: Any) -> float:
    """1.0 if the last message is the answer and nothing else, but for white space, a final full
    stop and upper case."""
    reply = (completion[-1]["content"] or "") if completion else ""
    return float(reply.strip().removesuffix(".").casefold() == answer.strip().casefold())
