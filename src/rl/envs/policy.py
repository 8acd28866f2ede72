"""What environments sample from: messages in, an answer out, and every turn kept exactly as it was sent and sampled."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from rl.config.run import RendererConfig
from rl.models.chat import Answer, Message, RendererError, Tool, assistant_message
from rl.models.renderer import load_renderer
from rl.models.template import Renderer
from rl.wire.inference_client import InferenceLostError, InferenceServers, PromptTooLongError
from rl.wire.rollouts import Cause
from rl.wire.turns import Turn, Turns
from rl.wire.worker_messages import Endpoint, PolicySpec

SAMPLING_KEYS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed")
OVERRIDABLE = ("max_tokens", "stop", "seed")
"""What an environment may set for a call. Not the temperature: the trainer scores a rollout's tokens at the one configured."""


class RolloutError(Exception):
    """A rollout failed for a known cause; anything else that an environment raises has the cause `environment`."""

    def __init__(self, cause: Cause, message: str):
        super().__init__(message)
        self.cause: Cause = cause


class Talk(Protocol):
    """What an episode asks of the policy while it is played."""

    turns: Turns

    def messages(self) -> tuple[list[Message], list[Message]]:
        """A conversation as far as it came: its first prompt, and what followed."""


TALKS: ContextVar[list[Talk]] = ContextVar("TALKS")
"""Where an environment puts the talk of each episode, in their order: who plays it has them when the environment's code raises."""


class Policy:
    """The policy of a worker. Exactly one of our servers' client (`servers`, `renderer`) and `endpoint` is set."""

    def __init__(self, spec: PolicySpec, timeout_s: float):
        self.spec = spec
        self.endpoint: Endpoint | None = spec.endpoint
        if spec.endpoint is None:
            config = RendererConfig(**spec.renderer)
            self.renderer: Renderer = load_renderer(spec.model_path, config, slim=spec.tokenizer, trust_remote_code=spec.trust_remote_code)
            self.servers = InferenceServers(spec.inference_urls, Path(spec.inference_status), timeout_s, relay=spec.relay)

    async def sample(self, server: int, prompt_ids: list[int], sampling: dict[str, Any], overrides: dict[str, Any]) -> Turn:
        """One completion of a prompt. Raises PromptTooLongError, and RolloutError if no server answers or one refuses the request."""
        sampling = {key: sampling[key] for key in SAMPLING_KEYS if sampling.get(key) is not None}
        sampling |= {key: overrides[key] for key in OVERRIDABLE if overrides.get(key) is not None}
        room = self.spec.max_model_len - len(prompt_ids)
        if room <= 0:
            raise PromptTooLongError(f"a prompt of {len(prompt_ids)} tokens fills model.max_model_len = {self.spec.max_model_len}")
        sampling["max_tokens"] = min(sampling.get("max_tokens", room), room)
        sampling["stop_token_ids"] = self.renderer.stop_token_ids
        try:
            answer = await self.servers.generate(server, prompt_ids, sampling)
        except (InferenceLostError, ValueError) as error:
            raise RolloutError("inference", str(error)) from error
        return Turn(
            prompt_ids=prompt_ids,
            completion_ids=answer.token_ids,
            logprobs=answer.logprobs,
            policy_versions=answer.policy_versions,
            finish_reason=answer.finish_reason,
        )

    def check_append_only(self, num_turns: int) -> None:
        """Called for a prompt that continues none of `num_turns` earlier turns. Raises RolloutError if that is forbidden."""
        if num_turns and self.spec.enforce_monotonicity:
            raise RolloutError(
                "not_append_only",
                f"turn {num_turns + 1} does not continue an earlier turn's token ids, and orchestrator.enforce_monotonicity is set; "
                'see renderer.thinking_retention = "all", or unset it: then such a turn starts a new sample',
            )


@dataclass
class Past:
    """A conversation up to and including a turn's answer. It refers to the one that it continues, so that it holds only what is new."""

    index: int
    """Place of the turn in its Turns."""
    before: "Past | None"
    added: list[Any]
    """Messages in the form of `comparable`, or pieces of text."""
    tools: list[Tool] | None = None
    """Those that the turn was offered."""

    @property
    def num_prompt(self) -> int:
        """Messages before the conversation's first answer."""
        past = self
        while past.before:
            past = past.before
        return len(past.added) - 1

    def whole(self) -> list[Any]:
        """The conversation from its beginning."""
        parts, past = [], self
        while past:
            parts.append(past.added)
            past = past.before
        return list(chain.from_iterable(reversed(parts)))


@dataclass
class Conversation:
    """One agent's chat with the policy. `history` grows by one a call, in the order in which the answers came; so do the `turns`, which
    several conversations may share."""

    policy: Policy
    server: int
    """The session at the inference servers; see PlayGroup."""
    sampling: dict[str, Any]
    turns: Turns = field(default_factory=Turns)
    history: list[Past] = field(default_factory=list)

    async def answer(self, messages: list[Message], tools: list[Tool] | None, overrides: dict[str, Any]) -> tuple[Turn, Answer]:
        """The policy's answer to a chat. Raises what `Policy.sample` raises."""
        tools, compared = tools or None, [comparable(message) for message in messages]
        try:
            before, ids = self._prompt(messages, compared, tools)
        except RendererError as error:  # the environment's messages or tools are nothing that this model's template can show
            raise RolloutError("environment", str(error)) from error
        turn = await self.policy.sample(self.server, ids, self.sampling, overrides)
        answer = self.policy.renderer.parse(turn.completion_ids, tools, ids)
        num_old = len(before.whole()) if before else 0
        added = [*compared[num_old:], comparable(assistant_message(answer))]
        self.history.append(Past(len(self.turns), before, added, tools))
        self.turns.add(turn)
        return turn, answer

    def _prompt(self, messages: list[Message], compared: list[Message], tools: list[Tool] | None) -> tuple[Past | None, list[int]]:
        """Prompt ids that continue, id for id, the newest earlier turn whose conversation the messages extend, and that conversation;
        without one, None and ids that are rendered anew."""
        for past in reversed(self.history):
            known = past.whole()
            if len(known) < len(compared) and past.tools == tools and compared[: len(known)] == known:
                ids = self.policy.renderer.next_prompt_ids(self.turns.token_ids(past.index), messages, len(known), tools)
                if ids is not None:
                    return past, ids
        self.policy.check_append_only(len(self.history))
        return None, self.policy.renderer.prompt_ids(messages, tools)


def comparable(message: Message) -> Message:
    """A message as it is compared with history. Environments may drop reasoning, or name a tool's message, and still mean the same."""
    return {key: value for key, value in message.items() if key not in ("reasoning_content", "name") and value not in (None, "", [])}
