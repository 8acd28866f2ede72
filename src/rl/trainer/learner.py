"""Several adapters over one model, each trained with its own optimizer: the trainer of `rl serve`.

The model has adapters of the largest rank. Those of a client lie in it while its calls are
computed, and beside it otherwise. A smaller rank is padded with zeros: where A and B are both 0 so
are their gradients, and AdamW leaves them 0, so the first `rank` rows of A and columns of B are
trained as if there were no others. The scale alpha / rank is the client's own.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file
from torch import Tensor

from rl.config.loss import AnyLossConfig, LossConfig
from rl.config.run import RLConfig
from rl.run_dir.checksums import DIGESTS, checksum
from rl.run_dir.files import CorruptFileError, write_directory, write_file
from rl.run_dir.safetensors import HASH, digest, digest_of_file
from rl.system.errors import RunError
from rl.trainer import determinism
from rl.trainer.data.batch_sources import prepare
from rl.trainer.loss.common import LossInputs
from rl.trainer.loss.losses import loss_function
from rl.trainer.measure.performance import free_bytes
from rl.trainer.model import lora
from rl.trainer.model.head import mode_of, score
from rl.trainer.model.policy import DTYPES, load_policy
from rl.trainer.optim import MOMENTS, local, make_optimizer, optimizer_step
from rl.trainer.parallel.world import World
from rl.trainer.store.checkpoint import require_space, write_tensors
from rl.trainer.train import loss_inputs
from rl.wire.messages import ITEM_BYTES, TrainBatch, TrainedSpan, TrainingSample
from rl.wire.training_calls import CallError, Example, LossCall, NoRoomError, Scored, Step
from rl.wire.turns import pack_ids

STATE, RECORD = "state.safetensors", "state.json"
COPIES = 4
"""A client's tensors for each weight: itself, its gradient and AdamW's two moments."""
A, B = ".lora_A.", ".lora_B."


@dataclass
class Adapters:
    """One client's adapters. While they are in the model, `tensors` and `gradients` are out of
    date."""

    rank: int
    tensors: dict[str, Tensor]
    """By `weight.`, `exp_avg.`, `exp_avg_sq.` or `step.` and the parameter's name; padded to the
    model's rank."""
    gradients: dict[str, Tensor]
    """By the parameter's name; empty if there are none."""


