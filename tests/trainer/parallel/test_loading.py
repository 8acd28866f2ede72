"""Models are loaded by slices: three ranks, started once, load what is made here."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.models.tiny import make_tiny_model
from tests.families import CONFIGS, UNTIED
from tests.ports import free_ports
from tests.trainer.parallel.loads import RANKS
from tests.trainer.parallel.test_sharding import run_ranks
from tests.trainer.samples import in_bfloat16

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def change(source: Path, target: Path, change_tensors) -> None:
    """A copy of a model with other tensors in its file."""
    shutil.copytree(source, target)
    save_file(
        change_tensors(load_file(source / "model.safetensors")),
        target / "model.safetensors",
        {"format": "pt"},
    )


def make_models(folder: Path) -> list[str]:
    """Models whose files are read in each way that there is; returns their names."""
    # plain; too few experts for three ranks; a tied head; frozen frequencies
    for family in ("llama", "qwen3_moe", "gpt2", "phi3"):
        make_tiny_model(folder / family, CONFIGS[family])
    make_tiny_model(folder / "experts", CONFIGS["qwen3_moe"] | {"num_experts": 7})
    make_tiny_model(folder / "untied", UNTIED)
    llama, head, embedding = folder / "llama", "lm_head.weight", "model.embed_tokens.weight"
    change(llama, folder / "both", lambda tensors: tensors | {head: tensors[embedding].clone()})
    change(
        llama,
        folder / "both but last",
        lambda tensors: tensors | {head: tensors[embedding] + (torch.arange(259) == 258)[:, None]},
    )
    in_bfloat16(llama, folder / "half")
    change(
        llama,
        folder / "without prefix",
        lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
    )
    shutil.copytree(llama, folder / "own")
    (folder / "own" / "own.py").write_text(CODE)
    config = json.loads((llama / "config.json").read_text()) | {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
    }
    config["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnForCausalLM",
    }
    (folder / "own" / "config.json").write_text(json.dumps(config))
    return [path.name for path in folder.iterdir() if path.is_dir()]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the ranks have found, and where their logs are."""
    folder = tmp_path_factory.mktemp("loads")
    same = make_models(folder)
    change(
        folder / "llama",
        folder / "torn",
        lambda tensors: {name: t for name, t in tensors.items() if "layers.1.mlp.up" not in name},
    )
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }
    make_tiny_model(folder / "large", UNTIED | sizes)  # 170 MB
    (folder / "plan.json").write_text(json.dumps({"same": same, "port": free_ports(1)[0]}))
    run_ranks("tests.trainer.parallel.loads", folder, RANKS)
    return folder, [
        json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(RANKS)
    ]


def test_each_rank_loads_what_transformers_loads(results):
    """Parameters, buffers, what is tied and what is trained, bit for bit, in both types;
    adapters with the values of the seed."""
    _, found = results
    for name in (name for name in found[0] if name not in ("torn", "memory")):
        assert [each[name] for each in found] == [[]] * RANKS, name
    assert len(found[0]) == 3 * 11 + 3


def test_a_rank_takes_the_memory_of_its_rows_and_of_one_tensor(results):
    for each in results[1]:
        memory = each["memory"]
        assert memory["shard"] < 57e6
        assert memory["taken"] <= 1.2 * memory["shard"] + memory["largest"], memory


def test_a_model_whose_files_lack_a_part_is_refused(results):
    for each in results[1]:
        assert (
            "its files lack model.layers.1.mlp.up_proj.weight, which LlamaForCausalLM needs"
            in each["torn"]
        )


def test_what_is_not_read_by_slices_is_said(results):
    folder, _ = results
    logs = [(folder / f"rank{rank}.log").read_text() for rank in range(RANKS)]
    assert (
        "own: each rank reads the whole model, 0.00 GiB, because its code came with it "
        "(model.trust_remote_code)" in logs[0]
    )
    assert logs[0].count("each rank") == 2 and "each rank" not in logs[1]  # in two types
