"""Reads examples for supervised fine-tuning from the rows of JSONL files, Hugging Face data
sets, and a run's rollouts."""

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.fields import without_none
from rl.config.kinds import SftColumns, SftConfig
from rl.config.rows import TABLES, chat_messages
from rl.models.chat import Message, Tool, chat_call, chat_tools
from rl.models.hub import hub_or_cache, load_table
from rl.run_dir.files import matching
from rl.system.errors import RunError
from rl.system.jsonl import json_objects
from rl.system.terminal import did_you_mean
from rl.wire.batch_file import check_given

ROLES = ("system", "developer", "user", "assistant", "tool")
EXAMPLE = (
    '{"prompt": "What is 2 + 2?", "completion": "4"} or {"messages": [{"role": "user", '
    '"content": ...}, {"role": "assistant", ...}]}'
)
PATTERN = "*?["
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
class DataSource:
    """One data set."""

    dataset: str
    split: str
    key: str
    """The setting that names the data set, for messages."""


@dataclass(frozen=True)
class ChatExample:
    """A row that is ready to be rendered."""

    where: str
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


def sources(config: SftConfig) -> dict[str, DataSource]:
    """Returns the data sets of a configuration: `train`, and `validation` if it is a separate
    one."""
    result = {"train": DataSource(config.dataset, config.split, "sft.dataset")}
    if config.validation or config.validation_split:
        key = "sft.validation" if config.validation else "sft.validation_split"
        dataset = config.validation or config.dataset
        result["validation"] = DataSource(dataset, config.validation_split or config.split, key)
    return result


def read_examples(
    source: DataSource, config: SftConfig, counts: Counter[str]
) -> Iterator[ChatExample]:
    """Yields the examples of a data set, in its order. Counts rows, and rows left out by reason.
    Raises RunError."""
    rows = rows_of(source, config)
    best = best_rollouts(rows(), config) if config.max_per_task else None
    chooses = source.key == "sft.dataset" and (best is not None or config.min_reward is not None)
    for where, row in rows():
        counts["rows"] += 1
        if row.keys() >= ROLLOUT:
            why = why_unused(row, where, config)
            if why is None and best is not None and where not in best:
                why = f"rollouts beyond the best {config.max_per_task} of their task"
            if why:
                counts[why] += 1
                continue
        elif chooses:
            raise RunError(
                f"{where}: sft.min_reward and sft.max_per_task choose among rollouts, but this "
                f"row is not one: it lacks {', '.join(sorted(ROLLOUT - row.keys()))}"
            )
        yield example_of(row, where, config)


def rows_of(
    source: DataSource, config: SftConfig
) -> Callable[[], Iterator[tuple[str, dict[str, Any]]]]:
    """Returns a function that reads a data set from its beginning: it yields the place and the
    content of each row. Raises RunError."""
    files = files_of(source)
    if files is not None:
        refuse_split(source, config)
        return lambda: json_rows(files)
    data = hub_rows(source, config)
    # Arrow gives every object the keys of all objects in its column, with None for keys it did not
    # have.
    as_written = dict if isinstance(data, list) else without_none
    name = source.dataset
    return lambda: ((f"{name} row {n}", as_written(row)) for n, row in enumerate(data))


def refuse_split(source: DataSource, config: SftConfig) -> None:
    """Raises RunError if a part is wanted of a file or a data set that has none: the whole would
    be read in its place."""
    setting, wanted = "sft.validation_split", config.validation_split
    if source.key == "sft.dataset":
        setting, usual = "sft.split", SftConfig.model_fields["split"].default
        wanted = config.split if config.split != usual else None
    if wanted:
        raise RunError(
            f"{setting} = {wanted!r}: {source.dataset} has no splits; name the held-out file with "
            "sft.validation, or hold out a part of this one with sft.validation_fraction"
        )
    if config.subset and not config.validation:  # which may be what it is of
        raise RunError(
            f"sft.subset = {config.subset!r}: {source.dataset} has no subsets; leave it out"
        )


