"""Shards the model over the ranks (FSDP2, HSDP), and one row of tokens over several ranks (context
parallelism).

Context parallelism: the ranks of a context group hold the same row of T tokens, and each computes
its own part of the positions, its queries. Only attention crosses ranks: it gathers the keys and
values of the whole row, one layer at a time; all other activations stay local. With causal
attention later tokens cost more, so each rank takes one chunk from the front of the row and one
from its end (the zigzag of https://arxiv.org/abs/2407.21783, section 3.3.2).

Each rank weights its own loss tokens, and FSDP sums the gradients over all ranks, whether they
share a row or not.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from transformers import PreTrainedModel

from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.parallel.copies import copies_of, keep_copies, leave_all
from rl.trainer.parallel.experts import experts_of, shard_of
from rl.trainer.parallel.world import World


def shard_model(model: PreTrainedModel, dtype: torch.dtype, world: World) -> None:
    """Shards the model over the ranks, in place: it computes in `dtype` and reduces gradients in
    float32. A single rank keeps plain weights, see copies.py.

    With a mesh of (replicate, shard) each replica is sharded over its own ranks, and gradients are
    summed over both dimensions. They are summed, not averaged as is FSDP's default, because each
    token's loss is already weighted by its share of the whole batch.
    """
    kept = set(filter(is_whole, model.parameters()))
    if world.size == 1:
        blocks = [*reversed(untied_blocks(model)), model.to(world.device)]
        keep_copies(blocks, kept, dtype)
        return
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # If the weights are not sharded, freeing the gathered ones between forward and backward would
    # save nothing.
    reshard = world.mesh.size(-1) > 1
    for parameter in kept:
        parameter.data = parameter.data.to(world.device)
    if world.experts:
        copies = world.experts[world.experts.mesh_dim_names[:-1]]
        # Inputs of experts include the router's weights, which some models keep in float32.
        inner = replace(precision, cast_forward_inputs=False)
        for experts in experts_of(model).values():
            among = partial(shard_of, mesh=world.experts)
            fully_shard(
                experts,
                mesh=copies,
                mp_policy=inner,
                reshard_after_forward=copies.size(-1) > 1,
                shard_placement_fn=among,
            )
    # inner blocks first, where blocks are nested (Falcon-Mamba)
    for block in reversed(untied_blocks(model)):
        fully_shard(
            block,
            mesh=world.mesh,
            mp_policy=precision,
            reshard_after_forward=reshard,
            ignored_params=kept,
        )
    fully_shard(
        model,
        mesh=world.mesh,
        mp_policy=precision,
        reshard_after_forward=False,
        ignored_params=kept,
    )
    # A rank whose tokens pass by an expert has no gradient of it. Without zeros in its place,
    # ranks would add different experts'.
    model.set_reduce_scatter_unused_params(True)  # see finish_gradients
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Neither setting recurses, and the factor without the other setting needs nccl's
            # PREMUL_SUM.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def is_whole(parameter: nn.Parameter) -> bool:
    """Whether each rank holds all of a parameter, which FSDP neither shards nor casts: it is
    computed with in the type of its file."""
    return hasattr(parameter, "file_type")


def note_reached(held: FSDPParam) -> Tensor:
    """In place of FSDP's own: returns the gradient that a backward pass has given to a gathered
    weight, and notes at the weight that it has one."""
    held.sharded_param.is_reached = True
    return held._get_grad_inner_tensor(held.unsharded_param.grad)


FSDPParam.unsharded_grad_data = property(note_reached)  # type: ignore[assignment]


def finish_gradients(model: nn.Module, world: World) -> None:
    """Removes the gradients of weights that no backward pass has reached on any rank, which are
    zeros in place of none (see `shard_model`): the optimizer leaves these weights alone then, as
    it does on one rank. Sums those of weights that are not sharded. Every rank calls this,
    before an optimizer step."""
    if world.size == 1:
        return reshard(model)
    parameters = [*model.parameters()]
    flags = [vars(parameter).pop("is_reached", is_whole(parameter)) for parameter in parameters]
    reached = world.reduce(
        torch.tensor(flags, dtype=torch.int32, device=world.device), dist.ReduceOp.MAX
    )
    for parameter, is_reached in zip(parameters, reached.tolist(), strict=True):
        if not is_reached:
            parameter.grad = None
        elif is_whole(parameter) and parameter.grad is not None:
            world.reduce(parameter.grad, dist.ReduceOp.SUM)


def untied_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the modules to gather one by one: those that transformers would not split, except
    modules with a tensor that the model also uses elsewhere (BERT's embedding, tied to the
    head), because sharding these separately would make two tensors of it."""

    def places(module: nn.Module) -> Counter[nn.Parameter]:
        return Counter(
            parameter for part in module.modules() for parameter in part.parameters(recurse=False)
        )

    everywhere = places(model)
    blocks = [
        module
        for module in model.modules()
        if type(module).__name__ in (model._no_split_modules or ())
    ]
    return [
        block
        for block in blocks
        if all(everywhere[parameter] == count for parameter, count in places(block).items())
    ]


