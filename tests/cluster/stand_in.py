"""A stand-in for `rl node`: says that it runs, and ends as the test says, or with 75 at SIGTERM.

stand-ins/INDEX-PID   while it runs, its variables in it      over     the run is over: 0
stand-ins/INDEX-PID.left   it got SIGTERM                     exit-INDEX   the next exit code of that machine
"""

import os
import signal
import sys
import time
from pathlib import Path


def leave(*_: object) -> None:
    mine.rename(f"{mine}.left")
    os._exit(75)


root, index = Path(sys.argv[2]).parent, sys.argv[sys.argv.index("--cluster.index") + 1]
mine, ending = root / "stand-ins" / f"{index}-{os.getpid()}", root / f"exit-{index}"
mine.parent.mkdir(exist_ok=True)
signal.signal(signal.SIGTERM, leave)
mine.write_text(
    " ".join(
        str(os.environ.get(name))
        for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_TOKEN", "RL_NODE_ADDRESS")
    )
)
deadline = time.monotonic() + 300
while not (root / "over").exists() and time.monotonic() < deadline:
    if ending.exists():
        code = int(ending.read_text())
        ending.unlink()
        print(f"stand-in {index} was told to end with {code}", flush=True)
        mine.rename(f"{mine}.ended")
        sys.exit(code)
    time.sleep(0.1)
mine.rename(f"{mine}.over")
