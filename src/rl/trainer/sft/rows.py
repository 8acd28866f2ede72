"""Reads examples for supervised fine-tuning from the rows of JSONL files, Hugging Face data
sets, and a run's rollouts."""

import glob
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.command_line import without_none
from rl.config.rows import chat_messages
from rl.config.sft import SftColumns, SftConfig
from rl.models.chat import Message, Tool, chat_call, chat_tools
from rl.models.hub import hub_or_cache
from rl.models.tables import csv_rows, load_table
from rl.run_dir.paths import PENDING_ROLLOUTS
from rl.system.errors import RunError
from rl.system.jsonl import json_objects
from rl.wire.batch_file import check_given

ROLES = ("system", "developer", "user", "assistant", "tool")
EXAMPLE = (
    '{"prompt": "What is 2 + 2?", "completion": "4"} or {"messages": [{"role": "user", '
    '"content": ...}, {"role": "assistant", ...}]}'
)
ROLLOUT = {"messages", "reward", "outcome"}
"""Columns that mark a row as a rollout, from rollouts/*.jsonl or `rl collect`."""
TRAINED = ("weight", "train")
"""Keys of a message that say whether it is trained."""
IGNORED_MARKS = ("loss", "loss_mask", "mask", "trainable", "training")
IGNORED_COLUMNS = (
    # Parts of the prompt, in Alpaca's rows and in those of image models:
    "history",
    "images",
    "input",
    "videos",
    # What is trained:
    "assistant_masks",
    "chat_template_kwargs",
    "labels",
    "loss",
    "loss_mask",
    "train",
    "trainable",
    "weight",
)
UNUSED_OUTCOMES = ("failed", "timeout", "truncated", "overlong", "empty")
"""Outcomes that are not trained: failed rollouts show nothing, and the others did not end where
the policy wanted."""


@dataclass(frozen=True)
class Source:
    """One data set."""

    dataset: str
    split: str
    key: str
    """The setting that names the data set, for messages."""


@dataclass(frozen=True)
class Example:
    """A row that is ready to be rendered."""

    place: str
    """File and line, or data set and row."""
    messages: list[Message]
    num_context: int
    """Number of messages at the beginning that are never trained."""
    untrained: frozenset[int]
    """Places of further messages that are not trained."""
    tools: list[Tool] | None
    text: tuple[str, str] | None
    """Prompt and completion, if the row has them as text; `messages` then holds the same as a
    chat."""
    task: str
    """Name of the task, if the row names one."""

    @property
    def group(self) -> str:
        """What all has to be on one side of training and validation: its task, else its prompt,
        else itself."""
        prompt = self.text[0] if self.text else self.messages[: self.num_context or -1]
        return self.task or json.dumps(prompt or self.messages)


def sources(config: SftConfig) -> dict[str, Source]:
    """Returns the data sets of a configuration: `train`, and `validation` if it is a separate
    one."""
    found = {"train": Source(config.dataset, config.split, "sft.dataset")}
    if config.validation or config.validation_split:
        key = "sft.validation" if config.validation else "sft.validation_split"
        found["validation"] = Source(
            config.validation or config.dataset, config.validation_split or config.split, key
        )
    return found


def read_examples(source: Source, config: SftConfig, counts: Counter[str]) -> Iterator[Example]:
    """Yields the examples of a data set, in its order. Counts rows, and rows left out by reason.
    Raises RunError."""
    rows = rows_of(source, config)
    chosen = best_rollouts(rows(), config) if config.max_per_task else None
    for place, row in rows():
        counts["rows"] += 1
        if not set(row) >= ROLLOUT:
            if source.key == "sft.dataset" and (
                chosen is not None or config.min_reward is not None
            ):
                which = f"this row is not one: it lacks {', '.join(sorted(ROLLOUT - set(row)))}"
                raise RunError(
                    f"{place}: sft.min_reward and sft.max_per_task choose among rollouts, "
                    f"but {which}"
                )
            yield example_of(row, place, config)
        elif why := why_unused(row, place, config):
            counts[why] += 1
        elif chosen is not None and place not in chosen:
            counts[f"rollouts beyond the best {config.max_per_task} of their task"] += 1
        else:
            yield example_of(row, place, config)


