"""A run's policy on several servers: a slow, dead, late or wrong one delays no other, and gets
no request that it may not answer."""

import asyncio
import itertools
import json
import random
import time
from contextlib import AsyncExitStack

import pytest

from rl.orchestrator.evals.evaluator import Evaluator
from rl.orchestrator.policy import served_policy
from rl.orchestrator.policy.served_policy import ServedPolicy
from rl.orchestrator.progress import StepClock
from rl.run_dir.status import Phase, RoleStatus, write_status
from rl.wire import inference_client
from rl.wire.http import RefusedError
from rl.wire.inference_client import Expected, InferenceLostError, InferenceServers
from rl.wire.worker_messages import ServerSet
from tests import steady
from tests.orchestrator.made import run_config
from tests.stub_server import StubServer


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(served_policy, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(served_policy, "LATE_S", 0.1)
    monkeypatch.setattr(inference_client, "LOOK_S", 0.1)
    monkeypatch.setattr(inference_client, "STATUS_S", 0.3)
    monkeypatch.setattr(inference_client, "RETRY_S", 0.05)


class World:
    """The policy of a run with versions 1 to 9, whose servers are found by their status files;
    `client` is a worker's."""

    def __init__(self, folder, stack):
        flags = "--model.name m --model.max_model_len 100 --orchestrator.sampling.max_tokens 9"
        self.config = run_config(folder, flags)
        self.run_dir, self.stack = self.config.run_dir, stack
        for number in range(1, 10):
            self.run_dir.weights(number).mkdir(parents=True)
        status, told = self.run_dir.status("inference"), []
        self.servers = InferenceServers([], status, 3.0, Expected("m", 100))
        self.client = InferenceServers([], status, 3.0)
        self.told = told

        async def tell(server_set):
            told.append(server_set)
            self.client.follow(server_set)

        self.policy = ServedPolicy(
            self.servers,
            self.run_dir,
            str(folder),
            Evaluator(self.config, None, {}, StepClock()),
            tell,
        )

    async def add(self, name, version=0, **options):
        return await self.stack.enter_async_context(
            StubServer(version, status=self.run_dir.status(name), **options)
        )

    async def load(self, number):
        """Returns the seconds that it took."""
        began = time.monotonic()
        await self.policy.load(self.policy.versions[number])
        return time.monotonic() - began


def in_world(work):
    """A test of the name of `work`, which it runs in a world of its own."""

    def test(tmp_path, caplog, monkeypatch):
        async def main():
            async with AsyncExitStack() as stack, asyncio.timeout(30):
                world = World(tmp_path, stack)
                world.caplog, world.monkeypatch = caplog, monkeypatch
                stack.push_async_callback(world.client.close)
                stack.push_async_callback(world.servers.close)
                await work(world)

        steady.run(main())

    test.__doc__ = work.__doc__
    return test


@in_world
async def test_a_slow_or_dead_server_delays_no_load_and_joins_when_it_has_caught_up(world):
    quick, slow = (
        await world.add("inference", load_s=0.05),
        await world.add("inference-a-1", load_s=1.0),
    )
    hangs = await world.add("inference-a-2")
    dead = await world.add("inference-a-3")
    await world.policy.start()
    assert len(world.told[-1].urls) == 4
    hangs.hangs.set()
    await dead.die()
    seconds = await world.load(5)
    assert seconds < 0.9 and world.policy.loaded == 5
    assert world.told[-1] == ServerSet([quick.url], [slow.url], 5, 9) or world.told[-1].urls == [
        quick.url
    ]
    answers = await asyncio.gather(
        *(world.client.generate(session, [session], {}) for session in range(20))
    )
    assert {span.policy_version for answer in answers for span in answer.policy_versions} == {5}
    assert len(quick.answered) == 20
    await world.load(6)  # the slow one still loads version 5
    while slow.version != 6:
        await world.policy.reconcile()
        await asyncio.sleep(0.05)
    await world.policy.reconcile()
    assert {*world.told[-1].urls} == {quick.url, slow.url}
    assert slow.loads == [5, 6]
    assert quick.loads == [5, 6]


@in_world
async def test_a_server_that_is_late_once_keeps_what_it_has_and_loses_it_when_it_is_late_again(
    world,
):
    busy, other = await world.add("inference", delay_s=0.8), await world.add("inference-a-1")
    await world.policy.start()

    async def ask(session):
        world.client.balancer.last_server[session] = busy.url
        asked = asyncio.create_task(world.client.generate(session, [session], {}))
        while session not in busy.sessions:
            await asyncio.sleep(0.01)
        return asked

    async def settle_until(urls, closed):
        while ({*world.told[-1].urls}, {*world.told[-1].closed}) != (urls, closed):
            await world.policy.reconcile()

    asked, busy.status_s = await ask(1), 0.4
    await settle_until({other.url}, {busy.url})
    assert (await world.client.generate(2, [2], {})).completion_ids == [2] and other.sessions == [2]
    busy.status_s = 0.0
    assert (await asked).completion_ids == [1] and other.sessions == [2]  # nothing was asked twice
    await settle_until({busy.url, other.url}, set())
    asked = await ask(3)
    busy.hangs.set()
    await settle_until({other.url}, {busy.url})
    await settle_until({other.url}, set())
    assert (await asked).completion_ids == [3] and other.sessions == [2, 3]


@in_world
async def test_an_evaluation_is_answered_by_servers_of_its_version_alone(world):
    exact, newer = (
        await world.add("inference", 3),
        await world.add("inference-b-1", 5, load_s=0.5),
    )
    await world.policy.start()
    await world.load(3)
    newer.version = 6  # it died and came back
    await world.policy.reconcile()
    assert {*world.told[-1].urls} == {exact.url, newer.url}  # training accepts newer versions
    async with world.policy.pin():
        assert world.told[-1] == ServerSet([exact.url], [newer.url], 3, 9)
        await world.policy.reconcile()
        assert newer.loads[-1] == 3
        while newer.version != 3:
            await asyncio.sleep(0.02)
        await world.policy.reconcile()
        assert {*world.told[-1].urls} == {exact.url, newer.url}


@in_world
async def test_what_all_refuse_is_refused_and_one_that_refuses_is_left_out(world):
    sound, other = await world.add("inference"), await world.add("inference-b-1")
    await world.policy.start()
    load = world.servers.load

    async def refuse(url, version):
        if url == other.url or version.policy_version == 7:
            raise RefusedError(422, "tensor w is missing")
        return await load(url, version)

    world.servers.load = refuse
    await world.load(5)
    assert (sound.version, world.policy.loaded, world.told[-1].urls) == (5, 5, [sound.url])
    assert any(
        "is excluded because it refused version 5: tensor w is missing" in line
        for line in world.caplog.messages
    )
    world.run_dir.weights(7).joinpath("x").touch()
    with pytest.raises(Exception, match=r"000007: .*refused version 7: tensor w is missing"):
        await world.load(7)


@in_world
async def test_the_version_that_a_server_reads_is_kept_for_it(world):
    """Meanwhile the run continues with its other servers, and its trainer deletes versions."""
    await world.add("inference")
    slow = await world.add("inference-b-1", load_s=1.0)
    await world.policy.start()
    write_status(
        world.run_dir.status("inference-c-1"),
        RoleStatus(phase=Phase.LOADING_MODEL, policy_version=2),
    )
    await world.load(5)
    assert world.policy.loaded == 5 and world.policy.in_use() == {2, 5} and slow.version == 0
    write_status(
        world.run_dir.status("inference-c-1"),
        RoleStatus(phase=Phase.SERVING, policy_version=2, address="http://127.0.0.1:9"),
    )
    while slow.version != 5:
        await asyncio.sleep(0.05)
    await world.policy.reconcile()
    assert world.policy.in_use() == set()


@in_world
async def test_the_version_that_a_killed_server_was_reading_is_kept_for_a_minute_by_our_own_clock(
    world,
):
    world.monkeypatch.setattr(served_policy, "CLAIM_S", 0.2)
    world.policy.staleness.clock = time.monotonic

    def beat(time_there):
        status = RoleStatus(phase=Phase.LOADING_MODEL, policy_version=2, heartbeat=time_there)
        write_status(world.run_dir.status("inference-c-1"), status)

    for time_there in (9e9, 9e9 + 2, 5.0):  # its host's clock may show anything
        beat(time_there)
        assert world.policy.in_use() == {2}
        await asyncio.sleep(0.12)
        assert world.policy.in_use() == {2}
    await asyncio.sleep(0.12)
    assert world.policy.in_use() == set()
    beat(7.0)  # it was only stopped
    assert world.policy.in_use() == {2}


@in_world
async def test_a_late_load_of_an_older_version_that_fails_is_no_refusal_of_the_newer_one(world):
    """The version's folder is deleted meanwhile: the server gets the newest version as soon as
    it has reported this."""
    quick, slow = await world.add("inference"), await world.add("inference-b-1")
    await world.policy.start()
    load, reading = world.servers.load, asyncio.Event()

    async def load_slowly(url, version):
        if url == slow.url and version.policy_version == 3:
            await reading.wait()
            raise RefusedError(404, "weights_gone")
        return await load(url, version)

    world.servers.load = load_slowly
    await world.load(3)
    loading = asyncio.create_task(world.load(4))
    await asyncio.sleep(0.02)
    reading.set()
    await loading
    while slow.version != 4:
        await world.policy.reconcile()
        await asyncio.sleep(0.05)
    assert not any("left out" in line for line in world.caplog.messages) and quick.loads == [3, 4]


@in_world
async def test_a_server_that_does_not_see_the_folder_yet_is_asked_again_until_the_deadline(world):
    """A stale listing of a network file system: the folder exists here."""
    await world.add("inference")
    await world.policy.start()
    world.monkeypatch.setattr(served_policy, "RETRY_S", 0.01)
    load, refusals = world.servers.load, iter(range(3))

    async def load_unseen(url, version):
        if next(refusals, None) is not None:
            raise RefusedError(404, "weights_gone: no such directory")
        return await load(url, version)

    world.servers.load = load_unseen
    await world.load(4)
    assert world.policy.loaded == 4 and next(refusals, None) is None
    refusals, world.servers.timeout_s = itertools.repeat(0), 0.2
    with pytest.raises(
        InferenceLostError,
        match=r"no such directory; .*000005 exists on this host: share output_dir",
    ):
        await world.load(5)


@in_world
async def test_no_token_is_older_than_the_version_that_was_loaded_when_its_group_began(world):
    """Servers die, come back with any version, and load at any speed, while versions are
    published and groups of three turns are played."""
    chance = random.Random(7)
    stubs = [await world.add(f"inference-h-{i}", load_s=0.02 * i, delay_s=0.01) for i in range(4)]
    await world.policy.start()
    lost, begun = [], 0

    async def group(session):
        start = world.policy.loaded
        for _ in range(3):
            answer = await world.client.generate(session, [session % 90], {})
            lost.extend(span for span in answer.policy_versions if span.policy_version < start)

    async def trouble():
        while True:
            await asyncio.sleep(0.07)
            stub = chance.choice(stubs)
            stub.version = chance.randrange(10)  # as if it had been restarted
            await world.policy.reconcile()

    async def publish():
        for number in range(1, 10):
            await world.load(number)
            await asyncio.sleep(0.1)

    troubled, published = asyncio.create_task(trouble()), asyncio.create_task(publish())
    while not published.done():
        await asyncio.gather(*(group(begun + i) for i in range(8)))
        begun += 8
    troubled.cancel()
    await published
    assert not lost and begun >= 40 and world.policy.loaded == 9


@in_world
async def test_a_version_that_is_trained_again_and_comes_out_otherwise_is_loaded_again(world):
    """Regression: the trainer was killed after its checkpoint, and is not bit-exact. The server
    kept the old version 3 forever."""

    def train(digest):
        record = world.run_dir.digests(3)
        record.parent.mkdir(exist_ok=True)
        record.write_text(json.dumps({"hash": "blake3", "tensors": {"w": digest}}))
        world.policy.note(3)

    first, second = await world.add("inference", 3), await world.add("inference-a-1", 3)
    await world.policy.start()
    # they started from disk, with unknown content
    assert (world.policy.loaded, first.loads) == (3, [])
    train("a" * 64)
    await world.load(4)
    assert [server.version for server in (first, second)] == [4, 4]
    world.policy.loaded = 3  # resumed from a checkpoint, with new servers
    await world.load(3)
    train("a" * 64)
    await world.policy.reconcile()
    assert (first.loads, second.loads, world.told[-1].urls) == (
        [4, 3],
        [4, 3],
        [first.url, second.url],
    )
    train("b" * 64)
    await world.policy.reconcile()
    assert world.told[-1].urls == [first.url, second.url] and world.policy.loaded == 3
    await world.policy.reconcile()
    contents = {server.about["content"] for server in (first, second)}
    assert first.loads == second.loads == [4, 3, 3]
    assert contents == {world.policy.versions[3].content}
