"""Variables of the shell that are not meant for this machine's own servers."""

import json
import os
import subprocess
import sys

import pytest

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
    printed = subprocess.run([sys.executable, "-c", CLIENT, *LOCAL, *REMOTE], env=env, capture_output=True, text=True, check=True).stdout
    used, no_proxy = json.loads(printed)
    proxied = expected != "*"
    assert used == dict.fromkeys(LOCAL, False) | dict.fromkeys(REMOTE, proxied) and no_proxy == expected
