"""The threads beside the training: one batch ahead, one version behind, and whose errors are
whose."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

from rl.config.trainer import WeightsConfig
from rl.diagnosis import disk
from rl.run_dir.files import CorruptFileError
from rl.run_dir.in_memory import make
from rl.run_dir.paths import RunDir, numbered
from rl.run_dir.status import Phase
from rl.trainer.data.batch_sources import FromOrchestrator, Prefetch
from rl.trainer.store import publisher as publisher_module
from rl.trainer.store.publisher import Publisher
from rl.trainer.store.threads import SingleTaskThread
from rl.wire.messages import Acknowledged, RunEnded
from rl.wire.transport import Wait
from tests.flags import made
from tests.raised import run_error
from tests.trainer.samples import make_batch
from tests.waiting import until


class Source:
    """Gives batches 1 to 3; batch 2 only when it is let go, batch 3 is damaged."""

    def __init__(self):
        self.asked, self.release, self.threads = [], threading.Event(), set()

    def receive(self, step):
        self.asked.append(step)
        self.threads.add(threading.current_thread())
        if step == 2:
            assert self.release.wait(10)
        if step == 3:
            raise CorruptFileError("batch 3: cut short at byte 7")
        return make_batch(step) if step < 4 else None

    def validation(self, step):
        return []


def nothing(*_):
    pass


def test_the_next_batch_is_made_ready_while_this_one_is_trained():
    source = Source()
    batches = Prefetch(source, lambda batch: f"packed {batch.step}", Wait(10, nothing), 10)
    first = batches.take(1)  # nobody had asked
    assert first == "packed 1"
    batches.ask(2)
    while source.asked != [1, 2]:
        time.sleep(0.01)
    source.release.set()
    assert batches.take(2) == "packed 2"
    batches.ask(3)
    with pytest.raises(CorruptFileError, match="batch 3: cut short at byte 7"):
        batches.take(3)
    assert batches.take(4) is None
    assert source.asked == [1, 2, 3, 4] and threading.main_thread() not in source.threads


def test_who_waits_has_the_deadline_and_hears_of_other_failures():
    def fail():
        raise OSError("no space left")

    publishing = SingleTaskThread()
    publishing.start(fail)
    batches = Prefetch(Source(), nothing, Wait(10, nothing), 0.2)
    batches.ask(2)
    time.sleep(0.3)  # asking ahead has no deadline
    with pytest.raises(OSError, match="no space left"):
        batches.take(2, [publishing])
    with run_error("waited 0 s for batch 2 from rank 0"):
        batches.take(2)


class Client:
    """Notes what is published."""

    def __init__(self):
        self.versions = []

    def published(self, version, wait):
        self.versions.append(version.policy_version)
        return Acknowledged(version.policy_version)


class Empty:
    """A version without tensors, whose folder is written when it may be: by default at once."""

    def __init__(self, in_memory=None, may_be_written=lambda: True):
        self.in_memory, self.may_be_written = in_memory, may_be_written

    def write_record(self, record, fence):
        record.parent.mkdir(exist_ok=True)
        record.touch()

    def write(self, path, **_):
        until(self.may_be_written)
        path.mkdir(parents=True)


def publishing(tmp_path, **settings) -> tuple[Client, RunDir, Publisher]:
    """A publisher that keeps two versions, and its client."""
    client, run_dir = Client(), RunDir(tmp_path, tmp_path / "weights")
    weights = WeightsConfig(**{"keep_last": 2} | settings)
    return client, run_dir, Publisher(run_dir, weights, client, Wait(60, nothing))


def test_a_version_waits_until_the_one_before_it_is_announced(tmp_path, monkeypatch):
    release, said = threading.Event(), []
    client, run_dir, publisher = publishing(tmp_path)
    answer = client.published

    def published(version, wait):
        wait.about(Phase.ANNOUNCING_VERSION, version.policy_version)
        assert release.wait(10)
        return answer(version, wait)

    monkeypatch.setattr(client, "published", published)
    # who waits for version 1 says so
    publisher.wait.on_wait = lambda *what: said.append(what) or release.set()
    publisher.start(1, Empty(), checkpoints={})
    until(lambda: list(numbered(run_dir.weights_dir)) == [1])
    time.sleep(0.2)
    assert client.versions == said == []
    publisher.start(2, Empty(), checkpoints={})
    assert client.versions[:1] == [1] and said[0] == (Phase.ANNOUNCING_VERSION, 1, "")
    assert publisher.metrics()["time/publish_latency"] >= 0.2
    publisher.finish()


def test_a_version_is_announced_before_it_is_durable_and_the_next_but_one_waits_for_that(
    tmp_path, monkeypatch
):
    (client, run_dir, publisher), happened = publishing(tmp_path), []
    slow = threading.Event()
    monkeypatch.setattr(client, "versions", happened)

    def durable(path):
        assert slow.wait(10)
        happened.append(str(path.relative_to(tmp_path)))

    monkeypatch.setattr("rl.trainer.store.publisher.make_durable", durable)
    for version in (1, 2):
        publisher.start(version, Empty(), checkpoints={})
    # a disk that is slow for the first holds the second up no longer than for its own writing
    while happened != [1, 2]:
        time.sleep(0.01)
    waited = r"waited 0 s for a version to be written to .*: does that disk answer\?"
    with run_error(waited) as late:
        publisher.deadline_s = 0.2
        publisher.free()
    # a line in the log in place of a traceback, and another start
    assert late.value.exit_code == 1
    monkeypatch.undo()
    slow.set()
    publisher.start(3, Empty(), checkpoints={})
    publisher.finish()
    assert list(numbered(run_dir.weights_dir)) == [2, 3]


def test_the_disk_that_versions_take_at_most_is_what_the_estimate_says(
    tmp_path, run_dir, tied_folder, monkeypatch
):
    """Two are written while an older one cannot be deleted yet, as the disk is slow to make the
    newer durable: it was short by two."""
    slow = threading.Event()
    slow.set()
    monkeypatch.setattr("rl.trainer.store.publisher.make_durable", lambda path: slow.wait(60))
    publisher = Publisher(run_dir, WeightsConfig(keep_last=2), None, Wait(10, nothing))
    for version in range(1, 6):
        publisher.start(version, Empty(), checkpoints={1, 2})
    publisher.finish()
    assert list(numbered(run_dir.weights_dir)) == [1, 2, 4, 5]
    slow.clear()
    for version in (6, 7):
        publisher.start(version, Empty(), checkpoints={1, 2})
    until(lambda: 7 in numbered(run_dir.weights_dir))
    assert list(numbered(run_dir.weights_dir)) == [1, 2, 4, 5, 6, 7]
    slow.set()
    publisher.finish()
    flags = f"--orchestrator.environment.id e --output_dir {tmp_path} --trainer.weights.keep_last 2"
    (need,) = disk.needs(made(flags), tied_folder)
    assert "6 policy versions" in need.files


@pytest.mark.parametrize("transport", ["memory", "files"])
def test_a_version_is_announced_out_of_memory_and_again_when_its_folder_is_there(
    tmp_path, monkeypatch, transport
):
    client, run_dir, publisher = publishing(tmp_path, transport=transport)
    seen, told, answer = [], {}, client.published

    def published(version, wait):
        seen.append((version.memory, run_dir.digests(1).exists(), run_dir.weights(1).exists()))
        return answer(version, wait)

    monkeypatch.setattr(client, "published", published)
    file = make(100)
    may_be_written = lambda: told.update(publisher.metrics()) or told or transport == "files"  # noqa: E731
    publisher.start(1, Empty(file, may_be_written), checkpoints={})
    publisher.finish()
    os.close(file.fd)
    assert seen == [(file, True, False)] * (transport == "memory") + [(None, True, True)]
    assert transport == "files" or publisher.metrics() == told, "the second counts for nothing"


def test_a_version_that_is_not_acknowledged_before_the_trainer_leaves_deletes_none(
    tmp_path, monkeypatch
):
    client, run_dir, publisher = publishing(tmp_path)
    for version in (1, 2):
        publisher.start(version, Empty(), checkpoints={})
    publisher.finish()
    latency = publisher.metrics()
    assert latency["time/publish_latency"] > 0
    monkeypatch.setattr(client, "published", nothing)
    publisher.start(3, Empty(), checkpoints={})
    publisher.finish()
    assert list(numbered(run_dir.weights_dir)) == [1, 2, 3] and publisher.metrics() == latency


def test_other_ranks_wait_for_a_batch_as_long_as_a_step_takes():
    """A deadline counts from when the trainer waits for the thread, which asks before it trains.
    Regression: their collective had one of its own, so a step and the wait after it had to take
    less than two hours."""
    deadlines = []
    world = SimpleNamespace(new_group=deadlines.append)
    FromOrchestrator(None, Wait(1.0, lambda *_: None), world)
    assert deadlines[0] > 7 * 86400 and 1000 * deadlines[0] < 2**31, "which gloo can count"


def test_rank_0_says_that_it_waits_for_the_others_while_they_do_not_take_a_batch():
    """Regression: it said that the orchestrator kept it waiting."""
    said, wait = [], Wait(1.0, lambda *what: said.append(what))
    client = SimpleNamespace(get_batch=lambda step, wait: RunEnded("all is done"))
    world = SimpleNamespace(
        size=2, new_group=nothing, broadcast_bytes=lambda data, _: said.append("sent") or data
    )
    with wait:
        assert FromOrchestrator(client, wait, world).receive(3) is None
    assert said == [(Phase.WAITING_FOR_RANKS, 3, "they are to take batch 3"), "sent"]


def test_other_ranks_learn_whether_rank_0_could_delete_what_follows_a_version(
    tmp_path, monkeypatch
):
    """Regression: an error there was rank 0's alone, and the others lost a rank."""
    _, _, publisher = publishing(tmp_path)
    monkeypatch.setattr(
        publisher_module, "record_of", lambda _: {"tensors": {"w": "0"}, "made_by": {}}
    )
    done, version = [], SimpleNamespace(digests_like=lambda _: {"w": "1"}, made_by={})
    publisher.ranks = SimpleNamespace(
        is_main=False, of_main=lambda work: done.append(work()) or done[-1]
    )
    publisher._compare(1, version)
    assert len(done) == 2