class AdapterLearner:
    """The model with the adapters of all clients, see rl.wire.training_calls.Learner."""

    def __init__(self, config: RLConfig, base: Path, world: World):
        assert config.trainer.lora
        self.config, self.base, self.world, self.settings = config, base, world, config.trainer.lora
        determinism.apply(config.trainer, world.device)
        torch.manual_seed(config.seed)
        self.model = load_policy(str(base), config.model, config.trainer, world)
        self.optimizer = make_optimizer(self.model, config.trainer.optim)
        self.parameters = lora.trainable(self.model)
        text = self.model.config.get_text_config()
        self.vocab_size, self.hidden_size = text.vocab_size, text.hidden_size
        self.adapters: dict[str, Adapters] = {}
        self.inside = ""
        """Whose adapters are in the model; empty for nobody's."""
        self.has_stepped = False
        """Whether any client's adapters have had a step here."""

    # Whose adapters are in the model --------------------------------------------------------------

    def _live(self) -> dict[str, Tensor]:
        """Returns the tensors in model and optimizer by their keys in `Adapters.tensors`."""
        tensors = {f"weight.{name}": parameter for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state[parameter]
            tensors |= {f"{key}.{name}": state[key] for key in (*MOMENTS, "step")}
        return {key: local(tensor.detach()) for key, tensor in tensors.items()}

    def _of(self, name: str) -> Adapters:
        """Returns a client's adapters. Raises CallError if there are none."""
        if name not in self.adapters:
            raise CallError(f"model {name} is not loaded")
        return self.adapters[name]

    def _cut(self, name: str) -> dict[str, Tensor]:
        """Returns a client's tensors with its own rank."""
        self._leave()
        adapters = self._of(name)
        return {key: cut(key, tensor, adapters.rank) for key, tensor in adapters.tensors.items()}

    def _enter(self, name: str) -> None:
        """Puts a client's adapters into the model. Raises CallError if there are none."""
        adapters = self._of(name)
        if self.inside == name:
            return
        self._leave()
        for key, tensor in self._live().items():
            tensor.copy_(adapters.tensors[key])
        for key, gradient in adapters.gradients.items():
            self.parameters[key].grad = gradient
        for layer in lora.layers(self.model).values():
            layer.scaling[lora.ADAPTER] = self.settings.alpha / adapters.rank
        adapters.gradients, self.inside = {}, name

    def _leave(self) -> None:
        """Copies the adapters in the model to where their client's are kept."""
        if adapters := self.adapters.get(self.inside):
            for key, tensor in self._live().items():
                adapters.tensors[key].copy_(tensor)
            adapters.gradients = {
                key: p.grad for key, p in self.parameters.items() if p.grad is not None
            }
        self.optimizer.zero_grad()
        self.inside = ""

    def forget(self, name: str) -> None:
        self.adapters.pop(name, None)
        if self.inside == name:
            self._leave()

    def create(self, name: str, rank: int, seed: int) -> None:
        """See Learner. A is drawn as peft draws it, uniformly within 1 / sqrt(its columns), from
        `seed` alone."""
        if not 1 <= rank <= self.settings.rank:
            raise CallError(
                f"rank {rank}: this server trains ranks from 1 to {self.settings.rank}; start it "
                f"with --trainer.lora.rank {rank}"
            )
        live, free = self._live(), free_bytes(self.world.device)
        # with a gradient
        needed = COPIES * sum(local(p).nbytes for p in self.parameters.values())
        if name not in self.adapters and needed > free:
            raise NoRoomError(
                f"another model takes {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB "
                "of memory are free: unload one"
            )
        self.forget(name)
        generator = torch.Generator().manual_seed(seed)
        tensors = {key: torch.zeros_like(tensor) for key, tensor in live.items()}
        for key, tensor in tensors.items():
            if key.startswith("weight.") and A in key:
                width = tensor.shape[1]
                drawn = torch.empty(rank, width).uniform_(-1, 1, generator=generator)
                tensor[:rank] = drawn / math.sqrt(width)
        self.adapters[name] = Adapters(rank, tensors, {})

    # Computing ------------------------------------------------------------------------------------

    def forward_backward(
        self, name: str, examples: list[Example], loss: LossCall, backward: bool
    ) -> Scored:
        settings = loss_settings(loss)
        self._enter(name)
        flat = {  # of all targets, in the order of the samples of `as_batch`
            key: torch.from_numpy(np.concatenate([getattr(x, key).T.ravel() for x in examples]))
            for key in ("targets", "advantages", "logprobs", "trained")
        }
        logprobs, losses = torch.zeros(2, len(flat["targets"]))
        mode = mode_of(self.model)
        packed = prepare(as_batch(examples), self.config, self.world, self.hidden_size, mode=mode)
        for row in packed.micro_batches:
            values = {key: column[row.token_index] for key, column in flat.items()}
            trained = values.pop("trained").to(self.world.device)
            batch = replace(row, **values).to(self.world.device)
            with torch.set_grad_enabled(backward):
                scores = score(self.model, batch, self.world)
                inputs = loss_inputs(batch, len(packed.batch.samples), scores, self.world)
                terms = terms_of(inputs, trained, settings)
                if backward:
                    terms.sum().backward()
            logprobs[row.token_index] = scores.trainer_logprobs.detach().cpu()
            losses[row.token_index] = terms.detach().cpu()
        if not bool(losses.isfinite().all()):
            if backward:
                self.optimizer.zero_grad()
            discarded = "; the gradient of this model is discarded" * backward
            raise CallError(f"the loss is not finite{discarded}")
        sizes = [example.targets.size for example in examples]
        return Scored(
            *(
                [
                    part.numpy().reshape(example.targets.T.shape).T
                    for example, part in zip(examples, column.split(sizes), strict=True)
                ]
                for column in (logprobs, losses)
            )
        )

    def optimizer_step(self, name: str, step: Step) -> float:
        self._enter(name)
        if all(parameter.grad is None for parameter in self.parameters.values()):
            raise CallError(
                "optim_step without a gradient: no forward_backward has succeeded since the "
                "last one"
            )
        for group in self.optimizer.param_groups:
            group |= {"betas": step.betas, "eps": step.eps, "weight_decay": step.weight_decay}
        limit = {"max_grad_norm": step.max_grad_norm or math.inf}
        config = self.config.trainer.optim.model_copy(update=limit)
        try:
            norm = optimizer_step(self.model, self.optimizer, config, step.lr, 0, 0.0)
        except RunError as error:
            self.optimizer.zero_grad()
            raise CallError(f"the gradient is not finite and was discarded ({error})") from None
        if not self.has_stepped:
            self.has_stepped = True
            lora.warn_of_untrained(self.model, self.optimizer)
        return norm

    # Files ----------------------------------------------------------------------------------------

    def save(self, name: str, folder: Path, notes: Mapping[str, Any]) -> None:
        """See Learner. A gradient is not saved: it is computed again from the calls that made
        it."""
        tensors = {key: tensor.cpu() for key, tensor in self._cut(name).items()}

        def fill(temporary: Path) -> None:
            require_space(temporary, tensors.values())
            write_tensors(temporary / STATE, tensors)
            record = {
                "rank": self.adapters[name].rank,
                "files": {STATE: checksum(temporary / STATE)},
            }
            (temporary / RECORD).write_text(json.dumps({**notes, **record}))

        write_directory(folder, fill)

    def notes(self, folder: Path) -> dict[str, Any]:
        try:
            record = json.loads((folder / RECORD).read_text())
            if record["files"][STATE] == checksum(folder / STATE):
                return record
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise CorruptFileError(f"{folder}: missing or damaged")

    def load(self, name: str, folder: Path, optimizer: bool) -> None:
        rank, saved = self.notes(folder)["rank"], load_file(folder / STATE)
        if saved.keys() != self._live().keys():
            raise CallError(
                f"{folder.name} is a state of another model or of other trainer.lora.targets"
            )
        self.create(name, rank, 0)
        for key, tensor in self._cut(name).items():
            if optimizer or key.startswith("weight."):
                tensor.copy_(saved[key])

    def publish(self, name: str, folder: Path, record: Path | None) -> None:
        now, dtype = self._cut(name), DTYPES[self.config.model.dtype]
        tensors = {
            lora.name_in_file(key): now[f"weight.{key}"].to(dtype).cpu().contiguous()
            for key in self.parameters
        }
        content = {
            "hash": HASH,
            "tensors": {
                key: digest(memoryview(tensor.view(torch.uint8).numpy()))
                for key, tensor in tensors.items()
            },
            "made_by": determinism.conditions(self.config.trainer, self.world, mode_of(self.model)),
        }

        def fill(temporary: Path) -> None:
            require_space(temporary, tensors.values())
            lora.write_config(temporary, self.model, self.base, self.adapters[name].rank)
            config = temporary / "adapter_config.json"
            files = {"files": {config.name: digest_of_file(config)}}
            write_tensors(temporary / lora.WEIGHTS_FILE, tensors)
            (temporary / DIGESTS).write_text(json.dumps(content | files, indent=1))

        if record:
            write_file(record, json.dumps(content, indent=1).encode())
        write_directory(folder, fill)


def terms_of(inputs: LossInputs, trained: Tensor, settings: AnyLossConfig) -> Tensor:
    """Returns the loss of each target [N], 0 for others than the `trained` [N]."""

    def of_trained(values: Tensor) -> Tensor:
        return torch.where(trained, values, 0.0)

    def sequence_sum(values: Tensor) -> Tensor:
        return inputs.sequence_sum(of_trained(values))

    part = replace(inputs, sequence_sum=sequence_sum)
    return of_trained(loss_function(settings)(part, settings)[0])


def cut(key: str, tensor: Tensor, rank: int) -> Tensor:
    """Returns the part of a padded tensor that has the client's rank: rows of A, columns of B."""
    if not tensor.ndim:
        return tensor
    return tensor[:rank] if A in key else tensor[:, :rank] if B in key else tensor


def as_batch(examples: list[Example]) -> TrainBatch:
    """Returns one sample for each example and column of targets. What they predict is replaced
    afterwards, since an example may ask for any target: a sample's own are the tokens that
    follow."""
    samples = []
    for example in examples:
        count = len(example.token_ids)
        sample = TrainingSample(
            packed_ids=pack_ids([*example.token_ids.tolist(), 0]),
            spans=[TrainedSpan(1, count + 1, policy_version=-1, advantage=0.0)],
            packed_logprobs=bytes(ITEM_BYTES * count),
            env="",
            group_id=0,
            rollout_id=0,
        )
        samples += [sample] * example.targets.shape[1]
    return TrainBatch(step=1, samples=samples)


def loss_settings(call: LossCall) -> Any:
    """Returns the settings of a loss. Raises CallError for a value that it does not take."""
    try:
        return TypeAdapter(LossConfig).validate_python({"type": call.type, **call.settings})
    except ValidationError as error:
        fault = error.errors()[0]
        raise CallError(f"{call.type}: {fault['msg']}, not {fault['input']!r}") from None
