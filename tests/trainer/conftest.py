import pytest
import torch

from rl.trainer.parallel.world import start_world
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def world():
    """A process group of one rank."""
    torch.set_num_threads(1)
    yield start_world(use_gpus=False, timeout_s=60)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session", params=["tied", "untied"])
def model_folder(request, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / request.param, tied=request.param == "tied")


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tied")
