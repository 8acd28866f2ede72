import pytest

from rl.homes import make, request
from tests.homes.index import VERIFIERS, Index, make_wheel
from tests.web import serving

UNSET = ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_FIND_LINKS", "UV_OFFLINE")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """uv, the Hub and the homes of this test alone, in which a worker needs one small package."""
    for version, files in VERIFIERS.items():
        make_wheel(tmp_path / "index" / "simple", "verifiers", version, files)
    make_wheel(tmp_path / "index" / "simple", "helper", "1.0", {"helper.py": "VALUE = 7\n"})
    for key in UNSET:
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("RL_ENVIRONMENTS", str(tmp_path / "homes"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    for module in (request, make):
        monkeypatch.setattr(module, "WORKER", ("helper>=1",))
    with serving(Index(tmp_path / "index")) as server:
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{server.url}/simple/")
        monkeypatch.setenv("RL_ENVIRONMENTS_HUB", f"{server.url}/hub")
        yield server


@pytest.fixture
def said():
    """A list of what was said: `said.append` is a Say."""
    return []
