"""Measures the difference between trainer and inference on the same tokens with the same weights:
in batches, probes and `rl doctor`.

`python -m rl.trainer.measure.parity CONFIG.toml FILE.batch` scores samples as the trainer does. Its
last line of output is one JSON object: the model's `sliding_window` (null without one), and
`tokens`, a list of [position, temperature, difference].
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from rl.config.command_line import from_toml
from rl.config.run import RLConfig
from rl.models.folder import resolve_model
from rl.system.errors import RunError
from rl.trainer.data.batch_sources import prepare
from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.data.packing import Packed
from rl.trainer.loss.common import MAX_LOG_RATIO, k3
from rl.trainer.model.head import mode_of, score
from rl.trainer.model.modes import layer_windows
from rl.trainer.model.policy import load_policy
from rl.trainer.parallel.world import World, start_world
from rl.wire.batch_file import decode_batch
from rl.wire.messages import TrainBatch, TrainingSample
from rl.wire.parity import GROSS, Limit, Parity, parity_from
from rl.wire.transport import OrchestratorClient

TIMEOUT_S = 600.0
PROBE_WAIT_S, MOST_PROBE_WAIT_S = 15.0, 60.0
"""Seconds that a checkpoint waits for inference to load the version and answer: at first, and
after several waits in vain."""


class ParitySums:
    """Sums over differences of log-probabilities, without gradient."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        """[4]: number of tokens; sums of |d|, of the KL exp(d) - 1 - d, and of its square."""
        self.largest = torch.zeros((), dtype=torch.float32, device=device)

    def add(self, differences: Tensor, counted: Tensor) -> None:
        """Adds `differences` [N] float32, trainer minus inference in nats, clamped to +-10;
        `counted` [N] bool selects those that count."""
        if len(differences):
            d = differences.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).where(counted, 0.0)
            kl = k3(d.double())
            self.sums += torch.stack([counted, d.abs(), kl, kl.square()]).double().sum(1)
            self.largest = torch.maximum(self.largest, d.abs().max())

    def total(self, world: World) -> Parity | None:
        """Returns the agreement over all ranks; None if no token counts. Every rank calls this."""
        sums = world.reduce(self.sums, dist.ReduceOp.SUM).tolist()
        largest = float(world.reduce(self.largest, dist.ReduceOp.MAX))
        return parity_from(*sums, largest) if sums[0] else None


class ParityWatch:
    """Judges by each batch or a probe whether a run's trainer agrees with its inference."""

    def __init__(
        self,
        limit: Limit,
        strict: bool | None,
        client: OrchestratorClient | None,
        has_adapters: bool = False,
    ):
        """`strict`: whether a disagreement ends the run; None: only beyond GROSS and in the
        first comparison. `client`: only on rank 0. `has_adapters`: whether adapters are
        trained: they add nothing to version 0, so its comparison does not count as the first."""
        self.limit, self.strict, self.client = limit, strict, client
        self.has_adapters = has_adapters
        self.is_first = True
        self.seen = False
        """Whether anything has been compared since the last checkpoint."""
        self.unjudged = 0
        """Number of consecutive checkpoints without any comparison."""
        self.wait_s = PROBE_WAIT_S
        """Seconds that the next probe may take: twice as many after each wait in vain, because
        large models take longer to load."""

    def judge(self, parity: Parity | None, version: int) -> dict[str, float]:
        """Returns the metrics of a comparison of this version; empty if nothing was compared.
        Raises RunError for a disagreement that ends the run."""
        if parity is None:
            return {}
        is_first, self.seen = self.is_first, True
        self.is_first = is_first and self.has_adapters and version == 0
        agrees = parity.within(self.limit)
        if not agrees and self.strict:
            raise RunError(
                f"{parity.complaint(self.limit)}. This ends the run because of "
                "trainer.strict_parity = true"
            )
        if self.strict is None and is_first and not parity.within(GROSS):
            raise RunError(
                f"{parity.complaint(self.limit)}. This is more than rounding: the two compute "
                "different models, so samples of one cannot "
                "train the other; docs/models.md lists known differences by family. "
                "trainer.strict_parity = false trains anyway"
            )
        return parity.metrics | {"parity/agrees": float(agrees)}

    def at_checkpoint(
        self,
        step: int,
        model: PreTrainedModel,
        pack: Callable[[TrainBatch], Packed],
        world: World,
        asks: bool = True,
    ) -> dict[str, float]:
        """Compares on a probe of version `step`, the model's own, if no batch since the last
        checkpoint allowed it. Every rank calls this.

        Returns the metrics, which say so if nothing was compared. `asks`: whether inference will
        load this version, so that a probe makes sense. Waits for: inference to load the version and
        answer, `wait_s` at most.
        """
        seen, self.seen = self.seen, False
        if seen:
            self.unjudged = 0
            return {}
        probe = self.client.probe(step, self.wait_s) if self.client and asks else []
        samples = msgspec.msgpack.decode(
            world.broadcast_bytes(msgspec.msgpack.encode(probe)), type=list[TrainingSample]
        )
        if not samples:
            self.unjudged, self.wait_s = self.unjudged + 1, min(2 * self.wait_s, MOST_PROBE_WAIT_S)
            return {"parity/unjudged": float(self.unjudged)}
        self.unjudged = 0
        sums = ParitySums(world.device)
        for row in pack(TrainBatch(step=step + 1, samples=samples)).micro_batches:
            part = row.to(world.device)
            sums.add(differences(model, part, world), part.lag_zero)
        metrics = self.judge(sums.total(world), step)
        self.seen = False
        return metrics


@torch.no_grad()
def differences(model: PreTrainedModel, batch: MicroBatch, world: World) -> Tensor:
    """Returns [N] float32: the trainer's log-probability of each loss token minus inference's,
    in nats."""
    return score(model, batch, world).trainer_logprobs - batch.logprobs


def main() -> None:
    config = from_toml(Path(sys.argv[1]))
    batch = decode_batch(Path(sys.argv[2]).read_bytes(), sys.argv[2]).batch
    world = start_world(
        use_gpus=config.trainer.gpus != 0 and torch.cuda.is_available(), timeout_s=TIMEOUT_S
    )
    model = load_policy(resolve_model(config.model), config.model, config.trainer, world)
    window = next(filter(None, layer_windows(model)), None)
    print(json.dumps({"sliding_window": window, "tokens": compare(model, config, batch, world)}))
    dist.destroy_process_group()


def compare(
    model: PreTrainedModel, config: RLConfig, batch: TrainBatch, world: World
) -> list[tuple[int, float, float]]:
    """Returns (position, temperature, difference) of every sampled token of the batch."""
    rows: list[tuple[int, float, float]] = []
    width = model.config.get_text_config().hidden_size
    for row in prepare(batch, config, world, width, mode=mode_of(model)).micro_batches:
        part = row.to(world.device)
        positions = (part.position_ids[part.predictors][part.predictor_of] + 1).tolist()
        temperatures = [round(value, 6) for value in part.temperatures[part.predictor_of].tolist()]
        rows += zip(positions, temperatures, differences(model, part, world).tolist(), strict=True)
    return rows


if __name__ == "__main__":
    main()
