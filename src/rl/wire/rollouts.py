"""Rollouts and groups: made by workers, judged by the orchestrator, and read by `records`, `view`
and `diagnosis`. The trainer never reads them.

Also the records of `batches/pending.log`: finished rollouts that no batch has settled yet, and the
tasks that were drawn since the newest batch.
"""

import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from rl.run_dir.files import (
    HEADER,
    MAGIC,
    UNREADABLE,
    CorruptFileError,
    decode_records,
    encode_record,
    reading,
)
from rl.wire.turns import Turn, Turns, Usage

Split = Literal["train", "eval"]

MAX_NUMBER = 1e18
"""Largest absolute value of a reward or metric: the squares of larger ones overflow float32, and
means of them may not be finite."""

MAX_NAME = 200
"""Maximum length of the name of a metric or an agent; it becomes part of names in metrics.jsonl
and of table headers."""

MAX_BITS = 1024
"""Longest integer that is written out in a message: Python refuses to write those of some
thousand digits."""


def at_least(reward: float, bound: float) -> bool:
    """Whether a reward reaches a bound, such as another reward, up to the rounding of sums: 0.7
    + 0.2 + 0.1 is less than 1."""
    return reward >= bound or math.isclose(reward, bound, rel_tol=1e-9, abs_tol=1e-12)


def all_equal(rewards: Collection[float]) -> bool:
    """Whether rewards differ by no more than the rounding of sums."""
    return not rewards or at_least(min(rewards), max(rewards))


Cause = Literal["environment", "reward", "inference", "timeout", "worker", "teacher", "logprobs"]
"""Why a rollout failed, in order: the environment's code raised; a reward function raised or
returned no finite number (or its judge is down); inference did not answer; a deadline passed;
the worker process died; the teacher did not score it; the sampler returned a log-probability
that is not finite."""


