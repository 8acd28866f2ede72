"""Pure functions for the opposite direction: an environment of ours as an agent of NeMo Gym, its
tasks as rows, its rollouts as results."""

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from rl.envs.nemo_gym.head import AGENTS, MODELS
from rl.envs.nemo_gym.wire import FAILURE, TOKEN_KEYS, joined_text
from rl.models.chat import Message
from rl.system.errors import RunError
from rl.wire.rollouts import Rollout, Split, Turn

TASK = "rl_task"
"""The key of a row that names its task."""
TASK_INDEX, ROLLOUT_INDEX = "_ng_task_index", "_ng_rollout_index"
"""Keys that NeMo Gym adds to rows."""
SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"} | {
    key: key for key in ("metadata", "parallel_tool_calls", "tool_choice")
}
"""Parameters of a row that reach the model server -> their names in the chat API."""
NEUTRAL = {"parallel_tool_calls": True, "tool_choice": "auto"}


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
    given = {
        key: value
        for key, value in params.items()
        if key not in ("input", "tools") and value is not None
    }
    if unknown := sorted(set(given) - set(SAMPLING)):
        raise ValueError(
            f"responses_create_params.{unknown[0]} cannot be passed on; known are "
            f"{', '.join(SAMPLING)}"
        )
    return {SAMPLING[key]: value for key, value in given.items() if value != NEUTRAL.get(key)}


def to_result(row: dict[str, Any], rollout: Rollout) -> dict[str, Any]:
    """The answer of `/run`: the row, the reward, the metrics, and the conversation with its
    tokens. A failed rollout has no reward."""
    params, said = (
        row["responses_create_params"],
        rollout.messages[rollout.num_prompt_messages or 0 :],
    )
    turns, num_answers = (
        list(rollout.turns),
        sum(message["role"] == "assistant" for message in said),
    )
    cut = rollout.overlong or (turns[-1].finish_reason == "length" if turns else rollout.truncated)
    items = to_items(said, [tokens_of(turn) for turn in turns] if len(turns) == num_answers else [])
    if rollout.overlong:
        items += to_items([{"role": "assistant", "content": ""}])
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
    if rollout.error:
        return row | {"response": response, FAILURE: rollout.cause, "error": rollout.error}
    if num_answers != len(turns):
        error = (
            f"the conversation shows {num_answers} answers of {len(turns)}: the environment "
            "rewrites it, which a result cannot show"
        )
        return row | {"response": response, FAILURE: "environment", "error": error}
    taken = {*row, "reward", "response"}
    metrics = {
        name if name not in taken else f"metrics/{name}": value
        for name, value in rollout.metrics.items()
    }
    return metrics | row | {"response": response, "reward": rollout.reward}


def aggregate(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer of `/aggregate_metrics`: statistics of all numbers of results that did not
    fail, of each task and of all."""
    tasks: dict[int, list[dict[str, float]]] = {}
    for result in results:
        if FAILURE not in result:
            numbers = result | ((result.get("response") or {}).get("usage") or {})
            numbers = {
                key: float(value)
                for key, value in numbers.items()
                if isinstance(value, int | float)
            }
            tasks.setdefault(result.get(TASK_INDEX, 0), []).append(
                {
                    key: value
                    for key, value in numbers.items()
                    if key not in (TASK_INDEX, ROLLOUT_INDEX)
                }
            )
    whole = dict(statistics_of([numbers for task in tasks.values() for numbers in task]))
    return {
        "agent_metrics": whole,
        "key_metrics": {key: value for key, value in whole.items() if key.startswith("mean/")},
        "group_level_metrics": [
            {TASK_INDEX: index, **dict(statistics_of(tasks[index]))} for index in sorted(tasks)
        ],
    }


def statistics_of(rows: list[dict[str, float]]) -> Iterator[tuple[str, float]]:
    """Yields (name, value), under NeMo Gym's names."""
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if key in row]
        yield f"mean/{key}", statistics.fmean(values)
        yield f"max/{key}", max(values)
        yield f"min/{key}", min(values)
        yield f"median/{key}", statistics.median(values)
        yield f"std/{key}", statistics.stdev(values) if len(values) > 1 else 0.0


def tokens_of(turn: Turn) -> dict[str, Any]:
    """The token fields of a turn; none if the policy gave none."""
    return (
        dict(zip(TOKEN_KEYS, (turn.prompt_ids, turn.completion_ids, turn.logprobs), strict=True))
        if turn.completion_ids
        else {}
    )


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
        text = joined_text(message.get("content")) or ""
        if not isinstance(text, str):
            raise RunError(
                f"a {message['role']} message has content that is not text, which is not "
                "passed to NeMo Gym"
            )
        if message["role"] == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message.get("tool_call_id") or "",
                    "output": text,
                }
            )
        elif message["role"] == "assistant":
            answer = answer_items(message, text, number)
            answer[-1] |= next(of_answers, {})
            items += answer
        else:
            items.append({"type": "message", "role": message["role"], "content": text})
    return items


def answer_items(message: Message, text: str, number: int) -> list[dict[str, Any]]:
    """The items of an answer: reasoning, text, calls."""
    items, calls = [], message.get("tool_calls") or []
    if thought := message.get("reasoning_content"):
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{number}",
                "summary": [{"type": "summary_text", "text": thought}],
            }
        )
    if text or not calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        items.append(
            {
                "type": "message",
                "id": f"msg_{number}",
                "role": "assistant",
                "status": "completed",
                "content": content,
            }
        )
    for call in calls:
        function = {key: call["function"][key] for key in ("name", "arguments")}
        items.append(
            {
                "type": "function_call",
                "id": call["id"],
                "call_id": call["id"],
                "status": "completed",
                **function,
            }
        )
    return items
