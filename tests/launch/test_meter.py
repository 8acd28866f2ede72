"""Seconds of machines, over several starts of `rl`; the clock is simulated."""

import errno
import os
from types import SimpleNamespace

import pytest

from rl.launch.meter import Meter
from rl.run_dir.lease import LEASE_S
from rl.run_dir.metrics import Merger, MetricsLog, cut_metrics, read_metrics
from rl.run_dir.nodes import Nodes, NodeStatus
from rl.run_dir.status import Staleness
from rl.system.machine import Machine
from tests.flags import made


@pytest.fixture
def clock(monkeypatch):
    """Time by both clocks of the module, and of the signs of life."""
    clock = SimpleNamespace(now=1e9)
    now = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now)
    monkeypatch.setattr("rl.launch.meter.time", now)
    monkeypatch.setattr("rl.launch.meter.Staleness", lambda: Staleness(now.monotonic))
    monkeypatch.setattr("rl.launch.meter.machine", lambda: Machine(["0", "1"], [0]))
    return clock


def config_of(tmp_path, flags=""):
    return made(f"--output_dir {tmp_path} --name r --orchestrator.environment.id e {flags}")


def trained(step):
    return [{"step": step, "source": "trainer"}]


def spent(config):
    Merger(config.run_dir.metrics).merge()
    lines = read_metrics(config.run_dir.metrics, "rl")
    ours = ("step", "time", "source")
    return {
        step: {name: value for name, value in line.items() if name not in ours}
        for (step, _), line in lines.items()
    }


def test_seconds_are_those_of_all_starts(tmp_path, clock):
    config = config_of(tmp_path, "--cost.per_hour 7.2")
    meter = Meter(config, config.run_dir)
    clock.now += 10
    meter.note([])
    clock.now += 20
    meter.note(trained(1))
    clock.now += 5
    meter.write()  # at the end, this adds to the line of step 1
    seconds = {"cost/machine_s": 35.0, "cost/machine_0_s": 35.0, "cost/gpu_s": 70.0}
    assert spent(config) == {1: seconds | {"cost/total": pytest.approx(0.07)}}
    clock.now += 1000  # the run is stopped
    meter = Meter(config, config.run_dir)
    clock.now += 100
    meter.note(trained(3))
    clock.now += 1000  # and killed, so that this is lost
    meter = Meter(config, config.run_dir)
    clock.now += 1
    meter.write()
    assert spent(config)[3]["cost/machine_s"] == 136.0
    assert spent(config)[3]["cost/total"] == pytest.approx(0.272)
    free = config_of(tmp_path)
    Meter(free, free.run_dir).write()
    assert spent(config)[3]["cost/total"] == 0.0, "not the total at a price of before"
    cut_metrics(config.run_dir.metrics, 1)  # --resume 1
    assert Meter(config, config.run_dir).spent == seconds


def test_lines_go_on_after_a_repair_has_replaced_the_file(tmp_path, clock):
    config = config_of(tmp_path)
    meter = Meter(config, config.run_dir)
    for step in (1, 2, 3):
        clock.now += 10
        meter.note(trained(step))
    cut_metrics(config.run_dir.metrics, 1)
    clock.now += 10
    meter.note(trained(2))
    seconds = {step: values["cost/machine_s"] for step, values in spent(config).items()}
    assert seconds == {1: 10.0, 3: 40.0}


def test_a_disk_that_fails_costs_neither_seconds_nor_lines_of_others(tmp_path, clock, monkeypatch):
    """Regression: prices are of numbers that are read, and what `rl` had read before was lost."""

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    config = config_of(tmp_path, "--cost.per_hour 3600")
    meter, descriptors = Meter(config, config.run_dir), len(os.listdir("/proc/self/fd"))
    clock.now += 10
    for owner, method in ((meter.numbers, "refresh"), (MetricsLog, "write")):
        with monkeypatch.context() as broken:
            broken.setattr(owner, method, fail)
            meter.note(trained(1))
        assert not spent(config) and len(os.listdir("/proc/self/fd")) == descriptors
    meter.write()
    assert spent(config)[1]["cost/total"] == spent(config)[1]["cost/machine_s"] == 10


def test_each_machine_counts_as_long_as_it_gives_signs_of_life(tmp_path, clock):
    config = config_of(tmp_path, "--cluster.nodes 2 --trainer.gpus 4")
    nodes = Nodes(config.run_dir)

    def beat(index, at):
        nodes.folder.mkdir(parents=True, exist_ok=True)
        fields = dict.fromkeys(("host", "address", "software", "config", "place"), "")
        numbers = {"port": 0, "ranks": 1, "gpus": 4, "lease": 1, "pid": 1, "started": 0.0}
        status = NodeStatus(index=index, roles=[], heartbeat=at, **fields, **numbers)
        nodes.write(nodes.status_path(index), status)

    meter = Meter(config, config.run_dir)
    for _ in range(3):  # the first look only learns of them
        clock.now += 10
        beat(0, clock.now)
        beat(1, clock.now)
        meter.note([])
    for _ in range(2):  # the second is gone
        clock.now += LEASE_S + 1
        beat(0, clock.now)
        meter.note([])
    meter.write()
    first, second = 20 + 2 * (LEASE_S + 1), 20
    ours = 10  # before that, this machine counts as the only one
    assert spent(config) == {
        0: {
            "cost/machine_s": first + second + ours,
            "cost/machine_0_s": first + ours,
            "cost/machine_1_s": second,
            "cost/gpu_s": 4 * (first + second) + 2 * ours,
        }
    }


def test_tokens_have_their_price_in_each_line(tmp_path, clock):
    config = config_of(tmp_path, "--cost.per_million_sampled 2 --cost.per_million_prompt 1")
    logs = {name: MetricsLog(config.run_dir.metrics, name) for name in ("orchestrator", "eval")}
    meter = Meter(config, config.run_dir)
    logs["orchestrator"].write(1, {"tokens/sampled": 1e6, "tokens/cached": 1e6})
    logs["eval"].write(0, {"tokens/eval/e/sampled": 5e5, "tokens/eval/e/prefilled": 25e4})
    meter.note(trained(1))
    logs["orchestrator"].write(2, {"tokens/sampled": 1e6})
    meter.note(trained(2))
    assert [values["cost/total"] for values in spent(config).values()] == [4.25, 6.25]
