"""The packages that a home needs besides its environment: those that our worker imports, and the
supported versions of verifiers."""

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
    "sentencepiece>=0.2",
    "transformers>=4.56,<6",
    "uvloop>=0.21",
)
"""The packages that `rl.envs` and the modules it imports are written for."""
NO_CLASSIC = "0.4"
"""The first version of verifiers without a classic API."""
VERIFIERS: dict[Api, str] = {
    "classic": f"verifiers>=0.3.1,<{NO_CLASSIC}",
    "v1": "verifiers>=0.3.1,<0.5",
}
"""The supported versions of verifiers, by API."""