class Rollout(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One scored play of a task by one agent. If `error` is set, the rollout failed and its
    reward is meaningless."""

    turns: Turns = msgspec.field(default_factory=Turns)
    """A list of `Turn`s is converted."""
    text: list[dict[str, Any]] | bytes = msgspec.field(default=b"[]", name="messages")
    """The messages: a list while the rollout is played, afterwards the JSON of one, which is
    written once and copied into all files."""
    num_prompt_messages: int | None = None
    """Number of leading messages that are the prompt, including worked examples; the policy
    wrote none of them. None: unknown."""
    reward: float = 0.0
    metrics: dict[str, float] = {}
    stop: str = ""
    """Why it ended, in the environment's words."""
    truncated: bool = False
    """Whether an answer hit max_tokens or the end of the context."""
    overlong: bool = False
    """Whether a prompt left no room for an answer in the context."""
    error: str | None = None
    cause: Cause | None = None
    """Set with `error`."""
    episode: int = 0
    """Index in the group. Each agent of an episode has its own rollout."""
    agent: str = "agent"
    trainable: bool = True
    completion_tokens: int = 0
    """As counted by an endpoint that returns no token ids."""
    retries: int = 0
    """Number of earlier, failed attempts at this episode."""
    retried: Usage = {}
    """What they used; of episodes that were played again together, the first has all of it."""
    filtered: bool = False
    """Whether orchestrator.filter dropped it."""

    def __post_init__(self) -> None:
        turns: Turns | list[Turn] = self.turns
        if isinstance(turns, list):
            self.turns = Turns.of(turns)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return msgspec.json.decode(self.text) if isinstance(self.text, bytes) else self.text

    @property
    def num_sampled(self) -> int:
        """Number of tokens whose ids and log-probabilities are known."""
        return sum(answer.num_tokens for answer in self.turns.answers)

    @property
    def num_untrained(self) -> int:
        """Number of these that cannot be trained, because too many ids were kept."""
        return sum(len(answer.untrained) for answer in self.turns.answers)

    @property
    def num_tokens(self) -> int:
        return self.num_sampled or self.completion_tokens

    @property
    def outcome(self) -> str:
        """One of finished, truncated, overlong, empty, timeout and failed."""
        if self.error:
            return "timeout" if self.cause == "timeout" else "failed"
        if self.overlong:
            return "overlong"
        if self.truncated:
            return "truncated"
        return "finished" if self.num_tokens else "empty"

    @property
    def versions(self) -> list[int]:
        """The policy versions that sampled any token, oldest first."""
        spans = (span for answer in self.turns.answers for span in answer.policy_versions)
        return sorted({span.policy_version for span in spans if span.policy_version >= 0})

    def as_record(self) -> dict[str, Any]:
        """Returns the fields of a rollout that are common to all JSONL files of rollouts."""
        return {
            "agent": self.agent,
            **({} if self.trainable else {"trainable": False}),
            "messages": msgspec.Raw(self.text) if isinstance(self.text, bytes) else self.text,
            **(
                {"num_prompt_messages": self.num_prompt_messages}
                if self.num_prompt_messages is not None
                else {}
            ),
            "reward": None if self.error else self.reward,
            "metrics": self.metrics,
            "outcome": self.outcome,
            "stop": self.stop,
            "truncated": self.truncated,
            "num_tokens": self.num_tokens,
            "num_turns": len(self.turns),
            "versions": self.versions,
            **({"error": self.error} if self.error else {}),
        }


def unfit(rollout: Rollout) -> str:
    """Describes the first number or name of a rollout that cannot be used or recorded; empty if
    there is none. Environments put anything in them, and nothing here raises."""
    for name in (rollout.agent, *rollout.metrics):
        if not isinstance(name, str):
            return f"the name of a metric or agent is of type {type(name).__name__}, not str"
        if not name or len(name) > MAX_NAME or not name.isprintable():
            return f"{name!r:.100} is not a valid name: 1 to {MAX_NAME} printable characters"
    for name, value in {
        "the reward": rollout.reward,
        **{f"metric {name!r:.100}": value for name, value in rollout.metrics.items()},
    }.items():
        if not isinstance(value, (int, float)):
            return f"{name} is of type {type(value).__name__}, not int or float"
        if not abs(value) <= MAX_NUMBER:  # also true for nan
            long = isinstance(value, int) and value.bit_length() > MAX_BITS
            shown = f"an integer of {value.bit_length()} bits" if long else value
            return f"{name} is {shown}, not a number of at most {MAX_NUMBER:g}"
    return ""


Episode = list[Rollout]
"""One play of a task: one rollout per agent, so a single one for most environments."""


Untrained = Literal[
    # set when the group is judged
    "error",  # a rollout of the group failed
    "truncated",  # all answers were cut off
    "kept_overflow",  # sampling kept more than trainer.max_kept ids at each token
    "overlong",  # no token was sampled, and a prompt left no room
    "empty",  # no token was sampled
    "filtered",  # the user's filter dropped it
    "no_signal",  # all its advantages are 0
    # set when a batch is formed
    "stale",  # its tokens are older than `max_off_policy_steps`
    "surplus",  # the batch is full without it
]
"""The reason why a group is not trained. A rollout's `why` in rollouts/*.jsonl is the Cause of its
own failure, else its group's reason, else its own reason (`why_left_out`). rl/view/rollouts.py has
a sentence for each value."""


class Group(msgspec.Struct, kw_only=True, tag=True):
    """The rollouts of one task, with their credit."""

    group_id: int
    env: str
    task: int
    rollouts: list[Rollout]
    advantages: list[float] = []
    penalties: list[float] = []
    """The length penalty subtracted from each reward before credit."""
    signal: bool | None = None
    """Whether there is something to learn from the group; None: only its batch can tell."""
    why: Untrained | None = None
    """The reason why the group is not trained; None if it is, or will be."""
    temperature: float = 1.0
    """Sampling temperature of its rollouts."""
    finished: bool = True
    """Whether all its episodes are there, and scored by its teacher, if it has one."""

    @property
    def num_episodes(self) -> int:
        return len({rollout.episode for rollout in self.rollouts})

    @property
    def rewarded(self) -> list[Rollout]:
        """The rollouts whose rewards count: those that did not fail and whose agent is trained."""
        return [rollout for rollout in self.rollouts if rollout.error is None and rollout.trainable]

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rewarded]

    @property
    def versions(self) -> list[int]:
        """The policy versions that sampled any token, oldest first."""
        return sorted({version for rollout in self.rollouts for version in rollout.versions})


