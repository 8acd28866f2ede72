"""What is asked of the Hugging Face hub. `python -m rl.models.hub NAME` prints how many bytes of a model's files a start downloads."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TIMEOUT_S = 10.0


@contextmanager
def hub_or_cache(name: str) -> Iterator[str]:
    """Yields why the hub, which the data set `name` comes from, is out of reach; an empty text if it answers, or if `name` is here.

    While it is out of reach `datasets` reads from the cache alone, at once: by itself it would ask again and again, for half a minute.
    """
    import datasets
    from huggingface_hub import constants

    fault = "" if Path(name).expanduser().exists() else hub_fault()
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if fault:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield fault
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def hub_fault() -> str:
    """Why the hub is out of reach; empty if it answers, whatever it says, within TIMEOUT_S."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        httpx.head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except httpx.HTTPError as error:
        return f"{constants.ENDPOINT} does not answer ({error or type(error).__name__})"
    return ""


def main() -> None:
    """Prints the bytes; exit code 1 with one line when the hub does not have the model or does not answer."""
    from huggingface_hub import model_info
    from huggingface_hub.errors import HfHubHTTPError

    if fault := hub_fault():
        raise SystemExit(fault)
    try:
        files = model_info(sys.argv[1], files_metadata=True, timeout=TIMEOUT_S).siblings or []
    except (HfHubHTTPError, OSError) as error:
        raise SystemExit(str(error).splitlines()[0]) from None
    print(sum(file.size or 0 for file in files if file.rfilename.endswith((".safetensors", ".json"))))


if __name__ == "__main__":
    main()
