"""NeMo Gym's model server as the policy of an environment that NeMo Gym's programs play (`rl env
--serve-gym`): messages in, and token ids and log-probabilities out if it is configured to return
them. Earlier answers go back to it as they came, token ids included, so that a server that
splices them (ours does) continues the very ids that it sampled."""

import json
from dataclasses import dataclass, field
from typing import Any

from rl.envs.nemo_gym.head import Head
from rl.envs.nemo_gym.wire import as_turn
from rl.envs.policy import Conversation, Policy, RolloutError, comparable, overriding
from rl.models.chat import THINK, THINK_END, Answer, Message, Tool, ToolCall, assistant_message
from rl.system.errors import RunError
from rl.wire.inference_client import PromptTooLongError
from rl.wire.turns import Turn
from rl.wire.worker_messages import PolicySpec

UNKNOWN = 0
"""Policy version of a token sampled by a server that does not tell."""


class GymPolicy(Policy):
    """The model server of the agent `name` at a head server. It has no renderer: NeMo Gym's
    model server renders."""

    def __init__(self, spec: PolicySpec, name: str):
        self.spec, self.endpoint, self.name = spec, None, name
        self.head = Head(spec.head_server)

    @property
    def chat(self) -> "type[Conversation]":
        return GymConversation

    def __getattr__(self, name: str) -> Any:
        needed = (
            "NeMo Gym's model server answers chats only, but this environment asks in "
            f"completion style (it needs a {name})"
        )
        raise (
            RolloutError("environment", needed)
            if name in ("renderer", "servers")
            else AttributeError(name)
        )

    def url(self) -> str:
        """The address that answers chats. Raises RolloutError."""
        agent = self.head.agents.get(self.name)
        if agent is None or not agent.model_url:
            lacks = (
                f"has no agent {self.name}"
                if agent is None
                else f"has no address of the model server of agent {self.name}"
            )
            raise RolloutError(
                "inference",
                f"{self.head.url} {lacks}: start ng_run with the entry that `rl env "
                "--serve-gym` printed",
            )
        return f"{agent.model_url}/v1/chat/completions"

    async def ask(self, body: dict[str, Any], cookies: dict[str, str]) -> dict[str, Any]:
        """Returns the first choice of an answer. Raises PromptTooLongError and RolloutError."""
        if self.name not in self.head.agents:
            try:
                await self.head.discover()
            except RunError as error:
                raise RolloutError("inference", str(error)) from error
        text = await self.head.post(self.url, body, "inference", cookies)
        try:
            reply = json.loads(text)
            choice, message = reply["choices"][0], reply["choices"][0]["message"]
            is_empty = not (message.get("content") or message.get("tool_calls"))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RolloutError(
                "inference", f"{self.url()} answered without choices[0].message: {text[:500]}"
            ) from error
        # so it says that vLLM refused the prompt
        if is_empty and choice.get("finish_reason") == "length" and not reply.get("usage"):
            raise PromptTooLongError(
                "the prompt leaves no room for max_output_tokens in the model's context"
            )
        return choice


@dataclass
class GymConversation(Conversation):
    """A chat whose earlier answers are sent as they came."""

    policy: GymPolicy
    came: dict[int, dict[int, Message]] = field(default_factory=dict)
    """For each turn, by its index: the answers up to it, by their places in the conversation."""
    cookies: dict[str, str] = field(default_factory=dict)
    """NeMo Gym's session: one of several policy servers answers the whole conversation, for its
    prefix cache."""

    async def answer(
        self, messages: list[Message], tools: list[Tool] | None, overrides: dict[str, Any]
    ) -> tuple[Turn, Answer]:
        """The policy's answer to a chat. Raises PromptTooLongError and RolloutError."""
        tools, compared = tools or None, [comparable(message) for message in messages]
        before = next(self.continued(compared, tools), None)
        earlier = self.came[before.index] if before else {}
        sampling = self.sampling | overriding(overrides)
        body = {key: value for key, value in sampling.items() if value is not None}
        body |= {"messages": sent(messages, earlier)} | ({"tools": tools} if tools else {})
        choice = await self.policy.ask(body, self.cookies)
        message = choice["message"]
        turn, answer = (
            as_turn(message, UNKNOWN, finish_reason=choice.get("finish_reason") or "stop"),
            as_answer(message),
        )
        said = comparable(assistant_message(answer))
        past = self.keep(turn, before, [*compared, said], tools)
        # Without null fields: NeMo Gym takes a message with `routed_experts: null` for one without
        # tokens.
        raw = {key: value for key, value in message.items() if value is not None}
        self.came[past.index] = earlier | {len(messages): raw}
        return turn, answer


def sent(messages: list[Message], earlier: dict[int, Message]) -> list[Message]:
    """Returns messages, with `earlier` answers as they came. Reasoning is in the text, as NeMo
    Gym has it."""
    result = []
    for place, message in enumerate(messages):
        message = dict(message)
        if thought := message.pop("reasoning_content", None):
            message["content"] = f"{THINK}{thought}{THINK_END}{message['content'] or ''}"
        result.append(earlier.get(place, message))
    return result


def as_answer(message: Message) -> Answer:
    """A message as an answer, whose reasoning NeMo Gym has in think tags at the start of the
    text."""
    content, reasoning = message.get("content") or "", None
    if content.startswith(THINK) and THINK_END in content:
        reasoning, _, content = content.removeprefix(THINK).partition(THINK_END)
    calls = message.get("tool_calls") or []
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in calls
    ]
    return Answer(content, reasoning, calls, [])
