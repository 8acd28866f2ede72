"""When the orchestrator considers the trainer ended."""

import asyncio
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from rl.orchestrator.policy import trainer_requests
from rl.orchestrator.policy.trainer_requests import TrainerRequests
from rl.orchestrator.progress import Progress
from rl.run_dir.files import CorruptFileError
from rl.run_dir.status import RoleStatus, write_status
from rl.system.errors import RunError
from rl.wire.batch_file import write_batch
from rl.wire.inference_client import InferenceLostError, PromptTooLongError
from rl.wire.messages import TrainBatch, VersionSpan
from rl.wire.turns import Turn
from tests import steady
from tests.trainer.samples import make_sample
from tests.waiting import until


def requests_of(run_dir):
    nothing = SimpleNamespace()
    return TrainerRequests(run_dir, SimpleNamespace(final=5), nothing, nothing, 0)


def test_a_trainer_that_is_ahead_of_a_lowered_max_steps_has_ended(run_dir):
    requests = requests_of(run_dir)
    run_dir.checkpoint(4).mkdir(parents=True)
    assert not requests.trainer_has_ended()  # it died before its last checkpoint, and comes again
    run_dir.checkpoint(10).mkdir()
    assert requests.trainer_has_ended()


@pytest.mark.parametrize("clock", [1e9, 9e9], ids=["behind", "ahead"])
def test_a_trainer_on_a_host_with_another_clock_lives_as_long_as_its_heart_beats(
    run_dir, monkeypatch, clock
):
    monkeypatch.setattr(trainer_requests, "DEAD_S", 0.2)
    run_dir.checkpoint(5).mkdir(parents=True)
    requests = requests_of(run_dir)
    for beat in range(8):
        write_status(run_dir.status("trainer"), RoleStatus(heartbeat=clock + beat))
        assert not requests.trainer_has_ended()
        time.sleep(0.05)
    until(requests.trainer_has_ended)


def test_a_batch_that_is_played_for_long_is_not_the_trainers_fault(run_dir):
    """Regression: a healthy run whose batch took longer than trainer_timeout_s was ended,
    however many of its groups had finished."""
    progress, status = Progress(9), SimpleNamespace(progress=0)
    requests = TrainerRequests(run_dir, progress, SimpleNamespace(), status, 0)

    async def play(num_groups):
        for _ in range(num_groups):
            await asyncio.sleep(0.15)
            status.progress += 8
            await progress.notify()

    async def main():
        playing = asyncio.create_task(play(6))
        with pytest.raises(RunError, match="waited 0 s for version 1"):
            await requests.wait_for_trainer(lambda: status.progress > 48, "version 1", 0.2)
        assert status.progress == 48 and playing.done()

    steady.run(main())


def test_a_probe_asks_for_the_first_groups_of_the_newest_batch(run_dir, monkeypatch):
    progress, asked = Progress(9), []
    samples = [make_sample([group, group], [9], group=group) for group in (7, 7, 3, 8, 5)]
    write_batch(run_dir.batch(1), TrainBatch(step=1, samples=samples), {})
    progress.newest = 1

    async def generate(session, token_ids, sampling):
        asked.append((token_ids, sampling))
        return Turn.of(token_ids, [6], [-0.5], [VersionSpan(1, 1)])

    async def reply(sender, answer):
        answers.append(answer)

    answers, policy = [], SimpleNamespace(loaded=1, servers=SimpleNamespace(generate=generate))
    requests = TrainerRequests(run_dir, progress, policy, SimpleNamespace(), max_model_len=33)

    def probe():
        asyncio.run(requests.answer_probe(SimpleNamespace(reply=reply), b"", 1))
        return [sample.token_ids.tolist() for sample in answers.pop().samples]

    assert probe() == [[group, 6] for group in (7, 3, 8, 5)]
    assert asked == [
        ([group], {"max_tokens": 32, "temperature": 1.0, "routes": False}) for group in (7, 3, 8, 5)
    ]

    async def hang(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(trainer_requests, "PROBE_S", 0.1)
    policy.servers.generate = hang
    assert probe() == []
    for refusal in (
        InferenceLostError("no server answered"),
        PromptTooLongError("64 tokens"),
        ValueError("inference answered 400"),
    ):
        # Regression: it ended the orchestrator
        policy.servers.generate = AsyncMock(side_effect=refusal)
        assert probe() == []
    run_dir.batch(1).unlink()
    with pytest.raises(CorruptFileError):
        probe()
