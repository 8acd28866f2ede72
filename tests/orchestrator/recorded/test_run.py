"""Batches of recorded rollouts: which rollouts each has, how old they may be, and that they are
the same after every start."""

import asyncio
import contextlib
import json
import math

import pytest

from rl.orchestrator.batches.batch_files import OrchestratorState, decode_state
from rl.orchestrator.batches.contents import group_samples
from rl.orchestrator.groups.group_credit import Rules, credit_group
from rl.orchestrator.recorded.run import RecordedRun, check_same, read, run_recorded
from rl.orchestrator.tasks.task_source import TaskState
from rl.run_dir.files import write_file
from rl.run_dir.lease import hold_role
from rl.run_dir.metrics import Merger, read_metrics
from rl.run_dir.paths import BranchOrigin
from rl.run_dir.status import Status
from rl.wire.batch_file import decode_batch, write_batch
from rl.wire.messages import RunEnded, TrainBatch
from rl.wire.transport import OrchestratorClient, Wait
from tests.orchestrator.recorded.lines import config, line, turn, write
from tests.raised import run_error


def task(number, *rewards, version=0):
    return [
        line(number, reward, turns=[turn(completion=(7, 8 + i), version=version)])
        for i, reward in enumerate(rewards)
    ]


FILE = [
    *task(0, 0, 1),
    *task(1, 0, 1),
    *task(2, 1, 1),
    *task(3, 0, 1, 1),
    *task(4, 0, 0),
    *task(5, 2, 1),
    *task(6, 0, 0),
]


@contextlib.contextmanager
def running(settings, model):
    """A run that has read its file, and whose process holds its role."""
    settings.run_dir.status_dir.mkdir(parents=True, exist_ok=True)
    lease, status = (
        hold_role(settings.run_dir.lock("orchestrator")),
        Status(settings.run_dir.status("orchestrator"), "orchestrator"),
    )
    try:
        run = RecordedRun(settings, read(settings, str(model), 0), status)
        run.restore()
        yield run
    finally:
        status.close()
        lease.close()


def content_of(settings, step):
    return decode_batch(settings.run_dir.batch(step).read_bytes(), "")


def settings_of(path, model, *lines, **more):
    return config(write(path / "r.jsonl", *lines), model, orchestrator__batch_size=4, **more)


def test_batches_have_whole_tasks_in_the_order_of_the_file(tmp_path, model):
    settings = settings_of(tmp_path, model, *FILE)
    with running(settings, model) as run:
        assert (run.ends, run.progress.final) == ([2, 7], 2)
        for step in (1, 2):
            run.commit(step)
        warned = run.status.current.warnings
    assert not warned
    groups = read(settings, str(model), 0).groups
    for group in groups:
        credit_group(group, Rules())
    for step, used in ((1, groups[:2]), (2, [groups[3], groups[5]])):
        content = content_of(settings, step)
        assert content.batch.samples == [
            sample for group in used for sample in group_samples(group)
        ]
        assert decode_state(content.state).tasks.next_group == (2, 7)[step - 1]
    lines = [json.loads(text) for text in settings.run_dir.rollouts(2).read_text().splitlines()]
    assert [(one["task"], one["why"]) for one in lines if one["rollout_id"] == 0] == [
        *((2, "no_signal"), (3, None), (4, "no_signal"), (5, None), (6, "no_signal"))
    ]
    Merger(settings.run_dir.metrics, lambda: None).merge()
    measured = read_metrics(settings.run_dir.metrics)
    assert measured[1, "orchestrator"]["reward/mean"] == 0.5
    assert measured[2, "orchestrator"]["lag/max"] == 1
    assert measured[2, "orchestrator"]["rollouts/finished"] == 11
    assert measured[2, "orchestrator"]["rollouts/trained"] == 5


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_every_start_makes_the_same_batches(tmp_path, model, done):
    lines = [one for number in range(6) for one in task(number, 0, 1)]
    made = []
    for stop in (None, done):
        folder = tmp_path / str(stop)
        folder.mkdir()
        settings = settings_of(folder, model, *lines)
        with running(settings, model) as run:
            for step in range(1, (3 if stop is None else stop) + 1):
                run.commit(step)
        with running(settings, model) as run:
            assert run.progress.newest == (3 if stop is None else stop)
            for step in range(run.progress.newest + 1, 4):
                run.commit(step)
        made.append([settings.run_dir.batch(step).read_bytes() for step in (1, 2, 3)])
    assert made[0] == made[1]


