import pytest

from rl.models.tiny import make_tiny_model
from tests.families import UNTIED


@pytest.fixture(scope="session", params=["tied", "untied"])
def model_folder(request, tmp_path_factory):
    return make_tiny_model(
        tmp_path_factory.mktemp("model") / request.param,
        UNTIED if request.param == "untied" else None,
    )


@pytest.fixture(scope="session")
def straight(tied_folder, tmp_path_factory):
    """A run of test_main.py of all steps in one go, and what it announced."""
    from tests.trainer import test_main as main

    config = main.make_config(tmp_path_factory.mktemp("straight"), tied_folder)
    with main.StubOrchestrator(config.run_dir, main.batches()) as orchestrator:
        main.run_trainer(config)
    return config.run_dir, orchestrator


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tied")
