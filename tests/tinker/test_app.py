"""The server of the Tinker API with a trainer and an inference that only count. What the SDK
itself sees: test_sdk.py."""

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import time

import httpx
import numpy as np
import pytest

from rl.config.run import RLConfig
from rl.run_dir.files import write_file
from rl.run_dir.paths import RunDir
from rl.run_dir.safetensors import HASH
from rl.system.errors import RunError
from rl.tinker.app import TinkerApi, make_app
from rl.tinker.codec import FLOAT32, INT64, MESSAGE
from rl.tinker.requests import KeyGate
from rl.tinker.sampling import SamplingSessions, Target, VersionTurns
from rl.tinker.storage import CallLog, ClientCall, Storage
from rl.tinker.training import Training
from rl.wire.messages import VersionSpan
from rl.wire.training_calls import CallError, NoRoomError, Scored
from rl.wire.turns import Turn, pack_logprobs

KEY, SECRET = "k" * 32, "s" * 32


class CountingLearner:
    """Adapters are a number: the steps that they have made. `done` is what it was asked, in
    order."""

    vocab_size = 100

    def __init__(self):
        self.steps: dict[str, int] = {}
        self.done: list[tuple] = []

    def create(self, name, rank, seed):
        if rank > 8:
            raise CallError(f"rank {rank}: at most 8")
        self.steps[name] = 0
        self.done.append(("create", rank))

    def forget(self, name):
        self.steps.pop(name, None)

    def forward_backward(self, name, examples, loss, backward):
        self.done.append(("forward_backward", loss.type, self.steps[name]))
        return Scored(
            [example.targets / -100 for example in examples],
            [example.advantages for example in examples],
        )

    def optimizer_step(self, name, step):
        self.steps[name] += 1
        self.done.append(("optim_step", step.lr))
        return 1.0

    def save(self, name, folder, notes):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").write_text(
            json.dumps({**notes, "rank": 4, "steps": self.steps[name]})
        )

    def notes(self, folder):
        return json.loads((folder / "state.json").read_text())

    def load(self, name, folder, optimizer):
        self.steps[name] = self.notes(folder)["steps"]
        self.done.append(("load", self.steps[name]))

    def publish(self, name, folder, record):
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(bytes([self.steps[name]]))
        if record:
            write_file(
                record,
                json.dumps(
                    {"hash": HASH, "tensors": {"a": "0" * 31 + str(self.steps[name])}}
                ).encode(),
            )


class Servers:
    """Inference: answers with the version it holds. `loads` are the versions that it was given."""

    timeout_s = 5.0

    def __init__(self):
        self.held, self.loads = 0, list[int]()

    async def wait_for_any(self):
        return {"http://one": self.held}

    async def load(self, url, version):
        self.loads.append(version.policy_version)
        self.held = version.policy_version

    async def generate(self, session, token_ids, sampling):
        held = self.held
        await asyncio.sleep(0.01)
        of_prompt = (
            [None, *(-float(token) for token in token_ids[1:])]
            if sampling.get("prompt_logprobs")
            else []
        )
        return Turn.of(
            token_ids,
            [7, 8],
            [-0.5, -0.25],
            [VersionSpan(held, 2)],
            packed_prompt_logprobs=pack_logprobs(of_prompt),
        )


def service_of(root, learner, servers):
    """A service in a folder."""
    model = {"name": "tiny", "max_model_len": 64}
    config = RLConfig.model_validate(
        {"name": "s", "output_dir": str(root), "model": model, "serve": {"alias": "meta/x"}}
    )
    storage = Storage(config.run_dir)
    training = Training(config, storage, learner)
    sampling = SamplingSessions(config, storage, servers, training.name, learner.vocab_size)
    app = make_app(TinkerApi(training, sampling, storage, SECRET))
    return training, sampling, KeyGate(app, KEY, SECRET, loopback=True)


