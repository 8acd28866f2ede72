import errno
import json
from pathlib import Path

from rl.orchestrator.batches.batch_files import PendingLog
from rl.orchestrator.groups.group_credit import Rules, credit_group
from rl.wire.rollouts import Drawn, Group, Rollout, waiting_lines
from tests.orchestrator.made import turn


def make(path, ids):
    log = PendingLog(path)
    log.load(set(), 9)
    for group_id in ids:
        log.append(
            [
                Group(
                    group_id=group_id,
                    env="e",
                    task=1,
                    rollouts=[Rollout(reward=0.5)],
                    advantages=[0.0],
                    why=None,
                )
            ]
        )
    return log


def test_a_log_that_the_disk_cannot_give_back_does_not_end_the_run(tmp_path, monkeypatch):
    path = tmp_path / "pending.log"
    make(path, [1])

    def read_bytes(self):
        if self == path:
            raise OSError(errno.EIO, "Input/output error", str(self))
        return read(self)

    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    log = PendingLog(path)
    assert log.load(set(), 9) == [
        f"{path}: cannot be read (Input/output error); rollouts there are sampled again"
    ]
    assert log.groups == []


def test_what_waits_is_readable_with_what_will_become_of_it(tmp_path):
    def group(group_id, *rewards, finished=True):
        rollouts = [
            Rollout(
                turns=[turn(version=3)], reward=reward, text=[{"role": "assistant", "content": "2"}]
            )
            for reward in rewards
        ]
        made = Group(group_id=group_id, env="e", task=8, rollouts=rollouts, finished=finished)
        return credit_group(made, Rules())

    log = PendingLog(tmp_path / "pending.log")
    log.append([group(1, 0.0, 1.0), Drawn(3, {"e": 3}, {}, []), group(2, 0.0, 0.0)])
    log.append([group(3, 1.0, finished=False)])
    with log.path.open("ab") as file:
        file.write(b"torn")
    lines = [json.loads(line) for line in waiting_lines(log.path).splitlines()]
    assert [(line["group_id"], line["reward"], line["why"]) for line in lines] == [
        (1, 0.0, "pending"),
        (1, 1.0, "pending"),
        (2, 0.0, "no_signal"),
        (2, 0.0, "no_signal"),
    ]
    first = lines[0]
    assert (
        first["step"],
        first["trained"],
        first["task"],
        first["advantage"],
        first["versions"],
    ) == (None, False, 8, -0.5, [3])
    assert first["messages"] == [{"role": "assistant", "content": "2"}]
