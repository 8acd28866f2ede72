"""Loads the policy: a Hugging Face causal LM under FSDP2, one code path for any number of ranks.
And loads the frozen reference model of the loss's KL term (`trainer.loss.kl_coefficient`).
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rl.config.run import ModelConfig, RLConfig
from rl.config.trainer import TrainerConfig
from rl.models.folder import resolve_model
from rl.system.errors import RunError
from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.model.head import LossHead, score
from rl.trainer.model.lora import add_adapters, without_adapters
from rl.trainer.model.modes import turn_off_randomness, widen_windows
from rl.trainer.model.rope import freeze_rope
from rl.trainer.model.routes import Routers
from rl.trainer.model.selftest import choose_mode
from rl.trainer.parallel.experts import count_tokens, dispatch_tokens
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


@torch.no_grad()
def reference_logprobs(reference: PreTrainedModel, batch: MicroBatch, world: World) -> Tensor:
    """Returns the log-probability of each loss token, [N] float32 without gradient, by routes of
    its own. Every rank calls this, as for `score`."""
    with without_adapters(reference):
        return score(reference, replace(batch, routes=None), world).logprobs


def load_reference(
    config: RLConfig, base: str, policy: PreTrainedModel, world: World
) -> PreTrainedModel | None:
    """Returns the reference of `policy`, or None if the loss has no KL term. Raises RunError for a
    model that cannot be a reference.

    `base` is the folder of the model that the run started from; `kl_reference` may name another
    model. With adapters the policy's own frozen weights are the base, and the reference takes no
    memory. Otherwise it takes, on each rank, a shard of the weights in the compute dtype, and the
    gathered weights of one layer while it computes.
    """
    loss = config.trainer.loss
    if not loss.kl_coefficient:
        return None
    if config.trainer.lora and not loss.kl_reference:
        return policy
    try:
        other = config.model.model_copy(update={"name": loss.kl_reference, "chat_template": None})
        folder = resolve_model(other, needs_template=False) if loss.kl_reference else base
    except RunError as error:
        raise RunError(f"trainer.loss.kl_reference: {error}") from error
    settings = config.trainer.model_copy(
        update={"lora": None, "activation_checkpointing": "none", "router_replay": "off"}
    )
    model = load_policy(folder, config.model, settings, world, frozen=True)
    if model.config.get_text_config().vocab_size != policy.config.get_text_config().vocab_size:
        raise RunError(
            f"trainer.loss.kl_reference: {folder} has another vocabulary than {base}; a "
            "reference must use the same token ids"
        )
    for module in model.modules():
        # there is no backward pass, so gathered weights are freed right after use
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(True, recurse=False)
    return model
