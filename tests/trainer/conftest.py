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
def tied_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tied")
