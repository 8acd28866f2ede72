"""What workers read of weight files, and what they then hold."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from rl.inference.weights import Weights
from rl.inference.worker import WeightLoader
from rl.models.tiny import make_tiny_model
from rl.system.errors import RunError
from rl.system.linux import pid_scope
from tests.families import CONFIGS
from tests.inference.layers import ROADS
from tests.raised import run_error
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
GOOD = {
    "matrix": torch.randn(8, 4096).bfloat16(),
    "cube": torch.randn(4, 6, 10),
    "scalar": torch.tensor(3, dtype=torch.int64),
}


def test_tensors_of_every_type_and_files_that_vanish_or_shrink(tmp_path):
    save_file(GOOD, tmp_path / "model.safetensors")
    weights = Weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tensors = dict(weights)
    assert all(tensors[name].equal(good) for name, good in GOOD.items()), "an open file stays"
    assert weights.bytes_read == sum(good.nbytes for good in GOOD.values())
    with run_error("no such directory"):
        Weights(tmp_path / "gone")
    save_file(GOOD, tmp_path / "model.safetensors")
    weights = Weights(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 4096)
    with run_error("it was cut short while it was read"):
        dict(weights)


def test_a_host_without_memory_for_a_second_copy_reads_in_the_pause_and_says_so(
    tmp_path, monkeypatch, capsys
):
    """Two engines with two workers of 0.5 GiB each, and 1.5 GiB free. vLLM tells each engine of a
    dense model that it is the only one, so each found room for its own."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    save_file(GOOD, tmp_path / "model.safetensors")
    monkeypatch.setattr("rl.inference.worker.memory_bytes", lambda: (4 << 30, 3 << 29))
    layer = torch.nn.Linear(1, 1)
    get_layerwise_info(layer).restore_metadata = (
        {"weight": torch.empty(1 << 27, device="meta")},
        {},
    )
    loader = WeightLoader()
    monkeypatch.setattr(loader, "die_with", lambda pid: None)
    monkeypatch.setattr(loader, "prepare_cpu", lambda: None)
    loader.begin(os.getpid(), pid_scope(), 2)
    loader.model_config = SimpleNamespace(model="", quantization=None)
    loader.model_runner = SimpleNamespace(get_model=lambda: layer)
    parallel = SimpleNamespace(local_world_size=2)
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
    assert not loader.has_room(False), (
        "a second set of modules made after a reload would load nothing, in silence"
    )
    # its experts and sinks would stay those of the version before
    layer.__class__ = type("GptOssForCausalLM", (torch.nn.Linear,), {})
    with run_error("GptOssForCausalLM: vLLM cannot load its weights in place"):
        loader._stage(tmp_path)
    assert loader.has_room(False), "nothing was reloaded"


def test_page_locked_memory_has_sizes_of_powers_of_two_and_is_kept_for_the_next_version(
    tmp_path, monkeypatch
):
    """On a GPU, also if the first version's files are torn. Regression: the second version found no
    room beside the first one's memory, which torch keeps for it, and from then on weights were
    read while generation paused."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    save_file(GOOD, tmp_path / "model.safetensors")
    layer, free = torch.nn.Linear(1, 1), [1000, 1024, 0]
    tensor = torch.empty(513, dtype=torch.uint8, device="meta")
    get_layerwise_info(layer).restore_metadata = ({"weight": tensor}, {})
    monkeypatch.setattr("rl.inference.worker.memory_bytes", lambda: (1 << 30, free.pop(0)))
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: False)
    staged = Mock()
    staged.load.side_effect = [RunError("torn"), None]
    monkeypatch.setattr("rl.inference.staging.Staged", lambda *_: staged)
    monkeypatch.setattr("rl.inference.staging.can_stage", lambda _: True)
    parallel = SimpleNamespace(local_world_size=1)
    for is_first in (True, False):
        loader = WeightLoader()
        loader.model_config = SimpleNamespace(model="")
        loader.model_runner = SimpleNamespace(get_model=lambda: layer)
        loader.vllm_config = SimpleNamespace(parallel_config=parallel)
        if is_first:
            assert loader._stage(tmp_path) is not staged
            continue
        with run_error("torn"):
            loader._stage(tmp_path)
        assert loader._stage(tmp_path) is staged


def loaded(folder: Path, kinds: dict[str, tuple[dict, list[int], bool]]) -> None:
    """Checks what workers of two hold who load a version of each kind (fields of the config, ranks,
    whether experts are apart) over another."""
    cases = []
    for name, (fields, ranks, apart) in kinds.items():
        models = [make_tiny_model(folder / f"{name}-{seed}", fields, seed) for seed in range(2)]
        case = {"name": name, "versions": [*map(str, models)], "dtype": "float32"}
        case["roads"] = ROADS[: 2 if name == "gpt_oss" else 3]  # worker.NOT_IN_PLACE
        cases.append(case | {"ranks": ranks, "size": 2, "experts_apart": apart})
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


def test_each_worker_holds_what_it_would_have_been_started_with(tmp_path):
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
    loaded(tmp_path, kinds)


@pytest.mark.proof
def test_workers_of_other_families_hold_what_they_would_have_been_started_with(tmp_path):
    """Fused and transposed matrices, states of sequences, all experts in one tensor of the
    files, with biases that one worker adds."""
    loaded(tmp_path, {family: (fields, [1], False) for family, fields in FAMILIES.items()})