def rows_of(
    source: Source, config: SftConfig
) -> Callable[[], Iterator[tuple[str, dict[str, Any]]]]:
    """Returns a function that reads a data set from its beginning: it yields the place and the
    content of each row. Raises RunError."""
    files = files_of(source)
    if files is None:
        data = hub_rows(source, config)
        # Arrow gives every object the keys of all objects in its column, with None for keys it did
        # not have.
        as_written = dict if isinstance(data, list) else without_none
        return lambda: (
            (f"{source.dataset} row {number}", as_written(row)) for number, row in enumerate(data)
        )
    refuse_split(source, config)
    return lambda: json_rows(files)


def refuse_split(source: Source, config: SftConfig) -> None:
    """Raises RunError if a part is wanted of a file or a data set that has none: the whole would
    be read in its place."""
    setting, wanted = "sft.validation_split", config.validation_split
    if source.key == "sft.dataset":
        setting, wanted = (
            "sft.split",
            config.split if config.split != SftConfig.model_fields["split"].default else None,
        )
    if wanted:
        remedy = (
            "name the held-out file with sft.validation, or hold out a part of this one with "
            "sft.validation_fraction"
        )
        raise RunError(f"{setting} = {wanted!r}: {source.dataset} has no splits; {remedy}")
    if config.subset and not config.validation:  # which may be what it is of
        raise RunError(
            f"sft.subset = {config.subset!r}: {source.dataset} has no subsets; leave it out"
        )


def files_of(source: Source) -> list[Path] | None:
    """Returns the JSONL files that a source names, in order; None for a Hugging Face data set.
    Raises RunError."""
    path = Path(source.dataset).expanduser()
    if path.is_file():
        return [path] if path.suffix in (".jsonl", ".json") or is_compressed(path) else None
    if (path / "rollouts").is_dir():
        pattern = f"{glob.escape(str(path))}/rollouts/*.jsonl"
    elif any(sign in source.dataset for sign in "*?["):
        pattern = str(path)
    elif path.is_dir() or (
        source.dataset.count("/") <= 1
        and not source.dataset.startswith((".", "/", "~"))
        and path.suffix != ".jsonl"
    ):
        return None
    else:
        remedy = (
            "give a JSONL file, a pattern, a run directory, or owner/name of a Hugging Face data "
            "set"
        )
        raise RunError(
            f"{source.key} = {source.dataset!r}: there is no {path.absolute()}; {remedy}"
        )
    found = {Path(name) for end in ("", ".gz") for name in glob.glob(f"{pattern}{end}")}
    wanted = (
        path
        for path in found
        if path.name != PENDING_ROLLOUTS and (path.suffix != ".gz" or is_compressed(path))
    )
    files = sorted(
        path for path in wanted if path.suffix != ".gz" or path.with_suffix("") not in found
    )
    if not files:
        raise RunError(f"{source.key} = {source.dataset!r}: no file matches {pattern}")
    return files


def is_compressed(path: Path) -> bool:
    """Whether the path is an old rollouts file, which the run has compressed."""
    return path.parent.name == "rollouts" and path.name.endswith(".jsonl.gz")


