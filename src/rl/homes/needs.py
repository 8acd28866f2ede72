"""What a home needs beside its environment: the packages that our worker imports, and the versions of verifiers that it can play."""

from typing import Literal

Api = Literal["classic", "v1"]
WORKER = (
    "aiohttp>=3.10",
    "anyio>=4.5",
    "datasets>=3.0",
    "httpx>=0.28",
    "huggingface-hub>=0.30",
    "jinja2>=3.1",
    "mcp>=1.24",
    "msgspec>=0.19",
    "openai>=2.9",
    "pydantic>=2.11",
    "pyzmq>=26",
    "renderers>=0.1.10,<0.2",
    "tokenizers>=0.21",
    "uvloop>=0.21",
)
"""The packages that modules of `rl.envs`, and all that those import, are written for."""
VERIFIERS: dict[Api, str] = {"classic": "verifiers>=0.3.1,<0.4", "v1": "verifiers>=0.3.1,<0.5"}
"""By API: 0.4 has no classic one any more."""
