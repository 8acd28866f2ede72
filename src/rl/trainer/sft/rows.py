"""Rows of a data set as examples for supervised fine-tuning: JSONL, Hugging Face data sets, and rollouts that were played."""

import glob
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.command_line import without_none
from rl.config.sft import SftConfig
from rl.models.chat import Message, Tool
from rl.models.hub import hub_or_cache
from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import PENDING_ROLLOUTS
from rl.system.errors import RunError
from rl.system.jsonl import json_objects
from rl.wire.batch_file import check_rollouts

ROLES = ("system", "developer", "user", "assistant", "tool")
EXAMPLE = '{"prompt": "What is 2 + 2?", "completion": "4"} or {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}]}'
ROLLOUT = {"messages", "reward", "outcome"}
"""Columns of rollouts/*.jsonl and of what `rl collect` writes."""
OLD_LINE = "earlier versions of rl did not record where a prompt ends (num_prompt_messages)"
UNUSED_OUTCOMES = ("failed", "timeout", "truncated", "overlong", "empty")
"""A rollout that failed says nothing; the others end where the policy did not mean to end."""


@dataclass(frozen=True)
class Source:
    """One data set."""

    dataset: str
    split: str
    key: str
    """The setting that names it, for messages."""


@dataclass(frozen=True)
class Example:
    """A row that can be rendered."""

    place: str
    """File and line, or data set and row."""
    messages: list[Message]
    num_context: int
    """Number of messages at the beginning that are never trained."""
    tools: list[Tool] | None
    text: tuple[str, str] | None
    """Prompt and completion, if the row has them as text; `messages` then says the same as a chat."""
    task: str
    """Examples of one task are never split between training and validation."""
    doubt: str = ""
    """What cannot be told of it, for a warning."""


def sources(config: SftConfig) -> dict[str, Source]:
    """The data sets of a configuration: `train`, and `validation` if there is one of its own."""
    found = {"train": Source(config.dataset, config.split, "sft.dataset")}
    if config.validation or config.validation_split:
        key = "sft.validation" if config.validation else "sft.validation_split"
        found["validation"] = Source(config.validation or config.dataset, config.validation_split or config.split, key)
    return found


def read_examples(source: Source, config: SftConfig, counts: Counter[str]) -> Iterator[Example]:
    """The examples of a data set, in its order. Counts rows, and what is left out by why. Raises RunError."""
    files = files_of(source)
    if files is None:
        for number, row in enumerate(hub_rows(source, config)):
            counts["rows"] += 1
            # Arrow gives every object the keys of all objects of its column; those that were not there are None.
            yield example_of(without_none(row), f"{source.dataset} row {number}", config)
        return
    chosen = best_rollouts(files, config) if config.max_per_task else None
    for place, row in json_rows(files):
        counts["rows"] += 1
        if not set(row) >= ROLLOUT:
            if source.key == "sft.dataset" and (chosen is not None or config.min_reward is not None):
                which = f"this row is none: it lacks {', '.join(sorted(ROLLOUT - set(row)))}"
                raise RunError(f"{place}: sft.min_reward and sft.max_per_task choose among rollouts, and {which}")
            yield example_of(row, place, config)
        elif why := why_unused(row, place, config):
            counts[why] += 1
        elif chosen is not None and place not in chosen:
            counts[f"rollouts beyond the best {config.max_per_task} of their task"] += 1
        else:
            yield example_of(row, place, config)