class Client:
    """A server in a folder, and requests to it."""

    def __init__(self, root):
        self.learner, self.servers = CountingLearner(), Servers()
        self.training, self.sampling, app = service_of(root, self.learner, self.servers)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://localhost",
            headers={"x-api-key": f"tml-{KEY}"},
        )

    async def __aenter__(self):
        self.sampling.begin()
        self.work = asyncio.create_task(self.training.run())
        return self

    async def __aexit__(self, *_):
        self.work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.work
        # a state is copied after its call is answered
        await asyncio.get_running_loop().run_in_executor(self.training.thread, int)
        await self.http.aclose()

    async def post(self, path, body, status=200):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.http.post(f"/api/v1/{path}", content=data)
        assert response.status_code == status, response.text
        return (
            response.json()
            if response.headers["content-type"] == "application/json"
            else response.content
        )

    async def session(self):
        body = {"tags": [], "sdk_version": "0.38"}
        return (await self.post("create_session", body))["session_id"]

    async def base_session(self, session, number=0):
        """A sampling session of the base model."""
        base = {"session_id": session, "sampling_session_seq_id": number, "base_model": "meta/x"}
        return (await self.post("create_sampling_session", base))["sampling_session_id"]

    async def get(self, path):
        return (await self.http.get(f"/api/v1/{path}")).json()

    async def result(self, promise):
        return await self.post("retrieve_future", {"request_id": promise["request_id"]})

    async def call(self, path, body):
        return await self.result(await self.post(path, body))

    async def step(self, model, number):
        return await self.call("optim_step", step_of(model, number))


def with_client(test):
    """A test of a client of a new server."""

    def run(tmp_path, **arguments):
        async def scenario():
            async with Client(tmp_path) as client:
                await test(client, **arguments)

        asyncio.run(scenario())

    run.__doc__, run.__name__ = test.__doc__, test.__name__
    parameters = [*inspect.signature(test).parameters.values()]
    first = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([first, *parameters[1:]])
    return run


def forward_backward(model_id, number, loss="cross_entropy", **inputs):
    """The request for one datum of three tokens."""
    message = MESSAGE["ForwardBackwardRequest"](model_id=model_id, seq_id=number, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5, 6, 7], np.int32).tobytes()
    given = {
        "target_tokens": np.array([6, 7, 8]),
        "weights": np.array([0, 1, 1], np.float32),
    } | inputs
    for key, value in given.items():
        if value is not None:
            kind = INT64 if value.dtype.kind == "i" else FLOAT32
            tensor = MESSAGE["Tensor"](dense=value.tobytes(), dtype=kind, shape=value.shape)
            datum.loss_fn_inputs.add(key=key, value=tensor)
    return message.SerializeToString()


async def new_model(client, number=0, rank=4):
    session = await client.session()
    made = {
        "session_id": session,
        "model_seq_id": number,
        "base_model": "meta/x",
        "lora_config": {"rank": rank},
    }
    return (await client.call("create_model", made)).get("model_id")


