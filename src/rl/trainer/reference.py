"""The frozen reference model, from which the KL term of the loss (`trainer.loss.kl_coefficient`) is counted."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rl.config import RLConfig
from rl.models import ModelError, resolve_model
from rl.trainer.distributed import World
from rl.trainer.lora import without_adapters
from rl.trainer.model import load_policy, score
from rl.trainer.packing import MicroBatch


@dataclass(frozen=True)
class Reference:
    """A frozen model that scores the policy's micro batches."""

    model: PreTrainedModel
    is_policy: bool
    """It is the policy itself, whose adapters are switched off for the purpose."""

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, world: World) -> Tensor:
        """Log-probability of each loss token, [N] float32 without gradient. Every rank calls this, as it calls `score`."""
        with without_adapters(self.model) if self.is_policy else nullcontext():
            return score(self.model, batch, world).logprobs


def load_reference(config: RLConfig, base: str, policy: PreTrainedModel, world: World) -> Reference | None:
    """The reference of `policy`, or None if the loss has no KL term. Raises ModelError for a model that cannot be one.

    `base` is the folder of the model that the run started from; `kl_reference` names another. With adapters the policy's own frozen
    weights are the base, and the reference costs no memory. Otherwise it costs, on each rank, its shard of the weights in the dtype that
    is computed in (bfloat16: 2 bytes a parameter, an eighth of what the policy, its gradients and its optimizer state take), the gathered
    weights of one layer while it computes. In any case a step has one forward pass more.
    """
    loss = config.trainer.loss
    if not loss.kl_coefficient:
        return None
    if config.trainer.lora and not loss.kl_reference:
        return Reference(policy, is_policy=True)
    folder = named_model(config, loss.kl_reference) if loss.kl_reference else base
    settings = config.trainer.model_copy(update={"lora": None, "activation_checkpointing": "none"})
    model = load_policy(folder, config.model, settings, world, frozen=True)
    if model.config.get_text_config().vocab_size != policy.config.get_text_config().vocab_size:
        raise ModelError(f"trainer.loss.kl_reference: {folder} has another vocabulary than {base}; a reference scores the same token ids")
    for module in model.modules():
        if isinstance(module, FSDPModule):  # nothing waits for a backward pass: the gathered weights go as soon as they are used
            module.set_reshard_after_forward(True, recurse=False)
    return Reference(model, is_policy=False)


def named_model(config: RLConfig, name: str) -> str:
    """The folder of another model than the run's. Raises ModelError."""
    try:
        return resolve_model(config.model.model_copy(update={"name": name}))
    except ModelError as error:
        raise ModelError(f"trainer.loss.kl_reference: {error}") from error
