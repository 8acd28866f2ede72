"""What a step computed at each trained token, kept on the device until its end and put in the order of the batch's samples."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl.run_dir.token_log import CLIPPED, LATER, MASKED
from rl.trainer.loss import LossTerms
from rl.trainer.model import Scores
from rl.trainer.packing import MicroBatch
from rl.trainer.parallel.world import World

ROWS = ("seen", "trainer_logprobs", "entropies", "flags", "reference_logprobs")


class TokenColumns:
    """Values of the n loss tokens of a batch, [ROWS, n] float32: those of this rank's micro batches, and 0 of all others."""

    def __init__(self, num_tokens: int, device: torch.device, has_reference: bool) -> None:
        self.has_reference = has_reference
        self.values = torch.zeros(len(ROWS), num_tokens, device=device)

    @torch.no_grad()
    def add(self, batch: MicroBatch, scores: Scores, terms: LossTerms) -> None:
        """Notes the tokens of a micro batch. Of one that was noted before, in an earlier epoch, only that it was left without gradient.

        Nothing here waits for the device.
        """
        assert terms.clipped is not None and terms.outside is not None
        flags = CLIPPED * terms.clipped + MASKED * terms.outside
        reference = torch.zeros_like(scores.entropies) if batch.reference_logprobs is None else batch.reference_logprobs
        new = torch.stack([torch.ones_like(reference), scores.logprobs, scores.entropies, flags.float(), reference])
        old = self.values[:, batch.places]
        old[3] += LATER * terms.masked * (old[3] < LATER)
        self.values.index_copy_(1, batch.places, torch.where(old[0] > 0, old, new))

    def columns(self, world: World) -> dict[str, np.ndarray] | None:
        """The columns of rl.run_dir.token_log on rank 0, None on the others. Every rank calls this: each has some of the tokens."""
        values = world.reduce(self.values, dist.ReduceOp.SUM)
        if not world.is_main:
            return None
        rows = dict(zip(ROWS, values.cpu(), strict=True))
        return {
            "trainer_logprobs": array(rows["trainer_logprobs"], torch.float32),
            "entropies": array(rows["entropies"], torch.float16),
            "flags": array(rows["flags"], torch.uint8),
            **({"reference_logprobs": array(rows["reference_logprobs"], torch.float32)} if self.has_reference else {}),
        }


def array(values: Tensor, dtype: torch.dtype) -> np.ndarray:
    """A copy for another thread."""
    return values.to(dtype, copy=True).numpy()
