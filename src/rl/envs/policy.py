"""The policy as environments see it: messages in, an answer out. Every turn is kept exactly as
it was sent and sampled."""

import time
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl.config.run import TRUNCATIONS, RendererConfig
from rl.models import probes
from rl.models.chat import Answer, Message, RendererError, Tool, assistant_message
from rl.models.renderer import Renderer, load_renderer
from rl.wire.inference_client import InferenceLostError, InferenceServers, PromptTooLongError
from rl.wire.rollouts import Cause
from rl.wire.turns import Turn, Turns
from rl.wire.worker_messages import Endpoint, PolicySpec, RenderedChat, derived_seed

SAMPLING_KEYS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "max_kept")
OVERRIDABLE = ("max_tokens", "stop", "seed")
"""Sampling parameters that an environment may set per call; not the temperature, as the trainer
scores tokens at the configured one."""
FORCED = {
    "temperature": 1.0,
    **TRUNCATIONS,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Parameters that a call cannot override -> the value if the run sets none."""
PLAIN = {"n": [1], "tool_choice": ["auto", "none"], "response_format": [{"type": "text"}]}
"""Parameters that can change the form of an answer -> the values that do not."""


class RolloutError(Exception):
    """A rollout failed for a known cause. Any other exception of an environment gets the cause
    `environment`."""

    def __init__(self, cause: Cause, message: str):
        super().__init__(message)
        self.cause: Cause = cause


TALKS: ContextVar[list[Any]] = ContextVar("TALKS")
"""What holds each episode's exchange with the policy during play, in order: `turns`, and
`messages()`, the first prompt and the messages after it. Environments append to it, so that the
caller has both when their code raises."""


class Policy:
    """The policy of a worker: either a client of our own servers (`servers`, `renderer`) or an
    `endpoint`."""

    template_fault = ""
    """What is wrong with the chat template that we render; empty if nothing seems to be."""

    def __init__(self, spec: PolicySpec, timeout_s: float):
        self.spec = spec
        self.endpoint: Endpoint | None = spec.endpoint
        if spec.endpoint is None:
            config = RendererConfig(**spec.renderer)
            self.renderer: Renderer = load_renderer(
                spec.model_path, config, trust_remote_code=spec.trust_remote_code
            )
            self.template_fault = self.renderer.fault
            self.servers = InferenceServers(
                spec.inference_urls,
                Path(spec.inference_status),
                timeout_s,
                inference_proxy=spec.inference_proxy,
            )

    def chat_for_teachers(self) -> RenderedChat | None:
        """Renders probes.CHAT, without its system message if the template refuses that; None for
        a policy that others render for."""
        if self.endpoint or self.spec.head_server:
            return None
        messages, special = probes.CHAT, self.renderer.special_ids
        try:
            return RenderedChat(messages, self.renderer.prompt_ids(messages), special)
        except RendererError:
            return RenderedChat(messages[1:], self.renderer.prompt_ids(messages[1:]), special)

    @property
    def chat(self) -> "type[Conversation]":
        """The class of its conversations in messages."""
        return Conversation

    async def sample(
        self,
        session: int,
        prompt_ids: list[int],
        sampling: dict[str, Any],
        overrides: dict[str, Any],
    ) -> Turn:
        """Samples one completion. Raises PromptTooLongError, or RolloutError if no server
        answers or one refuses the request."""
        sampling = {key: sampling[key] for key in SAMPLING_KEYS if sampling.get(key) is not None}
        sampling |= overriding(overrides)
        room = self.spec.max_model_len - len(prompt_ids)
        if room <= 0:
            raise PromptTooLongError(
                f"a prompt of {len(prompt_ids)} tokens fills model.max_model_len = "
                f"{self.spec.max_model_len}"
            )
        sampling["max_tokens"] = min(sampling.get("max_tokens", room), room)
        sampling["stop_token_ids"] = self.renderer.stop_token_ids
        if self.spec.routes:
            sampling["routes"] = True
        try:
            return await self.servers.generate(session, prompt_ids, sampling)
        except (InferenceLostError, ValueError) as error:
            raise RolloutError("inference", str(error)) from error


@dataclass
class AnsweredTurn:
    """A conversation up to and including a turn's answer."""

    index: int
    """Index of the turn in its Turns."""
    messages: list[Any]
    """As returned by `comparable`, or pieces of text; those of one conversation are the same
    objects."""
    num_prompt: int
    """Number of messages before the conversation's first answer."""
    tools: list[Tool] | None = None
    """Tools offered in this turn."""


@dataclass
class Conversation:
    """One agent's chat with the policy. Each call appends to `history` and `turns`, in order of
    the answers; several conversations may share `turns`."""

    policy: Policy
    session: int
    """As in PlayOrder."""
    sampling: dict[str, Any]
    turns: Turns = field(default_factory=Turns)
    history: list[AnsweredTurn] = field(default_factory=list)
    seed: int | None = None
    asked: int = 0
    """Number of requests so far. Each has its own seed, even several at once."""
    forced: int = 0
    """Number of requests that asked for another value of FORCED."""

    async def answer(
        self, messages: list[Message], tools: list[Tool] | None, overrides: dict[str, Any]
    ) -> tuple[Turn, Answer]:
        """The policy's answer to a chat. Raises the errors of `Policy.sample`, and RolloutError
        for an invalid chat."""
        tools = None if overrides.get("tool_choice") == "none" else tools or None
        compared = [comparable(message) for message in messages]
        try:
            before, ids = self._prompt(messages, compared, tools)
        # this model's template cannot render the environment's messages or tools
        except RendererError as error:
            raise RolloutError("environment", str(error)) from error
        turn = await self.sample(ids, overrides)
        answer = self.policy.renderer.parse(turn.completion_ids, tools, ids)
        answer = self.before_stop(answer, overrides)
        self.keep(turn, before, [*compared, comparable(assistant_message(answer))], tools)
        return turn, answer

    async def sample(self, ids: list[int], overrides: dict[str, Any]) -> Turn:
        """The policy's answer to prompt ids; in a seeded conversation, each request has its own
        seed. Raises RolloutError."""
        for name, plain in PLAIN.items():
            if (value := overrides.get(name)) not in (None, *plain):
                raise RolloutError(
                    "environment",
                    f"{name} = {value!r}: the policy gives each call one free answer: leave it out",
                )
        self.forced += any(
            overrides.get(key) not in (None, self.sampling.get(key, plain))
            for key, plain in FORCED.items()
        )
        sampling = {"max_kept": self.policy.spec.max_kept or None} | self.sampling
        if self.seed is not None:  # an evaluation, which is not trained
            sampling |= {"max_kept": None, "seed": derived_seed(self.seed, self.asked)}
        self.asked += 1
        return await self.policy.sample(self.session, ids, sampling, overrides)

    def before_stop(self, answer: Answer, overrides: dict[str, Any]) -> Answer:
        """An answer without the stop string that ended it, which OpenAI's servers leave out,
        too. The turn's tokens have it."""
        stop = overrides.get("stop") or self.sampling.get("stop") or ()
        for text in [stop] if isinstance(stop, str) else stop:
            answer = replace(answer, content=answer.content.partition(text)[0])
        return answer

    def keep(
        self,
        turn: Turn,
        before: AnsweredTurn | None,
        messages: list[Any],
        tools: list[Tool] | None = None,
    ) -> AnsweredTurn:
        """Appends an answered turn, which continues `before`."""
        if before:
            messages[: len(before.messages)] = before.messages
        num_prompt = before.num_prompt if before else len(messages) - 1
        self.history.append(AnsweredTurn(len(self.turns), messages, num_prompt, tools))
        self.turns.add(turn)
        return self.history[-1]

    def _prompt(
        self, messages: list[Message], compared: list[Message], tools: list[Tool] | None
    ) -> tuple[AnsweredTurn | None, list[int]]:
        """Returns the newest earlier conversation that the messages extend, and prompt ids that
        begin with exactly its ids; or None and freshly rendered ids if there is no such
        conversation. Raises RendererError."""
        if compared and compared[-1].get("role") == "assistant":
            raise RendererError(
                "the messages end with the assistant's words, which are not continued; add "
                "what the policy answers to"
            )
        renderer = self.policy.renderer
        for past in self.continued(compared, tools):
            before = self.turns.token_ids(past.index)
            ids = renderer.next_prompt_ids(before, messages, len(past.messages), tools)
            if ids is not None:
                return past, ids
        return None, renderer.prompt_ids(messages, tools)

    def continued(
        self, compared: list[Message], tools: list[Tool] | None
    ) -> Iterator[AnsweredTurn]:
        """Yields the earlier conversations that the messages extend, the newest first."""
        for past in reversed(self.history):
            num_known = len(past.messages)
            if (
                num_known < len(compared)
                and past.tools == tools
                and compared[:num_known] == past.messages
            ):
                yield past


def overriding(asked: dict[str, Any]) -> dict[str, Any]:
    """What a call's parameters override."""
    asked = asked | {"max_tokens": asked.get("max_completion_tokens") or asked.get("max_tokens")}
    return {key: asked[key] for key in OVERRIDABLE if asked.get(key) not in (None, [])}


def chat_completion(turn: Turn, answer: Answer, model: str) -> dict[str, Any]:
    """An answer as a chat completion of OpenAI's API."""
    finish = "tool_calls" if answer.tool_calls else "stop"
    finish = "length" if turn.finish_reason == "length" else finish
    num_prompt, num_new = len(turn.prompt_ids), len(turn.completion_ids)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": assistant_message(answer), "finish_reason": finish}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        },
    }


def comparable(message: Message) -> Message:
    """A message without what the comparison with history ignores: environments may drop
    reasoning, or name a tool's message."""
    return {
        key: value
        for key, value in message.items()
        if key not in ("reasoning_content", "name") and value not in (None, "", [])
    }
