"""A run that a service trains: its defaults, the losses it may have, and what is refused."""

import math

import pytest

from rl.config.check import check
from rl.config.run import RLConfig
from rl.config.tinker import service_loss


def config_of(**values) -> RLConfig:
    """A run with a service; `values` are sections."""
    trainer = {"backend": "tinker"} | values.pop("trainer", {})
    orchestrator = {"environment": [{"id": "test"}]} | values.pop("orchestrator", {})
    return RLConfig.model_validate(
        {"name": "x", "trainer": trainer, "orchestrator": orchestrator, **values}
    )


def test_defaults_are_those_of_a_service(monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", "http://one")
    config = config_of()
    assert (
        not [*check(config)]
        and config.tinker.base_url == "http://one"
        and config.tinker.lora_rank == 32
    )
    assert (config.trainer.gpus, config.inference.gpus) == (
        0,
        0,
    ) and config.orchestrator.group_size == 16
    again = RLConfig.model_validate(config.model_dump())
    assert (
        again == config
        and config_of(tinker={"base_url": "http://two"}).tinker.base_url == "http://two"
    )
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


ENV = {"id": "test", "sampling": {"temperature": 0.5}}
BAD = {
    "temperature": (
        {"orchestrator": {"sampling": {"temperature": 0.7}}},
        "orchestrator.sampling.temperature",
        "1.0",
    ),
    "its own": (
        {"orchestrator": {"environment": [ENV]}},
        "orchestrator.environment.0.sampling.temperature",
        "1.0",
    ),
    "truncated": (
        {"orchestrator": {"sampling": {"top_p": 0.9}}},
        "orchestrator.sampling.top_p",
        "leave it out",
    ),
    "adapters": ({"trainer": {"lora": {}}}, "trainer.lora", "tinker.lora_rank"),
    "parallel": ({"trainer": {"context_parallel": 2}}, "trainer.context_parallel", "local"),
    "gpus": ({"trainer": {"gpus": 2}}, "trainer.gpus", "local"),
    "transport": (
        {"trainer": {"weights": {"transport": "nixl"}}},
        "trainer.weights.transport",
        "local",
    ),
    "deltas": (
        {"trainer": {"weights": {"anchor_every": 4}}},
        "trainer.weights.anchor_every",
        "local",
    ),
    "minibatches": ({"trainer": {"minibatches": 2}}, "trainer.minibatches", "one optimizer step"),
    "engine": ({"inference": {"vllm": {"max_num_seqs": 2}}}, "inference.vllm", "local"),
    "servers": (
        {"orchestrator": {"inference_urls": ["http://a:1"]}},
        "orchestrator.inference_urls",
        "leave it out",
    ),
    "NeMo Gym": (
        {"orchestrator": {"environment": [{"dataset": "x.jsonl", "head_server": "http://a:1"}]}},
        "orchestrator.environment.0.head_server",
        "local",
    ),
    "mask": (
        {"trainer": {"loss": {"token_mask": [0.5, 2.0]}}},
        "trainer.loss.token_mask",
        "does not have",
    ),
    "kl": (
        {"trainer": {"loss": {"kl_coefficient": 0.1}}},
        "trainer.loss.kl_coefficient",
        "leave it out",
    ),
    "dual clip": (
        {"trainer": {"loss": {"type": "clip", "delta": 3.0}}},
        "trainer.loss.delta",
        "leave it out",
    ),
    "loss": ({"trainer": {"loss": {"type": "dppo"}}}, "trainer.loss.type", "cispo"),
    "sequence": (
        {"trainer": {"loss": {"importance": "sequence"}}},
        "trainer.loss.importance",
        "token",
    ),
    "fine-tuning": ({"sft": {"dataset": "x.jsonl"}}, "trainer.backend", "sft"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_service_cannot_do_is_refused(name):
    values, key, remedy = BAD[name]
    assert [
        fault for fault in check(config_of(**values)) if fault[0] == key and remedy in fault[2]
    ], [*check(config_of(**values))]
