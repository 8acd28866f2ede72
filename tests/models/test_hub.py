"""A hub that does not answer: told at once, with what to do; data sets then come from the cache."""

import socket
import time
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub import constants

from rl.commands import export
from rl.config.kinds import SftConfig
from rl.models import hub
from rl.trainer.sft.rows import DataSource, hub_rows
from tests.models.hub_stub import TOKEN, HubStub
from tests.raised import run_error
from tests.web import serving


def test_the_size_is_that_of_what_is_downloaded(monkeypatch, capsys):
    """Regression: second copies counted, 41 GB for 14."""
    sizes = {
        "model.safetensors": 100,
        "config.json": 7,
        "vocab.txt": 3,
        "consolidated.safetensors": 100,
        "original/a.safetensors": 100,
    }
    files = [
        SimpleNamespace(rfilename=name, size=size)
        for name, size in (sizes | {"pytorch_model.bin": 100}).items()
    ]
    monkeypatch.setattr(
        "huggingface_hub.model_info", lambda name, **_: SimpleNamespace(siblings=files)
    )
    monkeypatch.setattr(hub, "hub_fault", lambda: "")
    monkeypatch.setattr("sys.argv", ["hub", "owner/name"])
    hub.main()
    assert capsys.readouterr().out == "110\n"


@pytest.mark.parametrize("listens", [False, True])  # nobody is there; somebody is and is silent
def test_a_hub_out_of_reach_is_told_at_once(listens, monkeypatch):
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        began = time.monotonic()
        with run_error(
            f"not in the cache of this machine, and {endpoint} does not answer .*network, or "
            "give a file"
        ):
            hub_rows(
                DataSource("nobody/nothing", "train", "sft.dataset"),
                SftConfig(dataset="nobody/nothing"),
            )
        assert time.monotonic() - began < 10
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_what_is_here_needs_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "hub_fault", lambda: pytest.fail("was asked"))
    with hub.hub_or_cache(str(tmp_path)) as unreachable:
        assert unreachable == "" and not datasets.config.HF_HUB_OFFLINE


@pytest.fixture
def stub(monkeypatch):
    with serving(HubStub()) as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield stub


def model(folder, **files):
    folder.mkdir()
    for name, data in ({"config.json": b"{}", "model.safetensors": b"weights"} | files).items():
        (folder / name).write_bytes(data)
    return folder


def test_a_model_that_is_there_is_replaced_whole_where_that_is_wanted(stub, tmp_path):
    stub.private["me/mine"] = True
    stub.files["me/mine"] = {
        "README.md": b"mine",
        "model-00001.safetensors": b"old",
        "adapter_config.json": b"{}",
    }
    with run_error("--push me/mine: there is a model already; give another name, or --overwrite"):
        export.check_push("me/mine", public=False, overwrite=False)
    export.check_push("me/mine", public=False, overwrite=True)
    export.push(model(tmp_path / "m"), "me/mine", "again", public=False, overwrite=True)
    assert sorted(stub.files["me/mine"]) == ["README.md", "config.json", "model.safetensors"]


def test_what_may_not_be_pushed(stub, tmp_path, monkeypatch):
    stub.files["me/open"], stub.private["me/open"] = {}, False
    for repo, said in (
        ("me/open", "this repository is public; give --public"),
        ("alone", "give owner/name"),
        ("a b/c", "not a valid repository name"),
        ("a/b/c", "not a valid repository name"),
    ):
        with run_error(said):
            export.check_push(repo, public=False, overwrite=False)
    export.check_push("me/open", public=True, overwrite=False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else_12345")
    with run_error(r"the hub answered 401 \(.*\); your token may not write there: `hf auth login`"):
        export.push(model(tmp_path / "m"), "me/open", "x", public=True, overwrite=False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with run_error(r"there is no token for .*; `hf auth login`, or set HF_TOKEN"):
        export.check_push("me/new", public=False, overwrite=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with run_error(
        r"127\.0\.0\.1:9 does not answer .*; check the network, or export with --to alone"
    ):
        export.check_push("me/new", public=False, overwrite=False)
