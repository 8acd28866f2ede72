"""Turns for tests, with only what a test is about said in it."""

from collections.abc import Sequence
from typing import Any

from rl.wire.messages import VersionSpan
from rl.wire.rollouts import Turn


def turn(prompt: Sequence[int] = (1,), completion: Sequence[int] = (2,), version: int = 0, **changes: Any) -> Turn:
    """Returns a turn whose completion is of one policy version."""
    fields = {"logprobs": [-1.0] * len(completion), "policy_versions": [VersionSpan(version, len(completion))], "finish_reason": "stop"}
    return Turn(prompt_ids=[*prompt], completion_ids=[*completion], **fields | changes)
