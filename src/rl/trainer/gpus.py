"""`python -m rl.trainer.gpus` prints the number of GPUs that torch sees, and the CUDA version
that it is built for."""

import torch


def main() -> None:
    """Prints one line: the number, a space, the CUDA version."""
    print(torch.cuda.device_count(), torch.version.cuda or "no CUDA in this build of torch")


if __name__ == "__main__":
    main()
