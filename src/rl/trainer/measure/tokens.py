"""The values that a step computes at each trained token, kept on the device until the step ends,
in the order of the batch's samples."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl.run_dir.token_log import CLIPPED, LATER, MASKED
from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.loss.common import LossTerms
from rl.trainer.model.head import Scores
from rl.trainer.parallel.world import World

ROWS = ("seen", "trainer_logprobs", "entropies", "flags", "reference_logprobs")


class TokenColumns:
    """Values of a batch's n loss tokens, [ROWS, n] float32; 0 for tokens that are not in this
    rank's micro batches."""

    def __init__(self, num_tokens: int, device: torch.device, has_reference: bool) -> None:
        self.has_reference = has_reference
        self.values = torch.zeros(len(ROWS), num_tokens, device=device)

    @torch.no_grad()
    def add(self, batch: MicroBatch, scores: Scores, terms: LossTerms) -> None:
        """Records the tokens of a micro batch. For tokens recorded in an earlier epoch, records
        only whether they now have no gradient.

        Never waits for the device.
        """
        flags = CLIPPED * terms.clipped + MASKED * terms.outside
        reference = (
            torch.zeros_like(scores.entropies)
            if batch.reference_logprobs is None
            else batch.reference_logprobs
        )
        new = torch.stack(
            [
                torch.ones_like(reference),
                scores.logprobs,
                scores.entropies,
                flags.float(),
                reference,
            ]
        )
        old = self.values[:, batch.token_index]
        old[3] += LATER * terms.without_gradient * (old[3] < LATER)
        self.values.index_copy_(1, batch.token_index, torch.where(old[0] > 0, old, new))

    def columns(self, world: World) -> dict[str, np.ndarray] | None:
        """Returns the columns of rl.run_dir.token_log on rank 0, None on the others. Every rank
        calls this: each has some tokens."""
        values = world.reduce(self.values, dist.ReduceOp.SUM)
        if not world.is_main:
            return None
        rows = dict(zip(ROWS, values.cpu(), strict=True))
        return {
            "trainer_logprobs": array(rows["trainer_logprobs"], torch.float32),
            "entropies": array(rows["entropies"], torch.float16),
            "flags": array(rows["flags"], torch.uint8),
            **(
                {"reference_logprobs": array(rows["reference_logprobs"], torch.float32)}
                if self.has_reference
                else {}
            ),
        }


def array(values: Tensor, dtype: torch.dtype) -> np.ndarray:
    """Returns a copy that another thread can use."""
    return values.to(dtype, copy=True).numpy()
