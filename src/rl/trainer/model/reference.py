"""The frozen reference model of the loss's KL term (`trainer.loss.kl_coefficient`)."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rl.config.run import RLConfig
from rl.models.folder import resolve_model
from rl.system.errors import RunError
from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.model.head import score
from rl.trainer.model.lora import without_adapters
from rl.trainer.model.policy import load_policy
from rl.trainer.parallel.world import World


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
