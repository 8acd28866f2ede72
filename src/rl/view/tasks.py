"""Tasks over time: how the rewards of one task move from version to version."""

import numpy as np

from rl.records.rollouts import Rollouts
from rl.records.run import Run
from rl.system.errors import RunError
from rl.view.answers import Task, TaskRow, Tasks, TaskVersion
from rl.view.rollouts import messages_of, row_of

SORTS = ("task", "rollouts", "first", "last", "change")
MOST_VERSIONS = 400
"""Of one task; of more the newest are shown."""


def tasks(run: Run, kind: str, env: str, sort: str, descending: bool, offset: int, limit: int) -> Tasks:
    """A page of the tasks of a run: those whose reward changed most first, unless another sort is asked for. Raises RunError."""
    rollouts = run.rollouts(kind, **({"env": env} if env else {}))
    rows = task_rows(rollouts)
    if sort and sort not in SORTS:
        raise RunError(f"sort = {sort}: give one of {', '.join(SORTS)}")
    if sort:
        rows.sort(key=lambda row: (getattr(row, sort) is None, -(getattr(row, sort) or 0) if descending else getattr(row, sort) or 0))
    else:
        rows.sort(key=lambda row: -abs(row.change or 0.0))
    return Tasks(total=len(rows), offset=offset, rows=rows[offset : offset + limit])


def task_rows(rollouts: Rollouts) -> list[TaskRow]:
    """Each task with its mean reward in the first and in the last third of its rollouts."""
    envs, numbers, versions, rewards = (rollouts.column(name) for name in ("env", "task", "version", "reward"))
    kept = np.isfinite(rewards)
    envs, numbers, versions, rewards = envs[kept], numbers[kept], versions[kept], rewards[kept]
    found = []
    for env in sorted(set(envs.tolist())):
        of_env = np.flatnonzero(envs == env)
        order = of_env[np.lexsort((versions[of_env], numbers[of_env]))]
        cuts = np.flatnonzero(np.diff(numbers[order])) + 1
        for own in np.split(order, cuts) if len(order) else []:
            found.append(task_row(env, int(numbers[own[0]]), versions[own], rewards[own]))
    return found


def task_row(env: str, task: int, versions: np.ndarray, rewards: np.ndarray) -> TaskRow:
    """One task; its change is nothing where one version alone played it."""
    third = max(1, len(rewards) // 3)
    first, last = float(rewards[:third].mean()), float(rewards[-third:].mean())
    several = versions[0] != versions[-1]
    return TaskRow(env=env, task=task, rollouts=len(rewards), first=first, last=last, change=last - first if several else None)


def one_task(run: Run, kind: str, env: str, task: int) -> Task:
    """One task over all versions. Raises RunError if no rollout of it is there."""
    versions = run.task(env, task, kind)
    if not versions:
        raise RunError(f"task {task} of {env}: no rollout of it is there")
    shown = list(versions.items())[-MOST_VERSIONS:]
    return Task(
        env=env,
        task=task,
        prompt=prompt_of(shown[-1][1]),
        versions=[
            TaskVersion(version=version, mean=mean_of(rollouts), rows=[row_of(rollout) for rollout in rollouts])
            for version, rollouts in shown
        ],
    )


def mean_of(rollouts: Rollouts) -> float | None:
    rewards = rollouts.column("reward")
    rewards = rewards[np.isfinite(rewards)]
    return float(rewards.mean()) if len(rewards) else None


def prompt_of(rollouts: Rollouts) -> list:
    """The messages before the first answer, of the newest rollout whose text is there."""
    for rollout in reversed(list(rollouts)):
        try:
            messages = messages_of(rollout.row)
        except RunError:
            continue
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        return messages[: answers[0]] if answers else messages
    return []
