"""The policy: a Hugging Face causal LM under FSDP2, one code path for any number of ranks."""

from functools import partial
from typing import get_args

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from rl.config.run import ModelConfig
from rl.config.trainer import TrainerConfig
from rl.system.errors import RunError
from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.measure.experts import count_tokens
from rl.trainer.model.attention import TreeMask
from rl.trainer.model.compiled import compiled
from rl.trainer.model.head import LossHead, Scores
from rl.trainer.model.lora import add_adapters
from rl.trainer.model.modes import Mode, is_compiled, turn_off_randomness, widen_windows
from rl.trainer.model.rope import freeze_rope
from rl.trainer.model.routes import Routers
from rl.trainer.model.selftest import Candidate, choose_mode
from rl.trainer.parallel.experts import check_experts, dispatch_tokens, experts_of
from rl.trainer.parallel.loading import LocalShards, load_rows
from rl.trainer.parallel.sharding import RowGather, reshard, shard_model
from rl.trainer.parallel.world import World

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_policy(
    folder: str, config: ModelConfig, settings: TrainerConfig, world: World, frozen: bool = False
) -> PreTrainedModel:
    """Loads the model of `folder` with float32 master weights, sharded over the ranks; it computes
    in `config.dtype`, reduces in float32.

    Every rank reads its own part of the files, see parallel/loading.py. A `frozen` model is used
    only for scoring, so its weights are kept in the dtype that it computes in. Raises RunError if
    the model cannot be computed exactly (see trainer/model/selftest.py) or if tensors are missing
    from its files.
    """
    check_experts(folder, config.trust_remote_code, world)
    choice = choose_mode(Candidate(folder, config, settings, world, frozen, assemble, score))
    return assemble(folder, config, settings, world, frozen, choice.mode, choice.implementation)


def assemble(
    folder: str,
    config: ModelConfig,
    settings: TrainerConfig,
    world: World,
    frozen: bool,
    mode: Mode,
    implementation: str,
    shape: PreTrainedConfig | None = None,
) -> PreTrainedModel:
    """Makes the policy that trains: loads it and puts in all that is ours, so this is what
    trainer/model/selftest.py tests, too.

    `implementation`: transformers' name for the attention of the mode. `shape`: the part of the
    model to make (alone.part_of), or all.
    """
    model = load_rows(
        folder,
        world,
        # frozen weights need no float32 master
        dtype=DTYPES[config.dtype] if settings.lora or frozen else torch.float32,
        attn_implementation=implementation,
        trust_remote_code=config.trust_remote_code,
        **({"config": shape} if shape else {}),
    )
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
    change_layers(model, settings, mode, world)
    head = model.get_output_embeddings()
    if head is None:
        raise RunError(f"{type(model).__name__} has no language-model head")
    head.forward = LossHead(head, mode, routers)
    rows = LocalShards(model)
    shard_model(model, DTYPES[config.dtype], world)
    rows.attach_shards(model)
    return model


def change_layers(
    model: PreTrainedModel, settings: TrainerConfig, mode: Mode, world: World
) -> None:
    """Compiles the layers and makes them recompute activations, as configured. Call it before
    sharding: FSDP's hooks must wrap both."""
    compiles = is_compiled(settings, mode)
    if compiles and settings.compile is None and world.is_main:
        print(
            "trainer.compile: true, the default with flex; the first steps spend a minute or "
            "more compiling",
            flush=True,
        )
    for experts in experts_of(model).values() if compiles else ():
        # In a graph transformers replaces grouped_mm for float32 by a loop that torch cannot
        # compile, and if experts are divided or have
        # adapters the numbers of tokens would break the graph at every step.
        experts.forward = torch.compiler.disable(experts.forward)
    for layer in (
        module
        for module in model.modules()
        if type(module).__name__ in (model._no_split_modules or ())
    ):
        if compiles:
            layer.forward = compiled(layer.forward, "set trainer.compile = false")
        if settings.activation_checkpointing == "full":
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )


def mode_of(*models: PreTrainedModel) -> Mode:
    """Returns the mode in which the model computes a row; for several models that share rows,
    the mode that restricts rows the most."""
    return max(
        (model.get_output_embeddings().forward.mode for model in models), key=get_args(Mode).index
    )


def keep_old(model: PreTrainedModel, micro_batch: MicroBatch, scores: Scores) -> None:
    """Keeps what the policy that the batch began with has just computed: log-probabilities and,
    with router replay, routes."""
    routers = model.get_output_embeddings().forward.routers
    micro_batch.old_logprobs, micro_batch.routes = (
        scores.logprobs.detach(),
        routers.taken() if routers else None,
    )


def score(
    model: PreTrainedModel, batch: MicroBatch, world: World, entropy_gradient: bool = False
) -> Scores:
    """Scores the micro batch's loss tokens. `entropy_gradient`: whether the entropies have a
    gradient too.

    A row of an unpacked model must be one sample. Raises RunError if the model does not pass the
    prefix tree on to its attention.
    """
    head: LossHead = model.get_output_embeddings().forward
    assert head.mode != "unpacked" or batch.is_chain
    row = RowGather(len(batch.input_ids), world) if world.context_size > 1 else None
    tree = TreeMask(batch.subtree_ends, batch.position_ids, batch.queries, row)
    ids, positions = (
        x if batch.queries is None else x[batch.queries]
        for x in (batch.input_ids, batch.position_ids)
    )
    found = head.score(model, batch, (ids, positions, tree), entropy_gradient)
    if not torch.is_grad_enabled():
        reshard(model)
    return found
