"""vLLM's model of one worker of several, with its real layers and loaders, in one process: its
groups only say the worker's rank.

`python -m tests.inference.layers PLAN.json` loads version 1 over version 0 on each road of each
case, compares all that the model then holds with a model that was started with version 1, and
prints a line of JSON for each.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROADS = ("exchanged", "copied", "in place")


@contextmanager
def worker(rank: int, size: int) -> Iterator[None]:
    """Makes vLLM believe that this process is one of several."""
    from vllm.distributed import parallel_state as state

    # of experts only if the first model has some
    groups = [group for group in (state._TP, state._EP) if group is not None]
    kept = [dict(group.__dict__) for group in groups]
    for group in groups:
        group.world_size, group.rank_in_group = size, rank
    yield
    for group, before in zip(groups, kept, strict=True):
        group.__dict__.update(before)


@contextmanager
def start_vllm(config: Any) -> Iterator[None]:
    """Makes vLLM's groups, of this process alone."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with tempfile.NamedTemporaryFile() as meeting, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{meeting.name}", 0, "gloo")
        initialize_model_parallel()
        yield


def config_of(folder: Path, dtype: str, experts_apart: bool, size: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = {"max_model_len": 256, "skip_tokenizer_init": True, "enforce_eager": True}
    config = EngineArgs(model=str(folder), dtype=dtype, **arguments).create_engine_config()
    config.parallel_config.enable_expert_parallel = experts_apart
    config.parallel_config.tensor_parallel_size = size
    return config


def model_of(folder: Path, config: Any) -> nn.Module:
    """A model as a worker has it that was started with the folder."""
    from vllm.model_executor.model_loader import get_model

    config = copy.deepcopy(config)
    config.model_config.model = str(folder)
    config.compilation_config.static_forward_context.clear()
    return get_model(vllm_config=config)


def held(model: nn.Module) -> dict[str, Tensor]:
    """All tensors by their places: weights, what packing has made of them, and what each linear
    layer computes with them."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    found = {}
    for name, module in model.named_modules():
        experts = getattr(
            getattr(getattr(module, "quant_method", None), "moe_kernel", None),
            "fused_experts",
            None,
        )
        for owner in (
            module.__dict__,
            module._parameters,
            module._buffers,
            getattr(experts, "__dict__", {}),
        ):
            found |= {
                f"{name}.{key}": value.detach().clone()
                for key, value in owner.items()
                if isinstance(value, Tensor)
            }
        # others are convolutions
        if isinstance(module, LinearBase | ParallelLMHead) and module.weight.ndim == 2:
            width = next(
                getattr(module, name)
                for name in ("input_size_per_partition", "input_size", "embedding_dim")
                if hasattr(module, name)
            )
            x = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(
                next(module.parameters()).dtype
            )
            found[f"{name}()"] = module.quant_method.apply(module, x, None)
    return found


def load(road: str, model: nn.Module, folder: Path, config: Any) -> None:
    """Loads a folder into a model."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    from rl.inference.staging import Staged
    from rl.inference.weights import Weights
    from rl.inference.worker import repacked

    weights = Weights(folder)
    if road == "in place":
        with repacked(model):
            reload_weights(
                config,
                model,
                weights_iterator=iter(weights),
                weights_path=None,
                is_checkpoint_format=True,
            )
    else:
        staged = Staged(model, config, in_host=road == "copied")
        staged.load(weights)
        staged.put_in_place()


def main() -> None:
    from vllm.config import set_current_vllm_config

    cases = json.loads(Path(sys.argv[1]).read_text())
    with (
        start_vllm(config_of(Path(cases[-1]["versions"][0]), cases[-1]["dtype"], False, 1)),
        torch.no_grad(),
    ):
        for case in cases:
            for rank in case["ranks"]:
                config = config_of(
                    Path(case["versions"][0]), case["dtype"], case["experts_apart"], case["size"]
                )
                with worker(rank, case["size"]), set_current_vllm_config(config):
                    compare(case, rank, config)


def compare(case: dict[str, Any], rank: int, config: Any) -> None:
    """Prints what each road holds."""
    old, new = map(Path, case["versions"])
    fresh = held(model_of(new, config))
    for road in case["roads"]:
        model = model_of(old, config)
        before = held(model)
        places = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        load(road, model, new, config)
        after = held(model)
        differing = [
            name for name in fresh if not torch.equal(fresh[name], after.get(name, torch.empty(0)))
        ]
        moved = [
            name
            for name, tensor in model.named_parameters()
            if tensor.data_ptr() != places.get(name)
        ]
        stale = [
            name for name in fresh if name.endswith("()") and torch.equal(fresh[name], before[name])
        ]
        found = {"case": case["name"], "rank": rank, "road": road, "moved": len(moved)}
        found |= {"differing": differing, "equal before": stale, "held": len(fresh)}
        print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