class TaskRef(msgspec.Struct, frozen=True, array_like=True):
    """A group to be played: its id, and its task in the environment's training set."""

    group_id: int
    env: str
    task: int


class Drawn(msgspec.Struct, tag=True):
    """Tasks that were drawn since the record before this one, and the counters after them; see
    TaskState."""

    next_group: int
    issued: dict[str, int]
    skipped: dict[str, int]
    tasks: list[TaskRef]


def why_left_out(rollout: Rollout, mask_truncated: bool) -> str | None:
    """Returns a rollout's own reason not to be trained, ignoring its group's reason; None if it
    has none."""
    if rollout.error:
        return rollout.cause or "environment"
    if not rollout.trainable:
        return "not_trainable"
    if rollout.filtered:
        return "filtered"
    if not rollout.num_sampled:
        return "overlong" if rollout.overlong else "empty"
    if rollout.num_untrained == rollout.num_sampled:
        return "kept_overflow"
    return "truncated" if rollout.truncated and mask_truncated else None


def why_untrained(group: Group, rollout: Rollout, mask_truncated: bool) -> str | None:
    """Returns the reason why a group's rollout is not trained; None if it is, or will be. A failure
    of its own takes precedence over its group's reason, and that over any other."""
    left_out = why_left_out(rollout, mask_truncated)
    return left_out if rollout.error else group.why or left_out


def rollout_lines(groups: Iterable[Group], step: int | None, mask_truncated: bool = False) -> bytes:
    """Returns the lines of rollouts/*.jsonl for all rollouts of groups settled by batch `step`;
    None: no batch has settled them."""
    return b"".join(
        msgspec.json.encode(rollout_line(group, i, step, mask_truncated)) + b"\n"
        for group in groups
        for i in range(len(group.rollouts))
    )


def rollout_line(
    group: Group, i: int, step: int | None, mask_truncated: bool = False
) -> dict[str, Any]:
    """Returns the line for rollout `i` of a group, see rollout_lines."""
    rollout = group.rollouts[i]
    why = why_untrained(group, rollout, mask_truncated) or ("pending" if step is None else None)
    return {
        "step": step,
        "env": group.env,
        "task": group.task,
        "group_id": group.group_id,
        "rollout_id": i,
        "episode": rollout.episode,
        "advantage": None if rollout.error else group.advantages[i] if group.advantages else 0.0,
        "retries": rollout.retries,
        "trained": why is None,
        "why": why,
        **rollout.as_record(),
    }


ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(Group | Drawn)


def encoded(records: Iterable[Group | Drawn]) -> bytes:
    return b"".join(encode_record(ENCODER.encode(record)) for record in records)


def read_records(path: Path) -> tuple[list[Group | Drawn], list[str]]:
    """Returns the records of a log, and a warning for each damaged place: a write cut short at
    the end, or damage by a failing disk."""
    records: list[Group | Drawn] = []
    warnings: list[str] = []
    data, offset = b"", 0
    try:
        with reading(path):
            data = path.read_bytes() if path.exists() else b""
    except CorruptFileError as error:
        warnings.append(f"{error}; rollouts there are sampled again")
    while offset < len(data):
        try:
            for payload in decode_records(data[offset:], f"{path} from byte {offset}"):
                records.append(DECODER.decode(payload))
                offset += HEADER.size + len(payload)
        except (CorruptFileError, *UNREADABLE) as error:
            following = data.find(MAGIC, offset + 1)
            offset = following if following > 0 else len(data)
            warnings.append(f"{error}; rollouts there are sampled again")
    return records, warnings


def waiting_lines(path: Path) -> bytes:
    """Returns the rollouts of the finished groups in a log in the form of rollouts/*.jsonl."""
    records, _ = read_records(path)
    return rollout_lines(
        [record for record in records if isinstance(record, Group) and record.finished], None
    )
