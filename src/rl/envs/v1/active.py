"""Traces of verifiers v1 in play. Each has one conversation with the policy, whichever way its calls arrive."""

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
"""Stop condition of a trace whose prompt leaves no room for an answer: the name in verifiers 0.3; 0.4 has no such condition."""
OverlongPromptError: type[vf.ProviderError] = getattr(errors, "OverlongPromptError", vf.ProviderError)
"""Makes verifiers 0.3 end a rollout as if by a limit; 0.4 tolerates any error once the trace is stopped."""


@dataclass
class ActiveTrace:
    """One trace in play: its conversation (None with an endpoint), and the cause if its last call failed."""

    trace: vf.Trace
    conversation: Conversation | None
    failure: Cause | None = None

    async def answer(self, messages: list[Message], body: dict[str, Any]) -> tuple[Turn, Answer]:
        """Plays one turn. `body` has the tools and the sampling parameters that the harness and the agent's config ask for; the
        conversation has the run's. Raises vf.ProviderError."""
        assert self.conversation
        self.failure = None
        overrides = body | {"max_tokens": body.get("max_tokens") or body.get("max_completion_tokens")}
        try:
            return await self.conversation.answer(messages, body.get("tools"), overrides)
        except PromptTooLongError as error:
            self.trace.stop(OVERLONG)
            # Over HTTP, verifiers 0.3 recognises it by the first words.
            raise OverlongPromptError(f"context length exceeded: {error}", status_code=400) from error
        except RolloutError as error:
            raise self.fail(error) from error

    def fail(self, error: RolloutError) -> vf.ProviderError:
        """Records the cause. SDKs do not retry the status 400: our own client has already retried what it can."""
        self.failure = error.cause
        return vf.ProviderError(str(error), status_code=400)


def not_chat(what: str) -> RolloutError:
    problem = f"the harness uses {what}, but the policy answers chat completions only; configure another harness"
    return RolloutError("environment", problem)


def completion(turn: Turn, answer: Answer, model: str) -> dict[str, Any]:
    """An answer as a chat completion of OpenAI's API."""
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
