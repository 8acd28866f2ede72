"""Settings of the inference server."""

from typing import Any, Literal

from pydantic import Field

from rl.config.base import Devices, Host, Settings


class InferenceConfig(Settings):
    """One vLLM server, which `rl` starts. `inference @ RUN/config.toml` starts further servers,
    which join the run, on any machine that sees the run directory (docs/clusters.md)."""

    host: Host = "127.0.0.1"
    """Address to bind. Anything but loopback opens the server to other machines that have the
    run's token (docs/security.md)."""
    port: int = Field(0, ge=0, le=65535)
    """Port to bind; 0: any free one. The address is published in status/inference.json, or for a
    server that `rl` did not start, in status/inference-<host>-<port>.json."""
    gpus: Devices = None
    """GPUs of the server: a count, or a list of ids ("0,1"). Default: all that the trainer does
    not use; 0 runs on the CPU."""
    cpus: Devices = None
    """CPU cores of the server: a count, or a list of ids. Default: all cores, shared with the
    trainer."""
    startup_timeout_s: float = Field(900.0, gt=0)
    """Seconds that the server may take to start answering."""
    engine_timeout_s: float = Field(300.0, gt=0)
    """Seconds that vLLM's engine may take to answer a request of the server; beyond that the
    engine is killed and the server restarted. The engine answers between steps, which take long
    on a CPU. Reading new weights may make no progress for ten times as long, and putting them in
    place may take that. A stopped engine is detected sooner: see supervisor.silence_s."""
    adapters: Literal["auto", "merge", "hot"] = "auto"
    """How policy versions of a run with trainer.lora are served. `hot`: as adapters beside the
    model, loaded without a pause; requests in flight keep theirs. `merge`: added to the model's
    weights, as fast as the model alone. `auto`: hot on GPUs; merge on the CPU, where hot takes 5
    times as long, and for adapters of experts and of models that see images."""
    vllm: dict[str, Any] = {}
    """vLLM engine arguments by name, such as `tensor_parallel_size = 2`; vLLM checks them when
    the server starts."""
