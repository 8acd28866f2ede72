"""Rollouts as their files tell them: a run's rollouts/*.jsonl and evals/*/*.jsonl, and what `rl collect` writes. And as text for people."""

import contextlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.run_dir.files import CorruptFileError, reading
from rl.run_dir.paths import PENDING_ROLLOUTS, RunDir
from rl.system.terminal import cut_middle, visible
from rl.wire.batch_file import check_rollouts, open_rollouts

Row = dict[str, Any]
"""One line of such a file: a rollout and what became of it."""
TRAINED = "trained"
"""In place of a reason why not."""


# Reading ----------------------------------------------------------------------------------------------------------------


def rollout_files(run_dir: RunDir, step: int | None = None) -> list[Path]:
    """The files of a run's rollouts, newest first, of one step or of all; those that no batch has settled come before."""
    files = run_dir.rollout_files()
    if step is not None:
        return [files[step]] if step in files else []
    return [*([run_dir.pending_rollouts] if run_dir.pending_rollouts.exists() else []), *reversed(files.values())]


def read_rollouts(path: Path) -> Iterator[Row]:
    """The rollouts of a file, in its order. A line that is still being written, the last one, is not among them.

    Raises CorruptFileError for a file that does not hold what was written, or that is none of rollouts.
    """
    check_rollouts(path)
    with reading(path), open_rollouts(path) as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield parse_rollout(line, f"{path}:{number}")


def parse_rollout(line: bytes, place: str) -> Row:
    """The content of a line. Raises CorruptFileError."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{place}: not JSON ({error})") from None
    if not (isinstance(row, dict) and "reward" in row and is_conversation(row.get("messages"))):
        raise CorruptFileError(f"{place}: no rollout: it needs messages and a reward")
    return row


def is_conversation(value: Any) -> bool:
    """Whether it is a list of messages."""
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def unsettled(path: Path, newest: Path | None) -> Iterator[Row]:
    """The rollouts of pending.jsonl that the file of the `newest` step has not got, as it may while a batch is being committed."""
    settled = set()
    if newest and newest.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        with contextlib.suppress(CorruptFileError):  # which is said when it is read for itself
            settled = {row.get("group_id") for row in read_rollouts(newest)}
    return (row for row in read_rollouts(path) if row.get("group_id") not in settled)


def read_all(files: Iterable[Path], damaged: list[str]) -> Iterator[Row]:
    """The rollouts of several files, one file after the other. What is wrong with a file goes to `damaged`; then the next one follows."""
    files = list(files)
    for path in files:
        try:
            pending = path.name == PENDING_ROLLOUTS
            yield from unsettled(path, next((other for other in files if other != path), None)) if pending else read_rollouts(path)
        except CorruptFileError as error:
            damaged.append(str(error))
        except FileNotFoundError:  # gone since the folder was listed: compressed, or deleted or moved by retention or a resume
            if (compressed := path.with_name(f"{path.name}.gz")).exists():
                yield from read_all([compressed], damaged)


# Choosing ---------------------------------------------------------------------------------------------------------------


@dataclass
class Selection:
    """Which rollouts are wanted, and what those that were looked through have in these fields."""

    env: str | None = None
    task: str | None = None
    why: str | None = None
    """Why they were not trained, `trained` for those that were, `error` also for each that failed itself."""
    seen: dict[str, Counter[str]] = field(default_factory=lambda: {"env": Counter(), "task": Counter(), "why": Counter()})

    taken: int = 0
    """How many of them were wanted."""
    numbers: set[str] = field(default_factory=set)
    """Names of their numbers."""

    def takes(self, row: Row) -> bool:
        """Whether a rollout is one of them."""
        found = {"env": [str(row.get("env"))], "task": [str(row.get("task"))], "why": reasons_of(row)}
        self.numbers.update(name for name in {**row, **metrics_of(row)} if number_of(row, name) is not None)
        for name, values in found.items():
            self.seen[name].update(values)
        takes = all(wanted is None or wanted in found[name] for name, wanted in self.wanted.items())
        self.taken += takes
        return takes

    @property
    def wanted(self) -> dict[str, str | None]:
        return {"env": self.env, "task": self.task, "why": self.why}


def reasons_of(row: Row) -> list[str]:
    """What became of a rollout, in one or two words; empty for one that was not meant to be trained."""
    if "why" not in row:
        return ["error"] if row.get("error") else []
    return list(dict.fromkeys([row["why"] or TRAINED, *(["error"] if row.get("error") else [])]))


def number_of(row: Row, name: str) -> float | None:
    """A field of a rollout that is a finite number, or one of its environment's own metrics; None if it has no such. One that failed has no
    reward and no advantage, whatever earlier versions of rl wrote."""
    for value in (None if name in ("reward", "advantage") and row.get("error") else row.get(name), metrics_of(row).get(name)):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def metrics_of(row: Row) -> dict[str, Any]:
    """The values of its reward functions and other metrics, by name."""
    metrics = row.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def ranked(rows: Iterable[Row], name: str, limit: int, *, lowest_first: bool = False) -> list[Row]:
    """The `limit` rollouts with the highest value of a field or metric, or the lowest; equal ones in their order. No others are kept."""
    valued = ((value, row) for row in rows if (value := number_of(row, name)) is not None)
    pick = heapq.nsmallest if lowest_first else heapq.nlargest
    return [row for _, row in pick(limit, valued, key=lambda pair: pair[0])]


# Text -------------------------------------------------------------------------------------------------------------------


def message_text(message: dict[str, Any]) -> str:
    """One message: who, then thinking, content and tool calls. No character of it acts on a terminal."""
    parts = [f"(thinks) {message['reasoning_content']}"] if message.get("reasoning_content") else []
    content = message.get("content")
    parts += content_texts(content if isinstance(content, list) else [content])
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        parts.append(f"calls {function.get('name')}({plain(function.get('arguments'))})" if isinstance(function, dict) else plain(call))
    return visible(f"{message.get('role')}: " + "\n".join(parts))


def content_texts(parts: list[Any]) -> list[str]:
    """The parts of a message's content, those of another kind than text as JSON."""
    texts = [part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else part for part in parts]
    return [plain(text) for text in texts if text not in (None, "")]


