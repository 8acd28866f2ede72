"""The lease of a role: who holds it when the lock cannot tell, and how a holder declared dead
notices that."""

import errno
import os
import time
from types import SimpleNamespace

import msgspec
import pytest

from rl.run_dir import lease
from rl.run_dir.lease import (
    LeaseAttempt,
    LockOwner,
    check_fence,
    declare_lost,
    forget_dead_servers,
    hold_role,
    lease_path,
    newest_lease,
    this_process,
)
from rl.run_dir.status import Staleness, read_json
from rl.system.errors import GIVE_UP, RESTART, RunError
from tests.waiting import until

FAR = LockOwner(os.getpid(), "far", "0123abcd-4026531836", "1")
"""A process on another host with the pid of a live process here."""


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "r" / "status" / "orchestrator.lock"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lease, "RENEW_S", 0.02)
    monkeypatch.setattr(lease, "LEASE_S", 0.3)
    monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.fixture(
    params=[errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, None],
    ids=["ENOSYS", "ENOLCK", "EOPNOTSUPP", "this host alone"],
)
def no_locks(request, monkeypatch):
    """flock fails, or does not see other hosts."""

    def flock(_fd, _how):
        if request.param:
            raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr("fcntl.flock", flock)


def write_lease(lock, number, owner):
    lease_path(lock, number).write_bytes(msgspec.json.encode(owner))


def test_a_file_system_without_locks_has_one_holder_all_the_same(lock, no_locks):
    held = hold_role(lock)
    assert (held.number, read_json(held.path, LockOwner)) == (1, this_process())
    with pytest.raises(
        RunError,
        match=f"orchestrator of this run is already running \\(pid {os.getpid()} on .*\\); stop it "
        "first",
    ) as caught:
        hold_role(lock, 0.1)
    assert caught.value.exit_code == RESTART
    held.close()
    again = hold_role(lock)
    sizes = [path.stat().st_size > 0 for path in sorted(lock.parent.glob("*.lease"))]
    assert again.number == 2 and sizes == [False, True]
    again.close()


def test_a_dead_process_of_this_host_is_followed_at_once(lock, no_locks, monkeypatch):
    dead = msgspec.structs.replace(this_process(), started="1")  # another process has its pid now
    write_lease(lock, 7, dead)
    sleep = lambda seconds: pytest.fail(f"waits {seconds} s")  # noqa: E731
    monkeypatch.setattr(lease, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    held = hold_role(lock)
    assert held.number == 8
    held.close()


def test_another_hosts_lease_counts_as_long_as_it_changes(lock, no_locks):
    """The values of its timestamps do not matter: they may be in the future or long ago."""
    write_lease(lock, 3, FAR)
    stop, changes = time.monotonic() + 1.0, 0
    attempt = lease.LeaseAttempt(lock)
    while time.monotonic() < stop:
        changes += 1
        os.utime(lease_path(lock, 3), (1e9 - changes, 4e9 - changes))
        assert attempt.take() is None
        time.sleep(0.05)
    os.close(attempt.fd)
    before = time.monotonic()
    held = hold_role(lock)  # waits for it in any case
    assert held.number == 4 and time.monotonic() - before >= 0.3
    held.close()


def test_another_hosts_live_lease_is_refused_as_soon_as_it_changes(lock, no_locks, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_S", 30.0)
    renew = lambda _s: os.utime(lease_path(lock, 3), (5, 5))  # noqa: E731
    monkeypatch.setattr(lease, "time", SimpleNamespace(sleep=renew, monotonic=time.monotonic))
    write_lease(lock, 3, FAR)
    before = time.monotonic()
    with pytest.raises(RunError, match=f"already running \\(pid {os.getpid()} on far\\)"):
        hold_role(lock)
    assert time.monotonic() - before < lease.LEASE_S


def test_who_sees_a_listing_of_long_ago_gets_no_lease(lock, no_locks, monkeypatch):
    for number in range(1, 31):
        held = hold_role(lock)
        assert held.number == number
        if number < 30:
            held.close()
    assert sorted(lease.lease_numbers(lock)) == list(range(15, 31))
    for seen in range(15, 30):
        monkeypatch.setattr(lease, "lease_numbers", lambda path, seen=seen: [seen])
        assert lease.LeaseAttempt(lock).take() is None
    held.check()
    held.close()


@pytest.mark.parametrize("how", ["next", "emptied", "gone", "another run's"])
def test_who_was_given_up_learns_it_before_its_next_commit(lock, how):
    held = hold_role(lock)
    check_fence(lock)
    if how == "next":
        write_lease(lock, 2, FAR)
    elif how == "emptied":  # and the next name is not visible yet
        held.path.write_bytes(b"")
        write_lease(lock, 9, FAR)
    else:
        held.path.unlink()
        write_lease(lock, 9 if how == "gone" else held.number, FAR)
    with pytest.raises(
        RunError, match=r"on far.* has taken over as orchestrator of this run"
    ) as caught:
        check_fence(lock)
    assert caught.value.exit_code == GIVE_UP
    held.close()
    assert newest_lease(lock) and read_json(lease_path(lock, newest_lease(lock)), LockOwner) == FAR
    check_fence(lock)  # a process without a role, such as a tool, is not checked


def test_the_holder_renews_its_lease(lock):
    held = hold_role(lock)
    before = held.path.stat().st_mtime_ns
    until(lambda: held.path.stat().st_mtime_ns != before)
    held.close()
    assert held.path.stat().st_size == 0


def test_what_dead_servers_left_goes_and_a_live_one_stays(tmp_path, monkeypatch):
    """Servers on other hosts, where only time shows whether they are alive, are watched
    together."""
    monkeypatch.setattr(lease, "LEASE_S", 30.0)
    now, renewed = [0.0], tmp_path / "inference-b.example.org-3.000007.lease"

    def sleep(seconds):
        now[0] += seconds
        os.utime(renewed, (now[0], now[0]))

    monkeypatch.setattr(lease, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    monkeypatch.setattr(Staleness.__init__, "__defaults__", (lambda: now[0],))
    live = hold_role(tmp_path / "inference-a.example.org-1.lock")
    for name in ("a.example.org-1", "a.example.org-2", *(f"b.example.org-{i}" for i in (1, 2, 3))):
        (tmp_path / f"inference-{name}.json").write_text("{}")
        if name[0] == "b":
            path = tmp_path / f"inference-{name}.000007.lease"
            path.write_bytes(msgspec.json.encode(FAR))
    forget_dead_servers(tmp_path)
    assert lease.LEASE_S <= now[0] < 1.1 * lease.LEASE_S
    stays = {f"inference-{name}.json" for name in ("a.example.org-1", "b.example.org-3")}
    assert {path.name for path in tmp_path.glob("*.json")} == stays
    live.check()
    live.close()


def test_a_role_on_a_machine_that_is_declared_lost_is_free_at_once(tmp_path):
    lock, machine = (
        tmp_path / "status" / name for name in ("trainer.lock", "nodes/1.000001.lease")
    )
    machine.parent.mkdir(parents=True)
    machine.write_bytes(b"somebody")
    far = LockOwner(1, "far", "another-boot", "1", str(machine.relative_to(lock.parent)))
    lease_path(lock, 1).write_bytes(msgspec.json.encode(far))
    attempt = LeaseAttempt(lock)
    assert attempt.take() is None and attempt.undecided
    declare_lost(machine)
    lease = attempt.take()
    assert lease and lease.number == 2
    lease.close()
