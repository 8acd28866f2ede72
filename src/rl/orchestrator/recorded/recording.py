"""Reads recorded rollouts: checked row by row, and compared with each other in the groups of
their tasks."""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rl.config.run import RLConfig
from rl.models.folder import vocab_size
from rl.orchestrator.recorded.lines import Converter, RecordedLine, parse
from rl.orchestrator.recorded.verifiers_rows import lines_of
from rl.run_dir.files import matching
from rl.system.errors import RunError
from rl.system.jsonl import json_objects
from rl.wire.batch_file import check_given
from rl.wire.rollouts import Group

EXAMPLE = (
    '{"task": 3, "reward": 1.0, "messages": [...], "turns": [{"prompt_ids": [...], '
    '"completion_ids": [...], ...}]}'
)


@dataclass
class RecordedRollouts:
    """The rollouts of one or several files."""

    groups: list[Group] = field(default_factory=list)
    """In the order of their first rollouts."""
    places: dict[int, list[str]] = field(default_factory=dict)
    """Group id -> file:line of each rollout."""
    counts: Counter[str] = field(default_factory=Counter)
    """What is lacking -> number of rollouts that lack it."""

    @property
    def size(self) -> int:
        """Number of rollouts."""
        return sum(map(len, self.places.values()))


def files_of(pattern: str) -> list[Path]:
    """Returns the files of recorded.rollouts. Raises RunError if there is none."""
    files = [path for path in matching(pattern) if path.is_file()]
    if not files:
        raise RunError(
            f"recorded.rollouts = {pattern!r}: there is no such file; give a JSONL file, or "
            "a pattern (data/*.jsonl)"
        )
    return files


def digests(files: list[Path]) -> dict[str, str]:
    """Returns the SHA-256 of each file, by path. Raises RunError for a damaged file of another
    run's rollouts."""
    sums = {}
    for path in files:
        check_given(path)
        with path.open("rb") as file:
            sums[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def read(config: RLConfig, model_path: str, first_group: int) -> RecordedRollouts:
    """Reads the files. Group ids count from `first_group`. Raises RunError with file, line and
    field of the first fault."""
    assert config.recorded
    recording, files = RecordedRollouts(), files_of(config.recorded.rollouts)
    convert = Converter(config, model_path, vocab_size(Path(model_path)))
    groups: dict[Any, Group] = {}
    tasks: dict[tuple[str, Any], int] = {}
    episodes: dict[tuple[int, Any], Episode] = {}
    heats: dict[int, tuple[float, str]] = {}
    prompts: dict[tuple[int, str, bool], Any] = {}
    for path in files:
        for where, row in json_objects(path, EXAMPLE):
            for line in parsed(row, where):
                task = line.prompt if line.task is None else line.task
                key = msgspec.json.encode(
                    [
                        line.env,
                        task,
                        line.group_id,
                        str(path.parent) if line.group_id is not None else "",
                    ]
                )
                if (group := groups.get(key)) is None:
                    number = (
                        task
                        if isinstance(task, int)
                        else tasks.setdefault((line.env, msgspec.json.encode(task)), len(tasks))
                    )
                    group = groups[key] = Group(
                        group_id=first_group + len(groups), env=line.env, task=number, rollouts=[]
                    )
                if line.is_trainable and not line.failure:
                    heat = temperature(line, config, where)
                    group.temperature, first = heats.setdefault(group.group_id, (heat, where))
                    if heat != group.temperature:
                        why = (
                            f"not that of {first}, a rollout of the same task; give them "
                            "different group_ids"
                        )
                        raise RunError(f"{where}: temperature: {why}")
                rollout = convert.rollout(line, where)
                if line.prompt != prompts.setdefault(
                    (group.group_id, line.agent, bool(line.messages)), line.prompt
                ):
                    convert.counts[
                        "have another prompt than the first of their task: give rows of "
                        "several environments their `env`"
                    ] += 1
                key_of_episode = (
                    group.group_id,
                    where if line.sample is None else (str(path), line.sample),
                )
                episode = episodes.setdefault(
                    key_of_episode, Episode(len({rollout.episode for rollout in group.rollouts}))
                )
                episode.add(line, where)
                rollout.episode = episode.number
                group.rollouts.append(rollout)
                recording.places.setdefault(group.group_id, []).append(where)
    recording.groups, recording.counts = list(groups.values()), convert.counts
    if not groups:
        raise RunError(
            f"{', '.join(map(str, files))}: has no rollouts; write one a line, like {EXAMPLE}"
        )
    return recording


def parsed(row: dict[str, Any], where: str) -> list[RecordedLine]:
    """Returns the rollouts of a row. Raises RunError."""
    try:
        lines = list(lines_of(row))
    except RunError as error:
        raise RunError(f"{where}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise RunError(
            f"{where}: not as verifiers writes it ({type(error).__name__}: {error}); save it again"
        ) from None
    return [parse(line, where) for line in lines]


def temperature(line: RecordedLine, config: RLConfig, where: str) -> float:
    """Returns the temperature at which a rollout was sampled. Raises RunError for one at which
    nothing can be trained."""
    heat = (
        config.orchestrator.sampling.temperature if line.temperature is None else line.temperature
    )
    if not 0 < heat < math.inf:
        raise RunError(
            f"{where}: temperature: {heat} is not a finite number above 0, at which the "
            "trainer can score its tokens"
        )
    return heat


class Episode:
    """The lines of an episode so far."""

    def __init__(self, number: int):
        self.number, self.size = number, 0
        self.firsts: dict[tuple[str, int | str | None], str] = {}
        """(agent, rollout_id) -> place of the first line."""

    def add(self, line: RecordedLine, where: str) -> None:
        """Raises RunError for a second line of the same rollout. Rows of verifiers, and episodes
        that say how many lines they have, may have several of one agent."""
        first = self.firsts.setdefault((line.agent, line.rollout_id), where)
        if first != where and self.size >= line.agents:
            remedy = "did two programs write the file? Give each rollout a sample of its own"
            raise RunError(
                f"{where}: sample: {line.sample!r} of agent {line.agent!r} is in {first} "
                f"already; {remedy}"
            )
        self.size += 1
