import pytest

from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session", params=["tied", "untied"])
def model_folder(request, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / request.param, tied=request.param == "tied")


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tied")