def conversation_texts(messages: list[dict[str, Any]]) -> Iterator[str]:
    """What was written in a conversation: thinking, content, and the names and arguments of tool calls; no role and no key."""
    for message in messages:
        content = message.get("content")
        yield from content_texts([message.get("reasoning_content"), message.get("thinking")])
        yield from content_texts(content if isinstance(content, list) else [content])
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            yield from content_texts([function.get("name"), function.get("arguments")] if isinstance(function, dict) else [call])


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


PROMPT_ENDS = "[the prompt ends here]"


def num_prompt_messages(row: Row) -> int:
    """How many messages at the beginning of a rollout the policy did not write; 0 where the line does not say, as those of earlier versions
    of rl do not."""
    number = row.get("num_prompt_messages")
    return number if isinstance(number, int) and 0 <= number <= len(row["messages"]) else 0


def prompt_end(messages: list[dict[str, Any]], num_prompt: int) -> list[str]:
    """The line that tells a prompt's worked examples from what the policy said; none where the prompt has no answers."""
    return [PROMPT_ENDS] if any(message.get("role") == "assistant" for message in messages[:num_prompt]) else []


def messages_text(messages: list[dict[str, Any]], num_prompt: int = 0) -> str:
    """A whole conversation as text. num_prompt: as `num_prompt_messages` has it."""
    texts = [message_text(message).replace("\n", "\n    ") for message in messages]
    return "\n".join([*texts[:num_prompt], *prompt_end(messages, num_prompt), *texts[num_prompt:]])


MOST_MESSAGES = 10
"""Of a conversation in short: its beginning and its end."""
LEAST_OF_PROMPT = 2
"""So many of them are left to the prompt where what follows it is long: its first message and its last."""
MOST_CHARACTERS, MOST_LINES = 4000, 60
"""Of a conversation in short, shared by its messages."""


def short_messages_text(messages: list[dict[str, Any]], num_prompt: int = 0) -> str:
    """A conversation of any length on about one screen: what is in the middle of it, of the prompt first, and of its messages, is left out
    and counted."""
    prompt, rest = messages[:num_prompt], messages[num_prompt:]
    for_rest = min(len(rest), MOST_MESSAGES - min(len(prompt), LEAST_OF_PROMPT))
    shown = max(1, min(len(messages), MOST_MESSAGES))
    limits = max(200, MOST_CHARACTERS // shown), max(4, MOST_LINES // shown)

    def texts(part: list[dict[str, Any]], room: int) -> list[str]:
        left_out, head = max(0, len(part) - room), room // 2 if len(part) > room else len(part)
        kept = [*part[:head], *part[head + left_out :]]
        found = [cut_middle(message_text(message), *limits).replace("\n", "\n    ") for message in kept]
        return [*found[:head], *([f"[... {left_out:,} messages ...]"] if left_out else []), *found[head:]]

    return "\n".join([*texts(prompt, MOST_MESSAGES - for_rest), *prompt_end(messages, num_prompt), *texts(rest, for_rest)])


def heading(row: Row) -> str:
    """Where a rollout stands, what it got, and what became of it."""
    names = {"step": "step", "policy_version": "version", "policy": "policy", "env": "", "task": "task", "group_id": "group",
             "rollout_id": "rollout", "rollout": "rollout", "sample": "sample"}  # fmt: skip
    place = [f"{word} {row[name]}".strip() for name, word in names.items() if row.get(name) is not None]
    place += [f"agent {row['agent']}"] if row.get("agent", "agent") != "agent" else []
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in metrics_of(row).items() if isinstance(value, (int, float)))
    reward, advantage = number_of(row, "reward"), number_of(row, "advantage")
    scores = ["no reward" if reward is None else f"reward {reward:.3f}" + (f" ({metrics})" if metrics else "")]
    scores += [f"advantage {advantage:+.3f}"] if advantage is not None else []
    if "why" in row:
        scores.append(TRAINED if row["why"] is None else f"not trained: {row['why']}")
    return visible(f"{', '.join(place)}\n  {', '.join(scores)}\n  {ending(row)}")


def ending(row: Row) -> str:
    """How a rollout ended, how long it is, and which versions sampled it."""
    outcome, stop, tokens, turns = (row.get(name) for name in ("outcome", "stop", "num_tokens", "num_turns"))
    # Of a single answer an environment says that the number of turns is reached; of an endpoint's answers the turns are not known.
    why = f" ({stop})" if stop and turns != 1 and (turns or not tokens) else ""
    how = [f"{outcome or 'finished'}{why}"]
    how += [f"{tokens:,} tokens"] if isinstance(tokens, int) else []
    how += [f"{turns} turns"] if isinstance(turns, int) and turns > 1 else []
    how += [f"sampled by version {', '.join(map(str, row['versions']))}"] if row.get("versions") else []
    return ", ".join(how)


def rollout_text(row: Row) -> str:
    """A rollout in full, with its error if it failed."""
    error = [visible(f"error: {row['error']}").replace("\n", "\n    ")] if row.get("error") else []
    return "\n".join([heading(row), messages_text(row["messages"], num_prompt_messages(row)), *error])
