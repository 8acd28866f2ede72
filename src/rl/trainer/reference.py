"""The frozen reference model, from which the KL term of the loss (`trainer.loss.kl_coefficient`) is counted."""

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rl.config.run import RLConfig
from rl.models.folder import resolve_model
from rl.system.errors import RunError
from rl.trainer.lora import without_adapters
from rl.trainer.model import load_policy, score
from rl.trainer.packing import MicroBatch
from rl.trainer.parallel.world import World


@torch.no_grad()
def reference_logprobs(reference: PreTrainedModel, batch: MicroBatch, world: World) -> Tensor:
    """Log-probability of each loss token, [N] float32 without gradient. Every rank calls this, as it calls `score`."""
    with without_adapters(reference):
        return score(reference, batch, world).logprobs


def load_reference(config: RLConfig, base: str, policy: PreTrainedModel, world: World) -> PreTrainedModel | None:
    """The reference of `policy`, or None if the loss has no KL term. Raises RunError for a model that cannot be one.

    `base` is the folder of the model that the run started from; `kl_reference` names another. With adapters the policy's own frozen
    weights are the base, and the reference costs no memory. Otherwise it costs, on each rank, its shard of the weights in the dtype that
    is computed in, and the gathered weights of one layer while it computes.
    """
    loss = config.trainer.loss
    if not loss.kl_coefficient:
        return None
    if config.trainer.lora and not loss.kl_reference:
        return policy
    try:
        folder = resolve_model(config.model.model_copy(update={"name": loss.kl_reference})) if loss.kl_reference else base
    except RunError as error:
        raise RunError(f"trainer.loss.kl_reference: {error}") from error
    settings = config.trainer.model_copy(update={"lora": None, "activation_checkpointing": "none"})
    model = load_policy(folder, config.model, settings, world, frozen=True)
    if model.config.get_text_config().vocab_size != policy.config.get_text_config().vocab_size:
        raise RunError(f"trainer.loss.kl_reference: {folder} has another vocabulary than {base}; a reference scores the same token ids")
    for module in model.modules():
        if isinstance(module, FSDPModule):  # nothing waits for a backward pass: the gathered weights go as soon as they are used
            module.set_reshard_after_forward(True, recurse=False)
    return model
