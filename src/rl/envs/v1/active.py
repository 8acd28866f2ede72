"""Traces of verifiers v1 in play. Each has one conversation with the policy."""

from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from verifiers.v1 import errors

from rl.envs.policy import Conversation, RolloutError
from rl.models.chat import Answer, Message
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
            raise OverlongPromptError(f"context length exceeded: {error}", status_code=400) from error
        except RolloutError as error:
            raise self.fail(error) from error

    def fail(self, error: RolloutError) -> vf.ProviderError:
        """Records the cause. SDKs do not retry the status 400: our own client has already retried what it can."""
        self.failure = error.cause
        return vf.ProviderError(str(error), status_code=400)
