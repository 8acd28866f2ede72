"""The other side of the sandbox: started by `sandbox.py`, which imports an exit code alone, as
`python -I -S jail.py`. See there what it is worth.

It reads one JSON request from stdin, goes into namespaces of its own, gives up every right it can,
has the kernel refuse every system call that computing does not take, calls the code, and writes one
JSON answer to stdout.
"""

import ctypes
import os
import platform
import struct
import sys

ALLOWED_MODULES = (
    "math",
    "re",
    "string",
    "itertools",
    "functools",
    "collections",
    "operator",
    "typing",
    "heapq",
    "bisect",
)
NOBODY = 65534
MAX_ANSWER = 60_000
NO_FILTER = 77
"""Exit code where the kernel filters no system calls: nothing was run."""

# linux/sched.h
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC = (
    0x10000000,
    0x20000000,
    0x40000000,
    0x08000000,
)
# linux/prctl.h
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
CAPABILITY_VERSION = 0x20080522  # linux/capability.h, version 3
PROT_EXEC, EPERM = 4, 1

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
X32 = 0x40000000
"""On x86_64, the bit of the calls of another binary interface."""
CALLS: dict[str, tuple[int, int]] = {
    # name: its number on x86_64 and on aarch64
    "write": (1, 64),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "sched_yield": (24, 124),
    "futex": (202, 98),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "restart_syscall": (219, 128),
    "getrandom": (318, 278),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
"""All that the code may ask the kernel for: memory that is not executable, the time, random
bytes, to write to stdout, and to end."""
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | EPERM, 0x80000000  # linux/seccomp.h
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
"""Bytes of struct seccomp_data."""


def filter_program() -> list[tuple[int, int, int, int]]:
    """The filter of system calls as (code, jump if true, jump if false, operand); jumps count
    the instructions that are left out."""
    machine = platform.machine()
    column = list(ARCHITECTURES).index(machine)
    numbers = {name: pair[column] for name, pair in CALLS.items()}
    write, mappings = numbers.pop("write"), [numbers.pop("mmap"), numbers.pop("mprotect")]
    program = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, KILL),
        # to stdout alone
        (EQUAL, 0, 4, write),
        (LOAD, 0, 0, ARGUMENTS_AT),
        (EQUAL, 0, 1, 1),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    for number in mappings:  # without PROT_EXEC alone
        program += [
            (EQUAL, 0, 4, number),
            (LOAD, 0, 0, ARGUMENTS_AT + 2 * 8),
            (ANY_BIT, 0, 1, PROT_EXEC),
            (RETURN, 0, 0, REFUSE),
            (RETURN, 0, 0, ALLOW),
        ]
    for number in numbers.values():
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    return [*program, (RETURN, 0, 0, REFUSE)]


def filter_calls(libc: ctypes.CDLL) -> bool:
    """Has the kernel refuse all other system calls, for good. Returns False where it cannot."""
    if platform.machine() not in ARCHITECTURES:
        return False
    program = filter_program()
    code = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    )
    # struct sock_fprog
    described = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0) == 0


def attempt(call, *args) -> bool:
    """Whether the system allowed it: what is not permitted here is covered by the other layers."""
    try:
        call(*args)
    except OSError:
        return False
    return True


def write_text(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def isolate(libc: ctypes.CDLL) -> list[str]:
    """Goes on in a child that sees no network, no other process and no other's shared memory, if
    the system lets it. Returns what worked.

    This process waits for the child, and ends as it does; told to end it ends the child first, or
    whoever adopts that had to bury it.
    """
    import signal

    spaces, uid, gid = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC, os.getuid(), os.getgid()
    alone = libc.unshare(spaces) == 0
    if not alone and libc.unshare(CLONE_NEWUSER | spaces) == 0:
        alone = True
        # keeps the right to chroot
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {uid} 1"),
            ("gid_map", f"0 {gid} 1"),
        ):
            attempt(write_text, f"/proc/self/{name}", text)
    child = 0
    signal.signal(signal.SIGTERM, lambda *_: child and os.kill(child, signal.SIGKILL))
    child = os.fork()  # a process namespace is its creator's children's
    if child:
        os.close(0)
        os.close(1)
        _, status = os.waitpid(child, 0)
        os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
    return ["network", "processes"] if alone else []