def test_calls_run_once_in_their_order_and_a_restart_goes_on_from_state_and_log(tmp_path):
    async def first():
        async with Client(tmp_path) as client:
            model = await new_model(client)
            assert model.endswith(":train:0")
            rate = {"learning_rate": 0.5}
            step = await client.post("optim_step", step_of(model, 2) | {"adam_params": rate})
            # waits for call 1, which comes later, as the SDK's first chunk does
            assert len(client.learner.done) == 1
            body = forward_backward(model, 1)
            promises = [await client.post("forward_backward", body) for _ in range(2)]
            output = MESSAGE["ForwardBackwardOutput"].FromString(await client.result(promises[0]))
            assert promises[0] == promises[1]
            fields = {
                entry.key: np.frombuffer(entry.value.data, np.float32).tolist()
                for entry in output.loss_fn_outputs[0].fields
            }
            logprobs = pytest.approx([-0.06, -0.07, -0.08])
            assert fields == {"logprobs": logprobs, "elementwise_loss": [0, 1, 1]}
            assert (await client.result(step))["metrics"]["policy_version:max"] == 1
            assert client.learner.done == [
                ("create", 4),
                ("forward_backward", "cross_entropy", 0),
                ("optim_step", 0.5),
            ]
            saved = await client.call("save_weights", {"model_id": model, "seq_id": 3, "path": "a"})
            assert saved["path"] == f"tinker://{model}/weights/a"
            await client.post("forward_backward", forward_backward(model, 4))
            listed = await client.get("checkpoints?limit=5")
            (checkpoint,) = listed["checkpoints"]
            assert checkpoint["tinker_path"] == saved["path"]
            assert listed["cursor"]["total_count"] == 1
            run = await client.get(f"training_runs/{model}")
            assert run["lora_rank"] == 4 and run["last_checkpoint"]["checkpoint_id"] == "weights/a"
            return model, promises[0], step

    async def again(model, promise, step):
        async with Client(tmp_path) as client:
            # as it was answered
            assert (await client.result(step))["metrics"]["policy_version:max"] == 1
            assert await client.result(promise)
            assert (await client.post("optim_step", {"model_id": model, "seq_id": 2})) == step
            await client.result(await client.post("forward_backward", forward_backward(model, 4)))
            # from the state after call 0 (the first is copied at once), the calls after it; the
            # save is not repeated
            once = [
                ("forward_backward", "cross_entropy", 0),
                ("optim_step", 0.5),
                ("forward_backward", "cross_entropy", 1),
            ]
            assert client.learner.done == [("load", 0), *once]
            session = model.partition(":")[0]
            load = {
                "session_id": session,
                "model_seq_id": 1,
                "path": f"tinker://{model}/weights/a",
                "optimizer": True,
            }
            other = (await client.call("load_weights", load))["model_id"]
            assert client.learner.steps == {model: 1, other: 1}

    asyncio.run(again(*asyncio.run(first())))


def test_a_call_that_ends_the_trainer_each_time_fails_alone(tmp_path):
    async def dies(start):
        async with Client(tmp_path) as client:
            client.learner.forward_backward = lambda *_: (_ for _ in ()).throw(
                RunError("no memory")
            )
            started = await start(client)
            with pytest.raises(RunError, match="no memory"):
                await client.work
            client.work.exception()
            # what leaving the client ends
            client.work = asyncio.create_task(asyncio.Event().wait())
            return started

    async def begin(client):
        model = await new_model(client)
        return (
            await client.post("forward_backward", forward_backward(model, 1)),
            await client.post("optim_step", step_of(model, 2)),
            model,
        )

    async def scenario():
        promise, step, model = await dies(begin)
        for _ in range(2):
            await dies(lambda client: client.training.answer(model, 1, 0.0))
        async with Client(tmp_path) as client:
            assert "has died 3 times during this call" in (await client.result(promise))["error"]
            # the counting learner needs no gradient
            assert (await client.result(step))["metrics"]["policy_version:max"] == 1
            assert not (client.training.models[model].run_dir.root / "attempts").exists()
        for state in (client.training.models[model].run_dir.root / "state").iterdir():
            shutil.rmtree(state)
        async with Client(tmp_path) as client:  # whose calls are executed from the first
            await client.step(model, 3)
            assert client.learner.done == [
                ("create", 4),
                ("optim_step", 1e-4),
                ("optim_step", 1e-4),
            ], "but never what was not executed"

    asyncio.run(scenario())


@pytest.mark.parametrize("lost", [False, True], ids=["loaded", "executed from its first call"])
def test_a_model_that_finds_no_memory_after_a_restart_fails_alone(tmp_path, lost):
    """It ended the server at each start, as its call was in the log."""

    async def first():
        async with Client(tmp_path) as client:
            return [client.training.models[await new_model(client)] for _ in range(2)]

    async def again(poor, other):
        async with Client(tmp_path) as client:
            learner, full = client.learner, True

            def without_room(execute):
                def executed(name, *rest, **more):
                    if full and name == poor:
                        raise NoRoomError("no memory")
                    execute(name, *rest, **more)

                return executed

            learner.load, learner.create = without_room(learner.load), without_room(learner.create)
            refused, step = [await client.step(model, 1) for model in (poor, other)]
            assert refused["error"].startswith("not executed: no memory")
            assert step["metrics"]["policy_version:max"] == 1
            assert not client.work.done() and client.training.models[poor].applied == -1
            full = False
            assert (await client.step(poor, 2))["metrics"]["policy_version:max"] == 1
            assert learner.steps == {poor: 1, other: 1}, (
                "what was not executed is not executed later"
            )

    poor, other = asyncio.run(first())
    if lost:
        shutil.rmtree(poor.run_dir.root / "state")
    asyncio.run(again(poor.id, other.id))


