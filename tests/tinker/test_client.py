"""Our orchestrator's trainer and inference at a service: batches as data, each trained once,
versions exact, and what is refused."""

import asyncio
import json
import math
import os
import threading
from dataclasses import replace

import httpx
import numpy as np
import pytest
import tinker
import torch

from rl.config.run import RLConfig
from rl.config.tinker import service_loss
from rl.run_dir.checksums import check_version, content_id, verify_checkpoint
from rl.run_dir.paths import numbers
from rl.run_dir.status import Phase, Status
from rl.system.errors import RESTART, RunError
from rl.tinker.client.datums import metrics_of, prepare
from rl.tinker.client.inference import Sampler, make_app
from rl.tinker.client.service import Remote, check, read_remote, take_key, write_version
from rl.tinker.client.trainer import RemoteTrainer
from rl.tinker.codec import LOSSES, MESSAGE, loss_call
from rl.trainer.learner import loss_settings
from rl.trainer.loss.common import LossInputs
from rl.trainer.loss.losses import loss_function
from rl.wire.inference_client import read
from rl.wire.messages import GenerateRequest, Sampling, TrainBatch, VersionSpan
from rl.wire.turns import Turn, pack_ids, pack_logprobs
from tests.tinker.in_process import NAME, Service
from tests.trainer.samples import make_batch, make_sample
from tests.trainer.stub_orchestrator import StubOrchestrator
from tests.waiting import until
from tests.wire.samples import aligned, changed

LOSS_TYPES = (
    {},
    {"truncate": math.inf},
    {"importance": "none"},
    {"type": "clip"},
    {"type": "cispo"},
    {"type": "gspo"},
)


def config_of(root, url=None, **trainer):
    return RLConfig.model_validate(
        {
            "name": "run",
            "output_dir": str(root),
            "max_steps": 6,
            "model": {"name": NAME, "max_model_len": 64},
            "orchestrator": {"environment": [{"id": "test"}]},
            "tinker": {"base_url": url, "answer_timeout_s": 30.0, "lora_rank": 4},
            "trainer": {"backend": "tinker", "checkpoint": {"interval": 2}} | trainer,
        }
    )


@pytest.fixture
def service(tmp_path, monkeypatch):
    with Service(tmp_path / "service") as found:
        monkeypatch.setenv("TINKER_API_KEY", found.key)
        yield found


def small_batch(step):
    """A batch whose ids the counting trainer has."""
    return TrainBatch(
        step=step,
        samples=[
            make_sample([5, 6, 7], [8 + i, 9], rollout=i, advantage=i - 0.5) for i in range(2)
        ],
    )


def orchestrating(config, steps):
    return StubOrchestrator(config.run_dir, [small_batch(step) for step in range(1, steps + 1)])


# Data ---------------------------------------------------------------------------------------------


def gradient_there(loss, batch, logprobs, masks):
    """The gradient at the log-probabilities of the trained tokens, as `rl serve` computes it
    from the data of a batch."""
    prepared = prepare(batch, loss)
    request = MESSAGE["ForwardBackwardRequest"](loss_fn=prepared.loss_fn)
    for key, value in prepared.loss_fn_config.items():
        request.loss_fn_config.add(key=key, value=value)
    settings = loss_settings(loss_call(request))

    def trained(key):
        tensors = [
            datum.loss_fn_inputs[key].to_numpy()[mask]
            for datum, mask in zip(prepared.data, masks, strict=True)
        ]
        return torch.tensor(np.concatenate(tensors))

    compares = "logprobs" in prepared.data[0].loss_fn_inputs
    sampled, advantages = (
        (trained("logprobs"), trained("advantages"))
        if compares
        else (logprobs * 0, trained("weights"))
    )
    return gradient(settings, logprobs, sampled, advantages, torch.ones_like(logprobs), masks)


def gradient(settings, logprobs, sampled, advantages, weights, masks):
    logprobs = logprobs.clone().requires_grad_()
    sequences = torch.cat([torch.full((int(mask.sum()),), i) for i, mask in enumerate(masks)])
    inputs = LossInputs(
        logprobs,
        sampled,
        advantages,
        torch.zeros_like(sampled),
        weights,
        sequences,
        lambda values: values.new_zeros(len(masks)).index_add(0, sequences, values),
    )
    (loss_function(settings)(inputs, settings)[0] * weights).sum().backward()
    return logprobs.grad


