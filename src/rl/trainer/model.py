"""The policy: a Hugging Face causal LM under FSDP2, one code path for any number of ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl.config import ModelConfig
from rl.models import ModelError
from rl.trainer.config import TrainerConfig
from rl.trainer.distributed import World
from rl.trainer.logprobs import token_logprobs
from rl.trainer.packing import MicroBatch, tree_mask

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_policy(folder: str, config: ModelConfig, settings: TrainerConfig, world: World) -> PreTrainedModel:
    """The model of `folder` with float32 master weights, sharded over the ranks; it computes in `config.dtype`, reduces in float32.

    Every rank maps the same files and keeps its shards. Gradients are summed over ranks (each token's loss is weighted by its part in
    the whole batch's), not averaged as is FSDP's default.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=config.trust_remote_code
    )
    check_attention(model, config.max_model_len)
    turn_off_dropout(model)
    if settings.activation_checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # activation checkpointing asks for it; nothing else differs without dropout
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[config.dtype], reduce_dtype=torch.float32)
    # With one rank there is nothing to save by freeing the gathered weights between forward and backward.
    reshard = world.size > 1
    for block in (module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())):
        fully_shard(block, mesh=world.mesh, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(model, mesh=world.mesh, mp_policy=precision, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # neither setting recurses, and a factor without the other needs nccl's PREMUL_SUM
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def check_attention(model: PreTrainedModel, max_model_len: int) -> None:
    """Prefix trees are exact for full causal attention; says which layer is none."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or (window and getattr(config, "use_sliding_window", True) and not hasattr(config, "layer_types"))
    if kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{type(model).__name__}: layers of kind {sorted(kinds)} carry state across samples and cannot be packed as trees")
    if slides and window and window < max_model_len:
        raise ModelError(f"{type(model).__name__}: attention slides over {window} tokens; set model.max_model_len to {window} or less")


def turn_off_dropout(model: PreTrainedModel) -> None:
    """The sampler has none, and the ratio of trainer to sampler must be 1 on-policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


@dataclass(frozen=True)
class Scores:
    """What the model makes of a micro batch's N loss tokens."""

    logprobs: Tensor  # [N] float32, with gradient
    entropies: Tensor  # [N] float32, of the distribution that predicts the token


def score(model: PreTrainedModel, batch: MicroBatch, world: World) -> Scores:
    """Scores of the micro batch's loss tokens.

    The whole model is called at once (FSDP's hooks hang on that, and a tied head stays tied); logits exist at loss positions only.
    """
    logits = model(
        input_ids=batch.input_ids[None],
        position_ids=batch.position_ids[None],
        attention_mask=tree_mask(batch.ends)[None, None],
        logits_to_keep=batch.predictors,
        use_cache=False,
    ).logits[0]
    logprobs, entropies = token_logprobs(logits, batch.temperatures, batch.rows, batch.targets)
    return Scores(logprobs, entropies[batch.rows])
