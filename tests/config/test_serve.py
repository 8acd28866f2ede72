"""Settings of `rl serve`: their defaults, and what makes no sense together."""

import pytest

from rl.config.check import check, warnings_of
from rl.config.run import RLConfig
from tests.flags import faults


def test_a_server_has_adapters_of_rank_32_and_needs_no_environment():
    config = RLConfig.model_validate({"serve": True, "model": {"name": "a/b"}})
    assert config.trainer.lora
    assert config.trainer.lora.rank == 32
    assert config.name == "serve-b"
    assert not [*check(config)]
    # as after an unknown key: the lack of adapters was a second fault
    assert RLConfig.model_validate({"serve": {}}).trainer.lora
    given = RLConfig.model_validate({"serve": {"port": 0}, "trainer": {"lora": {"alpha": 8}}})
    assert given.trainer.lora and (given.trainer.lora.rank, given.trainer.lora.alpha) == (32, 8)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("--trainer.lora.targets experts", "trainer.lora.targets"),
        ("--trainer.ranks 2", "trainer.ranks"),
        ("--orchestrator.inference_urls http://a:1", "orchestrator.inference_urls"),
    ],
)
def test_what_a_server_cannot_do(settings, key):
    assert f"\n  {key} = " in faults("--serve --model.name a/b", settings)


def test_a_page_of_numbers_that_a_server_does_not_have_is_warned_of():
    config = RLConfig.model_validate(
        {"serve": True, "model": {"name": "a/b"}, "prometheus": True, "cost": {"per_hour": 2}}
    )
    assert [key for key, text in warnings_of(config) if "rl serve" in text] == [
        "prometheus",
        "cost",
    ]
