"""Several servers as seen by one client: dead, slow, wrong and late ones only cost a retry of
the requests they had."""

import asyncio
import subprocess
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rl.run_dir.status import RoleStatus, write_status
from rl.system import process_table
from rl.system.linux import pid_scope
from rl.wire import inference_client
from rl.wire.inference_client import (
    BATCHED,
    Balancer,
    Expected,
    InferenceLostError,
    InferenceServers,
)
from rl.wire.worker_messages import ServerSet
from tests import steady
from tests.stub_server import StubServer
from tests.web import WebServer


def play(work, *stubs, timeout_s=5.0, **options):
    """Runs `work(servers, *stubs)` with a client of the stubs."""

    async def main():
        async with AsyncExitStack() as stack, asyncio.timeout(20):
            for stub in stubs:
                await stack.enter_async_context(stub)
            servers = InferenceServers([stub.url for stub in stubs], Path(), timeout_s, **options)
            stack.push_async_callback(servers.close)
            return await work(servers, *stubs)

    return steady.run(main())


def test_a_request_to_a_dead_server_goes_to_another_one_at_once():
    async def work(servers, first, second):
        await first.die()
        began = time.monotonic()
        answers = await asyncio.gather(
            *(servers.generate(session, [session], {}) for session in range(8))
        )
        return [answer.completion_ids[0] for answer in answers], time.monotonic() - began

    tokens, seconds = play(work, StubServer(), StubServer(), timeout_s=30.0)
    assert tokens == [*range(8)] and seconds < 2.0


def test_what_a_server_had_when_it_died_is_asked_elsewhere_once():
    async def work(servers, first, second):
        asked = [
            asyncio.create_task(servers.generate(session, [session], {})) for session in range(40)
        ]
        while len(first.sessions) + len(second.sessions) < 40:
            await asyncio.sleep(0.01)
        had = list(first.sessions)
        await first.die()
        answers = await asyncio.gather(*asked)
        return (
            had,
            [answer.completion_ids[0] for answer in answers],
            first.answered,
            sorted(second.answered),
        )

    had, tokens, first, second = play(work, StubServer(delay_s=1.0), StubServer(delay_s=1.0))
    assert 15 <= len(had) <= 25 and first == []
    assert tokens == second == [*range(40)]  # each exactly once


def test_requests_leave_a_server_that_hangs_when_it_is_told_to_be_gone_and_another_is_there():
    async def work(servers, hanging, other):
        hanging.hangs.set()
        servers.follow(ServerSet([hanging.url], [], 0, 9))
        asked = asyncio.create_task(servers.generate(1, [7], {}))
        while not hanging.sessions:
            await asyncio.sleep(0.01)
        servers.follow(ServerSet([], [], 0, 9))  # nobody could take it over: it stays
        await asyncio.sleep(0.1)
        assert not asked.done()
        servers.follow(ServerSet([other.url], [], 0, 9))
        return (await asked).completion_ids, other.sessions

    assert play(work, StubServer(), StubServer()) == ([7], [1])


def test_a_session_stays_and_moves_when_its_server_is_gone():
    async def work(servers, *stubs):
        for _ in range(4):
            await asyncio.gather(
                *(servers.generate(session, [session], {}) for session in range(12))
            )
        homes = [set(stub.sessions) for stub in stubs]
        servers.follow(ServerSet([stub.url for stub in stubs[1:]], [], 0, 9))
        await asyncio.gather(*(servers.generate(session, [session], {}) for session in range(12)))
        return homes, [set(stub.sessions) for stub in stubs]

    before, after = play(work, StubServer(), StubServer(), StubServer())
    assert [*map(len, before)] == [4, 4, 4] and not before[0] & before[1] | before[1] & before[
        2
    ] | before[0] & before[2]
    assert (
        after[0] == before[0]
        and after[1] | after[2] == set(range(12))
        and after[1] >= before[1]
        and after[2] >= before[2]
    )


def test_load_counts_once_a_server_is_full():
    balancer = Balancer()
    balancer.update(["a", "b"])
    a = balancer.servers["a"]
    a.flights = {object() for _ in range(BATCHED - 1)}
    assert balancer.choose(1).url == "b"
    balancer.last_server[2] = "a"
    assert balancer.choose(2).url == "a"  # a server batches that many
    a.flights = {object() for _ in range(3 * BATCHED)}
    assert balancer.choose(2).url == "b" and balancer.choose(2).url == "b"