def step_of(model, number):
    return {"model_id": model, "seq_id": number, "adam_params": {}}


@with_client
async def test_names_are_told_apart_and_stay_in_their_folder(client):
    model = await new_model(client)
    for number, name in enumerate(("epoch-0.5", "epoch-0.25"), 1):
        await client.step(model, 3 * number - 2)
        for offset, kind in enumerate(("save_weights", "save_weights_for_sampler")):
            await client.call(
                kind, {"model_id": model, "seq_id": 3 * number - 1 + offset, "path": name}
            )
    storage = client.sampling.storage
    saved = [
        storage.find(f"tinker://{model}/sampler_weights/{name}")[1]
        for name in ("epoch-0.5", "epoch-0.25")
    ]
    assert [one.policy_version for one in saved] == [1, 2] and len(storage.all_saved(model)) == 4
    for number, name in enumerate((".", "..", "\u4e00", ".hidden"), 7):
        answer = await client.call(
            "save_weights", {"model_id": model, "seq_id": number, "path": name}
        )
        assert answer["category"] == "user"


@with_client
async def test_openai_requests_name_what_there_is(client):
    model = await new_model(client)
    for name, status in (
        ("typo:train:0", 404),
        (model, 400),
        (f"tinker://{model}/sampler_weights/a", 400),
    ):
        answer = await client.http.post("/v1/completions", json={"model": name, "prompt": "a"})
        assert answer.status_code == status, "the base model answered"


def test_an_answer_that_could_not_be_written_is_made_again_and_half_a_session_ends_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("rl.tinker.sampling.RETRY_S", 0.01)

    async def scenario():
        async with Client(tmp_path) as client:
            session_id = await client.base_session(await client.session())
            session, full = client.sampling.find(session_id), True
            written = session.log.answer

            def answer(one):
                nonlocal full
                if full:
                    full = False
                    raise OSError(28, "no space")
                written(one)

            session.log.answer = answer
            promise = await client.post("asample", sample_of(session_id, 0))
            await client.post("retrieve_future", {"request_id": promise["request_id"]}, 408)
            assert await client.result(promise) and not session.tasks
            client.sampling.storage.sampling_log("s:sample:1").touch()  # as a kill leaves it
            damaged = client.sampling.storage.sampling_log("s:sample:2")
            damaged.write_bytes(b"?" * 100)
        async with Client(tmp_path) as client:
            answer = await client.post("retrieve_future", {"request_id": "s:sample:2/1"}, 400)
            assert str(damaged) in answer["detail"]
            assert not client.sampling.storage.sampling_log("s:sample:1").exists()

    asyncio.run(scenario())


