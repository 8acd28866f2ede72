"""How the suite is spread over the machine: a process of pytest for each core and one more,
whole files to each, the longest first."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from rl.homes.home import Home
from rl.homes.make import ensure
from rl.homes.request import Request
from rl.launch.children import Children
from rl.launch.devices import mend_vllm_cpu
from rl.models.tiny import make_tiny_model
from rl.run_dir.paths import RunDir
from tests.interpreters import IN_A_HOME

MOST_WORKERS = 4
"""Each may hold a vLLM server or two of about 2 GiB."""
LONGEST = (
    "models/test_chat.py",
    "envs/test_in_a_home.py",
    "orchestrator/test_orchestrator.py",
    "inference/test_server.py",
    "launch/test_run.py",
    "test_integration.py",
    "launch/test_supervisor.py",
    "trainer/test_main.py",
    "orchestrator/workers/test_pool.py",
    "inference/test_adapters.py",
    "trainer/measure/test_parity.py",
    "commands/doctor/test_main.py",
    "trainer/parallel/test_sharding.py",
    "system/test_children.py",
)
"""Files of more than half a minute, which, begun last, would keep a single worker busy while the
others have nothing left; before them the one that converts a real model, for which others wait."""

LEFT_BY_USERS = ("outputs", "wandb")

hypothesis.settings.register_profile("rl", deadline=None)  # a slow machine fails no property
hypothesis.settings.load_profile("rl")
mend_vllm_cpu()
collect_ignore = list(IN_A_HOME)
os.environ["RL_ENVIRONMENTS_HUB"] = "http://127.0.0.1:9"  # no test asks the real one


@pytest.fixture(scope="session", autouse=True)
def start_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where all tests start: the clone as links, without what a user's commands left in it
    (`outputs/`). None may depend on that."""
    clone, folder = Path(__file__).parents[1], tmp_path_factory.mktemp("start")
    for entry in clone.iterdir():
        if entry.name not in LEFT_BY_USERS:
            (folder / entry.name).symlink_to(entry)
    begun = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(begun)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, which no test changes."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def classic_home() -> Home:
    """The home of rows and of single modules of the classic API. It is in the user's cache, so
    it is made once on a machine."""
    return ensure(Request("tests", None), print)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Of a run whose versions are in it."""
    return RunDir(tmp_path, tmp_path / "weights")


@pytest.fixture
def children() -> Iterator[Children]:
    """What starts processes; they end with the test."""
    found = Children()
    yield found
    found.stop()


@pytest.fixture(scope="session")
def world():
    """A process group of one rank, on the device of tests/trainer/device.py. A process can have
    but one, so all tests share it."""
    import torch

    from rl.trainer.parallel.world import start_world

    torch.set_num_threads(1)
    yield start_world(use_gpus=os.environ.get("RL_TEST_DEVICE") == "cuda", timeout_s=60)
    torch.distributed.destroy_process_group()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes that run tests: one more than cores, because tests of processes wait for a third
    of their time. Proofs have one for each core: several of them train a real model, which takes
    8 GiB. Single files have none beside the first: they end before another starts."""
    if not all(Path(argument.partition("::")[0]).is_dir() for argument in config.args):
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores if config.option.markexpr == "proof" else cores + 1, MOST_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first; all else stays in order."""
    order = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
