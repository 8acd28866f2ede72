"""The commands of a run's processes."""

import sys

import pytest

from rl.launch.roles import command, roles
from rl.run_dir.paths import RunDir
from tests.launch.test_devices import config, divide


def test_commands(tmp_path):
    run_dir = RunDir(tmp_path, tmp_path / "weights")
    config = str(tmp_path / "config.toml")
    assert command("trainer", run_dir, 1) == [sys.executable, "-m", "rl.trainer.main", "@", config]
    assert command("orchestrator", run_dir, 2) == [sys.executable, "-m", "rl.orchestrator.main", "@", config]
    assert command("trainer", run_dir, 2)[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("cores", "args", "after"),
    [(2, [], "orchestrator"), (4, [], ""), (4, ["--trainer.cpus", "1", "--inference.cpus", "1"], "orchestrator")],
)
def test_on_few_cores_the_trainer_starts_last(tmp_path, cores, args, after):
    found = roles(config(*args), RunDir(tmp_path, tmp_path / "weights"), divide(0, *args, cores=cores))
    assert {role.name: role.after for role in found} == {"inference": "", "orchestrator": "", "trainer": after}


def test_an_engine_on_the_cpu_gets_huge_pages_and_tunables_that_are_set_win(tmp_path, monkeypatch):
    def tunables() -> dict[str, str | None]:
        found = roles(config(), RunDir(tmp_path, tmp_path / "weights"), divide(0))
        return {role.name: role.env.get("GLIBC_TUNABLES") for role in found}

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert tunables() == {"inference": "glibc.malloc.hugetlb=1", "orchestrator": None, "trainer": None}
    set_already = "glibc.malloc.hugetlb=0"
    monkeypatch.setenv("GLIBC_TUNABLES", set_already)
    assert tunables() == {"inference": f"glibc.malloc.hugetlb=1:{set_already}", "orchestrator": set_already, "trainer": set_already}
    assert "GLIBC_TUNABLES" not in divide(2).inference.env
