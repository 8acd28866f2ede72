"""`python -m rl.models.hub NAME` prints how many bytes of a model's files a start downloads from the Hugging Face hub."""

import sys

TIMEOUT_S = 10.0


def main() -> None:
    """Prints the bytes; exit code 1 with one line when the hub does not have the model or does not answer."""
    from huggingface_hub import model_info
    from huggingface_hub.errors import HfHubHTTPError

    try:
        files = model_info(sys.argv[1], files_metadata=True, timeout=TIMEOUT_S).siblings or []
    except (HfHubHTTPError, OSError) as error:
        raise SystemExit(str(error).splitlines()[0]) from None
    print(sum(file.size or 0 for file in files if file.rfilename.endswith((".safetensors", ".json"))))


if __name__ == "__main__":
    main()
