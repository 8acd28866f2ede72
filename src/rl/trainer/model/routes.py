"""Router replay: which experts each layer's router chooses for each token, its route, is kept, and
chosen again in another pass.

Routers choose by a top-k over the scores of the experts. Here the chosen indices may be given ones;
their scores are gathered from the router's own, so the weights of experts are computed, and have
their gradient, as without replay. Rollout routing replay: https://arxiv.org/abs/2510.11370.

A free choice and a given one are the same operations, with a route of -1 for "choose freely" that
the choice replaces. So a pass gives the same bits again with its own routes, and recomputed
activations take the route of the first time, in compiled layers, too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rl.system.errors import RunError
from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.parallel.experts import experts_of, num_chosen


class Choice(TorchFunctionMode):
    """Within it, the top-k over a layer's experts takes the route of each token, and completes
    it."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts, self.count = experts, 0

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return result
        scores, route = args[0], self.experts.route
        shape = (scores.dim(), scores.shape[-1], result[1].shape[-1])
        if shape != (2, self.experts.num_routed, route.shape[1]):
            return result  # of groups of experts, or of keys in sparse attention
        self.count += 1
        chosen = torch.where(route < 0, result[1], route)
        route.copy_(chosen)
        return torch.return_types.topk((scores.gather(1, chosen), chosen))


class Routers:
    """The routers of a model. Routes of T tokens are [T, width] uint8: for each of the model's
    layers, with experts or not, the indices of the token's experts, one byte each, or two
    (little-endian) if there are more than 256 experts."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes over the choice of experts. Call it before adapters are added, which hide
        experts. Raises RunError without experts."""
        named, self.name = experts_of(model), type(model).__name__
        if not named:
            raise RunError(
                f"trainer.router_replay: {self.name} has no experts whose choice could be "
                "replayed; set it to off"
            )
        text = model.config.get_text_config()
        self.layers, self.experts = text.num_hidden_layers, list(named.values())
        self.numbers = [int(next(filter(str.isdecimal, name.split(".")))) for name in named]
        """The layer of each of `experts`."""
        self.chosen = num_chosen(text)
        self.count = self.experts[0].num_experts
        self.dtype = torch.uint8 if self.count <= 256 else torch.int16
        for name, experts in named.items():
            experts.num_routed = experts.num_experts
            self.take_over(model.get_submodule(name.rpartition(".")[0]), experts)

    @property
    def width(self) -> int:
        """Bytes of a token's routes."""
        return self.layers * self.chosen * self.dtype.itemsize

    def take_over(self, block: nn.Module, experts: Any) -> None:
        """Makes the router in `block` choose by the experts' `route`."""
        forward, name = block.forward, self.name

        def routed(*args: Any, **kwargs: Any) -> Any:
            with Choice(experts) as choice:
                output = forward(*args, **kwargs)
            if choice.count != 1:
                raise RunError(
                    f"{name} chooses experts in a way of its own, which cannot be replayed; "
                    "set trainer.router_replay = off"
                )
            return output

        # A compiled layer leaves it out: the experts, which must stay out of a graph, would break
        # one within this context.
        block.forward = torch.compiler.disable(routed)

    def set(self, batch: MicroBatch) -> None:
        """Sets the routes of the next pass: the batch's, or free choice. They stay, for
        activations may be computed again."""
        if batch.routes is not None:
            routes = batch.routes.view(self.dtype).view(-1, self.layers, self.chosen)
            for number, experts in zip(self.numbers, self.experts, strict=True):
                experts.route = routes[:, number].long()
            return
        self.choose_freely(batch.input_ids if batch.queries is None else batch.queries)

    def choose_freely(self, row: Tensor) -> None:
        """Lets the routers choose in the next pass over a row of T' tokens."""
        for experts in self.experts:
            experts.route = torch.full((len(row), self.chosen), -1, device=row.device)

    def taken(self) -> Tensor:
        """Returns the routes of the last pass, [T', width] uint8."""
        first = self.experts[0].route
        shape = (len(first), self.layers, self.chosen)
        routes = torch.zeros(shape, dtype=self.dtype, device=first.device)
        for number, experts in zip(self.numbers, self.experts, strict=True):
            routes[:, number] = experts.route
        return routes.flatten(1).view(torch.uint8)

    def check(self, routes: Tensor) -> None:
        """Raises RunError unless routes [T, width] are of this model: k different experts in
        each layer that has some."""
        if routes.shape[1] != self.width:
            raise RunError(
                f"trainer.router_replay: inference gave routes of {routes.shape[1]} bytes a "
                f"token, but {self.name} has {self.layers} "
                f"layers and {self.chosen} of {self.count} experts a token, {self.width} "
                "bytes; does inference serve the same model?"
            )
        chosen = routes.view(self.dtype).view(-1, self.layers, self.chosen)[:, self.numbers]
        chosen = chosen.sort(-1).values
        twice = (chosen.diff(dim=-1) == 0).any()
        if int(chosen.max()) >= self.count or int(chosen.min()) < 0 or bool(twice):
            raise RunError(
                f"trainer.router_replay: inference gave a route that {self.name} cannot "
                f"take: not {self.chosen} different ones of "
                f"{self.count} experts; set trainer.router_replay = trainer or off"
            )
