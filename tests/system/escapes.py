"""Escape attempts from a sandbox. Run as a program inside, it makes each system call of a JSON
file and prints errors, 0 for none."""

import ctypes
import json
import platform
import sys
from pathlib import Path

SHOT = ["x86_64", "aarch64"].index(platform.machine())
"""Index of this machine's number among the two numbers of a system call."""
ESCAPES: dict[str, tuple[tuple[int, int], tuple]] = {
    # System calls of code that has bypassed all checks in Python: numbers on x86_64 and aarch64,
    # and arguments.
    "open a file": ((257, 56), (-100, b"/etc/passwd", 0, 0)),
    "open a file another way": ((437, 437), (-100, b"/etc/passwd", bytes(24), 24)),
    "create a file": ((257, 56), (-100, b"/pwned", 0o101, 0o644)),
    "read what is open": ((0, 63), (0, bytearray(8), 8)),
    "write to stderr": ((1, 64), (2, b"x", 1)),
    "close stdout": ((3, 57), (1,)),
    "copy a descriptor": ((32, 23), (1,)),
    "change a descriptor": ((72, 25), (1, 4, 0)),
    "control a terminal": ((16, 29), (0, 0x5412, b"x")),
    "list a directory": ((217, 61), (0, bytearray(64), 64)),
    "look at a file": ((262, 79), (-100, b"/etc/passwd", bytearray(256), 0)),
    "change a setting of the kernel": ((257, 56), (-100, b"/proc/sys/vm/swappiness", 1, 0)),
    "change what the kernel runs": ((257, 56), (-100, b"/proc/sys/kernel/core_pattern", 1, 0)),
    "ask the kernel by its magic key": ((257, 56), (-100, b"/proc/sysrq-trigger", 1, 0)),
    "make a file beside the devices": ((257, 56), (-100, b"/dev/pwned", 0o101, 0o644)),
    "move interrupts": ((257, 56), (-100, b"/proc/irq/default_smp_affinity", 1, 0)),
    "read how pages are used": ((257, 56), (-100, b"/proc/kpagecount", 0, 0)),
    "list private keys": ((257, 56), (-100, b"/etc/ssl/private", 0o200000, 0)),
    "make a directory": ((258, 34), (-100, b"/pwned", 0o755)),
    "delete a file": ((263, 35), (-100, b"/pwned", 0)),
    "make a link": ((265, 37), (-100, b"/etc/passwd", -100, b"/pwned", 0)),
    "make a symbolic link": ((266, 36), (b"/etc", -100, b"/pwned")),
    "rename": ((316, 276), (-100, b"/a", -100, b"/b", 0)),
    "make a device": ((259, 33), (-100, b"/pwned", 0o60600, 0x100)),
    "change permissions": ((268, 53), (-100, b"/etc", 0o777)),
    "open a socket": ((41, 198), (2, 1, 0)),
    "open a unix socket": ((41, 198), (1, 1, 0)),
    "make a pair of sockets": ((53, 199), (1, 1, 0, bytearray(8))),
    "send a descriptor": ((46, 211), (1, bytearray(56), 0)),
    "fork": ((56, 220), (17, 0, 0, 0, 0)),
    "clone": ((435, 435), (bytearray(88), 88)),
    "start a thread": ((56, 220), (0x10F00, 0, 0, 0, 0)),
    "run a program": ((59, 221), (b"/bin/true", 0, 0)),
    "run a program another way": ((322, 281), (-100, b"/bin/true", 0, 0, 0)),
    "kill the parent": ((62, 129), ("parent", 9)),
    "stop the parent": ((62, 129), ("parent", 19)),
    "kill all": ((62, 129), (-1, 9)),
    "kill a thread of the parent": ((234, 131), ("parent", "parent", 9)),
    "queue a signal": ((129, 138), ("parent", 9, bytearray(128))),
    "open the parent": ((434, 434), ("parent", 0)),
    "trace the parent": ((101, 117), (16, "parent", 0, 0)),
    "read the parent's memory": ((310, 270), ("parent", bytearray(16), 1, bytearray(16), 1, 0)),
    "write the parent's memory": ((311, 271), ("parent", bytearray(16), 1, bytearray(16), 1, 0)),
    "change the parent's limits": ((302, 261), ("parent", 0, bytes(16), 0)),
    "raise a limit of its own": ((302, 261), (0, 7, bytes([255] * 16), 0)),
    "mount": ((165, 40), (b"none", b"/", b"tmpfs", 0, 0)),
    "change the root": ((161, 51), (b"/",)),
    "pivot the root": ((155, 41), (b"/", b"/")),
    "a new user namespace": ((272, 97), (0x10000000,)),
    "another's namespace": ((308, 268), (0, 0)),
    "become root": ((105, 146), (0,)),
    "become root in every sense": ((117, 147), (0, 0, 0)),
    "take capabilities": ((126, 91), (bytes(8), bytes([255] * 24))),
    "lift no_new_privs": ((157, 167), (38, 0, 0, 0, 0)),
    "another filter": ((317, 277), (1, 0, bytes(16))),
    "executable memory": ((9, 222), (0, 4096, 7, 0x22, -1, 0)),
    "memory made executable": ((10, 226), ("page", 4096, 5)),
    "a file in memory": ((319, 279), (b"x", 0)),
    "io_uring": ((425, 425), (8, bytearray(120))),
    "bpf": ((321, 280), (0, bytearray(72), 72)),
    "userfaultfd": ((323, 282), (0,)),
    "perf": ((298, 241), (bytearray(128), 0, -1, -1, 0)),
    "keys": ((250, 219), (0, -3, 1)),
    "shared memory": ((29, 194), (1234, 4096, 0o1600)),
    "load a module": ((175, 105), (b"", 0, b"")),
    "the kernel's log": ((103, 116), (3, bytearray(64), 64)),
    "name the machine": ((170, 161), (b"pwned", 5)),
    "reboot": ((169, 142), (0, 0, 0, 0)),
}


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    found = {}
    for what, (number, arguments) in json.loads(Path(sys.argv[1]).read_text()).items():
        values = [
            value.encode("latin-1") if isinstance(value, str) else value for value in arguments
        ]
        pointers = [
            ctypes.create_string_buffer(value) if isinstance(value, bytes) else ctypes.c_long(value)
            for value in values
        ]
        ctypes.set_errno(0)
        found[what] = (
            ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *pointers) == -1 else 0
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
