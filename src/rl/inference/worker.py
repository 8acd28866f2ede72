"""What runs inside every vLLM worker process: reads new weights beside the old ones, and puts them in place."""

import os
import select
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from rl.inference.weight_files import weight_files


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """All tensors of a model directory in main memory, page-locked where there is a GPU so that the copy to it is fast."""
    from safetensors import safe_open

    tensors = {}
    for file in weight_files(Path(path)):
        with safe_open(file, framework="pt", device="cpu") as weights:
            for name in weights.keys():  # noqa: SIM118  (safe_open is no mapping)
                tensor = weights.get_tensor(name)
                # A clone has its pages in memory; what get_tensor returns may be mapped and read only when it is used, in the pause.
                tensors[name] = tensor.pin_memory() if torch.cuda.is_available() else tensor.clone()
    return tensors


class WeightLoader:
    """Mixed into vLLM's worker class (`worker_extension_cls`); `collective_rpc` calls the methods between two steps of the engine."""

    _staged: Future[dict[str, torch.Tensor]] | None = None

    def die_with(self, pid: int) -> None:
        """Ends this process as soon as process `pid`, the server, has ended, however it did: vLLM's engine would wait for ever.

        With several workers the engine process ends because they do.
        """
        server = os.pidfd_open(pid)

        def watch() -> None:
            select.select([server], [], [])
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="die-with-server", daemon=True).start()

    def stage_weights(self, path: str) -> None:
        """Starts to read the weights at `path` in a thread; the engine goes on."""
        reader = ThreadPoolExecutor(1, thread_name_prefix="stage-weights")
        self._staged = reader.submit(read_weights, path)
        reader.shutdown(wait=False)

    def staging_state(self) -> tuple[bool, str]:
        """(done, what went wrong or "")."""
        assert self._staged is not None, "stage_weights comes first"
        if not self._staged.done():
            return False, ""
        error = self._staged.exception()
        return True, f"{type(error).__name__}: {error}" if error else ""

    def swap_weights(self) -> None:
        """Puts the staged weights into the running model; no step may run meanwhile.

        vLLM's own reload keeps the addresses that CUDA graphs have captured, splits for tensor parallelism and repeats any repacking.
        """
        staged, self._staged = self._staged, None
        assert staged is not None, "stage_weights comes first"
        self.reload_weights(weights_iterator=iter(staged.result().items()))
        repack_embeddings(self.model_runner.get_model())


def repack_embeddings(model: torch.nn.Module) -> None:
    """On the CPU, the reload leaves a head that is tied to the embedding with the packed copy of the old weights: pack again."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)
