"""Variables of the shell that are not meant for this machine's own servers, and ports."""

import json
import os
import subprocess
import sys
import time

import pytest

from rl.system.errors import RunError
from rl.system.linux import bind

CLIENT = """
import json, os, sys, httpx
from rl.system.linux import spare_loopback
spare_loopback()
spare_loopback()
client = httpx.Client()
used = {url: client._transport_for_url(httpx.URL(url)) is not client._transport for url in sys.argv[1:]}
print(json.dumps([used, os.environ["no_proxy"]]))
"""
LOCAL = ("http://127.0.0.1:8000/v1", "http://localhost:8000/v1", "http://[::1]:8000/v1")
REMOTE = ("http://10.0.0.7:8000/v1", "http://example.org/v1")


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"no_proxy": ".corp, 127.0.0.1"}, ".corp,127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "a.b", "no_proxy": ""}, "a.b,localhost,127.0.0.1,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
@pytest.mark.parametrize("proxy", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_loopback_is_asked_without_a_proxy_and_others_with_it(given, expected, proxy):
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    env |= {proxy: "http://127.0.0.1:9", **given}
    printed = subprocess.run(
        [sys.executable, "-c", CLIENT, *LOCAL, *REMOTE],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    used, no_proxy = json.loads(printed)
    proxied = expected != "*"
    assert used == dict.fromkeys(LOCAL, False) | dict.fromkeys(REMOTE, proxied)
    assert no_proxy == expected


def test_a_wrong_host_is_not_blamed_on_the_port():
    with pytest.raises(
        RunError, match=r"inference.host = 192.0.2.1: .*give an address of this machine"
    ):
        bind("192.0.2.1", 0, "inference.port")


def test_a_port_in_use_is_waited_for_and_then_said():
    with bind("127.0.0.1", 0, "serve.port") as taken:
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(
            RunError,
            match=f"serve.port = {port} on 127.0.0.1: Address already in use; choose another, or 0",
        ):
            bind("127.0.0.1", port, "serve.port", wait_s=0.5)
        assert 0.5 < time.monotonic() - began < 8
    with pytest.raises(RunError, match="--port = 70000: a port is a number from 1 to 65535"):
        bind("127.0.0.1", 70000, "--port")