def test_what_was_trained_cannot_be_of_another_file(tmp_path, model):
    settings = settings_of(tmp_path, model, *FILE)
    write_file(settings.run_dir.data / "recorded.json", json.dumps(check_same(settings)).encode())
    check_same(settings)
    with running(settings, model) as run:
        run.commit(1)
    write(tmp_path / "r.jsonl", *FILE[3:])
    with run_error(r"r.jsonl: has changed, or .* began with r.jsonl: restore the file"):
        check_same(settings)
    with (
        run_error(r"batch 1 of .* was made of other rollouts"),
        running(settings, model),
    ):
        pass


def test_files_keep_their_order(tmp_path, model):
    settings = config(tmp_path / "*.jsonl", model)
    for name, one in (("a", 0), ("b", 1)):
        write(tmp_path / f"{name}.jsonl", *task(one, 0, 1))
    write_file(settings.run_dir.data / "recorded.json", json.dumps(check_same(settings)).encode())
    (tmp_path / "a.jsonl").rename(tmp_path / "a1.jsonl")
    assert [*check_same(settings)] == [str(tmp_path / "a1.jsonl"), str(tmp_path / "b.jsonl")]
    (tmp_path / "a1.jsonl").rename(tmp_path / "c.jsonl")
    with run_error(
        r"comes in another order, since the run began with a.jsonl, b.jsonl: restore",
    ):
        check_same(settings)


def test_a_file_with_a_fault_can_be_mended_for_a_resume(tmp_path, model):
    settings = settings_of(tmp_path, model, *task(0, 1, 1))
    settings.run_dir.status_dir.mkdir(parents=True)
    status = Status(settings.run_dir.status("orchestrator"), "orchestrator")
    with run_error("nothing to train"):
        asyncio.run(asyncio.wait_for(run_recorded(settings, status, str(model)), 60))
    status.close()
    write(tmp_path / "r.jsonl", *FILE)
    assert len(check_same(settings)) == 1


def test_rollouts_of_a_version_served_as_a_model_are_not_of_its_branch(tmp_path, model):
    settings = settings_of(
        tmp_path, model, *task(0, 0, 1), *task(1, 0, 1), orchestrator__max_off_policy_steps=8
    )
    settings.run_dir.root.mkdir(exist_ok=True)
    settings.run_dir.origin.write_text(
        json.dumps({"run": "outputs/x", "step": 40, "time": 0.0, "changes": []})
    )
    with run_error(
        r"begins with version 40; .*: rl train --from FILE --model.name outputs/x/weights/40"
    ):
        running(settings, model).__enter__()


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        (
            {"orchestrator__max_off_policy_steps": 1},
            "r.jsonl:9: policy_versions: version 0 sampled it, 2 before version 2, which batch 3",
        ),
        (
            {"max_lag": 0},
            "r.jsonl:5: policy_versions: version 0 sampled it, 1 before version 1, which "
            "batch 2 trains; max_lag = 0",
        ),
        ({"orchestrator__max_off_policy_steps": 1, "max_steps": 2}, ""),
        ({"max_lag": 0, "max_steps": 1}, ""),
    ],
)
def test_rollouts_may_be_as_old_as_those_of_a_run(tmp_path, model, more, fault):
    settings = settings_of(
        tmp_path, model, *(one for number in range(6) for one in task(number, 0, 1)), **more
    )
    with contextlib.ExitStack() as stack:
        if not fault:
            assert stack.enter_context(running(settings, model)).progress.final == more["max_steps"]
            return
        with run_error(fault):
            stack.enter_context(running(settings, model))
    assert not settings.run_dir.batches.exists()


def test_rollouts_of_a_later_version_belong_to_a_branch(tmp_path, model):
    lines = [*task(0, 0, 1), *task(1, 0, 1), *task(2, 0, 1, version=2), *task(3, 0, 1, version=1)]
    settings = settings_of(tmp_path, model, *lines)
    with run_error(
        r"r.jsonl:5: policy_versions: version 2 sampled it, but batch 2 trains version 1; "
        r"continue the run"
    ):
        running(settings, model).__enter__()
    settings.run_dir.root.mkdir(exist_ok=True)
    settings.run_dir.origin.write_text(
        json.dumps({"run": "x", "step": 3, "time": 0.0, "changes": []})
    )
    assert BranchOrigin  # the file's form
    settings.run_dir.batches.mkdir()
    tasks = TaskState(next_group=0, issued={}, in_flight=[])
    write_batch(
        settings.run_dir.batch(3), TrainBatch(step=3, samples=[]), OrchestratorState(tasks=tasks)
    )
    with running(settings, model) as run:
        assert (run.first, run.progress.newest, run.progress.final) == (3, 3, 5)
        run.commit(4)
        run.commit(5)
    assert content_of(settings, 5).batch.step == 5


