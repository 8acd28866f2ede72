"""Plays example environments without a model: a verifiers client whose answers were prepared.
The packages need not be installed."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall, Usage

ENVIRONMENTS = Path(__file__).parents[2] / "environments"


def on_path(folder: str) -> None:
    """Makes the package in environments/`folder` importable."""
    path = str(ENVIRONMENTS / folder)
    if path not in sys.path:
        sys.path.insert(0, path)


def load(env_id: str, **args: Any) -> vf.Environment:
    """Loads environments/<id> as a trainer does."""
    datasets.disable_progress_bars()
    on_path(env_id.replace("-", "_"))
    return vf.load_environment(env_id, **args)


def call(arguments: dict[str, Any] | str, name: str = "calculate") -> dict[str, Any]:
    """A prepared answer that is a tool call."""
    return {
        "name": name,
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
    }


class Scripted(Client):
    """Gives the prepared answers one after the other: a str is text, a dict a tool call.
    `prompts` has what it was asked."""

    def __init__(self, answers: list[str | dict[str, Any]]):
        super().__init__(object())
        self.answers = list(answers)
        self.prompts: list[list[dict[str, Any]]] = []

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None: ...

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return [message.model_dump(exclude_none=True) for message in messages], {}

    async def get_native_response(
        self,
        prompt: Any,
        model: str,
        sampling_args: dict[str, Any],
        tools: Any = None,
        **kwargs: Any,
    ) -> Any:
        self.prompts.append(prompt)
        return self.answers.pop(0)

    async def raise_from_native_response(self, response: Any) -> None: ...

    async def from_native_response(self, response: Any) -> Response:
        said = {"content": response, "tool_calls": None, "finish_reason": "stop"}
        if isinstance(response, dict):
            calls = [ToolCall(id=f"call_{len(self.prompts)}", **response)]
            said = {"content": "", "tool_calls": calls, "finish_reason": "tool_calls"}
        message = ResponseMessage(**said, is_truncated=False)
        usage = Usage(prompt_tokens=0, reasoning_tokens=0, completion_tokens=0, total_tokens=0)
        return Response(id="", created=0, model="", usage=usage, message=message)


def play(
    env: vf.Environment, row: dict[str, Any], *answers: str | dict[str, Any]
) -> tuple[dict[str, Any], Scripted]:
    """One rollout with these answers; what verifiers returns, and the client that saw the
    prompts."""
    client = Scripted(list(answers))
    output = asyncio.run(
        env.run_rollout(
            dict(row), client=client, model="m", sampling_args={}, state_columns=["trajectory"]
        )
    )
    assert output["error"] is None, output["error"]
    return output, client


def prompts_of(rows: list[dict[str, Any]]) -> list[str]:
    """What tells tasks apart: their last prompt message."""
    return [row["prompt"][-1]["content"] for row in rows]


def check_splits(env_id: str, **args: Any) -> None:
    """Deterministic by seed, different with another, no task twice, and none of evaluation's in
    training."""

    def both(**more: Any) -> list[list[dict[str, Any]]]:
        env = load(env_id, **args, **more)
        return [env.get_dataset().to_list(), env.get_eval_dataset().to_list()]

    train, held_out = map(prompts_of, both())
    assert len({*train, *held_out}) == len(train) + len(held_out) and train and held_out
    assert both() == both()
    assert {*prompts_of(both(seed=1)[1])} != {*held_out}