def files_of(source: Source) -> list[Path] | None:
    """The JSONL files that are meant, in order; None: it is a Hugging Face data set. Raises RunError."""
    path = Path(source.dataset).expanduser()
    if path.is_file():
        return [path] if path.suffix in (".jsonl", ".json") or is_compressed(path) else None
    if (path / "rollouts").is_dir():
        pattern = str(path / "rollouts" / "*.jsonl")
    elif any(sign in source.dataset for sign in "*?["):
        pattern = str(path)
    elif path.is_dir() or (source.dataset.count("/") <= 1 and not source.dataset.startswith((".", "/", "~")) and path.suffix != ".jsonl"):
        return None
    else:
        remedy = "give a JSONL file, a pattern, a run directory, or owner/name of a Hugging Face data set"
        raise RunError(f"{source.key} = {source.dataset!r}: there is no {path.absolute()}; {remedy}")
    found = {Path(name) for end in ("", ".gz") for name in glob.glob(f"{pattern}{end}")}
    wanted = (path for path in found if path.name != PENDING_ROLLOUTS and (path.suffix != ".gz" or is_compressed(path)))
    files = sorted(path for path in wanted if path.suffix != ".gz" or path.with_suffix("") not in found)
    if not files:
        raise RunError(f"{source.key} = {source.dataset!r}: no file matches {pattern}")
    return files


def is_compressed(path: Path) -> bool:
    """Whether it is a file of rollouts that the run has compressed, for it is old."""
    return path.parent.name == "rollouts" and path.name.endswith(".jsonl.gz")


def json_rows(files: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, row) of every line that is not blank. Raises RunError."""
    for listed in files:
        path = listed if listed.exists() else listed.with_name(f"{listed.name}.gz")  # compressed since then
        try:
            if path.parent.name == "rollouts":
                check_rollouts(path)
        except CorruptFileError as error:
            raise RunError(str(error)) from None
        yield from json_objects(path, EXAMPLE)


def hub_rows(source: Source, config: SftConfig) -> Any:
    """The rows of a Hugging Face data set: on the hub, saved in a folder, or files of a kind that `datasets` reads. Raises RunError."""
    import datasets

    datasets.disable_progress_bars()
    path, unreachable = Path(source.dataset).expanduser(), ""
    try:
        if path.is_file():
            kind = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}.get(path.suffix)
            if kind is None:
                raise RunError(f"{source.key} = {source.dataset!r}: what kind of file is it? Known are .jsonl, .parquet, .csv and .arrow")
            return datasets.load_dataset(kind, data_files=str(path), split="train")
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(path))
            return saved[source.split] if isinstance(saved, datasets.DatasetDict) else saved
        with hub_or_cache(source.dataset) as unreachable:
            return datasets.load_dataset(source.dataset, config.subset, split=source.split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetGenerationError) as error:
        where = "" if path.exists() else f"; {path.absolute()} is no file or folder either"
        reason = str(error).strip().splitlines()[0]
        remedy = "check name, sft.split and sft.subset"
        if unreachable:
            reason, remedy = f"not in the cache of this machine, and {unreachable}", "check the network, or give a file"
        raise RunError(f"{source.key} = {source.dataset!r} (split {source.split}): {reason}; {remedy}{where}") from None


def why_unused(row: dict[str, Any], place: str, config: SftConfig) -> str | None:
    """Why a rollout is not trained on; None if it is."""
    if row.get("error") or row["outcome"] in UNUSED_OUTCOMES:
        return f"{row['outcome']} rollouts"
    if row.get("why") == "not_trainable":
        return "rollouts of agents that are not trained"
    if not isinstance(row["reward"], (int, float)):
        raise RunError(f"{place}: the reward is {row['reward']!r}; a rollout's is a number")
    if config.min_reward is not None and row["reward"] < config.min_reward:
        return f"rollouts with a reward below {config.min_reward:g}"
    return None


def best_rollouts(files: list[Path], config: SftConfig) -> set[str]:
    """The places (file:line) of the `max_per_task` best rollouts of each task."""
    tasks: dict[str, list[tuple[float, int, str]]] = {}
    for number, (place, row) in enumerate(json_rows(files)):
        if set(row) >= ROLLOUT and why_unused(row, place, config) is None:
            tasks.setdefault(task_of(row, place), []).append((-row["reward"], number, place))
    return {place for rollouts in tasks.values() for *_, place in sorted(rollouts)[: config.max_per_task]}


def task_of(row: dict[str, Any], place: str) -> str:
    """A name that tells tasks apart. A row that names no task is one of its own."""
    return f"{row.get('env')} {row['task']}" if "task" in row and set(row) >= ROLLOUT else place


def example_of(row: dict[str, Any], place: str, config: SftConfig) -> Example:
    """A row by its columns. Raises RunError with its place for one of another shape."""
    columns = config.columns
    tools = tools_in(row.get(columns.tools), f"{place}: {columns.tools}")
    task = task_of(row, place)
    if columns.messages in row:
        messages = messages_in(row[columns.messages], f"{place}: {columns.messages}")
        num_prompt, doubt = prompt_of(row, messages, place, config) if set(row) >= ROLLOUT else (0, "")
        return Example(place, messages, num_prompt, tools, None, task, doubt)
    if columns.prompt not in row or columns.completion not in row:
        wanted = f"neither {columns.messages} nor {columns.prompt} and {columns.completion}"
        there = ", ".join(row) or "nothing"
        raise RunError(f"{place}: has {wanted}, but {there}; name the columns with sft.columns.*, or write rows like {EXAMPLE}")
    prompt, completion = row[columns.prompt], row[columns.completion]
    both_text = isinstance(prompt, str) and isinstance(completion, str)
    context = as_messages(prompt, "user", f"{place}: {columns.prompt}")
    answer = as_messages(completion, "assistant", f"{place}: {columns.completion}")
    return Example(place, context + answer, len(context), tools, (prompt, completion) if both_text else None, task)


def prompt_of(row: dict[str, Any], messages: list[Message], place: str, config: SftConfig) -> tuple[int, str]:
    """How many messages at the beginning of a rollout are its prompt, and what is doubtful about it. Raises RunError where answers behind
    the prompt cannot all be the policy's, and all would be trained."""
    num_prompt, turns = row.get("num_prompt_messages"), row.get("num_turns")
    if num_prompt is not None and not (isinstance(num_prompt, int) and 0 <= num_prompt <= len(messages)):
        raise RunError(f"{place}: num_prompt_messages is {num_prompt!r}; of {len(messages)} messages so many are the prompt")
    answers = sum(message["role"] == "assistant" for message in messages[num_prompt or 0 :])
    if config.train == "last" or answers <= 1:
        return num_prompt or 0, ""
    if isinstance(turns, int) and 0 < turns < answers:
        which = "the environment wrote the others" if num_prompt is not None else f"the line does not say which: {OLD_LINE}"
        remedy = 'train the last answer of each alone, sft.train = "last", or play new ones with `rl collect`'
        raise RunError(f"{place}: the policy sampled {turns} of its {answers} answers, and {which}; {remedy}")
    if num_prompt is None and not turns:
        return 0, f"all answers of rollouts are trained, worked examples in their prompts, too: {OLD_LINE}"
    return num_prompt or 0, ""