def test_sessions_sample_their_own_versions_and_the_base(tmp_path):
    async def scenario():
        async with Client(tmp_path) as client:
            model = await new_model(client)
            targets = []
            for number in (1, 2):
                await client.post("optim_step", step_of(model, 2 * number - 1))
                save = {"model_id": model, "seq_id": 2 * number, "sampling_session_seq_id": number}
                saved = await client.call("save_weights_for_sampler", save)
                targets.append(saved["sampling_session_id"])
            targets.append(await client.base_session(model.partition(":")[0]))
            promises = [
                await client.post("asample", sample_of(target, number, num_samples=3))
                for number in range(2)
                for target in targets
            ]
            assert len(promises[0]["sample_sequence_ids"]) == 3
            for promise in promises:
                answer = MESSAGE["SampleResponse"].FromString(await client.result(promise))
                tokens = [np.frombuffer(each.tokens, np.int32) for each in answer.sequences]
                assert np.array_equal(tokens, [[7, 8]] * 3)
            assert {*client.servers.loads} == {0, 1, 2}
            client.servers.loads.clear()
            client.servers.held = 0  # started again
            client.sampling.turns.held = client.sampling.find(targets[1]).target
            await client.call("asample", sample_of(targets[1], 5))
            assert client.servers.loads == [2]
            scored = {"tokens": [1, 2, 3], "prompt_logprobs": True}
            for number, last, expected in (
                (6, None, [np.nan, -2.0, -3.0]),
                (7, 1, [np.nan, np.nan, -3.0]),
            ):
                asked = sample_of(targets[1], number, prompt_logprobs_last_n=last, **scored)
                answer = MESSAGE["SampleResponse"].FromString(await client.call("asample", asked))
                logprobs = np.frombuffer(answer.prompt_logprobs, np.float32)
                assert np.array_equal(logprobs, np.float32(expected), equal_nan=True)
            wrong = sample_of(targets[1], 8, prompt_logprobs_last_n=3, **scored)
            await client.post("asample", wrong, 400)
        async with Client(tmp_path) as client:
            repeated = await client.post("asample", sample_of(targets[0], 0, num_samples=3))
            assert repeated == promises[0] and await client.result(repeated)
            assert not client.servers.loads
            await client.post("retrieve_future", {"request_id": "s:sample:9/1"}, 410)

    asyncio.run(scenario())


def test_after_a_restart_a_request_is_sampled_again_once_its_client_asks_for_it(tmp_path):
    """All that had no answer were sampled at once, for clients who may be gone."""

    async def scenario():
        async with Client(tmp_path) as client:
            session_id = await client.base_session(await client.session())
            client.servers.generate = lambda *_: asyncio.Event().wait()
            promise = await client.post("asample", sample_of(session_id, 0))
            assert client.sampling.waiting == 1
        async with Client(tmp_path) as client:
            assert client.sampling.waiting == 0
            answer = MESSAGE["SampleResponse"].FromString(await client.result(promise))
            assert len(answer.sequences) == 1 and client.sampling.waiting == 0

    asyncio.run(scenario())


@with_client
async def test_an_adapter_is_downloaded_at_an_address_that_only_its_signature_opens(
    client, monkeypatch
):
    model = await new_model(client)
    await client.post("forward_backward", forward_backward(model, 1))
    await client.post("optim_step", step_of(model, 2))
    save = {"model_id": model, "seq_id": 3, "path": "e", "ttl_seconds": 7200}
    saved = await client.call("save_weights_external", save)
    assert saved["path"] == f"tinker://{model}/external_weights/e"
    named = f"/api/v1/training_runs/{model}/checkpoints/external_weights/e"
    (listed,) = (await client.get("checkpoints"))["checkpoints"]
    assert listed["checkpoint_type"] == "external" and listed["expires_at"]
    urls = (await client.http.get(f"{named}/external_weights_urls")).json()["urls"]
    (url,) = urls.values()
    assert [*urls] == ["adapter_model.safetensors"]
    key = client.http.headers.pop("x-api-key")
    assert (await client.http.get(url)).content == b"\x01"
    for forged in (f"{url}0", url.replace("adapter_model", "other"), url.split("?")[0]):
        assert (await client.http.get(forged)).status_code == 401
    with monkeypatch.context() as later:
        now = time.time()
        later.setattr("rl.tinker.requests.time.time", lambda: now + 3601)
        assert (await client.http.get(url)).status_code == 401
    client.http.headers["x-api-key"] = key
    path = {
        "session_id": model.partition(":")[0],
        "sampling_session_seq_id": 0,
        "model_path": saved["path"],
    }
    assert (
        "cannot be sampled" in (await client.post("create_sampling_session", path, 400))["detail"]
    )
    assert (await client.http.delete(named)).status_code == 200
    assert (await client.http.get(url)).status_code == 404


