"""The weights of a single rank, which shares them with no other: what FSDP would copy through its
buffers stays where it is.

The model's parameters are the masters, in float32. While a block computes, copies in the compute
type take their places: from its forward pass to the end of the backward pass, or, without one,
until `leave`. Weights that have the compute type anyway are their own copies. Each backward pass
adds a copy's gradient to its master's, in float32.
"""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]
"""Parameters, each with all modules and names under which it is used."""


class Copies:
    """The weights of a block that are of no block within it.

    The backward pass may reach no weight of some blocks, so the first that it reaches makes all
    blocks of the `model` leave at its end.
    """

    def __init__(self, model: nn.Module, places: Places, dtype: torch.dtype) -> None:
        self.model, self.places, self.dtype = model, places, dtype
        self.by_master: dict[nn.Parameter, nn.Parameter] = {}
        self.computing = self.is_test = False

    def compute_in(self, dtype: torch.dtype, is_test: bool) -> None:
        """Changes the compute type. In a test, copies exist during the forward pass alone."""
        self.leave()
        self.dtype, self.is_test, self.by_master = dtype, is_test, {}

    def enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a forward pass: puts current copies into place, and casts the inputs."""
        if not self.computing:
            self.computing = True
            masters = [master for master in self.places if master.dtype != self.dtype]
            copies = [self.copy_of(master) for master in masters]
            if copies:  # one kernel on a GPU
                with torch.no_grad():
                    torch._foreach_copy_(copies, masters)
            for master, copy in zip(masters, copies, strict=True):
                self.put(master, copy)
        return tree_map_only(Tensor, self.cast, (args, kwargs))

    def pass_by(self, *_: Any) -> None:
        """After a forward pass."""
        if self.is_test:
            self.leave()

    def cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def copy_of(self, master: nn.Parameter) -> nn.Parameter:
        """Returns a master's copy, whatever its values."""
        if master not in self.by_master:
            empty = torch.empty_like(master, dtype=self.dtype, requires_grad=False)
            copy = nn.Parameter(empty, requires_grad=master.requires_grad)
            if master.requires_grad:
                copy.register_post_accumulate_grad_hook(partial(self.pass_on, master))
            self.by_master[master] = copy
        return self.by_master[master]

    def put(self, master: nn.Parameter, parameter: nn.Parameter) -> None:
        for module, leaf in self.places[master]:
            module._parameters[leaf] = parameter

    def leave(self) -> None:
        """Puts the masters back."""
        for master in self.by_master:
            self.put(master, master)
        self.computing = False
        if self.is_test:
            self.by_master = {}

    def pass_on(self, master: nn.Parameter, copy: nn.Parameter) -> None:
        """Adds the gradient of a backward pass to the master's."""
        assert copy.grad is not None
        gradient, copy.grad = copy.grad.to(master.dtype), None
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        if not vars(self.model).get("leaves"):
            self.model.leaves = True
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(leave_all, self.model))


def keep_copies(blocks: list[nn.Module], whole: set[nn.Parameter], dtype: torch.dtype) -> None:
    """Makes blocks, inner ones first and the model last, compute in `dtype`; parameters of `whole`
    keep their own type."""
    # of a pass that an error has ended
    blocks[-1].register_forward_pre_hook(lambda model, _: leave_all(model))
    taken = set(whole)
    for block in blocks:
        places: Places = defaultdict(list)
        for module in block.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is None or parameter in taken:
                    continue
                if parameter.is_floating_point():
                    places[parameter].append((module, leaf))
        taken.update(places)
        block.copies = copies = Copies(blocks[-1], places, dtype)
        block.register_forward_pre_hook(copies.enter, with_kwargs=True)
        block.register_forward_hook(copies.pass_by)


def copies_of(model: nn.Module) -> list[Copies]:
    """Returns the copies of all blocks of a model; none if it is sharded."""
    return [vars(module)["copies"] for module in model.modules() if "copies" in vars(module)]


def leave_all(model: nn.Module) -> None:
    """Puts all masters of a model back."""
    model.leaves = False
    for copies in copies_of(model):
        copies.leave()
