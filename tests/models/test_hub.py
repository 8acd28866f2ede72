"""A hub that does not answer: told at once, with what to do; data sets then come from the cache."""

import socket
import time

import datasets
import pytest
from huggingface_hub import constants

from rl.config.sft import SftConfig
from rl.envs.classic.rows import read
from rl.models import hub
from rl.system.errors import RunError
from rl.trainer.sft.rows import Source, hub_rows


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
        with pytest.raises(RunError, match=f"not in the cache of this machine, and {endpoint} does not answer .*network, or give a file"):
            hub_rows(Source("nobody/nothing", "train", "sft.dataset"), SftConfig(dataset="nobody/nothing"))
        with pytest.raises(RunError, match=f"{endpoint} does not answer .*: check the network, or give a JSONL file"):
            read("nobody/nothing")
        assert time.monotonic() - began < 10
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_what_is_here_needs_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "hub_fault", lambda: pytest.fail("was asked"))
    with hub.hub_or_cache(str(tmp_path)) as unreachable:
        assert unreachable == "" and not datasets.config.HF_HUB_OFFLINE
