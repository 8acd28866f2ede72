"""A network that delays and loses, where the kernel cannot (no sch_netem): `python -m
tests.proofs.slow_switch DELAY_S LOSS PID ...`.

In the network namespace of each process it makes the interface eth0 (TAP), and carries every frame
to the one that has its address, or to all, DELAY_S later, except the share LOSS of them. Says `up`
and ends when its input does.
"""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import sys
import time

from rl.system.linux import LIBC

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
CLONE_NEWNET = 0x40000000
LARGEST = 65536
HELD = 20000
"""Frames under way; more are lost, as in a full queue."""


def make_interface(pid: int) -> int:
    """Returns the file that carries the frames of a new eth0 in the process's network."""
    space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if LIBC.setns(space, CLONE_NEWNET):
        raise OSError(f"no network of process {pid}")
    os.close(space)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
    return fd


def carry(ports: list[int], delay_s: float, loss: float) -> None:
    """Carries frames until the standard input ends."""
    draw, order, under_way = random.Random(1), itertools.count(), []
    known: dict[bytes, int] = {}
    """Port of each hardware address that has sent something."""
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for fd in select.select([0, *ports], [], [], wait_s)[0]:
            if fd == 0:
                return
            with contextlib.suppress(OSError):  # an interface that is down
                frame = os.read(fd, LARGEST)
                known[frame[6:12]] = fd
                to = (
                    [known[frame[:6]]]
                    if frame[:6] in known
                    else [port for port in ports if port != fd]
                )
                if draw.random() >= loss and len(under_way) < HELD:
                    heapq.heappush(under_way, (time.monotonic() + delay_s, next(order), frame, to))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, frame, to = heapq.heappop(under_way)
            for port in to:
                with contextlib.suppress(OSError):
                    os.write(port, frame)


def main() -> None:
    delay_s, loss, *pids = sys.argv[1:]
    ports = [make_interface(int(pid)) for pid in pids]
    print("up", flush=True)
    carry(ports, float(delay_s), float(loss))


if __name__ == "__main__":
    main()