def test_a_server_of_many_models_reads_the_logs_that_are_asked_for(tmp_path, monkeypatch):
    """It read every log at its start, and kept it open."""
    opened = []

    async def scenario():
        async with Client(tmp_path) as client:
            models = [await new_model(client, number % 3) for number in range(8)]
            for model in models:
                await client.step(model, 1)
            log = client.training.models[models[7]].log
            await log.add(ClientCall(2, "optim_step", json.dumps(step_of(models[7], 2)).encode()))
        monkeypatch.setattr(
            "rl.tinker.training.CallLog", lambda path: opened.append(path) or CallLog(path)
        )
        async with Client(tmp_path) as client:
            start = len(os.listdir("/proc/self/fd"))
            listed = [await client.get(f"training_runs?limit=5&offset={at}") for at in (0, 5)]
            runs = {
                run["training_run_id"]: run["lora_rank"]
                for of in listed
                for run in of["training_runs"]
            }
            assert runs == dict.fromkeys(models, 4) and listed[0]["cursor"]["total_count"] == 8
            assert opened == [] and client.learner.done == []
            # without an answer since the restart: executed when its client asks for it
            assert await client.result({"request_id": f"{models[7]}/2"})
            assert len(opened) == 1
            for model in models:
                assert await client.result({"request_id": f"{model}/1"})
            assert len(opened) == 8 and len(os.listdir("/proc/self/fd")) < start + 4

    asyncio.run(scenario())


def test_a_damaged_log_of_a_model_stops_that_model_alone(tmp_path):
    async def first():
        async with Client(tmp_path) as client:
            return [await new_model(client) for _ in range(2)]

    async def again(damaged, sound):
        path = (
            Storage(RLConfig.model_validate({"name": "s", "output_dir": str(tmp_path)}).run_dir)
            .model(damaged)
            .root
            / "calls.log"
        )
        content = bytearray(path.read_bytes())
        content[40] ^= 1
        path.write_bytes(content)
        async with Client(tmp_path) as client:
            answer = await client.post("retrieve_future", {"request_id": f"{damaged}/0"}, 400)
            assert f"{path}: damaged at byte 0" in answer["detail"]
            start = len(os.listdir("/proc/self/fd"))
            for _ in range(20):
                await client.post("retrieve_future", {"request_id": f"{damaged}/0"}, 400)
            assert len(os.listdir("/proc/self/fd")) < start + 10, (
                "a log that cannot be read stays open"
            )
            assert (await client.result({"request_id": f"{sound}/0"}))["model_id"] == sound

    asyncio.run(again(*asyncio.run(first())))


def sample_of(session_id, number, tokens=(1, 2), params=None, **fields):
    """A request for samples."""
    return {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "sampling_params": {"max_tokens": 4} if params is None else params,
        "sampling_session_id": session_id,
        "seq_id": number,
        **fields,
    }


@pytest.mark.parametrize(
    ("tokens", "more", "says"),
    [
        ([], {}, "the prompt is empty: send at least one token"),
        ([5, 100, 7], {}, "the prompt has token id 100; the vocabulary has 100 tokens"),
        ([5] * 64, {}, "the prompt has 64 tokens; model.max_model_len of the server is 64"),
        ([5], {"record_stability_info": True}, "set loss_fn=cispo"),
    ],
    ids=["empty", "vocabulary", "long", "stable_reinforce"],
)
@with_client
async def test_a_sample_that_is_refused_says_what_is_wrong(client, tokens, more, says):
    session_id = await client.base_session(await client.session())
    sample = sample_of(session_id, 0, tokens, {}, **more)
    assert says in (await client.post("asample", sample, 400))["detail"]