def json_rows(files: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (file:line, row) of every line that is not blank, by the file's name in `files`.
    Raises RunError."""
    for listed in files:
        # compressed since then
        path = listed if listed.exists() else listed.with_name(f"{listed.name}.gz")
        check_given(path)
        for place, row in json_objects(path, EXAMPLE):
            yield f"{listed}{place.removeprefix(str(path))}", row


def hub_rows(source: Source, config: SftConfig) -> Any:
    """Returns the rows of a Hugging Face data set: on the hub, saved in a folder, or a file that
    `datasets` can read. Raises RunError."""
    import datasets

    # hidden; `datasets` has now seen that, but pickles with it if its name is there
    if sys.modules.get("torch", datasets) is None:
        del sys.modules["torch"]
    datasets.disable_progress_bars()
    path, unreachable = Path(source.dataset).expanduser(), ""
    try:
        if path.is_file():
            kind = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}.get(path.suffix)
            if kind is None:
                raise RunError(
                    f"{source.key} = {source.dataset!r}: unknown kind of file; give .jsonl, "
                    ".parquet, .csv or .arrow"
                )
            refuse_split(source, config)
            if kind == "csv":
                return csv_rows(path)
            return datasets.load_dataset(kind, data_files=str(path), split="train")
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(path))
            if isinstance(saved, datasets.DatasetDict):
                return saved[source.split]
            refuse_split(source, config)
            return saved
        with hub_or_cache(source.dataset) as unreachable:
            return load_table(source.dataset, source.split, config.subset)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetGenerationError) as error:
        where = "" if path.exists() else f"; {path.absolute()} is not a file or folder either"
        reason = str(error).strip().splitlines()[0]
        remedy = "check name, sft.split and sft.subset"
        if unreachable:
            reason, remedy = (
                f"not in the cache of this machine, and {unreachable}",
                "check the network, or give a file",
            )
        raise RunError(
            f"{source.key} = {source.dataset!r} (split {source.split}): {reason}; {remedy}{where}"
        ) from None


def why_unused(row: dict[str, Any], place: str, config: SftConfig) -> str | None:
    """Returns why a rollout is not trained on; None if it is."""
    if row.get("error") or row["outcome"] in UNUSED_OUTCOMES:
        return f"{row['outcome']} rollouts"
    if row.get("trainable") is False or row.get("why") == "not_trainable":
        return "rollouts of agents that are not trained"
    if not isinstance(row["reward"], (int, float)) or not math.isfinite(row["reward"]):
        raise RunError(
            f"{place}: the reward is {row['reward']!r}, but a rollout's reward must be a number"
        )
    if config.min_reward is not None and row["reward"] < config.min_reward:
        return f"rollouts with a reward below {config.min_reward:g}"
    return None


def best_rollouts(rows: Iterator[tuple[str, dict[str, Any]]], config: SftConfig) -> set[str]:
    """Returns the places of the `max_per_task` best rollouts of each task."""
    tasks: dict[str, list[tuple[float, int, str]]] = {}
    for number, (place, row) in enumerate(rows):
        if set(row) >= ROLLOUT and why_unused(row, place, config) is None:
            tasks.setdefault(task_of(row, place), []).append((-row["reward"], number, place))
    return {
        place
        for rollouts in tasks.values()
        for *_, place in sorted(rollouts)[: config.max_per_task]
    }


def task_of(row: dict[str, Any], otherwise: str) -> str:
    """Returns the name of a row's task, or `otherwise` for a row that names none."""
    return f"{row.get('env')} {row['task']}" if "task" in row and set(row) >= ROLLOUT else otherwise


def example_of(row: dict[str, Any], place: str, config: SftConfig) -> Example:
    """Makes an example from a row's columns. Raises RunError with the row's place if its shape
    is wrong, or a part would be ignored."""
    columns = config.columns
    tools = tools_in(row.get(columns.tools), f"{place}: {columns.tools}")
    texts = row.get(columns.prompt), row.get(columns.completion)
    messages = messages_in(row, columns.messages, "", place)
    num_context, text = 0, None
    if set(row) >= ROLLOUT and messages:
        num_context = prompt_of(row, messages, place, config)
    else:
        refuse_ignored(row, place, columns)
        prompt = messages_in(row, columns.prompt, "user", place)
        completion = messages_in(row, columns.completion, "assistant", place)
        if messages:
            refuse_other_words(messages, prompt, completion, f"{place}: {columns.messages}")
        elif prompt and completion:
            if prompt[-1]["role"] == completion[0]["role"] == "assistant":
                raise RunError(
                    f"{place}: {columns.prompt}: ends with the assistant's words, which are "
                    "not continued; move them to the answer"
                )
            messages, num_context = prompt + completion, len(prompt)
            text = texts if all(isinstance(part, str) for part in texts) else None
        else:
            wanted = f"neither {columns.messages} nor {columns.prompt} and {columns.completion}"
            there = ", ".join(row) or "nothing"
            raise RunError(
                f"{place}: has {wanted}, but {there}; name the columns with sft.columns.*, "
                f"or write rows like {EXAMPLE}"
            )
        if system := row.get("system"):
            if (
                config.style == "completion"
                or not isinstance(system, str)
                or messages[0]["role"] == "system"
            ):
                raise RunError(
                    f"{place}: system: a text before a chat that has no system message yet; "
                    "leave it out, or write it there"
                )
            messages, num_context, text = (
                [{"role": "system", "content": system}, *messages],
                num_context + bool(num_context),
                None,
            )
    untrained = frozenset(
        at
        for at, message in enumerate(messages)
        if not is_trained(message, f"{place}: messages[{at}]")
    )
    if num_context == 0 and messages[0]["role"] == "assistant" and 0 not in untrained:
        raise RunError(
            f"{place}: begins with the assistant, whose words follow no prompt; write what "
            "precedes them, or give them weight 0"
        )
    messages = [
        {key: value for key, value in message.items() if key not in TRAINED} for message in messages
    ]
    return Example(place, messages, num_context, untrained, tools, text, task_of(row, ""))


def refuse_ignored(row: dict[str, Any], place: str, columns: SftColumns) -> None:
    """Raises RunError for a column that says what to train, or has a part of the prompt, in a
    way that is not read."""
    named = set(columns.model_dump().values())
    for name in IGNORED_COLUMNS:
        if row.get(name) not in (None, True, 1, {}, [], "") and name not in named:
            raise RunError(
                f"{place}: {name}: a column that is not read; write it into the messages (an "
                "answer may have weight 0 or 1), or remove it"
            )


def refuse_other_words(
    messages: list[Message], prompt: list[Message], completion: list[Message], place: str
) -> None:
    """Raises RunError unless the messages begin with the prompt and end with the completion that
    stand beside them."""
    said, begin, end = (
        [(m["role"], m.get("content")) for m in part if m["role"] != "system"]
        for part in (messages, prompt, completion)
    )
    if said[: len(begin)] != begin or said[len(said) - len(end) :] != end:
        raise RunError(
            f"{place}: says other things than prompt or completion beside it; remove one, or "
            "name other columns (sft.columns)"
        )


def is_trained(message: Message, place: str) -> bool:
    """Returns whether a message may be trained: all, unless `weight` is 0 or `train` false.
    Raises RunError for other marks."""
    for name in IGNORED_MARKS:
        if message.get(name) is not None:
            raise RunError(
                f"{place}.{name}: is not read; mark an answer that is not to be trained with "
                "weight 0"
            )
    marks = [message[name] for name in TRAINED if message.get(name) is not None]
    if any(mark not in (0, 1) or (mark == 1 and message["role"] != "assistant") for mark in marks):
        raise RunError(
            f"{place}: weight or train is {marks[0]!r}; give 0 or 1, and 1 to answers of the "
            "assistant alone"
        )
    return all(marks)


def prompt_of(row: dict[str, Any], messages: list[Message], place: str, config: SftConfig) -> int:
    """Returns the number of messages at the beginning of a rollout that are its prompt. Raises
    RunError if all answers after the prompt would be trained, but cannot all be the policy's."""
    num_prompt, turns = row.get("num_prompt_messages", 0), row.get("num_turns")
    if not (isinstance(num_prompt, int) and 0 <= num_prompt <= len(messages)):
        raise RunError(
            f"{place}: num_prompt_messages is {num_prompt!r}; it must be a number from 0 to "
            f"{len(messages)}"
        )
    answers = sum(message["role"] == "assistant" for message in messages[num_prompt:])
    if config.train != "last" and isinstance(turns, int) and 0 < turns < answers:
        remedy = (
            'train only the last answer of each rollout (sft.train = "last"), or play new ones '
            "with `rl collect`"
        )
        raise RunError(
            f"{place}: the policy sampled {turns} of its {answers} answers, and the "
            f"environment wrote the others; {remedy}"
        )
    return num_prompt


def messages_in(row: dict[str, Any], column: str, role: str, place: str) -> list[Message]:
    """Returns the chat messages of a column, in which text is one message of `role`; an empty
    list if the row has no such column. Raises RunError for anything else."""
    value = row.get(column)
    if value is None:
        return []
    if isinstance(value, str) and not role:
        raise RunError(f"{place}: {column}: a text; give a list of messages, like {EXAMPLE}")
    messages = chat_messages(value, role, f"{place}: {column}", ROLES)
    return [
        message | {"tool_calls": [chat_call(call) for call in message.get("tool_calls") or ()]}
        for message in messages
    ]


def tools_in(value: Any, place: str) -> list[Tool] | None:
    """Returns tool definitions, parsed if all or each is JSON text, as in data sets that store
    them so because Arrow has no free-form objects."""
    try:
        value = json.loads(value) if isinstance(value, str) and value else value
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in value or ()]
    except (TypeError, ValueError):  # a number, or an object, of which the keys are no JSON
        raise RunError(
            f"{place}: text that is not JSON, or no list; give a list of tool definitions"
        ) from None
    if not all(isinstance(tool, dict) for tool in tools):
        raise RunError(f"{place}: a list with something else; give a list of tool definitions")
    return chat_tools(tools)
