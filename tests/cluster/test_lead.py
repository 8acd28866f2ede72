"""Who leads, and what the end of a leader means for the run, with a program in place of `rl`."""

import sys

import pytest

from rl.cluster import lead as module
from rl.cluster.lead import TAKEN, Leader, on_a_cluster, with_open_hosts
from rl.cluster.world import END_S
from rl.run_dir.lease import LEASE_S, hold_role
from tests.cluster.configs import run_config, world_of
from tests.waiting import until


def make_config(tmp_path, cluster=None, **tables):
    supervisor = {"backoff_s": 0, "max_restarts": 2}
    return run_config(tmp_path, cluster or {}, supervisor=supervisor, **tables)


@pytest.fixture
def leader(tmp_path, children, monkeypatch):
    monkeypatch.setattr(module, "TRY_S", 0.05)
    leader = Leader(make_config(tmp_path), 0, children, {})

    def ends_as(statement):
        leader.command = [
            sys.executable,
            "-c",
            f"import os, sys, signal; print('the last words', flush=True); {statement}",
        ]
        return leader

    return ends_as


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, ""), (1, "the last words"), (2, "the last words"), (130, "the last words")],
)
def test_its_end_is_the_end_of_the_run(leader, code, text):
    assert until(leader(f"sys.exit({code})").poll) == (code, text)


def test_one_that_finds_another_leader_ends_nothing(leader):
    one = leader(f"sys.exit({TAKEN})")
    until(lambda: one.poll() or one.child)
    assert until(lambda: one.poll() or one.child is None) is True


def test_one_that_is_killed_starts_again_until_it_is_hopeless(leader):
    code, text = until(leader("os.kill(os.getpid(), signal.SIGKILL)").poll)
    assert code == 1 and "SIGKILL" in text and "3 times" in text


def test_it_waits_while_another_leads(leader):
    one = leader("sys.exit(0)")
    other = hold_role(one.lock)
    for _ in range(5):
        one.try_at = 0.0
        assert one.poll() is None and one.child is None
    other.close()
    assert until(one.poll) == (0, "")


def test_one_whose_machine_is_cut_off_leaves_the_role_to_others(leader):
    one = leader("import time; time.sleep(60)")
    child = until(lambda: one.poll() or one.child)
    assert one.poll(may_lead=False) is None and one.child is None and child.reaped
    one.try_at = 0.0
    assert one.poll(may_lead=False) is None and one.child is None
    hold_role(one.lock).close()


def test_one_that_takes_over_ends_the_ranks_of_the_world_before(leader):
    one = leader("sys.exit(0)")
    one.nodes.write(one.nodes.world_path, world_of(3, [0, 1]))
    until(lambda: one.poll() or one.child)
    assert one.nodes.world() == world_of(3, [0, 1], stop="kill")


def test_an_end_after_the_role_was_lost_is_not_the_end_of_the_run(leader):
    one = leader("sys.stdin.close(); sys.exit(1)")
    until(lambda: one.poll() or one.child)
    other = hold_role(one.lock)
    assert until(lambda: one.poll() or one.child is None) is True
    other.close()


def test_the_launcher_may_take_as_long_for_its_end_as_all_ranks(tmp_path):
    config = make_config(tmp_path, cluster={"nodes": 3, "grace_s": 100})
    trainer = on_a_cluster(config).roles(config.run_dir)[-1]
    assert trainer.name == "trainer" and trainer.stop_s > LEASE_S + END_S + 100


def test_processes_bind_all_interfaces_unless_the_user_chose_one(tmp_path):
    opened = with_open_hosts(make_config(tmp_path, inference={"host": "10.0.0.7"}))
    assert (opened.inference.host, opened.orchestrator.host) == ("10.0.0.7", "0.0.0.0")
    alone = with_open_hosts(make_config(tmp_path, cluster={"nodes": 1, "engine": "slurm"}))
    assert alone.orchestrator.host == "127.0.0.1"
