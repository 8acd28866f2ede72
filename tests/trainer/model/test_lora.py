"""Adapters against peft and against the base model: values, what is trained, what is stored, and
on how many ranks."""

import json
import re

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rl.config.command_line import load_config_or_exit
from rl.config.run import RLConfig
from rl.config.trainer import LoraConfig, OptimConfig
from rl.models.tiny import make_tiny_model
from rl.records.run import Run
from rl.trainer.export import Origin, load
from rl.trainer.model import lora
from rl.trainer.model.policy import DTYPES
from rl.trainer.optim import make_optimizer
from rl.trainer.store import versions
from tests.families import CONFIGS, SIZES
from tests.flags import flags, made
from tests.raised import run_error
from tests.trainer.layouts import weights_of, whole
from tests.trainer.parallel.test_experts import MODELS as WITH_EXPERTS
from tests.trainer.policies import learner
from tests.trainer.samples import assert_equal, save_checkpoint, toy_step, write_config

RANK = 4
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
IDS = torch.tensor([[5, 6, 7, 8, 9, 200]])
ADAPTERS = 2 * RANK * (4 * (64 + 64) + 3 * (64 + 128))
"""Numbers in the adapters of the tiny model: 2 layers, each with 4 layers of 64 x 64 and 3 of 64
x 128."""


def adapted(folder, world, dtype="float32", **settings):
    torch.manual_seed(0)
    more = {"optim": {"lr": 1e-2}, "attention": "eager"}
    return learner(folder, world, dtype, lora={"rank": RANK} | settings, **more)[:2]


@pytest.fixture
def trained(tied_folder, world):
    model, optimizer = adapted(tied_folder, world)
    for _ in range(3):
        toy_step(model, optimizer)
    return model, optimizer


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def publish(model, path, base, world, dtype="float32"):
    version = versions.snapshot(model, base, DTYPES[dtype], {})
    assert version.in_memory is None
    version.write(path)
    return path


def plain(folder, dtype="float32"):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], attn_implementation="eager"
    )


def test_settings(capsys):
    line = "--orchestrator.environment.id e --learning_rate 2e-5"
    assert made(line).trainer.lora is None
    assert made(line, "--trainer.lora").trainer.lora == LoraConfig()
    listed = made(line, "--trainer.lora.targets q_proj,v_proj").trainer.lora
    assert listed.targets == ["q_proj", "v_proj"]
    load_config_or_exit(flags("--orchestrator.environment.id e --trainer.lora"))
    said = capsys.readouterr().err
    assert "trainer.optim.lr = 1e-06 is the default" in said and "times that (1e-5 to 1e-4)" in said
    load_config_or_exit(flags("--sft.dataset rows.jsonl --trainer.lora"))
    assert "trainer.optim.lr = 2e-05 is the default" in capsys.readouterr().err


def test_version_0_is_the_base_model(tied_folder, world):
    assert torch.equal(logits_of(adapted(tied_folder, world)[0]), logits_of(plain(tied_folder)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_peft_computes_what_the_trainer_computes(dtype, tied_folder, world, tmp_path):
    model, optimizer = adapted(tied_folder, world, dtype)
    for _ in range(3):
        toy_step(model, optimizer)
    dtypes = {("lora_" in name, parameter.dtype) for name, parameter in model.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, DTYPES[dtype])}
    folder = publish(model, tmp_path / "000003", tied_folder, world, dtype)
    stored = load_file(folder / "adapter_model.safetensors")
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "digests.json",
    }
    config = json.loads((folder / "adapter_config.json").read_text())
    told = [config[key] for key in ("base_model_name_or_path", "r", "lora_alpha")]
    assert told == [str(tied_folder), RANK, 32.0]
    assert sum(tensor.numel() for tensor in stored.values()) == ADAPTERS
    theirs = PeftModel.from_pretrained(
        plain(tied_folder, dtype), folder, autocast_adapter_dtype=False
    )
    atol = 1e-5 if dtype == "float32" else 0
    assert torch.allclose(logits_of(model), logits_of(theirs), rtol=0, atol=atol)


def test_without_adapters_it_is_the_base_model(trained, tied_folder, world):
    """And training goes on as if nothing had been."""
    twin = adapted(tied_folder, world)
    for _ in range(3):
        toy_step(*twin)
    with lora.without_adapters(trained[0]):
        assert torch.equal(logits_of(trained[0]), logits_of(plain(tied_folder)))
    toy_step(*trained)
    toy_step(*twin)
    assert_equal(weights_of(trained[0]), weights_of(twin[0]))


