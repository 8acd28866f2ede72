"""Ranks as threads that meet in a real store."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from rl.system.errors import RunError
from rl.trainer.parallel.meetings import Meetings
from tests.waiting import until


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def ranks(server, size, patience_s=30.0):
    stores = [
        dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=30)) for _ in range(size)
    ]
    return [
        Meetings(dist.PrefixStore("meetings", store), rank, size, patience_s)
        for rank, store in enumerate(stores)
    ]


def test_all_get_rank_0s_word_when_the_last_has_come_and_nothing_stays_behind(server):
    """Also where one thread of a rank waits meanwhile in a meeting of its own."""
    size, times, here = 3, 50, ranks(server, 3)

    def go(meetings):
        return [
            meetings.meet(f"word {i}".encode() if not meetings.rank else b"mine")
            for i in range(times)
        ]

    with ThreadPoolExecutor(size + 2) as pool:
        waiting = [pool.submit(meetings.meet, b"late", "thread") for meetings in here[:2]]
        began = server.num_keys()
        found = list(pool.map(go, here))
        assert found == [[f"word {i}".encode() for i in range(times)]] * size
        assert server.num_keys() <= began + 2 * size, "keys of past meetings are deleted"
        assert not any(one.done() for one in waiting)
        assert (
            here[2].meet(b"", "thread") == b"late"
            and [one.result() for one in waiting] == [b"late"] * 2
        )
        list(pool.map(Meetings.close, here))


def test_who_has_not_come_by_the_deadline_is_named(server):
    first, second, _ = ranks(server, 3, patience_s=0.3)
    with ThreadPoolExecutor(1) as pool:
        before = server.num_keys()
        other = pool.submit(second.meet)
        until(lambda: server.num_keys() > before)
        with pytest.raises(
            RunError, match=r"rank 0 on .* waited 0 s for ranks \[2\], which did not come"
        ) as error:
            first.meet()
        assert error.value.exit_code == 1, "another start may succeed"
        assert other.exception()


def test_a_store_that_is_gone_is_said_at_once():
    """Here it belongs to nobody else: its connections are closed."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    parent, child = context.Pipe()

    def serve():
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        child.send(store.port)
        time.sleep(60)

    process = context.Process(target=serve, daemon=True)
    process.start()
    store = dist.TCPStore("127.0.0.1", parent.recv(), timeout=timedelta(seconds=30))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Meetings(store, 1, 2, 30.0).meet)
        time.sleep(0.2)
        process.kill()
        with pytest.raises(
            RunError, match=r"the process with the ranks' store, rank 0 or its torchrun, has ended"
        ):
            waiting.result(10)