@pytest.mark.parametrize(
    ("lines", "more", "message"),
    [
        (
            task(0, 1, 1),
            {},
            "2 rollouts of 1 tasks, and nothing to train: 1 no_signal: record several rollouts",
        ),
        (
            [*task(0, 1), *task(1, 0)],
            {},
            "nothing to train: 2 no_signal; 2 tasks have a single rollout, which there is "
            "nothing to compare",
        ),
        ([line(0, reward=None, error="broken"), line(0)], {}, "nothing to train: 1 error"),
        (
            [line(0, truncated=True), line(0, 1, truncated=True)],
            {"orchestrator__mask_truncated": True},
            "nothing to train: 1 truncated",
        ),
    ],
)
def test_a_file_that_teaches_nothing(tmp_path, model, lines, more, message):
    with run_error(message):
        running(settings_of(tmp_path, model, *lines, **more), model).__enter__()


def test_credit_over_the_batch_needs_no_groups(tmp_path, model):
    settings = settings_of(
        tmp_path, model, *task(0, 1), *task(1, 0), *task(2, 0), orchestrator__credit="reinforce_pp"
    )
    with running(settings, model) as run:
        run.commit(1)
    batch = content_of(settings, 1).batch
    assert [sample.advantages[-1] for sample in batch.samples] == pytest.approx(
        [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5]
    )


def test_rollouts_without_logprobs_have_no_ratio(tmp_path, model):
    lines = [one | {"turns": [turn(logprobs=None, policy_versions=None)]} for one in task(0, 0, 1)]
    settings = settings_of(tmp_path, model, *lines, trainer__loss="cross_entropy")
    with running(settings, model) as run:
        run.commit(1)
        texts = sorted(one.text for one in run.status.current.warnings)
    assert [text[:50] for text in texts] == [
        "2 of 2 recorded rollouts do not say which version ",
        "2 of 2 recorded rollouts have no log-probabilities",
    ]
    state = decode_state(content_of(settings, 1).state)
    assert state.metrics["lag/max"] == 0 and state.metrics["rollouts/trained"] == 2
    samples = content_of(settings, 1).batch.samples
    assert all(math.isnan(sample.logprobs[-1]) and sample.versions[0] == -1 for sample in samples)


def test_the_trainer_is_served_until_the_rollouts_are_used(tmp_path, model):
    settings = settings_of(tmp_path, model, *FILE)
    settings.run_dir.status_dir.mkdir(parents=True)
    lease, status = (
        hold_role(settings.run_dir.lock("orchestrator")),
        Status(settings.run_dir.status("orchestrator"), "orchestrator"),
    )

    def train():
        client, wait = OrchestratorClient(settings.run_dir), Wait(60.0, lambda *_: None)
        found = []
        for step in (1, 2, 3):
            with wait:
                found.append(client.get_batch(step, wait))
            settings.run_dir.checkpoint(step).mkdir(parents=True)
        return found

    async def both():
        end, found = await asyncio.gather(
            run_recorded(settings, status, str(model)), asyncio.to_thread(train)
        )
        return end, found

    end, (first, second, last) = asyncio.run(asyncio.wait_for(both(), 60))
    assert json.loads((settings.run_dir.data / "recorded.json").read_bytes()) == check_same(
        settings
    )
    status.close()
    lease.close()
    assert decode_batch(first, "").batch.step == 1 and decode_batch(second, "").batch.step == 2
    assert status.current.max_steps == 2, "the console takes the time left from it"
    assert last == RunEnded("all 15 recorded rollouts are used") and (end.reason, end.kind) == (
        last.reason,
        "early",
    )


@pytest.mark.parametrize(("steps", "told"), [(9, 1), (2, 0)])
def test_a_schedule_beyond_the_last_batch_is_told(tmp_path, model, steps, told):
    with running(
        settings_of(tmp_path, model, *FILE, max_steps=steps, trainer__optim__schedule="linear"),
        model,
    ) as run:
        assert len(run.status.current.warnings) == told
        assert all(
            "end at step 2: give --max_steps 2" in one.text for one in run.status.current.warnings
        )
