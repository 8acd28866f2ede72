"""Traces of verifiers v1 while they are played: each has one conversation with the policy, by whatever way its calls come."""

import time
import uuid
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from verifiers.v1 import errors

from rl.envs.policy import Conversation, RolloutError
from rl.models.chat import Answer, Message, assistant_message
from rl.wire.inference_client import PromptTooLongError
from rl.wire.rollouts import Cause, Turn

OVERLONG = "context_length"
"""Stop condition of a trace whose prompt leaves no room for an answer: verifiers 0.3 names it so, 0.4 has none."""
OverlongPromptError: type[vf.ProviderError] = getattr(errors, "OverlongPromptError", vf.ProviderError)
"""What ends a rollout of verifiers 0.3 as a limit does; 0.4 takes no error amiss once the trace is stopped."""


@dataclass
class ActiveTrace:
    """One trace while it is played: its conversation (None with an endpoint), and the cause if its last call failed."""

    trace: vf.Trace
    conversation: Conversation | None
    failure: Cause | None = None

    async def answer(self, messages: list[Message], body: dict[str, Any]) -> tuple[Turn, Answer]:
        """One turn. `body` has the tools, and the sampling that the harness and the agent's config ask for; the conversation has the
        run's. Raises vf.ProviderError."""
        assert self.conversation
        self.failure = None
        overrides = body | {"max_tokens": body.get("max_tokens") or body.get("max_completion_tokens")}
        try:
            return await self.conversation.answer(messages, body.get("tools"), overrides)
        except PromptTooLongError as error:
            self.trace.stop(OVERLONG)
            # Over HTTP verifiers 0.3 knows it by the words in front.
            raise OverlongPromptError(f"context length exceeded: {error}", status_code=400) from error
        except RolloutError as error:
            raise self.fail(error) from error

    def fail(self, error: RolloutError) -> vf.ProviderError:
        """Records the cause. The status is one that SDKs do not retry: our own client has retried what can be."""
        self.failure = error.cause
        return vf.ProviderError(str(error), status_code=400)


def not_chat(what: str) -> RolloutError:
    problem = f"the harness uses {what}, the policy answers chat completions only; configure another harness"
    return RolloutError("environment", problem)


def completion(turn: Turn, answer: Answer, model: str) -> dict[str, Any]:
    """An answer as chat APIs give it."""
    finish = "length" if turn.finish_reason == "length" else "tool_calls" if answer.tool_calls else "stop"
    num_prompt, num_new = len(turn.prompt_ids), len(turn.completion_ids)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": model,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": assistant_message(answer), "finish_reason": finish}],
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new},
    }
