"""Builds an environment from rows (a JSONL file or a Hugging Face dataset) and a reward function, without a package."""

import inspect
import json
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Any

import datasets
import verifiers as vf

from rl.config.outside import not_a_column, not_given, rows_fault
from rl.models.hub import hub_or_cache
from rl.system.errors import RunError
from rl.system.functions import Blame, load_function
from rl.system.jsonl import json_objects
from rl.wire.worker_messages import EnvSpec

ROLES = ("system", "user", "assistant", "tool")
KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
"""Names of the JSON types that Arrow distinguishes."""
EXAMPLE = '{"prompt": "What is 2 + 2?", "answer": "4"}'


def load_rows(spec: EnvSpec) -> vf.SingleTurnEnv:
    """Builds the environment of `dataset`, `eval_dataset`, `reward` and `system_prompt`. Raises RunError."""
    if not spec.dataset:
        raise RunError(f"environment {spec.name} has neither id nor dataset; give one of them")
    if not spec.reward:
        raise RunError(f"dataset {spec.dataset} needs a reward function; give reward = file.py:function or module:function")
    if spec.args:
        raise RunError(f"dataset {spec.dataset}: args are for environments with an id; leave out {', '.join(spec.args)}")
    function = load_function("reward", spec.reward)
    train = read(spec.dataset)
    held_out = read(spec.eval_dataset) if spec.eval_dataset else train
    for source, data in ((spec.dataset, train), (spec.eval_dataset, held_out)):
        check_parameters(spec.reward, function, set(data.column_names), source or spec.dataset)
    with Blame(f"dataset {spec.dataset}: building its environment", "check its rows"):
        return vf.SingleTurnEnv(dataset=train, eval_dataset=held_out, system_prompt=spec.system_prompt, rubric=vf.Rubric(funcs=[function]))


def read(source: str) -> datasets.Dataset:
    """The rows of a JSONL file, or of a Hugging Face dataset `owner/name` or `owner/name:split`, each with a `prompt` of messages."""
    path = Path(source)
    if path.is_file():
        return read_jsonl(path)
    if fault := rows_fault(source):
        raise RunError(f"dataset {source} {fault}")
    name, _, split = source.partition(":")
    with hub_or_cache(name) as unreachable:
        remedy = f"{unreachable}: check the network, or give a JSONL file" if unreachable else "check name and split (owner/name:split)"
        with Blame(f"dataset {source}", f"{remedy}; {path.absolute()} is not a file either"):
            data = datasets.load_dataset(name, split=split or "train")
    if not {"prompt", "question"} & set(data.column_names):
        raise RunError(f"dataset {source} has no column prompt or question; its columns are {', '.join(data.column_names)}")
    with Blame(f"dataset {source}", "prompts must be text or a list of messages"):
        return data.map(lambda row, i: {"prompt": messages_in(row, f"{source} row {i}")}, with_indices=True)


def read_jsonl(path: Path) -> datasets.Dataset:
    """The rows of a JSONL file. Raises RunError with the line number."""
    rows: list[dict[str, Any]] = []
    kinds: dict[str, tuple[str, str]] = {}
    for place, given in json_objects(path, EXAMPLE):
        row = with_messages(given, place)
        for column, kind in ((column, KINDS[type(value)]) for column, value in row.items() if value is not None):
            known, first = kinds.setdefault(column, (kind, place))
            if known != kind:
                raise RunError(f"{place}: {column} is {kind}, but {known} in {first}; use one type in every line")
        rows.append(row)
    if not rows:
        raise RunError(f"dataset {path} has no rows; write one JSON object per line, like {EXAMPLE}")
    columns = dict.fromkeys(column for row in rows for column in row)  # Arrow takes only those of the first row
    with Blame(f"dataset {path}", "use one type per column in all lines; put what varies under info"):
        return datasets.Dataset.from_list([{column: row.get(column) for column in columns} for row in rows])


def with_messages(row: dict[str, Any], place: str) -> dict[str, Any]:
    """The row with messages as its prompt. A nested `info` becomes JSON text: Arrow would give every row the keys of all rows."""
    if "task" in row:
        raise RunError(f"{place}: verifiers reserves the column `task` for itself; give it another name")
    info = {"info": json.dumps(row["info"])} if isinstance(row.get("info"), dict) else {}
    return row | {"prompt": messages_in(row, place)} | info


def messages_in(row: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """The messages of `prompt`, or else of `question`. Raises RunError."""
    prompt = row.get("prompt") if row.get("prompt") is not None else row.get("question")
    if prompt is None:
        raise RunError(f"{place}: no prompt or question, only {', '.join(row) or 'an empty object'}; write rows like {EXAMPLE}")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt or any(not isinstance(part, dict) or part.get("role") not in ROLES for part in prompt):
        raise RunError(f"{place}: the prompt is neither text nor a list of messages with a role of {', '.join(ROLES)}")
    return prompt


def check_parameters(reward: str, function: Callable[..., Any], columns: set[str], source: str) -> None:
    """Checks that every parameter of a reward function gets a value; otherwise every rollout would fail. Raises RunError."""
    parameters = inspect.signature(function).parameters.values()
    named = [one for one in parameters if one.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
    if asked := not_given([one.name for one in named if one.default is Parameter.empty], columns):
        raise RunError(f"reward {reward} ({inspect.getsourcefile(function)}) {not_a_column(asked[0], source, columns)}")
