"""How the client handles a server that is up but never answers, answers wrongly, or does not
answer everyone."""

import asyncio
import errno
import os
import socket
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from rl.system.errors import GIVE_UP
from rl.wire import http, inference_client
from rl.wire.inference_client import PROTOCOL, InferenceLostError, InferenceServers
from rl.wire.messages import WeightVersion
from rl.wire.turns import pack_ids, pack_logprobs
from tests import steady
from tests.web import WebServer

HELD = {"policy_version": 3, "protocol": PROTOCOL}
ANSWER = {
    "packed_ids": pack_ids([5]),
    "packed_logprobs": pack_logprobs([-1.0]),
    "policy_versions": [[3, 1]],
    "finish_reason": "stop",
}


def test_a_load_that_never_ends_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(inference_client, "CONNECT_S", 0.2)
    asked = []

    async def never(request):
        asked.append(await request.json())
        await asyncio.Event().wait()
        raise AssertionError

    async def load():
        async with WebServer(web.post("/load_weights", never)) as server, asyncio.timeout(20):
            servers = InferenceServers([server.url], tmp_path / "none.json", 0.5)
            try:
                await servers.load(server.url, WeightVersion(3, str(tmp_path)))
            finally:
                await servers.close()

    with pytest.raises(
        InferenceLostError,
        match=r"for inference at http\S+ to load version 3: .*raise "
        r"orchestrator.inference_timeout_s",
    ):
        steady.run(load())
    assert [body["policy_version"] for body in asked] == [3]


async def asked(tmp_path, answer, work):
    """Runs `work(servers)` with a server that answers every request with `answer(request)`."""
    async with WebServer(web.route("*", "/{path:.*}", answer)) as server, asyncio.timeout(20):
        servers = InferenceServers([server.url], tmp_path / "status" / "inference.json", 0.6)
        try:
            return await work(servers)
        finally:
            await servers.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"[]",
        b"\xff\xfe",
        b"{}",
        b"[" * 5000,
        b'{"policy_version": "x", "max_model_len": 1}',
        b'{"token_ids": 3}',
    ],
)
def test_an_answer_that_is_none_names_the_address_setting(tmp_path, content):
    async def answer(_request):
        return web.Response(body=content)

    for work in (
        lambda servers: servers.generate(0, [1], {}),
        lambda servers: servers.loaded_version(),
    ):
        with pytest.raises(
            InferenceLostError, match=r"sent an invalid answer \(.*Is orchestrator.inference_urls"
        ):
            steady.run(asked(tmp_path, answer, work))


@pytest.mark.parametrize(
    "changes",
    [
        {"packed_logprobs": b""},
        {"packed_ids": bytes(8)},
        {"packed_ids": [5]},
        {"policy_versions": [[3, 2]]},
        {"policy_versions": [[3, -1], [3, 2]]},
    ],
)
def test_an_answer_whose_parts_do_not_fit_is_asked_of_another_server(tmp_path, changes):
    came = []

    async def answer(request):
        came.append(request.path)
        is_bad = request.path.startswith("/bad")
        return web.Response(body=msgspec.msgpack.encode(ANSWER | (changes if is_bad else {})))

    async def ask(servers):
        (url,) = servers.fixed
        servers.fixed = [f"{url}/bad", f"{url}/good"]
        return await servers.generate(0, [1, 2], {})

    assert steady.run(asked(tmp_path, answer, ask)).token_ids == [1, 2, 5]
    assert came == ["/bad/generate", "/good/generate"]


def test_the_kernel_probes_the_host_of_a_server_that_is_silent(tmp_path):
    """Without that a request to a host that vanished would wait for ever."""

    async def answer(_request):
        return web.Response(body=b"{}")

    async def work(servers):
        await servers.http.request("GET", servers.fixed[0], None, {})
        [[(protocol, _)]] = servers.http.session.connector._conns.values()
        return protocol.transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_KEEPALIVE
        )

    assert steady.run(asked(tmp_path, answer, work)) == 1


def test_an_endless_answer_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1 << 20)

    async def answer(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"x" * (1 << 16))
        return response

    with pytest.raises(InferenceLostError, match="the answer is larger than 1 MiB"):
        steady.run(asked(tmp_path, answer, lambda servers: servers.loaded_version()))


def test_the_token_is_shown_and_its_refusal_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("RL_TOKEN", raising=False)
    token = "a-token-of-the-test-0123456789"

    async def answer(request):
        if request.headers.get("Authorization") != f"Bearer {token}":
            return web.Response(status=401)
        return web.json_response(HELD)

    def version(servers):
        return servers.loaded_version()

    with pytest.raises(
        InferenceLostError,
        match=r"answers 401: it requires its run's token. Set RL_TOKEN to the one in its run "
        r"directory",
    ) as refused:
        steady.run(asked(tmp_path, answer, version))
    assert refused.value.exit_code == GIVE_UP
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "token").write_text(token)
    assert steady.run(asked(tmp_path, answer, version)) == 3
    (tmp_path / "status" / "token").write_text("damaged")
    with pytest.raises(InferenceLostError, match="status/token: does not hold a token") as refused:
        steady.run(asked(tmp_path, answer, version))
    assert refused.value.exit_code == GIVE_UP
    monkeypatch.setenv("RL_TOKEN", token)
    assert steady.run(asked(tmp_path, answer, version)) == 3


def test_more_requests_than_files_that_may_be_open(tmp_path, monkeypatch):
    """Every request in flight has a connection; further requests are queued, and none fails."""
    monkeypatch.setattr("rl.wire.http.resource.getrlimit", lambda _kind: (32, 32))
    open_now, most = 0, 0

    async def answer(_request):
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.01)
        open_now -= 1
        return web.Response(body=msgspec.msgpack.encode(ANSWER))

    async def ask(servers):
        servers.timeout_s = 20.0
        answers = await asyncio.gather(*(servers.generate(i, [1], {}) for i in range(80)))
        return [answer.completion_ids[0] for answer in answers]

    assert steady.run(asked(tmp_path, answer, ask)) == [5] * 80
    assert most == 16  # the others are for the process's own files


def test_the_token_is_read_once_and_a_passing_fault_of_its_file_is_no_refusal(
    tmp_path, monkeypatch
):
    """With a stale handle, or no file descriptor left, the next attempt may succeed. A token
    that was replaced is read again."""
    monkeypatch.delenv("RL_TOKEN", raising=False)
    (tmp_path / "status").mkdir()
    (file := tmp_path / "status" / "token").write_text(first := "a-token-of-the-test-0123456789")
    faults, reads, tokens = [errno.ESTALE, errno.EMFILE], [], [first]
    read_text = Path.read_text

    def read_with_faults(path, **options):
        if path == file:
            reads.append(path)
            if faults:
                raise OSError(faults[0], os.strerror(faults.pop(0)), str(path))
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", read_with_faults)
    monkeypatch.setattr(inference_client, "RETRY_S", 0.01)

    async def answer(request):
        sound = request.headers.get("Authorization") == f"Bearer {tokens[0]}"
        return web.json_response(HELD) if sound else web.Response(status=401)

    async def ask(servers):
        versions = [await servers.loaded_version() for _ in range(20)]
        tokens[0] = first[::-1]
        file.write_text(tokens[0])
        return [*versions, await servers.loaded_version()]

    assert steady.run(asked(tmp_path, answer, ask)) == [3] * 21
    assert len(reads) == 4  # two faults, one read for twenty requests, one after the refusal