def lock(libc: ctypes.CDLL, cpu_s: int, memory_mib: int) -> list[str]:
    """Gives up files, user, capabilities and resources for good, as far as the system lets this
    process. Returns what worked."""
    import resource
    import signal

    layers = []
    # a folder that exists everywhere, cannot be written, and goes with the process
    if attempt(os.chroot, "/proc/self/fdinfo"):
        os.chdir("/")
        layers.append("files")
    attempt(os.setgroups, [])
    if (
        os.getuid() == 0
        and attempt(os.setresgid, NOBODY, NOBODY, NOBODY)
        and attempt(os.setresuid, NOBODY, NOBODY, NOBODY)
    ):
        layers.append("user")
    libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24))
    # after the change of user, which undoes it
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_mib << 20),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),  # what is open stays usable, nothing more can be opened
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    return layers


def refuse(event, args):
    """Audit hook. Only constants and built-in exceptions are used, so that no variable within
    reach of the code changes what it does."""
    if event == "object.__setattr__" and args[1] != "__code__":
        return  # namedtuple, NamedTuple and wraps set such attributes
    if event not in {"compile", "exec", "builtins.id", "sys._getframe", "sys._getframemodulename"}:
        raise PermissionError("not allowed here: " + event)


class Nowhere:
    """What `print` writes to."""

    def write(self, text):
        return len(text)

    def flush(self):
        pass


def restricted_builtins(modules: dict) -> dict:
    """Python's own functions without those that reach outside, and an import that knows a few
    modules."""
    import builtins

    def import_allowed(name, globals=None, locals=None, fromlist=(), level=0):
        if name not in modules:
            raise ImportError(f"not allowed here: {name}")
        return modules[name if fromlist else name.partition(".")[0]]

    kept = {
        name: value
        for name, value in vars(builtins).items()
        if name not in ("open", "input", "breakpoint")
    }
    return kept | {"__import__": import_allowed}


def outcomes(code: str, name: str, inputs: list, scope: dict) -> list:
    """[true, value] or [false, error] for every input."""
    results = []
    try:
        exec(compile(code, "answer", "exec"), scope)
        function = scope[name]
    except BaseException as error:  # SystemExit too: whatever the code does is an outcome
        return [[False, type(error).__name__]] * len(inputs)
    for args in inputs:
        try:
            results.append([True, function(*args)])
        except BaseException as error:
            results.append([False, type(error).__name__])
    return results


def main() -> None:
    import importlib
    import json
    import signal

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    request = json.loads(sys.stdin.buffer.read())
    modules = {
        name: importlib.import_module(name) for name in (*ALLOWED_MODULES, "collections.abc")
    }
    scope = {"__builtins__": restricted_builtins(modules), "__name__": "answer"}
    layers = isolate(libc) + lock(libc, request["cpu_s"], request["memory_mib"])
    sys.stdout = sys.stderr = Nowhere()
    write, leave, encode = os.write, os._exit, json.dumps
    if not filter_calls(libc):
        leave(NO_FILTER)
    del libc
    sys.addaudithook(refuse)
    try:
        results = outcomes(request["code"], request["name"], request["inputs"], scope)
        answer = encode({"layers": ["system calls", *layers], "results": results}).encode()
    except BaseException:  # a result that is no JSON, too large or too deep
        leave(1)
    if len(answer) <= MAX_ANSWER:
        while answer:
            answer = answer[write(1, answer) :]
    leave(0)


if __name__ == "__main__":
    main()
