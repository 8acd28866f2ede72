"""What a run cost, from its numbers."""

import pytest

from rl.config.run import CostConfig
from rl.run_dir.cost import cost_lines, totals
from rl.run_dir.numbers import Numbers

RUN = Numbers.of(
    {
        (1, "orchestrator"): {
            "tokens/prefilled": 1000.0,
            "tokens/cached": 3000.0,
            "tokens/sampled": 2000.0,
            "tokens/dropped_no_signal": 400.0,
            "tokens/dropped_stale": 100.0,
        },
        (2, "orchestrator"): {
            "tokens/prefilled": 500.0,
            "tokens/cached": 0.0,
            "tokens/sampled": 1000.0,
            "tokens/dropped_stale": 600.0,
        },
        (1, "trainer"): {
            "tokens/trained": 1500.0,
            "tokens/batch": 4000.0,
            "tokens/kept_mean": 3.5,  # of a batch, and no cost
        },
        (2, "trainer"): {"tokens/trained": 400.0, "tokens/batch": 900.0},
        (0, "eval"): {"tokens/eval/a/sampled": 300.0, "tokens/eval/a/prefilled": 20.0},
        (2, "eval"): {"tokens/eval/b/sampled": 200.0, "tokens/eval/b/cached": 30.0},
        (1, "rl"): {"cost/machine_s": 60.0, "cost/gpu_s": 480.0, "cost/total": 0.5},
        (2, "rl"): {
            "cost/machine_s": 3600.0,
            "cost/machine_0_s": 3600.0,
            "cost/gpu_s": 28800.0,
            "cost/total": 12.3456,
        },
    }
)


def test_tokens_are_sums_over_steps_and_costs_are_the_newest():
    spent = totals(RUN)
    assert spent["tokens/dropped_stale"] == 700 and spent["cost/machine_s"] == 3600
    assert spent["tokens/sampled"] == sum(
        spent[f"tokens/{name}"] for name in ("trained", "dropped_stale", "dropped_no_signal")
    )
    assert cost_lines(RUN) == [
        "tokens    1500 prefilled, 3000 cached, 3000 sampled, 400 dropped_no_signal, 700 "
        "dropped_stale, 300 eval/a/sampled, 200 eval/b/sampled, 1900 trained, 4900 batch",
        "cost      3600 machine_s, 28800 gpu_s, 12.35 total",
    ]
    sft = {(1, "trainer"): {"tokens/trained": 7.0, "tokens/batch": 9.0}}
    assert cost_lines(Numbers.of(sft)) == ["tokens    7 trained, 9 batch"]
    assert cost_lines(Numbers.of({(1, "trainer"): {"loss/mean": 1.0}})) == []


def test_the_price_is_that_of_machines_and_of_tokens_with_those_of_evaluations():
    prices = {"per_hour": 2.0, "per_million_prompt": 1.0}
    prices |= {"per_million_sampled": 10.0, "per_million_trained": 100.0}
    expected = {
        "per_hour": 2.0,
        "per_million_prompt": 4550 / 1e6,
        "per_million_sampled": 3500 * 10 / 1e6,
        "per_million_trained": 4900 * 100 / 1e6,
    }
    for key, value in prices.items():
        assert CostConfig(**{key: value}).price(totals(RUN)) == pytest.approx(expected[key])
    assert CostConfig(**prices).price(totals(RUN)) == pytest.approx(sum(expected.values()))
    assert CostConfig(**prices).price({}) == 0
