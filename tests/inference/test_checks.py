"""What is checked before a server runs or a weight is touched: engine arguments and weight files. No server."""

import json
from pathlib import Path

import pytest

from rl.inference.engine_args import EngineArgsError, parse_engine_args
from rl.inference.weight_files import WeightsError, check_weights, read_tensors
from tests.tiny_model import make_tiny_model


def test_engine_args_take_numbers_bools_lists_and_tables():
    given = {
        "tensor-parallel-size": 2,
        "enable_prefix_caching": False,
        "cudagraph_capture_sizes": [1, 2],
        "compilation_config": {"mode": 0},
        "kv_cache_memory_bytes": "1G",
        "tool_call_parser": "hermes",
    }
    args = parse_engine_args(given, {"dtype": "float32", "enforce_eager": True})
    assert (args.tensor_parallel_size, args.enable_prefix_caching, args.cudagraph_capture_sizes) == (2, False, [1, 2])
    assert (args.kv_cache_memory_bytes, args.tool_call_parser) == (2**30, "hermes")
    assert int(args.compilation_config.mode) == 0
    assert (args.dtype, args.enforce_eager) == ("float32", True)


def test_engine_args_report_every_fault_with_its_remedy():
    given = {"tensor_paralel_size": 2, "max_model_len": 100, "logprobs_mode": "raw_logprobs", "max_num_seqs": "many"}
    given["enforce_eager"] = "yes"
    with pytest.raises(EngineArgsError) as error:
        parse_engine_args(given)
    assert str(error.value).splitlines() == [
        "inference.vllm.tensor_paralel_size = 2: vLLM has no such argument; did you mean tensor_parallel_size?",
        "inference.vllm.max_model_len = 100: set model.max_model_len instead",
        "inference.vllm.logprobs_mode = 'raw_logprobs': cannot be set, training needs the logprobs of the distribution that was sampled"
        " from (processed_logprobs)",
        "inference.vllm.max_num_seqs = 'many': invalid int value: 'many'",
        "inference.vllm.enforce_eager = 'yes': takes true or false",
    ]


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]], cut: int = 0) -> None:
    """Zeros of the given types (BF16 or F32) and shapes; the last `cut` bytes are left out."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"BF16": 2, "F32": 4, "I32": 4}[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((len(text).to_bytes(8, "little") + text + bytes(offset))[: -cut or None])


EXPECTED = {"a.weight": ("F32", (2, 3)), "lm_head.weight": ("F32", (4, 2))}


@pytest.mark.parametrize(
    ("tensors", "tied", "fault"),
    [
        ({"a.weight": ("BF16", [2, 3]), "lm_head.weight": ("F32", [4, 2])}, False, None),
        ({"a.weight": ("F32", [2, 3])}, True, None),
        ({"a.weight": ("F32", [2, 3])}, False, "lm_head.weight is missing"),
        ({"a.weight": ("F32", [3, 2])}, True, r"a.weight has shape \[3, 2\], the model \[2, 3\]"),
        ({"a.weight": ("I32", [2, 3])}, True, "a.weight is I32, the model's F32"),
        ({"a.weight": ("F32", [2, 3]), "b": ("F32", [1])}, True, "b is not in the model"),
    ],
)
def test_weights_must_fit_the_model(tmp_path, tensors, tied, fault):
    write_safetensors(tmp_path / "model.safetensors", tensors)
    if fault is None:
        check_weights(tmp_path, EXPECTED, tied)
    else:
        with pytest.raises(WeightsError, match=fault):
            check_weights(tmp_path, EXPECTED, tied)


def test_damaged_files_are_named(tmp_path):
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"a.weight": ("F32", [2, 3])}, cut=5)
    with pytest.raises(WeightsError, match=r"model.safetensors: has .* bytes, its header says"):
        check_weights(tmp_path, EXPECTED, True)
    file.write_bytes(b"this is no safetensors file")
    with pytest.raises(WeightsError, match="not a safetensors file"):
        check_weights(tmp_path, EXPECTED, True)
    file.unlink()
    with pytest.raises(WeightsError, match="has no"):
        check_weights(tmp_path, EXPECTED, True)


def test_header_of_a_real_model(tmp_path):
    tensors = read_tensors(make_tiny_model(tmp_path / "model", tied=False))
    assert tensors["lm_head.weight"] == ("F32", (259, 64))
    assert len(tensors) == 21
