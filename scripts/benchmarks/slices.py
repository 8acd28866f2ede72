"""Measures how one worker of several loads a version, by slices and by whole tensors: `uv run scripts/bench.py slices` prints JSON.

vLLM's real layers of one worker, in this process, without the others and without requests. `copied` and `in place` are the roads of GPUs,
run here on a CPU. The files are in the page cache; seconds are medians. Whole tensors: as before 2026-11-26, all files are read ahead, and
vLLM's reload runs in the pause.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.inference.layers import config_of, model_of, share, start_vllm, worker  # noqa: E402


def read_ahead(folder: Path) -> int:
    """Reads all files; returns their bytes."""
    buffer, found = bytearray(1 << 24), 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as content:
            while got := content.readinto(buffer):
                found += got
    return found


def whole(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt", device="cpu") as weights:
            for name in weights.keys():  # noqa: SIM118  (safe_open is not a mapping)
                yield name, weights.get_tensor(name)


def roads(model: Any, folder: Path, config: Any) -> dict[str, Callable[[], tuple[int, float, float]]]:
    """Name -> a load of the folder, which returns bytes read, and seconds before and in the pause."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    from rl.inference.file_tensor import Weights
    from rl.inference.staging import Staged

    def reload(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        reload_weights(config, model, weights_iterator=weights, weights_path=None, is_checkpoint_format=True)

    def reload_whole() -> tuple[int, float, float]:
        began = time.perf_counter()
        num_read = read_ahead(folder)
        paused = time.perf_counter()
        reload(whole(folder))
        return num_read, paused - began, time.perf_counter() - paused

    def reload_slices() -> tuple[int, float, float]:
        weights, paused = Weights(folder), time.perf_counter()
        reload(iter(weights))
        return weights.bytes_read, 0.0, time.perf_counter() - paused

    def stage(weights: Any, in_host: bool) -> tuple[int, float, float]:
        began = time.perf_counter()
        staged = Staged(model, weights, config, in_host=in_host)
        paused = time.perf_counter()
        replaced = staged.put_in_place()  # which a worker frees later
        pause_s = time.perf_counter() - paused
        replaced.clear()
        return getattr(weights, "bytes_read", 0), paused - began, pause_s

    return {
        "GPU, whole tensors, reload": reload_whole,
        "GPU, slices, in place": reload_slices,
        "GPU, slices, copied": lambda: stage(Weights(folder), True),
        "CPU, whole tensors, mapped": lambda: stage(whole(folder), False),
        "CPU, slices": lambda: stage(Weights(folder), False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="among which the model is split")
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0: a dense model")
    parser.add_argument("--experts-apart", action="store_true", help="each worker has whole experts (enable_expert_parallel)")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    from rl.models.tiny import make_tiny_model

    kind = {"num_experts": args.experts, "num_experts_per_tok": 2, "moe_intermediate_size": args.hidden} if args.experts else {}
    sizes = {"hidden_size": args.hidden, "intermediate_size": 4 * args.hidden, "num_hidden_layers": args.layers, "head_dim": 64}
    heads = {"num_attention_heads": args.hidden // 64, "num_key_value_heads": args.hidden // 128, "max_position_embeddings": 1024}
    fields = {"model_type": "qwen3_moe" if kind else "qwen3", "initializer_range": 0.02, **sizes, **heads, **kind}
    with tempfile.TemporaryDirectory() as folder:
        model_folder = make_tiny_model(Path(folder) / "model", fields)
        config = config_of(model_folder, "float32", args.experts_apart, args.workers)
        with start_vllm(config), worker(0, args.workers), torch.no_grad():
            models = {name: model_of(model_folder, config) for name in roads(None, model_folder, config)}  # one for each road
            taken: dict[str, list[tuple[int, float, float]]] = {}
            for _ in range(args.rounds + 1):
                for name, model in models.items():
                    gc.collect()
                    taken.setdefault(name, []).append(roads(model, model_folder, config)[name]())
            said: dict[str, Any] = {"files_mib": read_ahead(model_folder) / 2**20}
            said["share_mib"] = share(next(iter(models.values()))) / 2**20
            for name, rounds in taken.items():
                read, before, pause = (median(values) for values in zip(*rounds[1:], strict=True))
                said[name] = {"read_mib": read / 2**20, "before_s": round(before, 4), "pause_s": round(pause, 4)}
            print(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