@pytest.mark.parametrize(
    ("asked", "sent"), [({}, 8), ({"max_tokens": 20}, 20), ({"max_tokens": 99}, 62)]
)
@with_client
async def test_an_answer_without_max_tokens_has_a_bound(client, monkeypatch, asked, sent):
    """It went on to the end of the context, for minutes."""
    monkeypatch.setattr("rl.tinker.sampling.DEFAULT_TOKENS", 8)
    limits, generate = [], client.servers.generate

    async def noting(session, token_ids, sampling):
        limits.append(sampling["max_tokens"])
        return await generate(session, token_ids, sampling)

    async def send(method, url, path, body=None):
        if method == "POST":
            limits.append(body["max_tokens"])
        status = {"policy_version": client.servers.held, "model": "tiny", "engine": ""}
        return 200, json.dumps(status | {"choices": []}).encode()

    client.servers.generate, client.servers.send = noting, send
    session_id = await client.base_session(await client.session())
    await client.call("asample", sample_of(session_id, 0, params=asked))
    assert limits == [sent]
    if sent < 62:
        answer = await client.http.post(
            "/v1/chat/completions", json={"model": "meta/x", "messages": [], **asked}
        )
        assert answer.status_code == 200 and limits == [sent, sent]


@with_client
async def test_a_client_that_cuts_its_samples_is_warned_once(client, capfd):
    session_id = await client.base_session(await client.session())
    for number, cut in enumerate([{"top_p": 1.0}, {"top_p": 0.9}, {"top_k": 3}]):
        params = {"max_tokens": 4} | cut
        await client.call("asample", sample_of(session_id, number, params=params))
        assert capfd.readouterr().err.count("Leave them out where answers are trained") == (
            number == 1
        )


@with_client
async def test_the_sdk_finds_the_tokenizer_of_the_model_under_an_alias(client):
    """It looks for it by the name that get_info and samplers give; recipes compare that of runs
    and weights with theirs."""
    model = await new_model(client)
    info = await client.post("get_info", {"model_id": model})
    assert info["model_data"]["tokenizer_id"] == info["model_data"]["model_name"] == "tiny"
    assert info["model_name"] == "meta/x"
    session = await client.base_session(await client.session())
    assert (await client.get(f"samplers/{session}"))["base_model"] == "tiny"
    assert (await client.get(f"training_runs/{model}"))["base_model"] == "meta/x"


NO_TEXT, DEEP = (
    b'{"model_id": "\xff", "tinker_path": "\xff", "model": "\xff"}',
    b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
)


@pytest.mark.parametrize("path", ["api/v1/get_info", "api/v1/weights_info", "v1/chat/completions"])
@pytest.mark.parametrize(
    "body", [b"{}", b"[", b"[]", b'{"model_id": 1, "tinker_path": 1}', NO_TEXT, DEEP]
)
@with_client
async def test_a_body_that_is_no_request_is_refused_as_such(client, path, body):
    answer = await client.http.post(f"/{path}", content=body)
    assert answer.status_code == 400 and "detail" in answer.json()
    assert (await client.http.get("/api/v1/sessions?limit=x")).status_code == 400


@pytest.mark.parametrize("key", ["sampling_session_id", "policy_version", "type"])
@with_client
async def test_words_of_a_client_that_look_like_ours_change_no_answer(client, key):
    """`user_metadata` comes back in the answer to create_model, which was searched for our
    names."""
    session = await client.session()
    new = {"session_id": session, "base_model": "meta/x", "lora_config": {"rank": 4}}
    for number, metadata in enumerate(({key: "x"}, {"x": key}, {key: "save_weights_for_sampler"})):
        answer = await client.call(
            "create_model", {**new, "model_seq_id": number, "user_metadata": metadata}
        )
        assert answer["type"] == "create_model" and answer["made"]["user_metadata"] == metadata


@pytest.mark.parametrize("ticks", range(8))
def test_a_request_that_is_cancelled_at_any_moment_lets_the_others_through(ticks):
    """Cancelled when its turn had come and before it ran, it counted as running for ever."""

    async def scenario():
        servers = Servers()
        turns = VersionTurns(servers)

        async def sample(number):
            async with turns.of(Target("m", number, "", "")):
                return servers.held

        first = asyncio.create_task(sample(1))
        for _ in range(ticks):
            await asyncio.sleep(0)
        first.cancel()
        async with asyncio.timeout(5):
            assert [await sample(number) for number in (2, 1, 2)] == [2, 1, 2]

    asyncio.run(scenario())


