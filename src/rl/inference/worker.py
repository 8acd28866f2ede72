"""What runs inside every vLLM worker process: prepares new weights beside the old ones, and puts them in place."""

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
from rl.system.linux import end_with_parent, place

if TYPE_CHECKING:
    from rl.inference.staging import Staged
    from rl.inference.threads import Threads

Weights = Iterable[tuple[str, torch.Tensor]]
"""Tensors by name, whole."""
FREE_AFTER_S = 1.0
"""When the memory of replaced weights is given back: that takes 10 ms for 135M parameters, which need not be part of the pause."""


def read_policy(folder: Path, base: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a policy version by name: those of its files, or an adapter's merged into the base model's."""
    return merge(read_adapter(folder), read_weights(base)) if is_adapter(folder) else read_weights(folder)


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a model's folder by name."""
    from safetensors import safe_open

    for file in weight_files(folder):
        with safe_open(file, framework="pt", device="cpu") as weights:
            for name in weights.keys():  # noqa: SIM118  (safe_open is no mapping)
                yield name, weights.get_tensor(name)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Page-locked where there is a GPU, so that the copy to it is fast; else a copy, as a mapped file is read only when it is used."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor.clone()


def read_ahead(folder: Path) -> None:
    """Has the kernel hold the files of a model in memory, once for all workers of the machine."""
    buffer = bytearray(1 << 24)
    for file in weight_files(folder):
        with file.open("rb", buffering=0) as content:
            while content.readinto(buffer):
                pass


class WeightLoader:
    """Mixed into vLLM's worker class (`worker_extension_cls`); `collective_rpc` calls the methods between two steps of the engine."""

    _staged: "Future[Staged | Weights] | None" = None
    _threads: "Threads | None" = None

    def begin(self, server_pid: int, server_place: str) -> bool:
        """What has to be done once, before the first request. Returns whether this worker is on the server's host; one on another node ends
        with its engine."""
        from vllm.platforms import current_platform

        if is_here := server_place == place():
            self.die_with(server_pid)
        if current_platform.is_cpu():
            self.prepare_cpu()
        return is_here

    def prepare_cpu(self) -> None:
        """Puts our own draws, norms and counts in place of vLLM's, and asks for what its attention computes with."""
        from rl.inference.eager import speed_up
        from rl.inference.seeds import Generators

        # A process must ask the kernel for AMX. oneDNN does with its first large product; before that vLLM's attention would be an illegal
        # instruction, as in a first request of one token.
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        count_uncompiled()
        if self.vllm_config.speculative_config is None:
            self.model_runner.input_batch.generators = Generators()
        self._threads = speed_up(self.model_runner)

    def head_is_tied(self) -> bool:
        """Whether the head is the embedding. The config does not say so any more where the files hold the head all the same (Qwen3-0.6B's
        do): vLLM then reads both, and ties them if they are equal."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        layers = [layer for layer in self.model_runner.get_model().modules() if isinstance(layer, VocabParallelEmbedding)]
        embeddings = [layer.weight for layer in layers if not isinstance(layer, ParallelLMHead)]
        heads = [layer.weight for layer in layers if isinstance(layer, ParallelLMHead)]
        said = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        return said or any(head is embedding for head in heads for embedding in embeddings)

    def die_with(self, pid: int) -> None:
        """Ends this process as soon as process `pid`, the server, has ended, however it did: vLLM's engine would wait for ever.

        The kernel does it where the server is the parent, so also to a process that is stopped. With several workers the parent is the
        engine process: a worker that sees the server's end ends it, and the kernel ends the workers with it.
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
        """A sign of life."""
        return True

    def stage_weights(self, path: str) -> None:
        """Starts to prepare the weights at `path` in a thread; the engine goes on."""
        stager = ThreadPoolExecutor(1, thread_name_prefix="stage-weights")
        self._staged = stager.submit(self._stage, Path(path))
        stager.shutdown(wait=False)

    def _stage(self, folder: Path) -> "Staged | Weights":
        """What `swap_weights` needs. A worker never holds more than its own part of a version and one tensor: of several, none keeps a copy
        of the files, which the kernel holds for all of them."""
        from rl.inference.staging import Staged, can_stage

        base, parallel = Path(self.model_config.model), self.vllm_config.parallel_config
        weights = read_policy(folder, base)
        if can_stage(self.vllm_config):
            # Half of the threads: the host has a version to hash meanwhile, or requests to answer.
            num_threads = self._threads.together if self._threads else torch.get_num_threads()
            return Staged(self.model_runner.get_model(), weights, self.vllm_config, max(1, num_threads // 2))
        if parallel.world_size * parallel.data_parallel_size == 1:
            return [(name, in_memory(tensor)) for name, tensor in weights]
        read_ahead(base if is_adapter(folder) else folder)
        return weights

    def forget_weights(self) -> None:
        """Gives back what was staged."""
        self._staged = None

    def staging_state(self) -> tuple[bool, str]:
        """(done, what went wrong or "")."""
        assert self._staged is not None, "stage_weights comes first"
        if not self._staged.done():
            return False, ""
        error = self._staged.exception()
        return True, f"{type(error).__name__}: {error}" if error else ""

    def swap_weights(self) -> None:
        """Puts the staged weights into the running model; no step may run meanwhile.

        Where they could not be staged whole, vLLM's own reload keeps the addresses that CUDA graphs have captured, splits for tensor
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
        if self._threads:
            self._threads.adopt()


def count_uncompiled() -> None:
    """Has vLLM count the tokens that are likelier than the sampled one by numpy. It would compile that while the first request of a start
    waits, 3 to 13 s on two cores. In 64 rows of 49,152 numpy counts in 2 ms, plain torch in 20 to 30."""
    from vllm.v1.sample import sampler

    def count(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.count_nonzero(logprobs.numpy() >= values.numpy(), axis=-1))

    sampler.batched_count_greater_than = count


def repack_embeddings(model: torch.nn.Module) -> None:
    """On the CPU, the reload leaves a head that is tied to the embedding with the packed copy of the old weights: pack again."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)
