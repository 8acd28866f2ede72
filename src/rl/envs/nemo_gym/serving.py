"""The opposite direction (`rl env --serve-gym`): an environment of ours as an agent of NeMo Gym,
its tasks as rows, its rollouts as results.

NeMo Gym's model server is the policy: messages in, and token ids and log-probabilities out if it is
configured to return them. Earlier answers go back to it as they came, token ids included, so that a
server that splices them (ours does) continues the very ids that it sampled.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from rl.envs.nemo_gym.wire import AGENTS, FAILURE, MODELS, TOKEN_KEYS, Head, as_turn, joined_text
from rl.envs.policy import Conversation, Policy, RolloutError, comparable, overriding
from rl.models.chat import THINK, THINK_END, Answer, Message, Tool, ToolCall, assistant_message
from rl.system.errors import RunError
from rl.wire.inference_client import PromptTooLongError
from rl.wire.rollouts import Rollout, Split
from rl.wire.turns import Turn
from rl.wire.worker_messages import PolicySpec

TASK = "rl_task"
"""The key of a row that names its task."""
TASK_INDEX, ROLLOUT_INDEX = "_ng_task_index", "_ng_rollout_index"
"""Keys that NeMo Gym adds to rows."""
SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"} | {
    key: key for key in ("metadata", "parallel_tool_calls", "tool_choice")
}
"""Parameters of a row that reach the model server -> their names in the chat API."""
NEUTRAL = {"parallel_tool_calls": True, "tool_choice": "auto"}
MEASURES: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "median": statistics.median,
    "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
}


def agent_entry(name: str, port: int) -> dict[str, Any]:
    """The entry for NeMo Gym's configuration. Without `entrypoint`, ng_run calls the server but
    does not start it."""
    model = {"type": MODELS, "name": "policy_model"}
    return {
        name: {
            AGENTS: {
                name: {"host": "127.0.0.1", "port": port, "domain": "other", "model_server": model}
            }
        }
    }


def task_row(name: str, split: Split, index: int, task: dict[str, Any]) -> dict[str, Any]:
    """A task as a row. Raises RunError for a prompt that is not text."""
    prompt = task.get("prompt") or []
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    tools = [
        {"type": "function", "strict": False, **tool["function"]}
        for tool in task.get("tools") or ()
    ]
    return {
        "responses_create_params": {
            "input": to_items(messages),
            **({"tools": tools} if tools else {}),
        },
        TASK: {"split": split, "index": index},
        "agent_ref": {"type": AGENTS, "name": name},
    }


def sampling_of(params: dict[str, Any]) -> dict[str, Any]:
    """The sampling that a row's parameters ask for. Raises ValueError for one that cannot be
    passed on."""
    sampling = {}
    for key, value in sorted(params.items()):
        if key in ("input", "tools") or value is None:
            continue
        if key not in SAMPLING:
            raise ValueError(
                f"responses_create_params.{key} cannot be passed on; known are "
                f"{', '.join(SAMPLING)}"
            )
        if value != NEUTRAL.get(key):
            sampling[SAMPLING[key]] = value
    return sampling


def to_result(row: dict[str, Any], rollout: Rollout) -> dict[str, Any]:
    """The answer of `/run`: the row, the reward, the metrics, and the conversation with its
    tokens. A failed rollout has no reward."""
    params = row["responses_create_params"]
    messages = rollout.messages[rollout.num_prompt_messages or 0 :]
    turns = list(rollout.turns)
    num_answers = sum(message["role"] == "assistant" for message in messages)
    items = to_items(messages, map(tokens_of, turns) if len(turns) == num_answers else ())
    cut = turns[-1].finish_reason == "length" if turns else rollout.truncated
    if rollout.overlong:
        cut, items = True, items + to_items([{"role": "assistant", "content": ""}])
    num_prompt, num_new = sum(len(turn.prompt_ids) for turn in turns), rollout.num_tokens
    response = {
        "id": f"resp_{row.get(TASK_INDEX, 0)}_{row.get(ROLLOUT_INDEX, 0)}",
        "created_at": 0,
        "model": "policy_model",
        "object": "response",
        "output": items,
        "tools": params.get("tools") or [],
        "temperature": params.get("temperature"),
        "top_p": params.get("top_p"),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        **{key: params.get(key, value) for key, value in NEUTRAL.items()},
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_new,
        },
    }
    result = row | {"response": response}
    if rollout.error:
        return result | {FAILURE: rollout.cause, "error": rollout.error}
    if num_answers != len(turns):
        error = (
            f"the conversation shows {num_answers} answers of {len(turns)}: the environment "
            "rewrites it, which a result cannot show"
        )
        return result | {FAILURE: "environment", "error": error}
    result["reward"] = rollout.reward
    metrics = {
        f"metrics/{name}" if name in result else name: value
        for name, value in rollout.metrics.items()
    }
    return metrics | result


def aggregate(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer of `/aggregate_metrics`: statistics of all numbers of results that did not
    fail, of each task and of all."""
    tasks: dict[int, list[dict[str, float]]] = {}
    for result in results:
        if FAILURE not in result:
            fields = result | ((result.get("response") or {}).get("usage") or {})
            numbers = {key: float(n) for key, n in fields.items() if isinstance(n, int | float)}
            task = int(numbers.pop(TASK_INDEX, 0))
            numbers.pop(ROLLOUT_INDEX, None)
            tasks.setdefault(task, []).append(numbers)
    whole = statistics_of([*chain(*tasks.values())])
    return {
        "agent_metrics": whole,
        "key_metrics": {key: value for key, value in whole.items() if key.startswith("mean/")},
        "group_level_metrics": [
            {TASK_INDEX: index, **statistics_of(tasks[index])} for index in sorted(tasks)
        ],
    }


