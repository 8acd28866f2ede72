"""Rows that verifiers has saved, as lines of ours: results.jsonl of its classic API, and
traces.jsonl of its v1 API."""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from rl.models.chat import chat_call
from rl.system.errors import RunError

Row = dict[str, Any]


def lines_of(row: Row) -> Iterator[Row]:
    """Yields the lines of a row: of a v1 episode one for each trace, of any row that is not
    verifiers' itself. Raises KeyError, TypeError and AttributeError for a row that lacks what
    verifiers writes, RunError for one that cannot be trained."""
    if isinstance(row.get("traces"), list):
        yield from (line_of_trace(trace, row) for trace in row["traces"])
    elif "example_id" in row and "completion" in row:
        yield line_of_result(row)
    else:
        yield row


def line_of_result(row: Row) -> Row:
    """Returns the line of a row of the classic API. Token ids are in its `trajectory`, if that
    is among the saved state columns."""
    error, prompt, completion = row.get("error"), row["prompt"], row["completion"]
    line = {
        "task": row["example_id"],
        "reward": None if error else row["reward"],
        "metrics": row.get("metrics") or {},
        "stop": row.get("stop_condition") or "",
        "truncated": bool(row.get("is_truncated")),
    }
    info = row.get("info")
    # an EnvGroup's name, or names, of the environment
    if env := info.get("env_id") if isinstance(info, dict) else None:
        line["env"] = env if isinstance(env, str) else "/".join(env)
    if error:
        chain = error.get("error_chain_repr", error) if isinstance(error, dict) else error
        line["error"] = str(chain)
    steps = row.get("trajectory")
    if steps and all(step.get("tokens") for step in steps):
        line["turns"] = [turn_of_step(step["tokens"]) for step in steps]
    if isinstance(prompt, list) and isinstance(completion, list):
        line |= {
            "messages": [message_of(message) for message in (*prompt, *completion)],
            "num_prompt_messages": len(prompt),
            "tools": row.get("tool_defs"),
        }
    elif "turns" not in line and not error:
        raise RunError(
            "completion: is text without token ids; save them, with trajectory among "
            "verifiers' state columns"
        )
    return line


def turn_of_step(tokens: Row) -> Row:
    """Returns the turn of a step of a trajectory. Masked tokens of a completion are not the
    policy's: nothing says how to train it then."""
    if not all(tokens["completion_mask"]):
        raise RunError("trajectory: an answer has masked tokens, which the policy did not sample")
    reason = "length" if tokens.get("is_truncated") else "stop"
    turn = {
        "prompt_ids": tokens["prompt_ids"],
        "completion_ids": tokens["completion_ids"],
        "finish_reason": reason,
    }
    return turn | {"logprobs": logprobs_of(turn, tokens.get("completion_logprobs"))}


def logprobs_of(turn: Row, saved: list[float] | None) -> list[float] | None:
    """Returns the log-probabilities of a turn: verifiers writes an empty list also for those
    that it does not have."""
    return saved or (None if turn["completion_ids"] else [])


def message_of(message: Row) -> Row:
    """Returns a message in the form of chat APIs: calls are JSON text in the classic API, and
    have no `function` in v1."""
    calls = [chat_call(call) for call in message.get("tool_calls") or ()]
    return {key: value for key, value in message.items() if value is not None} | (
        {"tool_calls": calls} if calls else {}
    )


def line_of_trace(trace: Row, episode: Row) -> Row:
    """Returns the line of one agent of an episode of the v1 API."""
    nodes, task, agent = trace["nodes"], episode["task"], trace["agent"]
    rewards = {name: reward for name, reward in trace.get("rewards", {}).items() if reward}
    metrics = {name: reward["score"] for name, reward in rewards.items()} | {
        name: value for name, value in trace.get("metrics", {}).items() if value is not None
    }
    path = path_to(nodes, len(nodes) - 1)
    sampled = [i for i, node in enumerate(nodes) if node.get("sampled")]
    prompt = takewhile(lambda i: not nodes[i].get("sampled"), path)
    line = {
        "env": episode.get("env", {}).get("id") or "recorded",
        "task": task.get("key") or task.get("hash"),
        "group_id": (episode.get("group") or {}).get("id"),
        "sample": episode["id"],
        "agent": agent.get("name", "agent"),
        "reward": sum(reward["score"] * reward.get("weight", 1.0) for reward in rewards.values()),
        "metrics": metrics,
        "stop": trace.get("stop_condition") or "",
        "truncated": any(call.get("finish_reason") == "length" for call in trace.get("calls", ())),
        "messages": [message_of(nodes[i]["message"]) for i in path],
        "num_prompt_messages": len([*prompt]),
        "tools": trace.get("tools"),
        "num_turns": len(sampled),
    }
    if not (episode.get("ok") and trace.get("ok")):
        errors = [*episode.get("errors", ()), *trace.get("errors", ())]
        text = str(errors[-1]["message"]) if errors else "the episode was not completed"
        line |= {"reward": None, "error": text}
    if agent.get("trainable", True):
        line["temperature"] = temperature_of(trace)
    else:
        line["trainable"] = False
    if sampled and all(nodes[i].get("token_ids") for i in sampled):
        line["turns"] = [turn_of_node(nodes, i) for i in sampled]
    return line


def temperature_of(trace: Row) -> float | None:
    """Returns the temperature of the calls of a trace that were answered; None if it is not
    recorded. Raises RunError if they differ."""
    answered = [call for call in trace.get("calls", ()) if not call.get("error")]
    temperatures = {(call.get("sampling") or {}).get("temperature") for call in answered} or {None}
    if len(temperatures) > 1:
        values = ", ".join(sorted(map(str, temperatures)))
        raise RunError(
            f"calls: sampled at several temperatures ({values}), but a rollout is trained at "
            "one; leave it out"
        )
    return temperatures.pop()


def path_to(nodes: list[Row], last: int) -> list[int]:
    """Returns the indices of a node and those before it in its conversation, in order."""
    path: list[int] = []
    at: int | None = last if nodes else None
    while at is not None:
        path.insert(0, at)
        at = nodes[at].get("parent")
    return path


def turn_of_node(nodes: list[Row], index: int) -> Row:
    """Returns the turn that sampled a node: its own tokens begin with the end of the prompt."""
    before = [id for i in path_to(nodes, index)[:-1] for id in nodes[i].get("token_ids", ())]
    ids, mask = nodes[index]["token_ids"], nodes[index]["mask"]
    first = mask.index(True) if True in mask else len(mask)
    if not all(mask[first:]):
        raise RunError(
            f"nodes[{index}].mask: an answer has masked tokens, which the policy did not sample"
        )
    turn = {"prompt_ids": before + ids[:first], "completion_ids": ids[first:]}
    return turn | {"logprobs": logprobs_of(turn, nodes[index].get("logprobs"))}