def reshard(model: PreTrainedModel) -> None:
    """Frees the weights that a forward pass gathered. A backward pass does this too; after a
    forward pass alone the model's parameters would remain the unsharded tensors in the compute
    dtype, and would be published or saved as such."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    leave_all(model)


def compute_in(model: PreTrainedModel, dtype: torch.dtype, is_test: bool = False) -> None:
    """Makes the sharded model compute in another type from its next pass on. FSDP has no other way
    to change what it gathers weights as. In a test each layer's weights are freed behind it, also
    where training keeps them."""
    for copies in copies_of(model):
        copies.compute_in(dtype, is_test)
    if isinstance(model, FSDPModule) and model._get_fsdp_state()._is_root is not None:
        model.reset_iter_state()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._mp_policy = replace(state._mp_policy, param_dtype=dtype)
            for group in state._fsdp_param_groups:
                usual = vars(group).setdefault("usual_mesh_info", group.post_forward_mesh_info)
                group.post_forward_mesh_info = group.mesh_info if is_test else usual
                group.mp_policy = state._mp_policy
                group._init_mp_dtypes()
                for parameter in group.fsdp_params:
                    parameter.all_gather_outputs = []
                    vars(parameter).pop("_unsharded_param", None)


def reduce_replicas(model: PreTrainedModel, last: bool, world: World) -> None:
    """Makes the next backward pass sum gradients over the replicas only if it is the `last` one
    before an optimizer step."""
    if world.num_replicas > 1:
        assert isinstance(model, FSDPModule)
        model.set_requires_all_reduce(last)


def parts_of_row(length: int, ranks: int) -> list[Tensor]:
    """Returns the positions that each of `ranks` ranks computes in a row of `length` tokens: [T']
    int64, ascending, never empty.

    The row is cut into 2 * ranks chunks of equal length (to one token); rank r gets chunks r and 2
    * ranks - 1 - r. If a row has too few tokens, ranks that would get none compute the first token
    again.
    """
    bounds = [length * chunk // (2 * ranks) for chunk in range(2 * ranks + 1)]
    chunks = [torch.arange(start, end) for start, end in pairwise(bounds)]
    shares = [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)]
    return [part if len(part) else torch.zeros(1, dtype=torch.int64) for part in shares]


def slots_of_row(shares: list[Tensor]) -> Tensor:
    """Returns [T] int64: the index of each position in the concatenation of the shares, each
    padded to the longest part."""
    slots = torch.full((max(int(part[-1]) for part in shares) + 1,), -1)
    longest = max(map(len, shares))
    # a token that several ranks compute belongs to the first
    for rank, part in reversed(list(enumerate(shares))):
        slots[part] = rank * longest + torch.arange(len(part))
    return slots


def localise(batch: MicroBatch, world: World) -> MicroBatch:
    """Returns this rank's part of a row shared by its context group, see MicroBatch; without such a
    group, the row itself.

    Every loss token belongs to exactly one rank, the one with the position that predicts it.
    """
    if world.context_size == 1:
        return batch
    shares = parts_of_row(len(batch.input_ids), world.context_size)
    slots, longest = slots_of_row(shares), max(map(len, shares))
    mine = slots // longest == world.context_rank
    kept, tokens = mine[batch.predictors], mine[batch.predictors][batch.predictor_of]
    predictors, temperatures = (slots % longest)[batch.predictors[kept]], batch.temperatures[kept]
    # computes logits of one position anyway: every rank takes part in every collective
    if not len(predictors):
        predictors, temperatures = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    names = (
        "targets logprobs advantages weights sequences token_index envs teacher_logprobs lag_zero"
    )
    columns = {name: getattr(batch, name) for name in names.split()}
    values = {name: x if x is None else x[tokens] for name, x in columns.items()}
    predictor_of = (kept.cumsum(0) - 1)[batch.predictor_of[tokens]]
    queries = shares[world.context_rank]
    values["routes"] = None if batch.routes is None else batch.routes[queries]
    if batch.kept is not None:
        of, ids = batch.kept[:, tokens[batch.kept[0]]]
        values["kept"] = torch.stack([(tokens.cumsum(0) - 1)[of], ids])
    return replace(
        batch,
        queries=queries,
        predictors=predictors,
        temperatures=temperatures,
        predictor_of=predictor_of,
        **values,
    )


class RowGather:
    """Assembles a row of `length` tokens from its shares, on every rank that shares it. Gradients
    flow back to the shares."""

    def __init__(self, length: int, world: World) -> None:
        shares = parts_of_row(length, world.context_size)
        self.group, self.ranks = world.context_group, world.context_size
        self.length, self.longest = len(shares[world.context_rank]), max(map(len, shares))
        self.slots = slots_of_row(shares).to(world.device)

    def __call__(self, part: Tensor) -> Tensor:
        """[..., T', D] at this rank's queries -> [..., T, D] of the whole row. Every rank of the
        group calls this."""
        return GatherRow.apply(part.movedim(-2, 0), self).movedim(0, -2)

    def gather(self, part: Tensor) -> Tensor:
        """[T', ...] -> [T, ...], without gradient."""
        padded = part.new_zeros(self.longest, *part.shape[1:])
        padded[: self.length] = part
        whole = part.new_empty(self.ranks * self.longest, *part.shape[1:])
        dist.all_gather_into_tensor(whole, padded, group=self.group)
        return whole[self.slots]


class GatherRow(torch.autograd.Function):
    """[T', ...] -> [T, ...]. Backward: the gradients of all ranks at this rank's queries, summed
    in float32."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor, row: RowGather) -> Tensor:
        ctx.row = row
        return row.gather(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        row = ctx.row
        padded = grad.new_zeros(row.ranks * row.longest, *grad.shape[1:], dtype=torch.float32)
        padded[row.slots] = grad.float()
        share = padded.new_empty(row.longest, *grad.shape[1:])
        dist.reduce_scatter_tensor(share, padded, group=row.group)
        return share[: row.length].to(grad.dtype), None


class ContextSum(torch.autograd.Function):
    """Sums values over the ranks of a group, on each of them; backward therefore sums the
    gradients of all of them."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return ContextSum.apply(grad, ctx.group), None


def sum_over_context(values: Tensor, world: World) -> Tensor:
    """Sums `values` over the ranks that share this rank's rows, with gradient. Every rank of the
    group calls this."""
    return values if world.context_size == 1 else ContextSum.apply(values, world.context_group)
