"""The code that runs inside every vLLM worker process: it prepares new weights beside the old
ones, and swaps them in."""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from rl.inference.weight_files import is_adapter, merge, read_adapter
from rl.inference.weights import NetworkWeights, Weights
from rl.run_dir.in_memory import OverNetwork
from rl.system.errors import RunError
from rl.system.linux import end_with_parent, pid_scope
from rl.system.machine import memory_bytes

if TYPE_CHECKING:
    from rl.inference.staging import Staged

FREE_AFTER_S = 1.0
"""Delay before the memory of replaced weights is freed: that takes 10 ms for 135M parameters,
which need not be part of the pause."""

NOT_IN_PLACE = ("GptOssForCausalLM",)
"""vLLM's classes of models that keep old experts in a reload, in silence: their loaders copy
into parameters without `weight_loader`."""


class WeightLoader:
    """Mixed into vLLM's worker class (`worker_extension_cls`); `collective_rpc` calls the
    methods between two steps of the engine."""

    _staged: "Future[Staged | Iterable[tuple[str, torch.Tensor]]] | None" = None
    _weights: Weights | None = None
    """The files that the staged weights come from."""
    _has_reloaded = False
    """The host had no memory for a second copy of the weights."""
    _has_pinned = False
    """A second copy had page-locked memory, which torch keeps for the next one."""
    _engines = 1
    """Engines of the server on this host. vLLM tells each of a dense model that it is alone."""

    def begin(self, server_pid: int, server_place: str, engines: int) -> bool:
        """Prepares the worker before the first request. Returns whether it is on the server's
        host; a worker on another node ends with its engine."""
        from vllm.platforms import current_platform

        self._engines = engines
        if is_here := server_place == pid_scope():
            self.die_with(server_pid)
        if current_platform.is_cpu():
            self.prepare_cpu()
        else:
            drop_whole_sets()
        return is_here

    def prepare_cpu(self) -> None:
        """Replaces vLLM's draws and counts by our own, enables AMX for its attention, and
        leaves the processors to others while several workers wait for orders."""
        from vllm.distributed import utils

        from rl.inference.draw import speed_up

        # Workers wait in a loop around sched_yield. Beside a thread that polls, as a reader over
        # the network, Linux 6.18 with autogroups
        # gives other sessions nothing of that processor: with a worker on each, the ranks that are
        # read stood still until the deadline.
        utils.USE_SCHED_YIELD = False
        # A process must ask the kernel for AMX. oneDNN does so at its first large product; before
        # that (in a first request of one token)
        # vLLM's attention would be an illegal instruction.
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        count_uncompiled()
        speed_up(self.model_runner)

    def head_is_tied(self) -> bool:
        """Whether the head is the embedding. The config no longer says so if the files also hold
        the head (as those of Qwen3-0.6B do): vLLM then reads both, and ties them if they are
        equal."""
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        modules = self.model_runner.get_model().modules()
        layers = [module for module in modules if isinstance(module, VocabParallelEmbedding)]
        embeddings = [layer.weight for layer in layers if not isinstance(layer, ParallelLMHead)]
        heads = [layer.weight for layer in layers if isinstance(layer, ParallelLMHead)]
        says_so = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        return says_so or any(head is embedding for head in heads for embedding in embeddings)

    def die_with(self, pid: int) -> None:
        """Ends this process as soon as process `pid`, the server, has ended in any way: vLLM's
        engine would wait forever.

        If the server is the parent, the kernel does it, even to a stopped process. With several
        workers the parent is the engine process: a worker that sees the server's end kills it, and
        the kernel kills the workers with it.
        """
        end_with_parent(signal.SIGKILL)
        server, parent = os.pidfd_open(pid), os.getppid()

        def watch() -> None:
            select.select([server], [], [])
            if parent not in (pid, 1) and os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="die-with-server", daemon=True).start()

    def stage_weights(self, path: str, over_network: str = "") -> None:
        """Starts to prepare the weights at `path`, or those announced by an `OverNetwork` in
        JSON, in a thread while the engine keeps running."""
        stager = ThreadPoolExecutor(1, thread_name_prefix="stage-weights")
        self._staged = stager.submit(self._stage, Path(path), over_network)
        stager.shutdown(wait=False)

    def _stage(
        self, folder: Path, over_network: str = ""
    ) -> "Staged | Iterable[tuple[str, torch.Tensor]]":
        """Returns what `swap_weights` needs: the worker's part of the weights, or tensors by
        name that it reads during the swap."""
        from vllm.platforms import current_platform

        from rl.inference.staging import Staged, can_stage

        base, model = Path(self.model_config.model), self.model_runner.get_model()
        weights: Iterable[tuple[str, torch.Tensor]]
        if over_network:
            version = msgspec.json.decode(over_network, type=OverNetwork)
            weights = self._weights = NetworkWeights(version)
        elif is_adapter(folder):
            self._weights = Weights(base)
            weights = merge(read_adapter(folder), self._weights, base)
        else:
            weights = self._weights = Weights(folder)
        in_host = not current_platform.is_cpu()
        if can_stage(self.vllm_config) and self.has_room(in_host):
            staged = Staged(model, self.vllm_config, in_host)
            self._has_pinned = in_host
            staged.load(weights)
            self._weights.confirm()
            return staged
        if (name := type(model).__name__) in NOT_IN_PLACE:
            # nor has it: with more memory the next version can be loaded
            self._has_reloaded = False
            raise RunError(
                f"{name}: vLLM cannot load its weights in place, so it needs memory for them "
                "twice, and no quantization"
            )
        if over_network:
            raise RunError(
                "this worker reads weights while generation pauses, for which they must stay "
                "as they are"
            )
        return weights

    def has_room(self, in_host: bool) -> bool:
        """Whether the host has memory for the parts of all its workers once more. `in_host`: see
        Staged."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        parallel, free = self.vllm_config.parallel_config, memory_bytes()[1]
        # as before packing, which may leave nothing here
        layers = map(get_layerwise_info, self.model_runner.get_model().modules())
        sizes = [tensor.nbytes for layer in layers for tensor in layer.restore_metadata[0].values()]
        if in_host:  # page-locked: torch makes powers of two of them
            sizes = [1 << (size - 1).bit_length() for size in sizes]
        need = sum(sizes) * parallel.local_world_size * self._engines
        if need > free and not (self._has_reloaded or self._has_pinned):
            # For good: vLLM's reload leaves its own loaders in the records that a second set of
            # modules is made from.
            self._has_reloaded = True
            print(
                f"inference: WARNING: {need / 2**30:.1f} GiB for new weights, {free / 2**30:.1f} "
                "GiB are free: from now on they are read while generation pauses",
                file=sys.stderr,
                flush=True,
            )
        return not self._has_reloaded

    def forget_weights(self) -> None:
        """Releases the staged weights."""
        self._staged = self._weights = None

    def staging_state(self) -> tuple[bool, str, int]:
        """Returns (done, the error or "", bytes read so far)."""
        assert self._staged is not None, "stage_weights comes first"
        num_read = self._weights.bytes_read if self._weights else 0
        if not self._staged.done():
            return False, "", num_read
        error = self._staged.exception()
        return True, f"{type(error).__name__}: {error}" if error else "", num_read

    def swap_weights(self) -> int:
        """Puts the staged weights into the running model; no step may run meanwhile. Returns how
        many bytes of them this worker has read.

        If they are not a second set of modules, vLLM's own reload keeps the addresses that CUDA
        graphs have captured, reads each layer's slices and repeats any repacking.
        """
        from rl.inference.staging import Staged

        assert self._staged is not None and self._weights is not None, "stage_weights comes first"
        staged, weights = self._staged.result(), self._weights
        self.forget_weights()
        if isinstance(staged, Staged):
            replaced = staged.put_in_place()
            later = threading.Timer(FREE_AFTER_S, replaced.clear)
            later.daemon = True
            later.start()
        else:
            with repacked(self.model_runner.get_model()):
                self.reload_weights(weights_iterator=iter(staged))
        return weights.bytes_read


def count_uncompiled() -> None:
    """Makes vLLM count the tokens that are at least as likely as the sampled one with numpy.
    Otherwise it compiles that during the first request after a start, 3 to 13 s on two cores.
    For 64 rows of 49,152 numpy takes 2 ms, plain torch 20 to 30."""
    from vllm.v1.sample import sampler

    def count(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.count_nonzero(logprobs.numpy() >= values.numpy(), axis=-1))

    sampler.batched_count_greater_than = count


def drop_whole_sets() -> None:
    """Makes vLLM's runner for GPUs give no ids where truncation leaves all. If it is asked for kept
    ids, it gives them for every request: an evaluation that truncates nothing took 148 MiB and
    0.3 s a step, for 256 requests and a vocabulary of 150,000, until the server dropped them."""
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    to_lists = SamplingMaskTensors.tolists
    SamplingMaskTensors.tolists = lambda masks, *args: to_lists(
        masks._replace(counts=masks.counts % masks.vocab_size), *args
    )


@contextmanager
def repacked(model: torch.nn.Module) -> Iterator[None]:
    """Completes a reload on the CPU: vLLM packs experts only with their kernel, and leaves a
    head that is tied to the embedding with the packed copy of the old weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    modules = list(model.modules()) if current_platform.is_cpu() else []
    for module in modules:
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None
    yield
    for module in modules:
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)
