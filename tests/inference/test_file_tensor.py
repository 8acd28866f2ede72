"""What a loader does with a tensor of a file reads the bytes that it uses, and gives the values
that it would have had."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from rl.inference.file_tensor import FileTensor, Weights
from rl.inference.worker import WeightLoader
from rl.models.tiny import make_tiny_model
from rl.system.errors import RunError
from tests.families import CONFIGS
from tests.inference.layers import ROADS
from tests.zygote import inference_zygote

FAMILIES = {name: CONFIGS[name] for name in ("gpt2", "falcon_h1")}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# vLLM knows no others
FAMILIES["gpt_oss"] = CONFIGS["gpt_oss"] | {"rope_parameters": YARN, "tie_word_embeddings": False}
ROWS, COLUMNS = 8, 4096
GOOD = {
    "matrix": torch.randn(ROWS, COLUMNS).bfloat16(),
    "cube": torch.randn(4, 6, 10),
    "scalar": torch.tensor(3, dtype=torch.int64),
}


@pytest.fixture
def weights(tmp_path) -> Weights:
    save_file(GOOD, tmp_path / "model.safetensors")
    return Weights(tmp_path / "model.safetensors")


def cases() -> dict:
    """Name -> what a loader does with a matrix [8, 4096] of bfloat16, and how many bytes that
    takes."""
    row, whole = 2 * COLUMNS, 2 * COLUMNS * ROWS
    return {
        "all": (lambda t: t, whole),
        "rows": (lambda t: t.narrow(0, 2, 3), 3 * row),
        "an expert": (lambda t: t[5], row),
        "columns, far apart": (lambda t: t[:, : COLUMNS // 4], whole // 4),
        "columns, close to each other: read with what is between them": (
            lambda t: t[:, 8:-8],
            whole - 32,
        ),
        "columns of some rows, transposed": (lambda t: t[2:6].t()[1024:2048], 4 * row // 4),
        "a part of parts": (
            lambda t: t.view(2, 4, COLUMNS)[1].chunk(2, 0)[1].unsqueeze(0),
            2 * row,
        ),
        "every other row": (lambda t: t[::2], 4 * row),
        "a shape that strides cannot express": (lambda t: t[:, :1024].reshape(-1, 2), whole // 4),
        "a transposed copy": (lambda t: t.permute(1, 0).contiguous(), whole),
        "other values": (lambda t: -t[:1].float().exp() + 1, row),
        "a choice by value": (lambda t: t[1][t[1] > 0], 2 * row),
        "another type of the same bytes": (lambda t: t.view(torch.int16)[3], row),
    }


@pytest.mark.parametrize("name", cases())
def test_exactly_what_is_used_is_read(weights, name):
    use, num_bytes = cases()[name]
    tensor = dict(weights)["matrix"]
    assert isinstance(tensor, FileTensor) and weights.bytes_read == 0
    used = use(tensor)
    expected = use(GOOD["matrix"])
    target = torch.zeros_like(expected)
    target.copy_(used)
    assert target.equal(expected) and weights.bytes_read == num_bytes


def test_targets_of_every_kind_and_tensors_of_every_shape(weights):
    tensors = dict(weights)
    for name, good in GOOD.items():
        assert torch.zeros_like(good).copy_(tensors[name]).equal(good)
    assert int(tensors["scalar"].item()) == 3
    other = torch.zeros(ROWS, COLUMNS)  # rounded once, by the copy
    assert other.copy_(tensors["matrix"]).equal(GOOD["matrix"].float())
    strided = torch.zeros(10, 6, 4).permute(2, 1, 0)
    strided.copy_(tensors["cube"])
    assert strided.equal(GOOD["cube"])
    broadcast = torch.zeros(3, 10)
    assert broadcast.copy_(tensors["cube"][1, 2]).equal(GOOD["cube"][1, 2].expand(3, 10))
    before = weights.bytes_read
    torch.empty(4, 6, 10, device="meta").copy_(tensors["cube"])
    assert weights.bytes_read == before


def test_a_loader_that_would_change_the_file_is_refused(weights):
    tensor = dict(weights)["cube"]
    for change in (
        lambda: tensor.mul_(2),
        lambda: tensor[1].zero_(),
        lambda: torch.exp(torch.zeros(4, 6, 10), out=tensor),
    ):
        with pytest.raises(RunError, match="changes a tensor of the weight files in place"):
            change()


def test_a_tensor_that_a_loader_sets_to_zero_is_zero_and_not_read(weights):
    """vLLM does so with a bias of gpt-oss on all workers but the first: these refused every
    version."""
    tensor = dict(weights)["cube"]
    assert tensor.zero_() is tensor
    assert torch.ones(6, 10).copy_(tensor[2]).equal(torch.zeros(6, 10)) and weights.bytes_read == 0
    assert torch.ones(4, 6, 10).copy_(dict(weights)["cube"]).equal(GOOD["cube"])


def test_files_that_vanish_or_shrink(weights, tmp_path):
    file, tensors = tmp_path / "model.safetensors", dict(weights)
    file.rename(tmp_path / "deleted")
    (tmp_path / "deleted").unlink()
    assert torch.zeros(6, 10).copy_(tensors["cube"][3]).equal(GOOD["cube"][3]), "an open file stays"
    with pytest.raises(RunError, match="no such directory"):
        Weights(Path(file))
    save_file(GOOD, file)
    tensors = dict(Weights(file))
    os.truncate(file, file.stat().st_size - 4096)
    with pytest.raises(RunError, match="it was cut short while it was read"):
        for tensor in tensors.values():
            tensor.clone()


def test_a_host_without_memory_for_a_second_copy_reads_in_the_pause_and_says_so(
    tmp_path, monkeypatch, capsys
):
    """Two workers of 1 GiB each, and 1.5 GiB free."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    save_file(GOOD, tmp_path / "model.safetensors")
    monkeypatch.setattr("rl.inference.worker.memory_bytes", lambda: (4 << 30, 3 << 29))
    layer = torch.nn.Linear(1, 1)
    get_layerwise_info(layer).restore_metadata = (
        {"weight": torch.empty(1 << 28, device="meta")},
        {},
    )
    loader = WeightLoader()
    loader.model_config, loader.model_runner = (
        SimpleNamespace(model="", quantization=None),
        SimpleNamespace(get_model=lambda: layer),
    )
    parallel = SimpleNamespace(local_world_size=2, data_parallel_size_local=1)
    plain = {"lora_config": None, "speculative_config": None}
    loader.vllm_config = SimpleNamespace(
        parallel_config=parallel, model_config=loader.model_config, **plain
    )
    assert loader._stage(tmp_path) is loader._weights and loader._weights.bytes_read == 0
    assert (
        "2.0 GiB for new weights, 1.5 GiB are free: from now on they are read while "
        "generation pauses" in capsys.readouterr().err
    )
    monkeypatch.setattr("rl.inference.worker.memory_bytes", lambda: (4 << 30, 4 << 30))
    assert not loader.has_room(), (
        "a second set of modules made after a reload would load nothing, in silence"
    )
    # its experts and sinks would stay those of the version before
    layer.__class__ = type("GptOssForCausalLM", (torch.nn.Linear,), {})
    with pytest.raises(RunError, match="GptOssForCausalLM: vLLM cannot load its weights in place"):
        loader._stage(tmp_path)
    assert loader.has_room(), "nothing was reloaded"