def test_an_error_of_a_load_that_nobody_expected_ends_its_requests_alone():
    async def scenario():
        servers = Servers()
        turns, load = VersionTurns(servers), servers.load

        async def broken(url, version):
            raise ValueError("not expected")

        servers.load = broken
        async with asyncio.timeout(5):
            with pytest.raises(ValueError, match="not expected"):
                async with turns.of(Target("m", 1, "", "")):
                    pass
            servers.load = load
            async with turns.of(Target("m", 2, "", "")):
                assert servers.held == 2

    asyncio.run(scenario())


BAD = {
    "unknown loss": (("ppo2",), {}, "known are"),
    "no formula": (("stable_reinforce",), {}, "the nearest of ours is cispo: set loss_fn=cispo"),
    "missing": (("ppo",), {"weights": None}, "lack logprobs, advantages"),
    "length": ((), {"weights": np.ones(2, np.float32)}, "one row for each input token"),
    "dtype": ((), {"target_tokens": np.ones(3, np.float32)}, "must be int64"),
    "nan": ((), {"weights": np.array([0, np.nan, 1], np.float32)}, "not finite at position 1"),
    "vocabulary": (
        (),
        {"target_tokens": np.array([6, 7, 100])},
        "token id 100; the vocabulary has 100",
    ),
    "no target": ((), {"target_tokens": np.ones((3, 0), np.int64)}, "give at least one number"),
    "extra": ((), {"mask": np.ones(3, np.float32)}, "mask, which cross_entropy does not take"),
}


@with_client
async def test_what_is_wrong_fails_alone_and_says_why(client):
    model = await new_model(client)
    for number, (name, (loss, inputs, said)) in enumerate(BAD.items(), 1):
        answer = await client.call(
            "forward_backward", forward_backward(model, number, *loss, **inputs)
        )
        assert answer["category"] == "user" and said in answer["error"], name
    for offset, (key, value) in enumerate(
        (("learning_rate", "NaN"), ("beta1", "1.5"), ("eps", "0.0"))
    ):
        body = (
            f'{{"model_id": "{model}", "seq_id": {len(BAD) + 1 + offset}, "adam_params": '
            f'{{"{key}": {value}}}}}'.encode()
        )
        assert (await client.call("optim_step", body))["category"] == "user"
    assert client.learner.done == [("create", 4)]
    assert await new_model(client, rank=9) is None
    other = {
        "session_id": model.partition(":")[0],
        "model_seq_id": 5,
        "base_model": "no/such",
        "lora_config": {},
    }
    assert "--serve.alias no/such" in (await client.call("create_model", other))["error"]
    await client.post("optim_step", {"model_id": "x:train:0", "seq_id": 1}, 404)
    await client.post("create_model", {**other, "session_id": "nobody"}, 404)
    path = {
        "session_id": "s",
        "sampling_session_seq_id": 0,
        "model_path": "tinker://x:train:0/sampler_weights/a",
    }
    await client.post("create_sampling_session", path, 400)
    await client.post("create_session", b"[", 400)
    await client.post("copy_weights", {}, 403)
    client.http.headers["x-api-key"] = "tml-wrong"
    await client.post("create_session", {}, 401)


def test_a_state_whose_replacement_was_interrupted_has_its_name_again(tmp_path):
    """Regression: between two renames a state had no name, and the earlier one was lost."""
    storage = Storage(RunDir(tmp_path, tmp_path / "weights"))
    for name in ("lost", "there"):
        folder = storage.saved(("s:train:0", "weights", name))
        folder.with_name(f".{name}.replaced").mkdir(parents=True)
        (folder.with_name(f".{name}.replaced") / "before").touch()
    folder.mkdir()
    storage.restore_replaced()
    assert sorted(str(path.relative_to(folder.parent)) for path in folder.parent.rglob("*")) == [
        "lost",
        "lost/before",
        "there",
    ]