def statistics_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """Returns the statistics of each number, under NeMo Gym's names."""
    measured = {}
    for key in dict.fromkeys(chain(*rows)):
        values = [row[key] for row in rows if key in row]
        for name, measure in MEASURES.items():
            measured[f"{name}/{key}"] = measure(values)
    return measured


def tokens_of(turn: Turn) -> dict[str, Any]:
    """The token fields of a turn; none if the policy gave none."""
    columns = (turn.prompt_ids, turn.completion_ids, turn.logprobs)
    return dict(zip(TOKEN_KEYS, columns, strict=True)) if turn.packed_ids else {}


def to_items(
    messages: list[Message], tokens: Iterable[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Converts chat messages to items of the Responses API, as `to_messages` does back. `tokens`:
    those of each answer, for its last item.

    Raises RunError for content that is not text.
    """
    items: list[dict[str, Any]] = []
    of_answers = iter(tokens)
    for number, message in enumerate(messages):
        role, text = message["role"], joined_text(message.get("content")) or ""
        if not isinstance(text, str):
            raise RunError(
                f"a {role} message has content that is not text, which is not passed to NeMo Gym"
            )
        if role == "tool":
            call = message.get("tool_call_id") or ""
            items.append({"type": "function_call_output", "call_id": call, "output": text})
        elif role == "assistant":
            items += answer_items(message, text, number)
            items[-1] |= next(of_answers, {})
        else:
            items.append({"type": "message", "role": role, "content": text})
    return items


def answer_items(message: Message, text: str, number: int) -> list[dict[str, Any]]:
    """The items of an answer: reasoning, text, calls."""
    items: list[dict[str, Any]] = []
    calls = message.get("tool_calls") or []
    if thought := message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": summary})
    done = {"status": "completed"}
    if text or not calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        shown = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": content}
        items.append(shown | done)
    for call in calls:
        asked = {"type": "function_call", "id": call["id"], "call_id": call["id"]}
        items.append(asked | {key: call["function"][key] for key in ("name", "arguments")} | done)
    return items


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
        last = comparable(assistant_message(answer))
        past = self.keep(turn, before, [*compared, last], tools)
        # Without null fields: NeMo Gym takes a message with `routed_experts: null` for one without
        # tokens.
        raw = {key: value for key, value in message.items() if value is not None}
        self.came[past.index] = earlier | {len(messages): raw}
        return turn, answer


def sent(messages: list[Message], earlier: dict[int, Message]) -> list[Message]:
    """Returns messages, with `earlier` answers as they came. Reasoning is in the text, as NeMo
    Gym has it."""
    result = []
    for number, message in enumerate(messages):
        message = dict(message)
        if thought := message.pop("reasoning_content", None):
            message["content"] = f"{THINK}{thought}{THINK_END}{message['content'] or ''}"
        result.append(earlier.get(number, message))
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
