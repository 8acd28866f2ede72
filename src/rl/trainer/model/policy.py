"""Loads the policy: a Hugging Face causal LM under FSDP2, one code path for any number of ranks."""

import torch
from transformers import PreTrainedModel

from rl.config.run import ModelConfig
from rl.config.trainer import TrainerConfig
from rl.system.errors import RunError
from rl.trainer.measure.experts import count_tokens
from rl.trainer.model.head import LossHead
from rl.trainer.model.lora import add_adapters
from rl.trainer.model.modes import turn_off_randomness, widen_windows
from rl.trainer.model.rope import freeze_rope
from rl.trainer.model.routes import Routers
from rl.trainer.model.selftest import choose_mode
from rl.trainer.parallel.experts import check_experts, dispatch_tokens
from rl.trainer.parallel.loading import LocalShards, load_rows
from rl.trainer.parallel.sharding import shard_model
from rl.trainer.parallel.world import World

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_policy(
    folder: str, config: ModelConfig, settings: TrainerConfig, world: World, frozen: bool = False
) -> PreTrainedModel:
    """Loads the model of `folder` with float32 master weights, sharded over the ranks; it computes
    in `config.dtype`, reduces in float32.

    Every rank reads its own part of the files, see parallel/loading.py. A `frozen` model is used
    only for scoring, so its weights are kept in the dtype that it computes in. Raises RunError if
    the model cannot be computed exactly (see selftest.py) or if tensors are missing from its files.
    """
    check_experts(folder, config.trust_remote_code, world)
    dtype = DTYPES[config.dtype]
    model = load_rows(
        folder,
        world,
        # frozen weights need no float32 master
        dtype=dtype if settings.lora or frozen else torch.float32,
        attn_implementation="eager",
        trust_remote_code=config.trust_remote_code,
    )
    model._can_set_attn_implementation()  # found out by the source of its class, which FSDP hides
    routers = Routers(model) if settings.router_replay != "off" else None
    if settings.lora:
        add_adapters(model, settings.lora)
    if frozen:
        model.requires_grad_(False)
    freeze_rope(model, config.max_model_len)
    widen_windows(model)
    turn_off_randomness(model)
    count_tokens(model, world.device)
    dispatch_tokens(model, world)
    head = model.get_output_embeddings()
    if head is None:
        raise RunError(f"{type(model).__name__} has no language-model head")
    head.forward = LossHead(head, routers)
    rows = LocalShards(model)
    shard_model(model, dtype, world)
    rows.attach_shards(model)
    choose_mode(model, settings, dtype, world)
    return model