@pytest.mark.parametrize("loss", LOSS_TYPES, ids=str)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_data_have_the_gradient_of_our_own_loss(tmp_path, loss, aggregation):
    config = config_of(tmp_path, loss=loss | {"aggregation": aggregation})
    batch = make_batch(3)
    untrained = changed(make_sample([5], [6, 7]), loss_mask=[False] * 3, policy_versions=[])
    batch.samples.append(untrained)
    used = batch.samples[:-1]
    masks = [np.array(aligned(sample).loss_mask[1:]) for sample in used]
    sampled = torch.cat([torch.tensor(one.logprobs) for one in used])
    advantages = torch.cat([torch.tensor(one.advantages) for one in used])
    logprobs = sampled + 0.4 * torch.randn(len(sampled), generator=torch.Generator().manual_seed(0))
    ours = config.trainer.loss
    per_sample = ours.sample_weights(
        [one.num_trained for one in batch.samples], config.orchestrator.sampling.max_tokens
    )
    weights = torch.cat(
        [
            torch.full((one.num_trained,), weight)
            for one, weight in zip(used, per_sample, strict=False)
        ]
    )
    expected = gradient(ours, logprobs, sampled, advantages, weights, masks)
    found = gradient_there(config, batch, logprobs, masks)
    assert expected.abs().max() > 1e-4
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max() + 1e-9
    name, _ = service_loss(ours) or ("", {})
    assert {*prepare(batch, config).data[0].loss_fn_inputs} == {
        "target_tokens",
        *(LOSSES[name][2] or ("weights",)),
    }


def test_metrics_are_those_of_the_trained_tokens(tmp_path):
    config = config_of(tmp_path, loss={"type": "clip", "clip_low": 0.2, "clip_high": 0.2})
    samples = [
        make_sample([5, 6], [7, 8], advantage=1.0),
        make_sample([5, 6, 7], [8], advantage=-1.0),
    ]
    prepared = prepare(TrainBatch(step=1, samples=samples), config)
    assert [datum.model_input.to_ints() for datum in prepared.data] == [[5, 6, 7], [5, 6, 7]]
    assert prepared.data[0].loss_fn_inputs["target_tokens"].data == [6, 7, 8]
    np.testing.assert_allclose(
        prepared.data[0].loss_fn_inputs["advantages"].data, [0, 1 / 3, 1 / 3]
    )
    tensors = [
        tinker.TensorData(np.float32(values), "float32")
        for values in ([9, -2 + math.log(1.5), -2], [9, 9, -2 + math.log(1.1)])
    ]
    output = tinker.ForwardBackwardOutput(
        "ArrayRecord", [{"logprobs": one} for one in tensors], {"loss:sum": 0.25}
    )
    found = metrics_of(prepared, output)
    assert found["loss/mean"] == 0.25 and found["ratio/mean"] == pytest.approx((1.5 + 1 + 1.1) / 3)
    assert found["masked_fraction"] == found["masked_fraction/test"] == pytest.approx(1 / 3)
    kl = [0.5 - math.log(1.5), 0.0, 0.1 - math.log(1.1)]
    assert found["mismatch_kl/mean"] == pytest.approx(sum(kl) / 3, rel=1e-4)
    assert found["mismatch_kl/max"] == pytest.approx(kl[0], rel=1e-4)
    assert "lag_kl/mean" not in found and found["parity/tokens"] == 3
    later = metrics_of(replace(prepared, lag_zero=~prepared.lag_zero), output)
    assert later["lag_kl/mean"] == found["mismatch_kl/mean"] and "parity/max" not in later


# The trainer --------------------------------------------------------------------------------------


def trainer_of(config):
    return RemoteTrainer(config, Status(config.run_dir.status("trainer"), "trainer"))


