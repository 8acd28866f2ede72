"""Tasks over time: how the rewards of a task change from version to version."""

import contextlib
from collections.abc import Sequence

import msgspec
import numpy as np

from rl.diagnosis.rollouts import num_prompt_messages
from rl.records.index import NONE
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
        sign = -1 if descending else 1

        def order(row: TaskRow) -> tuple[bool, float]:
            value = getattr(row, sort)
            return value is None, sign * (value or 0)

        rows.sort(key=order)
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
    envs, tasks, versions, rewards = (
        rollouts.column(name)[scored] for name in ("env", "task", "version", "reward")
    )
    rows = []
    for env in sorted(set(envs.tolist())):
        of_env = np.flatnonzero(envs == env)
        order = of_env[np.lexsort((versions[of_env], tasks[of_env]))]
        cuts = np.flatnonzero(np.diff(tasks[order])) + 1
        for chosen in np.split(order, cuts):
            task = int(tasks[chosen[0]])
            rows.append(task_row(env, task, versions[chosen], rewards[chosen]))
    return rows


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


def one_task(run: Run, kind: str, env: str, task: int, *, with_rollouts: bool = True) -> TaskDetail:
    """One task over all versions, perhaps without their rollouts and the prompt. Raises RunError
    if it has no rollouts."""
    versions = run.task(env, task, kind)
    without = len(versions.pop(NONE, ()))
    if not versions:
        failed = (
            f": all {without} that played it failed before their first token" if without else ""
        )
        raise RunError(f"task {task} of {env}: has no rollouts to show{failed}")
    shown, count = [*versions.items()][-MOST_VERSIONS:], len(versions)
    return TaskDetail(
        env=env,
        task=task,
        prompt=prompt_of(shown[-1][1]) if with_rollouts else [],
        without_version=without,
        note=f"the newest {MOST_VERSIONS} of {count} versions" if count > MOST_VERSIONS else "",
        versions=[
            TaskVersion(
                version=version,
                mean=mean(rollouts.column("reward")),
                count=len(rollouts),
                rows=[row_of(rollout) for rollout in rollouts] if with_rollouts else [],
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
        with contextlib.suppress(RunError):
            row = rollouts[i].row
            messages = messages_of(row)
            roles = [*(message.role for message in messages), "assistant"]
            return messages[: num_prompt_messages(row) or roles.index("assistant")]
    return []
