"""The same numbers however experts are divided, and those of plain transformers: one start of
four processes for all divisions."""

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl.models.tiny import make_tiny_model
from rl.system.errors import RunError
from rl.trainer.model.lora import name_in_file
from rl.trainer.parallel.experts import check_experts
from tests.families import CONFIGS, SIZES
from tests.ports import free_ports
from tests.trainer.parallel.experts import DIVISIONS, FEW, PASSED, RANKS, loss_of, rows_of
from tests.trainer.parallel.test_sharding import assert_trained_alike, run_ranks
from tests.trainer.samples import assert_equal

USUAL = {"initializer_range": 0.05}
MODELS = {
    "qwen3_moe": CONFIGS["qwen3_moe"] | USUAL | {"num_experts": 8},
    "six": CONFIGS["qwen3_moe"] | USUAL | {"num_experts": 6},
    "gpt_oss": CONFIGS["gpt_oss"] | USUAL,
    "deepseek_v3": SIZES
    | USUAL
    | {
        "model_type": "deepseek_v3",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
}


GEMMA4 = SIZES | {
    "model_type": "gemma4_text",
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The folder with the results of a division by name: of few, or with all for the proofs."""

    def run(trained: tuple[str, ...], passed: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("experts")
        models = {
            kind: str(make_tiny_model(folder / kind, config)) for kind, config in MODELS.items()
        }
        plan = {
            "models": models,
            "ports": free_ports(len(trained) + len(passed)),
            "trained": trained,
            "passed": passed,
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        run_ranks("tests.trainer.parallel.experts", folder, RANKS)
        return folder

    few, every = cache(partial(run, FEW, PASSED[:2])), cache(partial(run, tuple(DIVISIONS), PASSED))
    return lambda name: few() if name in FEW else every()


def gradient_of(folder: Path) -> dict[str, torch.Tensor]:
    """The gradient by plain transformers, in one process: of the sum over all ranks' rows."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    loss = torch.stack(
        [
            loss_of(model(input_ids=rows_of(rank), use_cache=False).logits, rows_of(rank))
            for rank in range(RANKS)
        ]
    ).sum()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()} | {
        "loss": loss.detach()
    }


def trainable_names(tensors: dict[str, torch.Tensor]) -> list[str]:
    """The names of an adapted model's trained parameters."""
    return [
        key.removeprefix("weight.")
        for key in tensors
        if key.startswith("weight.") and ".lora_" in key
    ]


def divisions(**wanted: object) -> list:
    """The names of the divisions that have these fields, without those on one rank; all but a
    few are left to the proofs."""
    found = {name: vars(layout) for name, layout in DIVISIONS.items() if layout.ranks > 1}
    names = [
        name
        for name, fields in found.items()
        if all(fields[key] == value for key, value in wanted.items())
    ]
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.proof) for name in names]


@pytest.mark.parametrize("name", divisions(ranks=RANKS, lora=False))
def test_the_gradient_is_that_of_plain_transformers(results, name):
    """That of adapters is compared with peft's in test_lora.py."""
    folder = results(name)
    expected, found = (
        gradient_of(folder / DIVISIONS[name].model),
        load_file(folder / f"{name}.gradients"),
    )
    assert float(found.pop("loss")) == pytest.approx(float(expected.pop("loss")), rel=1e-6)
    norm = float(found.pop("norm"))
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        assert (gradient - expected[key]).norm() <= 1e-5 * expected[key].norm().clamp(min=1e-4), key
    assert norm == pytest.approx(
        float(torch.stack([gradient.norm() for gradient in expected.values()]).norm()), rel=1e-6
    )


@pytest.mark.parametrize("name", divisions())
def test_every_division_trains_the_same(results, name):
    tensors, steps = assert_trained_alike(results(name), name, f"{name.split()[0]} one")
    assert any("experts" in key for key in tensors)
    for step in steps:
        assert 1 <= step["experts/load_mean"] <= step["experts/load_max"] <= 8


@pytest.mark.parametrize("name", divisions())
def test_a_version_has_what_was_trained(results, name):
    """Bit for bit, as plain transformers and peft read it; how far that may be from another
    division's is asserted above."""
    folder = results(name)
    trained = load_file(folder / f"{name}.safetensors")
    if DIVISIONS[name].lora:
        published = load_file(folder / f"{name} version" / "adapter_model.safetensors")
        assert {key.removeprefix("base_model.model.") for key in published} >= {
            "model.layers.1.mlp.experts.lora_A.weight"
        }
        names = {name_in_file(key): key for key in trainable_names(trained)}
    else:
        model = AutoModelForCausalLM.from_pretrained(
            folder / f"{name} version", dtype=torch.float32
        )
        published = dict(model.named_parameters())
        names = {key: key for key in published}
    assert published.keys() == names.keys()
    for key, tensor in published.items():
        assert tensor.equal(trained[f"weight.{names[key]}"]), key


@pytest.mark.parametrize(
    "names",
    [
        FEW[1:3],
        *(
            pytest.param(
                [f"{model} {name}" for name in ("1 of 4", "4 of 4")], marks=pytest.mark.proof
            )
            for model in ("deepseek_v3", "gpt_oss")
        ),
    ],
)
def test_every_division_counts_the_same_load(results, names):
    """Of the same rows: what is packed in another way computes a common prefix more or less
    often."""
    ours, theirs = (json.loads((results(name) / f"{name}.json").read_text()) for name in names)
    for key in ("experts/load_mean", "experts/load_max", "experts/unused"):
        assert [step[key] for step in ours] == [step[key] for step in theirs]


@pytest.mark.parametrize("passed", [PASSED[:2], pytest.param(PASSED, marks=pytest.mark.proof)])
def test_a_checkpoint_passes_from_division_to_division(results, passed):
    """Weights and moments, bit for bit."""
    folder = results("qwen3_moe one" if passed == PASSED[:2] else "all")
    first, *others = (load_file(folder / f"passed {name}.safetensors") for name in passed)
    for tensors in others:
        assert_equal(tensors, first)


@pytest.mark.parametrize(
    ("config", "shards", "parts", "said"),
    [
        (
            CONFIGS["llama"],
            1,
            2,
            "expert_parallel = 2: LlamaForCausalLM has no experts that transformers could "
            "divide; set it to 1",
        ),
        (
            MODELS["six"],
            1,
            4,
            "expert_parallel = 4 does not divide the 6 experts of Qwen3MoeForCausalLM; set "
            "one of 1, 2, 3, 6",
        ),
        (
            MODELS["six"],
            5,
            2,
            "5 ranks share 3 experts of Qwen3MoeForCausalLM, but divide neither their number "
            "nor their rows",
        ),
        (
            GEMMA4,
            1,
            2,
            "transformers has no plan that sends tokens to the experts of Gemma4ForCausalLM; "
            "set it to 1",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(world, config, shards, parts, said):
    """Before any weights are read: there are none."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    mesh = {
        "shard": SimpleNamespace(size=lambda: shards),
        "expert": SimpleNamespace(size=lambda: parts),
    }
    with pytest.raises(RunError, match=said):
        check_experts(model, replace(world, experts=mesh))
