"""Playing many tasks: how many at once, and when to give up."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

import rl.commands.play_session
from rl.commands.play_session import HOPELESS, PlaySession, policy_server, server_config
from rl.config.command_line import to_toml
from rl.launch.children import Children
from rl.launch.devices import split
from rl.orchestrator.workers.pool import PlayJob
from rl.system.errors import RunError
from rl.system.machine import Machine
from rl.wire.rollouts import Rollout
from tests.flags import made


class Pool:
    """Plays at once what `play` says; counts how many rollouts were in flight."""

    log_dir = Path("logs")

    def __init__(self, error=None, seconds=0.001, overlong=lambda task: False):
        self.overlong = overlong
        self.error, self.seconds, self.flying, self.most = error, seconds, 0, 0
        self.failed = asyncio.get_running_loop().create_future()

    async def play(self, env, split, task, num_episodes, sampling, server, seed):
        self.flying += num_episodes
        self.most = max(self.most, self.flying)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.flying -= num_episodes
        error = self.error(task) if self.error else None
        return [
            Rollout(reward=float(task), episode=i, error=error, overlong=self.overlong(task))
            for i in range(num_episodes)
        ]


def play(jobs, concurrency=None, patience_s=60.0, break_pool=False, **options):
    """(what was handed over, pool)."""
    config = made("--orchestrator.environment.id e")

    async def main():
        pool, given = Pool(**options), []
        play_session = PlaySession(pool, {}, config, None)
        play_session.patience_s = lambda: patience_s
        if break_pool:
            asyncio.get_running_loop().call_later(
                0.05, pool.failed.set_exception, RunError("worker does not come back")
            )
        try:
            async with aclosing(play_session.play("test", jobs, concurrency)) as played:
                async for job, rollouts in played:
                    given.append((job.task, len(rollouts)))
        finally:
            assert pool.flying == 0  # what was under way is cancelled
        return given, pool

    return asyncio.run(main())


def jobs(number, episodes=1):
    return [PlayJob("e", "eval", task, episodes, {}) for task in range(number)]


def test_every_job_is_handed_over_once_and_few_fly():
    given, pool = play(jobs(50, 2), concurrency=8)
    assert sorted(given) == [(task, 2) for task in range(50)] and 6 <= pool.most <= 9


def test_some_failures_are_the_callers_business():
    given, _ = play(jobs(40), error=lambda task: "boom" if task else None, concurrency=4)
    assert len(given) == 40


def test_when_all_fail_from_the_start_the_rest_is_not_played():
    with pytest.raises(RunError, match=r"all of the first \d+ rollouts failed; one of them:\nboom"):
        play(jobs(10_000), error=lambda task: "boom", concurrency=HOPELESS)
    with pytest.raises(RunError, match="all of the first 3 rollouts failed"):
        play(jobs(3), error=lambda task: "boom")


def test_prompts_that_are_all_too_long_are_no_result():
    """Regression: a reward of 0.000, and exit code 0."""
    with pytest.raises(
        RunError,
        match=r"all of the first 40 rollouts failed; one of them:\nthe prompt leaves no room .* "
        r"raise model.max_model_len",
    ):
        play(jobs(40), overlong=lambda task: True)
    given, _ = play(jobs(40), overlong=lambda task: task < 39)  # the longest first
    assert len(given) == 40


def test_nothing_that_finishes_in_time():
    with pytest.raises(RunError, match="waited 0 s for any of 3 tasks of e to finish"):
        play(jobs(3), seconds=60, patience_s=0.3)


def test_a_worker_that_cannot_be_brought_back():
    with pytest.raises(RunError, match="does not come back"):
        play(jobs(3), seconds=60, break_pool=True)


@pytest.mark.parametrize(
    "more", ["", " --cluster.nodes 6 --cluster.min_trainer_nodes 2 --inference.gpus 2"]
)
def test_a_server_alone_has_all_of_the_box(tmp_path, more):
    """Regression: of a cluster's settings, with trainer.gpus = 0, too few machines trained."""
    flags = (
        "--orchestrator.environment.id e --orchestrator.eval.id e --trainer-gpus 1 "
        "--trainer.weights.dir /dev/shm"
    )
    config = server_config(made(flags + more), "owner/model", tmp_path / "work")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    again = made(f"@{path}")
    assert again.run_dir.root == tmp_path / "work" / "server"
    assert again.run_dir.newest_weights() is None
    division = split(again, Machine(gpus=["0", "1"], cores=[0, 1]))
    assert division.inference.gpus == [0, 1] and division.vllm == {"data_parallel_size": 2}


def test_each_server_has_a_folder_of_its_own_and_nothing_else_is_touched(tmp_path, monkeypatch):
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "keep.txt").write_text("mine")

    async def start_in(folder, config, model, logs, children, adapter):
        folders.append(folder)
        raise RunError("no such model")

    folders = []
    monkeypatch.setattr(rl.commands.play_session, "start_in", start_in)
    config = made("--orchestrator.environment.id e")

    async def main():
        async with policy_server(config, "m", tmp_path, Children()):
            pass

    for _ in range(2):
        with pytest.raises(RunError, match="no such model"):
            asyncio.run(main())
    assert folders[0] != folders[1] and {folder.parent for folder in folders} == {tmp_path}
    assert [path.name for path in tmp_path.rglob("*")] == ["server", "keep.txt"]