def test_an_answer_of_an_older_version_than_was_promised_does_not_count():
    async def work(servers, liar, sound):
        servers.follow(ServerSet([liar.url, sound.url], [], 5, 9))
        answers = [await servers.generate(session, [session], {}) for session in range(4)]
        return {
            span.policy_version for answer in answers for span in answer.policy_versions
        }, liar.answered

    liar, sound = StubServer(5), StubServer(5)
    liar.stamp = 3
    versions, answered = play(work, liar, sound)
    assert versions == {5} and answered
    liar, sound = StubServer(5), StubServer(5)
    liar.stamp = 12  # never published
    versions, answered = play(work, liar, sound)
    assert versions == {5} and answered

    async def alone(servers, liar):
        servers.follow(ServerSet([liar.url], [], 5, 9))
        await servers.generate(0, [1], {})

    liar = StubServer(5)
    liar.stamp = 3
    with pytest.raises(
        InferenceLostError,
        match="its tokens are of versions 3 to 3, but it should hold 5 or a newer one",
    ):
        play(alone, liar, timeout_s=0.6)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (
            {"served_model": "/models/other"},
            "serves /models/other, but this run trains org/m: start it with this run's "
            "configuration",
        ),
        ({"max_model_len": 50}, "takes 50 tokens, but model.max_model_len = 100: start it with"),
        (
            {"protocol": 1},
            r"is a server of another version of rl \(protocol 1, here 7\): start it from the "
            r"same installation",
        ),
    ],
)
def test_a_wrong_server_is_left_out_and_named(about, message, caplog):
    async def work(servers, *stubs):
        for _ in range(3):
            held = await servers.poll_versions()
        return list(held) == [stubs[1].url] if len(stubs) > 1 else await servers.wait_for_any()

    expected = Expected("org/m", 100)
    assert play(
        work, StubServer(**about), StubServer(served_model="/elsewhere/m"), expected=expected
    )
    # logged once
    assert sum("inference" in line.lower() or "server" in line for line in caplog.messages) == 1
    with pytest.raises(InferenceLostError, match=message):
        play(work, StubServer(**about), expected=expected)


def test_an_address_that_is_not_ours():
    async def work(servers, _):
        await servers.wait_for_any()

    with pytest.raises(
        InferenceLostError, match=r"is not an inference server of rl: its /status answers 404"
    ):
        play(work, WebServer())


def test_the_version_of_some_servers_is_waited_for_although_others_are_there(monkeypatch):
    monkeypatch.setattr(inference_client, "RETRY_S", 0.01)

    async def work(servers, old, new):
        assert await servers.loaded_version() == 2 and await servers.loaded_version([new.url]) == 7
        new.hangs.set()
        monkeypatch.setattr(inference_client, "STATUS_S", 0.05)
        await asyncio.sleep(0.1)
        with pytest.raises(InferenceLostError, match="no answer within"):
            await servers.loaded_version([new.url])
        return await servers.loaded_version()

    assert play(work, StubServer(2), StubServer(7), timeout_s=0.3) == 2


def test_a_hanging_server_delays_no_look_at_the_others(monkeypatch):
    monkeypatch.setattr(inference_client, "LOOK_S", 0.1)
    monkeypatch.setattr(inference_client, "STATUS_S", 1.5)

    async def work(servers, hanging, sound):
        first = await servers.poll_versions()
        hanging.hangs.set()
        began = time.monotonic()
        sound.version = 4
        second = await servers.poll_versions()
        seconds = time.monotonic() - began
        await asyncio.sleep(1.6)
        third = await servers.poll_versions()
        return (
            [held.get(hanging.url) for held in (first, second, third)],
            second[sound.url],
            seconds,
        )

    held, other, seconds = play(work, StubServer(3), StubServer(3))
    assert held == [3, 3, None] and other == 4 and seconds < 1.0  # a moment's silence is no death


def test_a_killed_server_whose_status_stays_is_not_asked_again(tmp_path):
    """Regression: it was asked every second until another one came. Its address may belong to
    another service by now."""
    process = subprocess.Popen(["sleep", "60"])
    identity = {
        "pid": process.pid,
        "place": pid_scope(),
        "start_ticks": process_table.entry(process.pid).start,
    }
    write_status(
        tmp_path / "inference-h-1.json", RoleStatus(address="http://127.0.0.1:9", **identity)
    )
    write_status(
        tmp_path / "inference-h-2.json",
        RoleStatus(address="http://127.0.0.1:10", **identity | {"place": "elsewhere"}),
    )
    servers = InferenceServers([], tmp_path / "inference.json", 1.0)
    assert servers.find() == ["http://127.0.0.1:9", "http://127.0.0.1:10"]
    process.kill()
    process.wait()
    assert servers.find() == ["http://127.0.0.1:10"]  # whether it is alive cannot be seen from here