def test_each_batch_is_trained_once_and_a_restart_goes_on_from_the_newest_state(tmp_path, service):
    config = config_of(
        tmp_path, service.url, optim={"lr": 0.1, "warmup_steps": 2, "max_grad_norm": math.inf}
    )
    config.trainer.weights.keep_last = 2
    run_dir, done = config.run_dir, service.learner.done
    with orchestrating(config, 3) as orchestrator:
        trainer = trainer_of(config)
        trainer.train()
    assert [one[0] for one in done] == ["create", *["forward_backward", "optim_step"] * 3]
    assert [one[1] for one in done if one[0] == "optim_step"] == [0.05, 0.1, 0.1]
    assert orchestrator.published == [(step, str(run_dir.weights(step))) for step in (1, 2, 3)]
    lines = [
        json.loads(line)
        for line in (run_dir.metrics.with_suffix("") / "trainer.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["optim/lr"] for line in lines] == [0.05, 0.1, 0.1]
    assert numbers(run_dir.checkpoints) == [2, 3]
    first = read_remote(run_dir.weights(3))
    assert first.path == f"tinker://{first.model_id}/sampler_weights/000003"
    assert first.calls[1] - first.calls[0] == 1
    check_version(run_dir.weights(3), run_dir.digests(3))
    assert verify_checkpoint(run_dir.checkpoint(2))["step"] == 2
    before = content_id(run_dir.digests(3))

    # The trainer was killed after step 3 was trained, and before its state was kept.
    os.rename(run_dir.checkpoint(3), tmp_path / "lost")
    done.clear()
    run_dir.batch(5).with_suffix(".quarantined").write_text("{}")
    with orchestrating(config, 6) as orchestrator:
        trainer_of(config).train()
    assert [one[0] for one in done] == ["load", *["forward_backward", "optim_step"] * 3]
    assert done[0] == ("load", 2)
    # on which step's adapters
    assert [one[2] for one in done if one[0] == "forward_backward"] == [2, 3, 4]
    assert [number for number, _ in orchestrator.published] == [*range(2, 7)]
    assert orchestrator.asked == [3, 4, 6]
    assert read_remote(run_dir.weights(6)).model_id != first.model_id
    assert content_id(run_dir.digests(3)) != before
    kept = [
        one.tinker_path.rpartition("/")[2]
        for one in trainer.rest.list_user_checkpoints().result().checkpoints
    ]
    assert numbers(run_dir.checkpoints) == [4, 6] and "000004" in kept and kept.count("000002") == 0


def test_a_service_that_is_away_is_waited_for_and_trains_a_batch_once(
    tmp_path, service, monkeypatch
):
    monkeypatch.setattr("rl.tinker.client.trainer.LOOK_S", 0.1)
    config = config_of(tmp_path, service.url)
    with orchestrating(config, 3) as orchestrator:
        trainer = trainer_of(config)
        service.__exit__()
        training = threading.Thread(target=trainer.train)
        training.start()
        until(lambda: trainer.status.current.phase == Phase.WAITING_FOR_SERVICE)
        assert "to answer" in trainer.status.current.detail and not orchestrator.published
        with Service(service.root, service.port) as again:
            training.join(60)
    # the state after its creation
    assert [one[0] for one in again.learner.done] == [
        "load",
        *["forward_backward", "optim_step"] * 3,
    ]
    assert [number for number, _ in orchestrator.published] == [1, 2, 3]
    assert trainer.status.current.phase == Phase.CHECKPOINTING


def test_what_the_service_says_ends_the_trainer_as_it_should(tmp_path, service):
    config = config_of(tmp_path, service.url)
    config.tinker.lora_rank = 32
    with pytest.raises(RunError, match=r"adapters of rank 32 of meta/x: .*at most 8") as error:
        trainer_of(config)
    assert error.value.exit_code != RESTART
    config.tinker.lora_rank = 4
    bad = TrainBatch(step=1, samples=[make_sample([5, 5000, 7], [8, 9])])
    with (
        StubOrchestrator(config.run_dir, [bad]),
        pytest.raises(RunError, match=r"train batch 1: .*5000") as error,
    ):
        trainer = trainer_of(config)
        trainer.train()
    # the batch is to blame
    assert error.value.exit_code == RESTART and trainer.status.current.phase == "training"
    with (
        orchestrating(config, 1),
        pytest.raises(RunError, match=r"waited 30 s \(tinker\.answer_timeout_s\)"),
    ):
        trainer = trainer_of(config)
        trainer.timeout_s = 0.0
        trainer.train()
    assert trainer.status.current.phase == "waiting_for_service"


def test_the_check_names_the_remedy(tmp_path, service, monkeypatch):
    config = config_of(tmp_path, service.url)
    assert check(config) == f"{service.url} trains meta/x"
    config.model.max_model_len = 65
    with pytest.raises(RunError, match=r"more than the 64 tokens"):
        check(config)
    config.tinker.base_model = "other"
    with pytest.raises(
        RunError, match=r"does not train 'other'; set tinker\.base_model to one of these: meta/x"
    ):
        check(config)
    monkeypatch.setattr("rl.tinker.client.service.REACH_S", 0.3)
    with pytest.raises(RunError, match=r"does not answer .*tinker\.base_url"):
        check(config_of(tmp_path, "http://127.0.0.1:9"))
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong-wrong-wrong")
    monkeypatch.setattr("rl.tinker.client.service.REACH_S", 20.0)
    with pytest.raises(RunError, match=r"does not take the key .* set TINKER_API_KEY"):
        # the SDK keeps its connections by address
        check(config_of(tmp_path, service.url.replace("127.0.0.1", "localhost")))


def test_the_key_may_be_in_a_file(tmp_path, monkeypatch):
    (tmp_path / ".env").write_text('OTHER=1\nTINKER_API_KEY="tml-from-file"\n')
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    take_key(tmp_path)
    assert os.environ["TINKER_API_KEY"] == "tml-from-file"
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-the-shell")
    take_key(tmp_path)
    assert os.environ["TINKER_API_KEY"] == "tml-of-the-shell"


# Inference ----------------------------------------------------------------------------------------


def test_answers_are_of_the_version_that_was_held_and_groups_are_one_request(tmp_path, service):
    config = config_of(tmp_path, service.url)
    with orchestrating(config, 2):
        trainer_of(config).train()

    async def scenario():
        sampler = Sampler(config, Status(config.run_dir.status("inference"), "inference"))
        await asyncio.to_thread(sampler.begin)
        assert sampler.held.number == 2

        async def all_three(key):
            while len(key[1]) == 3 and len(sampler.together[key]) < 3:
                await asyncio.sleep(0.01)

        sampler.wait_for_others = all_three  # type: ignore[method-assign]
        app = make_app(sampler, config, "t" * 32)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://localhost",
            headers={"authorization": f"Bearer {'t' * 32}"},
        ) as http:

            async def generate(ids, **sampling):
                body = {
                    "token_ids": ids,
                    "sampling": {"max_tokens": 4, "stop_token_ids": [2], **sampling},
                }
                return await http.post("/generate", json=body)

            same = await asyncio.gather(*(generate([1, 2, 3]) for _ in range(3)), generate([1, 2]))
            turn = Turn(
                packed_ids=pack_ids([7, 8]),
                packed_logprobs=pack_logprobs([-0.5, -0.25]),
                policy_versions=[VersionSpan(2, 2)],
                finish_reason="stop",
            )
            assert [read(answer.content, Turn) for answer in same] == [turn] * 4
            logs = [*(tmp_path / "service").rglob("sampling/*.log")]
            assert len(logs) == 1 and logs[0].read_bytes().count(b'num_samples":3') == 1
            loaded = await http.post(
                "/load_weights",
                json={"policy_version": 1, "path": str(config.run_dir.weights(1)), "content": "c"},
            )
            assert loaded.json()["policy_version"] == 1
            assert (await http.get("/status")).json()["content"] == "c"
            later = read((await generate([1, 2], seed=2**40 + 5)).content, Turn)
            assert later.policy_versions == [VersionSpan(1, 2)]
            assert any(
                b'"seed":5' in log.read_bytes()
                for log in (tmp_path / "service").rglob("sampling/*.log")
            )
            gone = await http.post(
                "/load_weights", json={"policy_version": 9, "path": str(config.run_dir.weights(9))}
            )
            assert gone.status_code == 404 and gone.json()["error"]["policy_version"] == 1
            long = await generate([1] * 64)
            assert (long.status_code, long.json()["error"]["type"]) == (400, "prompt_too_long")
            assert (
                "leave sampling.stop out"
                in (await generate([1], stop=["x"])).json()["error"]["message"]
            )
            assert "min_p" in (await generate([1], min_p=0.1)).json()["error"]["message"]
            assert (
                await http.get("/status", headers={"authorization": "Bearer x"})
            ).status_code == 401

    asyncio.run(scenario())


def test_a_lost_session_is_made_again_and_a_lost_version_skipped(tmp_path, service, capsys):
    config = config_of(tmp_path, service.url)
    write_version(config.run_dir, Remote("tinker://x:train:0/sampler_weights/a", 3), lambda: None)
    sampler = Sampler(config, status := Status(config.run_dir.status("inference"), "inference"))
    sampler.begin()
    assert sampler.held.path is None and "skipping policy version 3" in capsys.readouterr().err
    asked = GenerateRequest([1, 2], Sampling(4))
    before = sampler.held
    before.client._sampling_session_id = "gone:sample:0"
    with pytest.raises(RunError, match="does not sample"):
        asyncio.run(sampler.generate(asked))
    assert [warning.about for warning in status.current.warnings] == ["service"]
    assert "does not sample" in status.current.warnings[0].text
    assert sampler.held is not before and asyncio.run(sampler.generate(asked)).token_ids == [7, 8]
