"""A run that a service trains: its defaults, the losses it may have, and what is refused."""

import math

import pytest

from rl.config.check import check
from rl.config.run import RLConfig
from rl.config.tinker import service_loss
from tests.flags import faults


def config_of(**values):
    """A run with a service; `values` are sections."""
    trainer = {"backend": "tinker"} | values.pop("trainer", {})
    orchestrator = {"environment": [{"id": "test"}]} | values.pop("orchestrator", {})
    return RLConfig.model_validate(
        {"name": "x", "trainer": trainer, "orchestrator": orchestrator, **values}
    )


def test_defaults_are_those_of_a_service(monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", "http://one")
    config = config_of()
    assert not [*check(config)]
    assert config.tinker.base_url == "http://one"
    assert config.tinker.lora_rank == 32
    assert (config.trainer.gpus, config.inference.gpus) == (
        0,
        0,
    )
    assert config.orchestrator.group_size == 16
    again = RLConfig.model_validate(config.model_dump())
    assert again == config
    assert config_of(tinker={"base_url": "http://two"}).tinker.base_url == "http://two"
    monkeypatch.delenv("TINKER_BASE_URL")
    assert config_of().tinker.base_url is None
    for kind in ("policy_gradient", "clip", "cispo", "gspo", "cross_entropy"):
        assert not [*check(config_of(trainer={"loss": {"type": kind}}))]


@pytest.mark.parametrize(
    ("loss", "name", "settings"),
    [
        ({}, "cispo", (0.0, 2.0)),
        ({"truncate": math.inf}, "importance_sampling", None),
        ({"importance": "none"}, "cross_entropy", None),
        ({"type": "clip", "clip_low": 0.25, "clip_high": 0.5}, "ppo", (0.75, 1.5)),
        ({"type": "cispo"}, "cispo", (0.0, 5.0)),
        ({"type": "gspo"}, "gspo", (1 - 3e-4, 1 + 4e-4)),
        ({"type": "cross_entropy"}, "cross_entropy", None),
    ],
)
def test_losses_have_names_there(loss, name, settings):
    found = service_loss(config_of(trainer={"loss": loss}).trainer.loss)
    assert found == (
        name,
        dict(zip(("clip_low_threshold", "clip_high_threshold"), settings, strict=True))
        if settings
        else {},
    )


BAD = [
    ("--orchestrator.sampling.temperature 0.7", "1.0"),
    ("--orchestrator.environment.sampling.temperature 0.5", "1.0"),
    ("--orchestrator.sampling.top_p 0.9", "leave it out"),
    ("--trainer.lora", "tinker.lora_rank"),
    ("--trainer.context_parallel 2", "local"),
    ("--trainer.gpus 2", "local"),
    ("--trainer.weights.transport nixl", "local"),
    ("--trainer.weights.anchor_every 4", "local"),
    ("--trainer.minibatches 2", "one optimizer step"),
    ("--inference.vllm {max_num_seqs=2}", "local"),
    ("--orchestrator.inference_urls http://a:1", "leave it out"),
    ("--orchestrator.environment.head_server http://a:1", "local"),
    ("--trainer.loss.token_mask 0.5,2.0", "does not have"),
    ("--trainer.loss.kl_coefficient 0.1", "leave it out"),
    ("--trainer.loss.delta 3.0 --trainer.loss.type clip", "leave it out"),
    ("--trainer.loss.type dppo", "cispo"),
    ("--trainer.loss.importance sequence", "token"),
    ("--trainer.backend tinker --sft.dataset x.jsonl", "sft"),
]


@pytest.mark.parametrize(("line", "remedy"), BAD)
def test_what_a_service_cannot_do_is_refused(line, remedy):
    key = line.split()[0].removeprefix("--").replace("environment.", "environment.0.")
    played = "dataset x.jsonl" if "head_server" in line else "id test"
    said = faults(f"--trainer.backend tinker --orchestrator.environment.{played}", line)
    assert said.startswith(f"1 fault in the configuration\n  {key} = ") and remedy in said
