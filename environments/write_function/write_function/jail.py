"""The other side of the sandbox: started by `sandbox.py` as `python -I -S jail.py enter`, never imported. See there what it is worth.

`enter` leaves the machine's network by ctypes and starts Python anew as `run`, so that ctypes is not in the process of the untrusted
code. `run` reads one JSON request from stdin, gives up every right it can, calls the code, and writes one JSON answer to stdout.
"""

import os
import sys

ALLOWED_MODULES = ("math", "re", "string", "itertools", "functools", "collections", "operator", "typing", "heapq", "bisect")
CLONE_NEWNET, CLONE_NEWUSER, CLONE_NEWIPC, PR_SET_NO_NEW_PRIVS = 0x40000000, 0x10000000, 0x08000000, 38
NOBODY = 65534
MAX_ANSWER = 60_000


def enter() -> None:
    """Into a network of its own, with nothing in it; then `run`."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    layers, uid, gid = "", os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNET | CLONE_NEWIPC) == 0:
        layers = "network"
    elif libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC) == 0:
        layers = "network"
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):  # keeps the right to chroot
            attempt(write_text, f"/proc/self/{name}", text)
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, "run", layers])


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


def lock(cpu_s: int, wall_s: int, memory_mib: int) -> list[str]:
    """Gives up files, user and resources for good, as far as the system lets this process. Returns what worked."""
    import resource
    import signal

    layers = []
    if attempt(os.chroot, "/proc/self/fdinfo"):  # a folder that exists everywhere, cannot be written, and goes with the process
        os.chdir("/")
        layers.append("files")
    attempt(os.setgroups, [])
    if os.getuid() == 0 and attempt(os.setresgid, NOBODY, NOBODY, NOBODY) and attempt(os.setresuid, NOBODY, NOBODY, NOBODY):
        layers.append("user")
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_mib << 20),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),  # what is open stays usable, nothing more can be opened
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    signal.alarm(wall_s)  # ends this process even if the parent was killed meanwhile
    return layers


def refuse(event, args):
    """Audit hook. Only constants and built-in exceptions are used, so that no variable within reach of the code changes what it does."""
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
    """Python's own functions without those that reach outside, and an import that knows a few modules."""
    import builtins

    def import_allowed(name, globals=None, locals=None, fromlist=(), level=0):
        if name not in modules:
            raise ImportError(f"not allowed here: {name}")
        return modules[name if fromlist else name.partition(".")[0]]

    kept = {name: value for name, value in vars(builtins).items() if name not in ("open", "input", "breakpoint")}
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


def run() -> None:
    import importlib
    import json

    request = json.loads(sys.stdin.buffer.read())
    modules = {name: importlib.import_module(name) for name in (*ALLOWED_MODULES, "collections.abc")}
    scope = {"__builtins__": restricted_builtins(modules), "__name__": "answer"}
    layers = sys.argv[2:] + lock(request["cpu_s"], request["wall_s"], request["memory_mib"])
    sys.stdout = sys.stderr = Nowhere()
    write, leave, encode = os.write, os._exit, json.dumps
    sys.addaudithook(refuse)
    try:
        results = outcomes(request["code"], request["name"], request["inputs"], scope)
        answer = encode({"layers": [layer for layer in layers if layer], "results": results}).encode()
    except BaseException:  # a result that is no JSON, too large or too deep
        leave(1)
    if len(answer) <= MAX_ANSWER:
        while answer:
            answer = answer[write(1, answer) :]
    leave(0)


if __name__ == "__main__":
    {"enter": enter, "run": run}[sys.argv[1]]()