def test_targets(tied_folder, world):
    model, _ = adapted(tied_folder, world, targets=["q_proj", "layers.1.mlp.up_proj"])
    found = {name.partition(".lora_")[0] for name in lora.trainable(model)}
    assert found == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }
    for target in ("q_prj", "lm_head", "embed_tokens", "proj"):
        expected = (
            f"targets: {target} is not a linear layer of LlamaForCausalLM .* choose from "
            "down_proj, gate_proj, k_proj, o_proj, q_proj"
        )
        with run_error(expected):
            adapted(tied_folder, world, targets=["q_proj", target])


def test_fused_experts_are_refused_or_left_out_loudly(capsys):
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIGS["qwen3_moe"]))
    wanted = (
        r"nor what holds all experts of a layer\); choose from k_proj, o_proj, q_proj, v_proj, "
        r'or all-linear; "experts" in .* trains them'
    )
    with run_error(f"gate_up_proj is not a linear layer of .*{wanted}"):
        lora.add_adapters(model, LoraConfig(targets=["gate_up_proj"]))
    lora.add_adapters(model, LoraConfig())
    said = capsys.readouterr().err
    assert (
        "down_proj, gate_up_proj hold all experts of a layer in one parameter and stay frozen"
        in said
    )
    assert said.endswith('; "experts" in trainer.lora.targets trains them\n')
    assert {name.split(".")[4] for name in lora.trainable(model)} == ATTENTION


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_with_adapters_are_peft_s(family, tmp_path, world):
    """Matrices that are stored either way round, with biases and without: values, gradients,
    what is merged and what is served."""
    base = make_tiny_model(
        tmp_path / "base",
        CONFIGS[family] | {"initializer_range": 0.05, "output_router_logits": False},
    )
    model, optimizer = adapted(base, world, targets=["experts"])
    for _ in range(3):
        toy_step(model, optimizer)
    assert {
        name.rpartition(".lora_")[0].partition(".mlp.")[2] for name in lora.trainable(model)
    } == {"experts", "experts.base_layer"}
    folder = publish(model, tmp_path / "000003", base, world)
    theirs = PeftModel.from_pretrained(plain(base), folder, is_trainable=True)
    ours, logits = logits_of(model), logits_of(theirs)
    assert torch.allclose(ours, logits, rtol=0, atol=1e-5)
    assert (ours - logits_of(plain(base))).abs().max() > 0.1
    for each in (model, theirs):
        each(input_ids=IDS).logits.square().mean().backward()
    expected = {
        lora.name_in_file(name): p.grad
        for name, p in theirs.base_model.model.named_parameters()
        if p.grad is not None
    }
    for name, parameter in lora.trainable(model).items():
        wanted = expected.pop(lora.name_in_file(name))
        assert (whole(parameter.grad) - wanted).norm() <= 1e-5 * wanted.norm(), name
    assert not expected
    with lora.without_adapters(model):
        assert torch.equal(logits_of(model), logits_of(plain(base)))
    exported = load(
        Origin(base, LoraConfig(rank=RANK, targets=["experts"]), version=folder), torch.float32
    )
    lora.merge_adapters(exported)
    assert torch.allclose(logits_of(exported), logits, rtol=0, atol=1e-5)
    assert exported.state_dict().keys() == plain(base).state_dict().keys()


def test_routers_that_do_more_than_their_product_have_no_adapter(tmp_path, world):
    """A router's module may choose the experts as well: peft cannot add anything to what it
    returns."""
    folder = make_tiny_model(tmp_path / "moe", CONFIGS["phimoe"] | {"tie_word_embeddings": False})
    model, _ = adapted(folder, world)
    assert {name.split(".")[-4] for name in lora.trainable(model)} == ATTENTION
    assert torch.equal(logits_of(model), plain(folder)(IDS).logits)


STATES = {
    "jamba": {
        "model_type": "jamba",
        **SIZES,
        "mamba_dt_rank": 4,
        "num_experts": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    }
}
LAYERS = {
    # without out_proj, which peft refuses
    "falcon_h1": "down_proj gate_proj in_proj k_proj o_proj q_proj up_proj v_proj",
    # without dt_proj, whose weight alone is used
    "jamba": "down_proj gate_proj in_proj k_proj o_proj q_proj up_proj v_proj x_proj",
    # of the shared experts, not of the others
    "deepseek_v3": "down_proj gate_proj kv_a_proj_with_mqa kv_b_proj o_proj q_proj up_proj",
}