def loaded(folder: Path, kinds: dict[str, tuple[dict, list[int], bool]]) -> list[dict]:
    """What workers of two find who load a version of each kind (fields of the config, ranks,
    whether experts are apart) over another."""
    cases = []
    for name, (fields, ranks, apart) in kinds.items():
        versions = [
            str(make_tiny_model(folder / f"{name}-{seed}", fields, seed)) for seed in range(2)
        ]
        roads = ROADS[: 2 if name == "gpt_oss" else 3]  # worker.NOT_IN_PLACE
        split = {"ranks": ranks, "size": 2, "experts_apart": apart}
        cases.append(
            {"name": name, "versions": versions, "dtype": "float32", "roads": roads} | split
        )
    (folder / "cases.json").write_text(json.dumps(cases))
    log = folder / "log"
    process = inference_zygote().fork("tests.inference.layers", str(folder / "cases.json"), log=log)
    assert process.wait(240) == 0, log.read_text()[-3000:]
    found = [
        json.loads(line.removeprefix("FOUND "))
        for line in log.read_text().splitlines()
        if line.startswith("FOUND ")
    ]
    assert len(found) == sum(len(case["ranks"]) * len(case["roads"]) for case in cases)
    for one in found:
        assert not one["differing"] and not one["equal before"] and one["held"] > 20, one
        # captured graphs know the addresses
        assert one["road"] == "exchanged" or not one["moved"], one
    return found


def test_each_worker_reads_its_own_part_and_holds_what_it_would_have_been_started_with(tmp_path):
    """On all three roads: exchanged (CPUs), copied from the host (GPUs, here on a CPU) and
    vLLM's reload in place; dense and with experts, split by tensors and by experts."""
    wide = {
        "hidden_size": 256,
        "intermediate_size": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    dense = CONFIGS["qwen3"] | wide
    experts = (
        CONFIGS["qwen3_moe"] | wide | {"moe_intermediate_size": 4096, "tie_word_embeddings": False}
    )
    kinds = {
        "dense": (dense, [0, 1], False),
        "experts, each split": (experts, [1], False),
        "experts, apart": (experts, [1], True),
    }
    for one in loaded(tmp_path, kinds):
        assert one["read"] <= 1.05 * one["share"], one


@pytest.mark.proof
def test_workers_of_other_families_hold_what_they_would_have_been_started_with(tmp_path):
    """Fused and transposed matrices, states of sequences, all experts in one tensor of the
    files, with biases that one worker adds."""
    loaded(tmp_path, {family: (fields, [1], False) for family, fields in FAMILIES.items()})
