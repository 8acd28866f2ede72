"""One-sided reads of other processes' memory over the network, by NVIDIA's NIXL (the extra `nixl`)
on UCX.

UCX is configured by its environment variables. Without them it uses TCP on this host alone;
`UCX_NET_DEVICES=mlx5_0:1` and `UCX_TLS=rc,tcp,self` make it use RDMA, on the same code. It has no
passwords: whoever reaches its port can read and write this process's memory.
"""

import importlib
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rl.system.errors import RunError

PACKAGE = "nixl_cu12"
MISSING = (
    "needs NIXL, which is not installed or lacks a library: install the extra (`uv sync "
    "--extra nixl`, or `pip install 'rl-triad[nixl]'`) "
    "on every machine of trainer and inference, or set it to memory or files"
)
DEFAULTS = {
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp,self",
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "fatal",
}
SEVERAL_HOSTS = (
    "name the devices of the network between trainer and servers on all of them, as "
    "UCX_NET_DEVICES (docs/clusters.md)"
)
WAKE_US = 10_000
"""How often an agent's thread looks around although nothing woke it. With 0, which nixl_agent
sets, it never sleeps."""
PLUGIN = "UCX"
DRAM = "DRAM"
"""Memory of the host, in NIXL's words."""


def make_agent(serves: bool) -> Any:
    """Returns a new NIXL agent; not for several threads at once. `serves`: a thread of NIXL's
    lets others read the memory that is registered with it, without this process's help. Raises
    RunError that names the remedy."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    with blamed("NIXL cannot be used"):
        try:
            api = importlib.import_module(f"{PACKAGE}._api")
        except ImportError as error:
            raise RunError(f"trainer.weights.transport = nixl {MISSING} ({error})") from None
        agent = api.nixl_agent(uuid.uuid4().hex, api.nixl_agent_config(backends=[]))
        config = api.nixlBind.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = serves, WAKE_US
        agent.agent = api.nixlBind.nixlAgent(agent.name, config)
        if PLUGIN in agent.plugin_list:
            agent.create_backend(PLUGIN)
    if PLUGIN not in agent.backends:
        raise RunError(f"trainer.weights.transport = nixl {MISSING} (NIXL has no UCX here)")
    return agent


def is_local() -> bool:
    """Returns whether only processes of this host can reach agents of this process."""
    return os.environ.get("UCX_NET_DEVICES", DEFAULTS["UCX_NET_DEVICES"]) == "lo"


def errors() -> tuple[type[Exception], ...]:
    """Returns the types of NIXL's errors, which have no common base."""
    module = sys.modules.get(f"{PACKAGE}._bindings")
    values = vars(module).items() if module else ()
    return (
        RuntimeError,
        *(value for name, value in values if name.startswith("nixl") and name.endswith("Error")),
    )


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Raises RunError for errors of NIXL in the block."""
    try:
        yield
    except errors() as error:
        name = type(error).__name__.removeprefix("nixl")
        devices, kinds = (os.environ.get(f"UCX_{key}") for key in ("NET_DEVICES", "TLS"))
        raise RunError(
            f"{what}: {name}: {error} (UCX_NET_DEVICES={devices}, UCX_TLS={kinds})"
        ) from None
