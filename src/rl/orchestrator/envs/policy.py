"""What environments sample from: messages in, an answer out, and every turn kept exactly as it was sent and sampled."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.orchestrator.inference_client import InferenceLostError, InferenceServers, PromptTooLongError
from rl.orchestrator.rollouts import Endpoint, PolicySpec, Turn
from rl.renderer import Answer, Message, Renderer, Tool, load_renderer
from rl.renderer_config import RendererConfig

SAMPLING_KEYS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed")
OVERRIDABLE = ("max_tokens", "stop", "seed")
"""What an environment may set for a call. Not the temperature: the trainer scores a rollout's tokens at the one configured."""


class OverlongError(Exception):
    """The prompt leaves no room for an answer in the model's context."""


class NotAppendOnlyError(Exception):
    """A prompt rewrites what the policy saw or said before, and enforce_monotonicity forbids that."""


def compared(message: Message) -> Message:
    """A message as it is compared with history. Environments may drop reasoning, or name a tool's message, and still mean the same."""
    return {key: value for key, value in message.items() if key not in ("reasoning_content", "name") and value not in (None, "", [])}


@dataclass
class Seen:
    """What a turn covers, and what it was offered."""

    messages: list[Message]
    text: str
    tools: list[Tool] | None
    turn: Turn


class Policy:
    """The policy of a worker. Exactly one of our servers' client (`servers`, `renderer`) and `endpoint` is set."""

    def __init__(self, spec: PolicySpec, timeout_s: float):
        self.spec = spec
        self.endpoint: Endpoint | None = spec.endpoint
        self.max_model_len = spec.max_model_len
        if spec.endpoint is None:
            self.renderer: Renderer = load_renderer(spec.model_path, RendererConfig(**spec.renderer), spec.chat_template)
            self.servers = InferenceServers(spec.inference_urls, Path(spec.inference_status), timeout_s)

    def conversation(self, server: int, sampling: dict[str, Any]) -> "Conversation":
        return Conversation(self, server, sampling)

    async def close(self) -> None:
        if self.endpoint is None:
            await self.servers.close()


@dataclass
class Conversation:
    """One agent's talk with the policy. `turns` grows by one a call, in the order in which the answers came."""

    policy: Policy
    server: int
    sampling: dict[str, Any]
    seen: list[Seen] = field(default_factory=list)

    @property
    def turns(self) -> list[Turn]:
        return [entry.turn for entry in self.seen]

    async def answer(self, messages: list[Message], tools: list[Tool] | None = None, **overrides: Any) -> tuple[Turn, Answer]:
        """The policy's answer to a chat. Raises OverlongError, NotAppendOnlyError, InferenceLostError, RendererError."""
        tools = tools or None
        ids = self._continued(messages, tools)
        if ids is None:
            self._check_append_only()
            ids = self.policy.renderer.prompt_ids(messages, tools)
        turn = await self._sample(ids, overrides)
        answer = self.policy.renderer.parse(turn.completion_ids, tools, ids)
        said = assistant_message(answer)
        self.seen.append(Seen([compared(message) for message in [*messages, said]], "", tools, turn))
        return turn, answer

    async def complete(self, text: str, **overrides: Any) -> tuple[Turn, str]:
        """The policy's continuation of a plain text. Raises as `answer` does."""
        renderer = self.policy.renderer
        for entry in reversed(self.seen):
            if entry.text and text.startswith(entry.text):
                ids = entry.turn.prompt_ids + entry.turn.completion_ids + renderer.encode(text[len(entry.text) :])
                break
        else:
            self._check_append_only()
            ids = renderer.encode(text)
        turn = await self._sample(ids, overrides)
        said = renderer.decode(turn.completion_ids)
        self.seen.append(Seen([], text + said, None, turn))
        return turn, said

    def _continued(self, messages: list[Message], tools: list[Tool] | None) -> list[int] | None:
        """Continues the newest earlier turn whose conversation this prompt extends, id for id; None if there is none."""
        asked = [compared(message) for message in messages]
        for entry in reversed(self.seen):
            known = len(entry.messages)
            if 0 < known < len(asked) and entry.tools == tools and asked[:known] == entry.messages:
                before = entry.turn.prompt_ids + entry.turn.completion_ids
                ids = self.policy.renderer.next_prompt_ids(before, messages, known, tools)
                if ids is not None:
                    return ids
        return None

    def _check_append_only(self) -> None:
        if self.seen and self.policy.spec.enforce_monotonicity:
            raise NotAppendOnlyError(
                f"turn {len(self.seen) + 1} does not continue an earlier turn's token ids, and orchestrator.enforce_monotonicity is set; "
                'see renderer.thinking_retention = "all", or unset it: then such a turn starts a new sample'
            )

    async def _sample(self, ids: list[int], overrides: dict[str, Any]) -> Turn:
        sampling = {key: self.sampling[key] for key in SAMPLING_KEYS if self.sampling.get(key) is not None}
        sampling |= {key: overrides[key] for key in OVERRIDABLE if overrides.get(key) is not None}
        room = self.policy.max_model_len - len(ids)
        if room <= 0:
            raise OverlongError(f"a prompt of {len(ids)} tokens fills model.max_model_len = {self.policy.max_model_len}")
        sampling["max_tokens"] = min(sampling.get("max_tokens", room), room)
        sampling["stop_token_ids"] = self.policy.renderer.stop_token_ids
        try:
            answer = await self.policy.servers.generate(self.server, ids, sampling)
        except PromptTooLongError as error:
            raise OverlongError(str(error)) from error
        return Turn(
            prompt_ids=ids,
            completion_ids=answer.token_ids,
            logprobs=answer.logprobs,
            policy_versions=answer.policy_versions,
            finish_reason=answer.finish_reason,
        )


def assistant_message(answer: Answer) -> Message:
    """An answer in the wire form of chat APIs."""
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        calls = answer.tool_calls
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
        ]
    return message


__all__ = ["Conversation", "InferenceLostError", "NotAppendOnlyError", "OverlongError", "Policy", "assistant_message"]