@pytest.mark.parametrize("family", LAYERS)
def test_every_adapter_of_all_linear_is_of_a_linear_layer_and_learns(family, tmp_path, capsys):
    """peft moved the adapters of shared experts to the routed ones, refused those of Mamba's,
    and made some that had no gradient."""
    model = plain(make_tiny_model(tmp_path / "base", (CONFIGS | WITH_EXPERTS | STATES)[family]))
    lora.add_adapters(model, LoraConfig(rank=RANK))
    assert {type(layer).__name__ for layer in lora.layers(model).values()} == {"Linear"}
    assert {name.rpartition(".")[2] for name in lora.layers(model)} == set(LAYERS[family].split())
    untold = "out_proj get no adapter, which would never learn" not in capsys.readouterr().err
    assert untold == (family == "deepseek_v3")
    model(input_ids=IDS).logits.square().mean().backward()
    assert all(p.grad.norm() > 0 for name, p in lora.trainable(model).items() if ".lora_B." in name)


def test_adapters_that_no_gradient_has_reached_are_named(tmp_path, monkeypatch, capsys):
    """Layers that only their weight is read of, in a model that is not known for it."""
    monkeypatch.setattr(lora, "BYPASSED", re.compile(r"\bout_proj$"))  # peft refuses these
    model = plain(make_tiny_model(tmp_path / "base", STATES["jamba"]))
    lora.add_adapters(model, LoraConfig(rank=RANK))
    optimizer = make_optimizer(model, OptimConfig())
    model(input_ids=IDS).logits.square().mean().backward()
    optimizer.step()
    capsys.readouterr()
    lora.warn_of_untrained(model, optimizer)
    assert "the adapters of dt_proj (1 layers) got no gradient" in capsys.readouterr().err


def test_adapters_of_shared_experts_are_loaded_as_they_were_trained(tmp_path):
    """peft alone takes them for those of the routed experts: 2 nats off."""
    base = make_tiny_model(tmp_path / "base", WITH_EXPERTS["deepseek_v3"])
    values = {
        "name": "run",
        "output_dir": str(tmp_path / "run"),
        "model": {"name": str(base)},
        "trainer": {"lora": True},
    }
    config = RLConfig.model_validate(values | {"orchestrator": {"environment": [{"id": "test"}]}})
    write_config(config)
    model = plain(base)
    lora.add_adapters(model, LoraConfig(rank=RANK))
    for parameter in lora.trainable(model).values():
        torch.nn.init.normal_(parameter, std=0.2)
    versions.snapshot(model, base, torch.float32, {}).write(config.run_dir.weights(1))
    loaded = Run(config.run_dir.root).load_model(
        1, dtype=torch.float32, attn_implementation="eager"
    )
    assert loaded.config.model_type == "deepseek_v3"
    assert (logits_of(model) - logits_of(plain(base))).abs().max() > 0.1
    assert torch.allclose(logits_of(loaded), logits_of(model), rtol=0, atol=1e-5)


def test_merged_equals_adapters_also_with_transposed_weights():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=1, vocab_size=300)).eval()
    lora.add_adapters(model, LoraConfig(rank=RANK))
    for parameter in lora.trainable(model).values():
        torch.nn.init.normal_(parameter, std=0.2)
    names = [name for name, _ in GPT2LMHeadModel(model.config).named_parameters()]
    before = logits_of(model)
    with lora.without_adapters(model):
        assert (logits_of(model) - before).abs().max() > 0.1
    lora.merge_adapters(model)
    assert torch.allclose(logits_of(model), before, rtol=0, atol=1e-5)
    assert [name for name, _ in model.named_parameters()] == names and not lora.has_adapters(model)


def test_checkpoints_hold_adapters_alone(trained, tied_folder, world, tmp_path):
    """Bit for bit they are resumed in test_replay.py."""
    save_checkpoint(tmp_path / "000003", 3, *trained, world)
    stored = FileSystemReader(tmp_path / "000003").read_metadata().state_dict_metadata
    assert len(stored) == 4 * len(lora.trainable(trained[0])) + 1  # weight, two moments, step; RNG
    assert all("lora_" in name for name in stored if not name.startswith("rng."))