def files_of(source: DataSource) -> list[Path] | None:
    """Returns the JSONL files that a source names, in order; None for a Hugging Face data set.
    Raises RunError."""
    name, path = source.dataset, Path(source.dataset).expanduser()
    if path.is_file():
        return [path] if path.suffix in (".jsonl", ".json") or is_compressed(path) else None
    if (path / "rollouts").is_dir():
        pattern = f"{path}/rollouts/*.jsonl"
    elif any(sign in name for sign in PATTERN) and not path.exists():
        pattern = str(path)
    elif path.is_dir() or (
        name.count("/") <= 1 and name[:1] not in (".", "/", "~") and path.suffix != ".jsonl"
    ):
        return None
    else:
        raise RunError(
            f"{source.key} = {name!r}: there is no {path.absolute()}; give a JSONL file, a "
            "pattern, a run directory, or owner/name of a Hugging Face data set"
        )
    # a compressed file only if it is not there as it was written
    matches = matching(f"{pattern}.gz") + matching(pattern)
    files = {
        path.with_suffix("") if path.suffix == ".gz" else path: path
        for path in matches
        if path.suffix != ".gz" or is_compressed(path)
    }
    if not files:
        raise RunError(f"{source.key} = {name!r}: no file matches {pattern}")
    return [files[key] for key in sorted(files)]


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
        for where, row in json_objects(path, EXAMPLE):
            yield f"{listed}{where.removeprefix(str(path))}", row


def hub_rows(source: DataSource, config: SftConfig) -> Any:
    """Returns the rows of a Hugging Face data set: on the hub, saved in a folder, or a file that
    `datasets` can read. Raises RunError."""
    import datasets

    # hidden; `datasets` has now seen that, but pickles with it if its name is there
    if sys.modules.get("torch", datasets) is None:
        del sys.modules["torch"]
    datasets.disable_progress_bars()
    name, path, unreachable = source.dataset, Path(source.dataset).expanduser(), ""
    try:
        if path.is_file():
            if path.suffix not in TABLES:
                raise RunError(
                    f"{source.key} = {name!r}: unknown kind of file; give .jsonl, .parquet, .csv "
                    "or .arrow"
                )
            refuse_split(source, config)
            return load_table(name, "")
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(path))
            if isinstance(saved, datasets.DatasetDict):
                if source.split not in saved:
                    raise ValueError(f"no such split; {did_you_mean(source.split, saved)}")
                return saved[source.split]
            refuse_split(source, config)
            return saved
        with hub_or_cache(name) as unreachable:
            return load_table(name, source.split, config.subset)
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        text = f"{str(error).strip().splitlines()[0]}; check name, sft.split and sft.subset"
        if unreachable:
            text = (
                f"not in the cache of this machine, and {unreachable}; check the network, or give "
                "a file"
            )
        if path.is_dir() and any(sign in name for sign in PATTERN):
            text = f"`datasets` takes its name for a pattern; rename it, or give {name}/*.jsonl"
        if not path.exists():
            text += f"; {path.absolute()} is not a file or folder either"
        raise RunError(f"{source.key} = {name!r} (split {source.split}): {text}") from None


def why_unused(row: dict[str, Any], where: str, config: SftConfig) -> str | None:
    """Returns why a rollout is not trained on; None if it is."""
    reward, least = row["reward"], config.min_reward
    if row.get("error") or row["outcome"] in UNUSED_OUTCOMES:
        return f"{row['outcome']} rollouts"
    if row.get("trainable") is False or row.get("why") == "not_trainable":
        return "rollouts of agents that are not trained"
    if not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise RunError(
            f"{where}: the reward is {reward!r}, but a rollout's reward must be a number"
        )
    if least is not None and reward < least:
        return f"rollouts with a reward below {least:g}"
    return None


