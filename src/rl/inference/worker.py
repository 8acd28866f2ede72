"""The code that runs inside every vLLM worker process: it prepares new weights beside the old ones, and swaps them in."""

import os
import select
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rl.inference.adapter import is_adapter, merge, read_adapter
from rl.inference.weight_files import weight_files
from rl.system.linux import end_with_parent, pid_scope

if TYPE_CHECKING:
    from rl.inference.staging import Staged

Weights = Iterable[tuple[str, torch.Tensor]]
"""Tensors by name, whole."""
FREE_AFTER_S = 1.0
"""Delay before the memory of replaced weights is freed: that takes 10 ms for 135M parameters, which need not be part of the pause."""


def read_policy(folder: Path, base: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a policy version by name: those of its files, or those of the base model with its adapter merged in."""
    return merge(read_adapter(folder), read_weights(base)) if is_adapter(folder) else read_weights(folder)


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a model's folder by name."""
    from safetensors import safe_open

    for file in weight_files(folder):
        with safe_open(file, framework="pt", device="cpu") as weights:
            for name in weights.keys():  # noqa: SIM118  (safe_open is not a mapping)
                yield name, weights.get_tensor(name)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A page-locked copy if there is a GPU, for a fast transfer; else a plain copy, since a mapped file is only read when it is used."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor.clone()


def read_ahead(folder: Path) -> None:
    """Brings the files of a model into the kernel's page cache, once for all workers of the machine."""
    buffer = bytearray(1 << 24)
    for file in weight_files(folder):
        with file.open("rb", buffering=0) as content:
            while content.readinto(buffer):
                pass


class WeightLoader:
    """Mixed into vLLM's worker class (`worker_extension_cls`); `collective_rpc` calls the methods between two steps of the engine."""

    _staged: "Future[Staged | Weights] | None" = None

    def begin(self, server_pid: int, server_place: str) -> bool:
        """Prepares the worker before the first request. Returns whether it is on the server's host; a worker on another node ends with its
        engine."""
        from vllm.platforms import current_platform

        if is_here := server_place == pid_scope():
            self.die_with(server_pid)
        if current_platform.is_cpu():
            self.prepare_cpu()
        return is_here

    def prepare_cpu(self) -> None:
        """Replaces vLLM's draws, norms and counts by our own, and enables AMX for its attention."""
        from rl.inference.eager import speed_up

        # A process must ask the kernel for AMX. oneDNN does so at its first large product; before that (in a first request of one token)
        # vLLM's attention would be an illegal instruction.
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        count_uncompiled()
        speed_up(self.model_runner)

    def head_is_tied(self) -> bool:
        """Whether the head is the embedding. The config no longer says so if the files also hold the head (as those of Qwen3-0.6B do): vLLM
        then reads both, and ties them if they are equal."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        layers = [layer for layer in self.model_runner.get_model().modules() if isinstance(layer, VocabParallelEmbedding)]
        embeddings = [layer.weight for layer in layers if not isinstance(layer, ParallelLMHead)]
        heads = [layer.weight for layer in layers if isinstance(layer, ParallelLMHead)]
        said = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        return said or any(head is embedding for head in heads for embedding in embeddings)

    def die_with(self, pid: int) -> None:
        """Ends this process as soon as process `pid`, the server, has ended in any way: vLLM's engine would wait forever.

        If the server is the parent, the kernel does it, even to a stopped process. With several workers the parent is the engine process: a
        worker that sees the server's end kills it, and the kernel kills the workers with it.
        """
        end_with_parent(signal.SIGKILL)
        server, parent = os.pidfd_open(pid), os.getppid()

        def watch() -> None:
            select.select([server], [], [])
            if parent not in (pid, 1) and os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="die-with-server", daemon=True).start()

    def answer(self) -> bool:
        """Gives a sign of life."""
        return True

    def stage_weights(self, path: str) -> None:
        """Starts to prepare the weights at `path` in a thread while the engine keeps running."""
        stager = ThreadPoolExecutor(1, thread_name_prefix="stage-weights")
        self._staged = stager.submit(self._stage, Path(path))
        stager.shutdown(wait=False)

    def _stage(self, folder: Path) -> "Staged | Weights":
        """Returns what `swap_weights` needs. With several workers, none keeps a copy of the files, which are in the page cache for all of
        them: a worker then never holds more than its own part of a version and one tensor."""
        from rl.inference.staging import Staged, can_stage

        base, parallel = Path(self.model_config.model), self.vllm_config.parallel_config
        weights = read_policy(folder, base)
        if can_stage(self.vllm_config):
            return Staged(self.model_runner.get_model(), weights, self.vllm_config)
        if parallel.world_size * parallel.data_parallel_size == 1:
            return [(name, in_memory(tensor)) for name, tensor in weights]
        read_ahead(base if is_adapter(folder) else folder)
        return weights

    def forget_weights(self) -> None:
        """Releases the staged weights."""
        self._staged = None

    def staging_state(self) -> tuple[bool, str]:
        """Returns (done, the error or "")."""
        assert self._staged is not None, "stage_weights comes first"
        if not self._staged.done():
            return False, ""
        error = self._staged.exception()
        return True, f"{type(error).__name__}: {error}" if error else ""

    def swap_weights(self) -> None:
        """Puts the staged weights into the running model; no step may run meanwhile.

        If they are not a second set of modules, vLLM's own reload keeps the addresses that CUDA graphs have captured, splits for tensor
        parallelism and repeats any repacking.
        """
        from rl.inference.staging import Staged

        assert self._staged is not None, "stage_weights comes first"
        staged, self._staged = self._staged.result(), None
        if isinstance(staged, Staged):
            replaced = staged.put_in_place()
            later = threading.Timer(FREE_AFTER_S, replaced.clear)
            later.daemon = True
            later.start()
        else:
            self.reload_weights(weights_iterator=iter(staged))
            repack_embeddings(self.model_runner.get_model())


def count_uncompiled() -> None:
    """Makes vLLM count the tokens that are at least as likely as the sampled one with numpy. Otherwise it compiles that during the first
    request after a start, 3 to 13 s on two cores. For 64 rows of 49,152 numpy takes 2 ms, plain torch 20 to 30."""
    from vllm.v1.sample import sampler

    def count(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.count_nonzero(logprobs.numpy() >= values.numpy(), axis=-1))

    sampler.batched_count_greater_than = count


def repack_embeddings(model: torch.nn.Module) -> None:
    """Packs embeddings again on the CPU, where the reload leaves a head tied to the embedding with the packed copy of the old weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)
