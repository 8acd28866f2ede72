"""Tasks over time: how the rewards of a task change from version to version."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rl.diagnosis.rollouts import num_prompt_messages
from rl.records.columns import NONE
from rl.records.rollouts import Rollouts
from rl.records.run import Run
from rl.system.errors import RunError
from rl.system.terminal import clip
from rl.view.responses import TaskDetail, TaskRow, TaskVersion
from rl.view.rollouts import messages_of, row_of

SORTS = ("task", "rollouts", "first", "last", "change")
SNIPPET = 80
"""Characters of a prompt that a list of tasks shows: the beginning of its last message."""
MOST_VERSIONS = 400
"""Maximum number of versions shown of one task; the newest are kept."""


def ordered(
    run: Run,
    kind: str,
    env: str = "",
    number: int | None = None,
    sort: str = "",
    descending: bool = True,
) -> list[TaskRow]:
    """The tasks of a run, sorted by how much their reward changed, or by `sort` and then by
    that. Raises RunError."""
    rows = task_rows(run.rollouts(kind, env=env or None, task=number))
    if sort and sort not in SORTS:
        raise RunError(f"sort = {sort}: give one of {', '.join(SORTS)}")
    rows.sort(key=lambda row: -abs(row.change or 0.0))
    if sort:
        rows.sort(
            key=lambda row: (
                getattr(row, sort) is None,
                -(getattr(row, sort) or 0) if descending else getattr(row, sort) or 0,
            )
        )
    return rows


def with_prompts(rollouts: Rollouts, rows: Sequence[TaskRow]) -> list[TaskRow]:
    """The rows with the beginning of their tasks' prompts, which are read from one rollout each."""
    shown = []
    for row in rows:
        prompt = prompt_of(rollouts.where(env=row.env, task=row.task))
        words = prompt[-1].text.split() if prompt else []
        shown.append(msgspec.structs.replace(row, prompt=clip(" ".join(words), SNIPPET)))
    return shown


def task_rows(rollouts: Rollouts) -> list[TaskRow]:
    """Each task with its mean reward in the first and the last third of the versions that played
    it. Ignores failed rollouts."""
    scored = np.isfinite(rollouts.column("reward")) & (rollouts.column("version") != NONE)
    return [
        task_row(env, task, versions, rewards)
        for env, task, versions, rewards in by_task(rollouts, scored)
    ]


def by_task(
    rollouts: Rollouts, kept: np.ndarray
) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
    """Yields (environment, task, versions, rewards) of each task, with its rollouts sorted by
    version. kept: bool [n], those that count."""
    envs, numbers, versions, rewards = (
        rollouts.column(name)[kept] for name in ("env", "task", "version", "reward")
    )
    for env in sorted(set(envs.tolist())):
        of_env = np.flatnonzero(envs == env)
        order = of_env[np.lexsort((versions[of_env], numbers[of_env]))]
        cuts = np.flatnonzero(np.diff(numbers[order])) + 1
        for rows in np.split(order, cuts):
            yield env, int(numbers[rows[0]]), versions[rows], rewards[rows]


def without_rollouts(run: Run, kind: str) -> dict[tuple[str, int], TaskDetail]:
    """Every task by environment and number, with its versions, but without their rollouts and
    the prompt."""
    rollouts, every = run.rollouts(kind), {}
    for env, task, versions, rewards in by_task(rollouts, np.full(len(rollouts), True)):
        played, starts = np.unique(versions, return_index=True)
        by_version = dict(zip(played.tolist(), np.split(rewards, starts[1:]), strict=True))
        without = len(by_version.pop(NONE, ()))
        every[env, task] = TaskDetail(
            env=env,
            task=task,
            prompt=[],
            versions=[
                TaskVersion(version=version, mean=mean(values), count=len(values), rows=[])
                for version, values in newest(by_version)
            ],
            without_version=without,
            note=left_out(by_version),
        )
    return every


def newest(versions: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """The (version, value) pairs of the MOST_VERSIONS newest versions, ascending."""
    return list(versions.items())[-MOST_VERSIONS:]


def left_out(versions: Mapping[int, object]) -> str:
    """A phrase on what `newest` leaves out; empty if nothing."""
    return (
        f"the newest {MOST_VERSIONS} of {len(versions)} versions"
        if len(versions) > MOST_VERSIONS
        else ""
    )


def task_row(env: str, task: int, versions: np.ndarray, rewards: np.ndarray) -> TaskRow:
    """The row of one task, with its rollouts sorted by version; its change is None if only one
    version played it."""
    played = np.unique(versions)
    third = max(1, len(played) // 3)
    first = float(rewards[versions <= played[third - 1]].mean())
    last = float(rewards[versions >= played[-third]].mean())
    return TaskRow(
        env=env,
        task=task,
        rollouts=len(rewards),
        first=first,
        last=last,
        change=last - first if len(played) > 1 else None,
    )


def one_task(run: Run, kind: str, env: str, task: int) -> TaskDetail:
    """One task over all versions. Raises RunError if it has no rollouts."""
    versions = run.task(env, task, kind)
    without = len(versions.pop(NONE, ()))
    if not versions:
        failed = (
            f": all {without} that played it failed before their first token" if without else ""
        )
        raise RunError(f"task {task} of {env}: has no rollouts to show{failed}")
    shown = newest(versions)
    return TaskDetail(
        env=env,
        task=task,
        prompt=prompt_of(shown[-1][1]),
        without_version=without,
        note=left_out(versions),
        versions=[
            TaskVersion(
                version=version,
                mean=mean(rollouts.column("reward")),
                count=len(rollouts),
                rows=[row_of(rollout) for rollout in rollouts],
            )
            for version, rollouts in shown
        ],
    )


def mean(rewards: np.ndarray) -> float | None:
    """The mean of the finite rewards; None if there are none."""
    rewards = rewards[np.isfinite(rewards)]
    return float(rewards.mean()) if len(rewards) else None


def prompt_of(rollouts: Rollouts) -> list:
    """The prompt, from the newest rollout with a text: the messages before the first answer if
    its line does not have their number."""
    for i in reversed(range(len(rollouts))):
        rollout = rollouts[i]
        try:
            row = rollout.row
        except RunError:
            continue
        messages = messages_of(row)
        first = next(
            (i for i, message in enumerate(messages) if message.role == "assistant"), len(messages)
        )
        return messages[: num_prompt_messages(row) or first]
    return []
