"""Reads rollouts from a run's rollouts/*.jsonl and evals/*/*.jsonl and from files of `rl
collect`, and formats them as text."""

import contextlib
import heapq
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.run_dir.files import MAX_LINE_BYTES, CorruptFileError
from rl.run_dir.paths import PENDING_LOG, RunDir
from rl.system.terminal import cut_middle, digits, visible
from rl.wire.batch_file import check_rollouts, open_rollouts
from rl.wire.rollouts import waiting_lines

Row = dict[str, Any]
"""One line of such a file: a rollout and whether it was trained on."""
TRAINED = "trained"
"""Used in place of a reason for not training on a rollout."""


# Reading ------------------------------------------------------------------------------------------


def rollout_files(run_dir: RunDir, step: int | None = None) -> list[Path]:
    """Returns the files of a run's rollouts of one step or of all, newest first, after the file
    of pending rollouts."""
    files = run_dir.rollout_files()
    if step is not None:
        return [files[step]] if step in files else []
    return [
        *([run_dir.pending] if run_dir.pending.exists() else []),
        *reversed(files.values()),
    ]


def read_rollouts(path: Path) -> Iterator[Row]:
    """Yields the rollouts of a file in order, except a last line that is still being written.

    Raises CorruptFileError if the file is damaged, or not a file of rollouts.
    """
    check_rollouts(path)
    with open_rollouts(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
            if len(line) >= MAX_LINE_BYTES:
                raise CorruptFileError(
                    f"{path}:{number}: a line of more than {MAX_LINE_BYTES:,} bytes is no rollout"
                )
            if line.endswith(b"\n"):
                yield parse_rollout(line, f"{path}:{number}")


def parse_rollout(line: bytes, where: str) -> Row:
    """Parses a line. Raises CorruptFileError."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{where}: not JSON ({error})") from None
    messages = row.get("messages") if isinstance(row, dict) and "reward" in row else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise CorruptFileError(f"{where}: not a rollout: it needs messages and a reward")
    return row


def unsettled(path: Path, newest: Path | None) -> Iterator[Row]:
    """Yields the rollouts of pending.log that are not yet in the `newest` step's file; while a
    batch is committed, both may have some."""
    settled = set()
    if newest and newest.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        with contextlib.suppress(CorruptFileError):  # reported when that file itself is read
            settled = {row.get("group_id") for row in read_rollouts(newest)}
    rows = (parse_rollout(line, str(path)) for line in waiting_lines(path).splitlines())
    return (row for row in rows if row.get("group_id") not in settled)


def read_all(files: Iterable[Path], damaged: list[str]) -> Iterator[Row]:
    """Yields the rollouts of several files in order. Appends faults of damaged files to
    `damaged` and continues with the next file."""
    files = list(files)
    for path in files:
        try:
            is_pending = path.name == PENDING_LOG
            newest = next((other for other in files if other != path), None)
            yield from unsettled(path, newest) if is_pending else read_rollouts(path)
        except CorruptFileError as error:
            damaged.append(str(error))
        except FileNotFoundError:  # compressed, deleted or moved since the folder was listed
            if (compressed := path.with_name(f"{path.name}.gz")).exists():
                yield from read_all([compressed], damaged)


# Choosing -----------------------------------------------------------------------------------------


@dataclass
class Selection:
    """A filter of rollouts, with counts of the values that it has seen in these fields."""

    env: str | None = None
    task: str | None = None
    why: str | None = None
    """Reason for not being trained on; `trained` for trained rollouts; `error` also matches
    every rollout that failed itself."""
    seen: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    taken: int = 0
    """Number of rollouts selected so far."""
    numbers: set[str] = field(default_factory=set)
    """Names of their numeric fields and metrics."""

    def takes(self, row: Row) -> bool:
        """Returns whether a rollout is selected, and counts its values."""
        names = {*row, *metrics_of(row)}
        self.numbers |= {name for name in names if number_of(row, name) is not None}
        env, task = [str(row.get("env"))], [str(row.get("task"))]
        values = {"env": env, "task": task, "why": reasons_of(row)}
        for name in values:
            self.seen[name].update(values[name])
        takes = all(wanted in (None, *values[name]) for name, wanted in self.wanted.items())
        self.taken += takes
        return takes

    @property
    def wanted(self) -> dict[str, str | None]:
        return {"env": self.env, "task": self.task, "why": self.why}


def reasons_of(row: Row) -> list[str]:
    """Returns why a rollout was not trained on, or `trained`, and `error` if it failed; empty if
    it was not meant for training."""
    reasons = [row["why"] or TRAINED] if "why" in row else []
    return [*dict.fromkeys([*reasons, *(["error"] if row.get("error") else [])])]


def number_of(row: Row, name: str) -> float | None:
    """Returns a field of a rollout, or a metric of its environment, as a finite number; None if
    there is none."""
    for value in (row.get(name), metrics_of(row).get(name)):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def metrics_of(row: Row) -> dict[str, Any]:
    """Returns a rollout's reward functions and other metrics by name."""
    metrics = row.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def ranked(rows: Iterable[Row], name: str, limit: int, *, lowest_first: bool = False) -> list[Row]:
    """Returns the `limit` rollouts with the highest (or lowest) value of a field or metric, ties
    in order; keeps only those in memory."""
    valued = ((value, row) for row in rows if (value := number_of(row, name)) is not None)
    pick = heapq.nsmallest if lowest_first else heapq.nlargest
    return [row for _, row in pick(limit, valued, key=lambda pair: pair[0])]


# Text ---------------------------------------------------------------------------------------------


def message_text(message: dict[str, Any]) -> str:
    """Formats a message: role, thinking, content and tool calls, with control characters
    escaped."""
    texts = [f"(thinks) {message['reasoning_content']}"] if message.get("reasoning_content") else []
    texts += content_texts(message.get("content"))
    texts += [
        f"calls {name}({plain(arguments)})" if name else plain(arguments)
        for name, arguments in calls_of(message)
    ]
    return visible(f"{message.get('role')}: " + "\n".join(texts))


def content_texts(content: Any) -> list[str]:
    """Returns the parts of a message's content; parts other than text as JSON."""
    items = content if isinstance(content, list) else [content]
    texts = [
        part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else part
        for part in items
    ]
    return [plain(text) for text in texts if text not in (None, "")]


def calls_of(message: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields name and arguments of each tool call of a message; a call in an unknown form has no
    name, and is its own arguments."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        known = isinstance(function, dict) and "name" in function
        yield (str(function["name"]), function.get("arguments", "")) if known else ("", call)


def contains(row: Row, text: str) -> bool:
    """Returns whether the conversation (thinking, content, names and arguments of tool calls) or
    the error of a rollout contains a text.

    text: casefolded; the case is ignored.
    """
    texts = [str(row.get("error") or "")]
    for message in row["messages"]:
        thinking = [message.get("reasoning_content"), message.get("thinking")]
        texts += content_texts(thinking) + content_texts(message.get("content"))
        texts += [plain(each) for call in calls_of(message) for each in call]
    return any(text in each.casefold() for each in texts)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def num_prompt_messages(row: Row) -> int:
    """Returns the number of messages at the start of a rollout that are not the policy's; 0 if
    the line does not have it."""
    number = row.get("num_prompt_messages")
    return number if isinstance(number, int) and 0 <= number <= len(row["messages"]) else 0


PROMPT_ENDS = "[the prompt ends here]"
"""Separates a prompt's worked examples from the policy's answers."""
MOST_MESSAGES = 10
"""Messages shown of a shortened conversation, at its start and end."""
LEAST_OF_PROMPT = 2
"""Messages of these kept for the prompt's first and last message if the rest is long."""
MOST_CHARACTERS, MOST_LINES = 4000, 60
"""Limits of a shortened conversation, divided among its messages."""


def messages_text(
    messages: list[dict[str, Any]], num_prompt: int = 0, *, is_short: bool = False
) -> str:
    """Formats a conversation. `num_prompt`: see `num_prompt_messages`. `is_short`: about one
    screen, without the middle of the conversation, first of the prompt, and of each message."""
    texts = [message_text(message) for message in messages]
    if is_short:
        count = max(1, min(len(texts), MOST_MESSAGES))
        limits = max(200, MOST_CHARACTERS // count), max(4, MOST_LINES // count)
        texts = [cut_middle(text, *limits) for text in texts]
    texts = [text.replace("\n", "\n    ") for text in texts]
    prompt, rest = texts[:num_prompt], texts[num_prompt:]
    if is_short:
        room = min(len(rest), MOST_MESSAGES - min(len(prompt), LEAST_OF_PROMPT))
        prompt, rest = without_middle(prompt, MOST_MESSAGES - room), without_middle(rest, room)
    has_answers = any(message.get("role") == "assistant" for message in messages[:num_prompt])
    return "\n".join([*prompt, *([PROMPT_ENDS] if has_answers else []), *rest])


def without_middle(texts: list[str], room: int) -> list[str]:
    """Returns the first and the last of the texts, `room` of them, and the number of others."""
    head, left_out = room // 2, len(texts) - room
    if left_out <= 0:
        return texts
    return [*texts[:head], f"[... {left_out:,} messages ...]", *texts[head + left_out :]]


PLACE = {
    "step": "step ",
    "policy_version": "version ",
    "policy": "policy ",
    "env": "",
    "task": "task ",
    "group_id": "group ",
    "rollout_id": "rollout ",
    "rollout": "rollout ",
    "sample": "sample ",
}
"""Fields that say which rollout it is, with the word before each."""


def heading(row: Row) -> str:
    """Returns a rollout's position, its reward and advantage, and how it ended."""
    position = [f"{word}{row[name]}" for name, word in PLACE.items() if row.get(name) is not None]
    if (agent := row.get("agent", "agent")) != "agent":
        position.append(f"agent {agent}")
    values = {name: number_of(metrics_of(row), name) for name in metrics_of(row)}
    metrics = ", ".join(f"{name} {digits(x, 4)}" for name, x in values.items() if x is not None)
    reward, advantage = number_of(row, "reward"), number_of(row, "advantage")
    scores = ["no reward" if reward is None else f"reward {reward:.3f}"]
    if reward is not None and metrics:
        scores = [f"reward {reward:.3f} ({metrics})"]
    if advantage is not None:
        scores.append(f"advantage {advantage:+.3f}")
    if "why" in row:
        scores.append(TRAINED if row["why"] is None else f"not trained: {row['why']}")
    return visible(f"{', '.join(position)}\n  {', '.join(scores)}\n  {ending(row)}")


def ending(row: Row) -> str:
    """Returns how a rollout ended, its length, and the versions that sampled it."""
    stop, tokens, turns = row.get("stop"), row.get("num_tokens"), row.get("num_turns")
    # For a single answer, `stop` only says that the turn limit is reached; for an endpoint's
    # answers, turns are unknown.
    why = f" ({stop})" if stop and turns != 1 and (turns or not tokens) else ""
    facts = [f"{row.get('outcome') or 'finished'}{why}"]
    if isinstance(tokens, int):
        facts.append(f"{tokens:,} tokens")
    if isinstance(turns, int) and turns > 1:
        facts.append(f"{turns} turns")
    if versions := row.get("versions"):
        facts.append(f"sampled by version {', '.join(map(str, versions))}")
    return ", ".join(facts)


def rollout_text(row: Row) -> str:
    """Formats a whole rollout, with its error if it failed."""
    error = [visible(f"error: {row['error']}").replace("\n", "\n    ")] if row.get("error") else []
    messages = messages_text(row["messages"], num_prompt_messages(row))
    return "\n".join([heading(row), messages, *error])