def best_rollouts(rows: Iterator[tuple[str, dict[str, Any]]], config: SftConfig) -> set[str]:
    """Returns the places of the `max_per_task` best rollouts of each task."""
    tasks = defaultdict[str, list[tuple[float, int, str]]](list)
    for number, (where, row) in enumerate(rows):
        if row.keys() >= ROLLOUT and why_unused(row, where, config) is None:
            tasks[task_of(row, where)].append((-row["reward"], number, where))
    best = (sorted(rollouts)[: config.max_per_task] for rollouts in tasks.values())
    return {where for rollouts in best for *_, where in rollouts}


def task_of(row: dict[str, Any], otherwise: str) -> str:
    """Returns the name of a row's task, or `otherwise` for a row that names none."""
    is_named = "task" in row and row.keys() >= ROLLOUT
    return f"{row.get('env')} {row['task']}" if is_named else otherwise


def example_of(row: dict[str, Any], where: str, config: SftConfig) -> ChatExample:
    """Makes an example from a row's columns. Raises RunError with the row's place if its shape
    is wrong, or a part would be ignored."""
    columns = config.columns
    tools = tools_in(row.get(columns.tools), f"{where}: {columns.tools}")
    messages, num_context, text = messages_in(row, columns.messages, "", where), 0, None
    if messages and row.keys() >= ROLLOUT:
        num_context = prompt_of(row, messages, where, config)
    else:
        messages, num_context, text = parts_of(row, messages, where, config)
    untrained = set()
    for at, message in enumerate(messages):
        if not is_trained(message, f"{where}: messages[{at}]"):
            untrained.add(at)
    if num_context == 0 and messages[0]["role"] == "assistant" and 0 not in untrained:
        raise RunError(
            f"{where}: begins with the assistant, whose words follow no prompt; write what "
            "precedes them, or give them weight 0"
        )
    messages = [
        {key: value for key, value in message.items() if key not in TRAINED} for message in messages
    ]
    task = task_of(row, "")
    return ChatExample(where, messages, num_context, frozenset(untrained), tools, text, task)


def parts_of(
    row: dict[str, Any], messages: list[Message], where: str, config: SftConfig
) -> tuple[list[Message], int, tuple[str, str] | None]:
    """Returns the `messages`, `num_context` and `text` of a row that is no rollout, whose column of
    messages holds `messages`. Raises RunError."""
    columns, num_context, text = config.columns, 0, None
    refuse_ignored(row, where, columns)
    prompt = messages_in(row, columns.prompt, "user", where)
    completion = messages_in(row, columns.completion, "assistant", where)
    if messages:
        refuse_other_words(messages, prompt, completion, f"{where}: {columns.messages}")
    elif not (prompt and completion):
        raise RunError(
            f"{where}: has neither {columns.messages} nor {columns.prompt} and "
            f"{columns.completion}, but {', '.join(row) or 'nothing'}; name the columns with "
            f"sft.columns.*, or write rows like {EXAMPLE}"
        )
    elif prompt[-1]["role"] == completion[0]["role"] == "assistant":
        raise RunError(
            f"{where}: {columns.prompt}: ends with the assistant's words, which are not "
            "continued; move them to the answer"
        )
    else:
        messages, num_context = prompt + completion, len(prompt)
        texts = row[columns.prompt], row[columns.completion]
        text = texts if all(isinstance(part, str) for part in texts) else None
    if not (system := row.get("system")):
        return messages, num_context, text
    if (
        config.style == "completion"
        or not isinstance(system, str)
        or messages[0]["role"] == "system"
    ):
        raise RunError(
            f"{where}: system: a text before a chat that has no system message yet; leave it out, "
            "or write it there"
        )
    first = {"role": "system", "content": system}
    return [first, *messages], num_context + bool(num_context), None


