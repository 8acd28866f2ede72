"""What the client does about a server that is there and never answers, or not what it should, or not to everyone."""

import asyncio

import pytest
from aiohttp import web

from rl.messages import WeightVersion
from rl.orchestrator import inference_client
from rl.orchestrator.inference_client import InferenceLostError, InferenceServers, TokenRefusedError


def test_a_load_that_never_ends_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(inference_client, "CONNECT_S", 0.2)
    asked = []

    async def never(request: web.Request) -> web.Response:
        asked.append(await request.json())
        await asyncio.Event().wait()
        raise AssertionError

    async def load() -> None:
        app = web.Application()
        app.add_routes([web.post("/load_weights", never)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        servers = InferenceServers([f"http://127.0.0.1:{runner.addresses[0][1]}"], tmp_path / "none.json", 0.5)
        try:
            async with asyncio.timeout(20):
                await servers.load(WeightVersion(3, str(tmp_path)))
        finally:
            await servers.close()
            await runner.cleanup()

    with pytest.raises(InferenceLostError, match=r"for inference to load version 3: .*raise orchestrator.inference_timeout_s"):
        asyncio.run(load())
    assert [body["policy_version"] for body in asked] == [3]


async def asked(tmp_path, answer, work):
    """`work(servers)` with a server that answers every request with `answer(request)`."""
    app = web.Application()
    app.add_routes([web.route("*", "/{path}", answer)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    servers = InferenceServers([f"http://127.0.0.1:{runner.addresses[0][1]}"], tmp_path / "status" / "inference.json", 0.6)
    try:
        async with asyncio.timeout(20):
            return await work(servers)
    finally:
        await servers.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", b"[]", b"\xff\xfe", b"{}", b"[" * 5000, b'{"policy_version": "x", "max_model_len": 1}', b'{"token_ids": 3}'],
)
def test_an_answer_that_is_none_names_the_address_setting(tmp_path, content):
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=content)

    for work in (lambda servers: servers.generate(0, [1], {}), lambda servers: servers.loaded_version()):
        with pytest.raises(InferenceLostError, match=r"answers what is no answer \(.*Is orchestrator.inference_urls"):
            asyncio.run(asked(tmp_path, answer, work))


@pytest.mark.parametrize("content", [b"[]", b"null", b"x", b'{"error": []}'])
def test_a_refusal_of_another_shape_too(tmp_path, content):
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=400, body=content)

    with pytest.raises(InferenceLostError, match="answers what is no answer"):
        asyncio.run(asked(tmp_path, answer, lambda servers: servers.generate(0, [1], {})))


def test_an_endless_answer_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(inference_client, "MAX_ANSWER_BYTES", 1 << 20)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"x" * (1 << 16))
        return response

    with pytest.raises(InferenceLostError, match="an answer of more than 1 MiB"):
        asyncio.run(asked(tmp_path, answer, lambda servers: servers.loaded_version()))


def test_the_token_is_shown_and_its_refusal_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("RL_TOKEN", raising=False)
    token = "a-token-of-the-test-0123456789"

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {token}":
            return web.Response(status=401)
        return web.json_response({"policy_version": 3, "max_model_len": 9})

    def version(servers: InferenceServers):
        return servers.loaded_version()

    with pytest.raises(TokenRefusedError, match=r"answers 401: it wants its run's token. Set RL_TOKEN to the one in its run directory"):
        asyncio.run(asked(tmp_path, answer, version))
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "token").write_text(token)
    assert asyncio.run(asked(tmp_path, answer, version)) == 3
    (tmp_path / "status" / "token").write_text("damaged")
    with pytest.raises(TokenRefusedError, match="status/token: holds no token"):
        asyncio.run(asked(tmp_path, answer, version))
    monkeypatch.setenv("RL_TOKEN", token)
    assert asyncio.run(asked(tmp_path, answer, version)) == 3