def as_messages(value: Any, role: str, place: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else messages_in(value, place)


def messages_in(value: Any, place: str) -> list[Message]:
    """A list of chat messages. Raises RunError for anything else."""
    if not isinstance(value, list) or not value:
        raise RunError(f"{place}: {'an empty list' if value == [] else type(value).__name__}; give text or a list of chat messages")
    for at, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise RunError(f"{place}[{at}]: no chat message: it needs a role of {', '.join(ROLES)}, like {EXAMPLE}")
        if not isinstance(message.get("content"), (str, list, type(None))):
            raise RunError(f"{place}[{at}]: its content is {type(message['content']).__name__}; give text")
        calls = message.get("tool_calls") or []
        if not all(isinstance(call, dict) and isinstance(call.get("function"), dict) and call["function"].get("name") for call in calls):
            raise RunError(f'{place}[{at}]: a tool call is {{"function": {{"name": ..., "arguments": ...}}}}')
    return value


def tools_in(value: Any, place: str) -> list[Tool] | None:
    """Tool definitions; several data sets keep them as JSON text, because Arrow has no free objects."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError:
            raise RunError(f"{place}: text that is not JSON; give a list of tool definitions") from None
    if value and (not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value)):
        raise RunError(f"{place}: {type(value).__name__}; give a list of tool definitions")
    return value or None