def refuse_ignored(row: dict[str, Any], where: str, columns: SftColumns) -> None:
    """Raises RunError for a column that says what to train, or has a part of the prompt, in a
    way that is not read."""
    named = set(columns.model_dump().values())
    for name in IGNORED_COLUMNS:
        if row.get(name) not in (None, True, 1, {}, [], "") and name not in named:
            raise RunError(
                f"{where}: {name}: a column that is not read; write it into the messages (an "
                "answer may have weight 0 or 1), or remove it"
            )


def refuse_other_words(
    messages: list[Message], prompt: list[Message], completion: list[Message], where: str
) -> None:
    """Raises RunError unless the messages begin with the prompt and end with the completion that
    stand beside them."""
    words, begin, end = (
        [
            (message["role"], message.get("content"))
            for message in part
            if message["role"] != "system"
        ]
        for part in (messages, prompt, completion)
    )
    if words[: len(begin)] != begin or words[len(words) - len(end) :] != end:
        raise RunError(
            f"{where}: says other things than prompt or completion beside it; remove one, or "
            "name other columns (sft.columns)"
        )


def is_trained(message: Message, where: str) -> bool:
    """Returns whether a message may be trained: all, unless `weight` is 0 or `train` false.
    Raises RunError for other marks."""
    for name in IGNORED_MARKS:
        if message.get(name) is not None:
            raise RunError(
                f"{where}.{name}: is not read; mark an answer that is not to be trained with "
                "weight 0"
            )
    marks = [message[name] for name in TRAINED if message.get(name) is not None]
    if any(mark not in (0, 1) or (mark == 1 and message["role"] != "assistant") for mark in marks):
        raise RunError(
            f"{where}: weight or train is {marks[0]!r}; give 0 or 1, and 1 to answers of the "
            "assistant alone"
        )
    return all(marks)


def prompt_of(row: dict[str, Any], messages: list[Message], where: str, config: SftConfig) -> int:
    """Returns the number of messages at the beginning of a rollout that are its prompt. Raises
    RunError if all answers after the prompt would be trained, but cannot all be the policy's."""
    num_prompt, turns = row.get("num_prompt_messages", 0), row.get("num_turns")
    if not (isinstance(num_prompt, int) and 0 <= num_prompt <= len(messages)):
        raise RunError(
            f"{where}: num_prompt_messages is {num_prompt!r}; it must be a number from 0 to "
            f"{len(messages)}"
        )
    answers = sum(message["role"] == "assistant" for message in messages[num_prompt:])
    if config.train != "last" and isinstance(turns, int) and 0 < turns < answers:
        raise RunError(
            f"{where}: the policy sampled {turns} of its {answers} answers, and the environment "
            'wrote the others; train only the last answer of each rollout (sft.train = "last"), '
            "or play new ones with `rl collect`"
        )
    return num_prompt


def messages_in(row: dict[str, Any], column: str, role: str, where: str) -> list[Message]:
    """Returns the chat messages of a column, in which text is one message of `role`; an empty
    list if the row has no such column. Raises RunError for anything else."""
    value = row.get(column)
    if value is None:
        return []
    if isinstance(value, str) and not role:
        raise RunError(f"{where}: {column}: a text; give a list of messages, like {EXAMPLE}")
    messages = chat_messages(value, role, f"{where}: {column}", ROLES)
    return [
        message | {"tool_calls": [chat_call(call) for call in message.get("tool_calls") or ()]}
        for message in messages
    ]


def tools_in(value: Any, where: str) -> list[Tool] | None:
    """Returns tool definitions, parsed if all or each is JSON text, as in data sets that store
    them so because Arrow has no free-form objects."""
    fault = "a list with something else"
    try:
        value = json.loads(value) if isinstance(value, str) and value else value
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in value or ()]
        if all(isinstance(tool, dict) for tool in tools):
            return chat_tools(tools)
    except (TypeError, ValueError):  # a number, or an object, of which the keys are no JSON
        fault = "text that is not JSON, or no list"
    raise RunError(f"{where}: {fault}; give a list of tool definitions")
