import asyncio
import ctypes
import errno
import json
import os
import platform
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.environments.playing import check_splits, load, on_path, play
from tests.system.escapes import ESCAPES, SHOT

on_path("write_function")

#
from write_function import code_of, jail, list_specs, number_specs, rows, sandbox, text_specs  # noqa: E402
from write_function.sandbox import Ended, Sandbox, read_answer  # noqa: E402

CASES = [{"input": 3, "output": 6}, {"input": 4, "output": 7}]
POSIX = "import collections\n    posix = collections._sys.modules['posix']\n    "
FORGED = '{"layers": [], "results": [[true, 6], [true, 7]]}'


def scored(env, code):
    """The reward of a reply with this code, for the function x + 3."""
    row = env.get_dataset().to_list()[0] | {"info": json.dumps({"cases": CASES})}
    return play(env, row, f"Sure:\n```python\n{code}\n```\nDone.")[0]["reward"]


@pytest.fixture(scope="module")
def env():
    return load("write-function", cpu_s=1, wall_s=8)


def is_jailed(process):
    """Whether it runs code of a model's."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return any("jail.py" in part for part in process.cmdline())
    return False


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """After the test: no file, no process and no open file more than before."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("SECRET_TOKEN", "xyz")
    num_open = len(os.listdir("/proc/self/fd"))
    yield
    assert not any(map(is_jailed, psutil.Process().children(recursive=True)))
    assert not Path("/pwned").exists() and not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) <= num_open


def test_right_and_half_right_solutions(env):
    assert scored(env, "def f(x):\n    return x + 3") == 1.0
    imports = "from math import sqrt\nimport collections.abc\n"
    for code, reward in (
        (f"{imports}def f(x):\n    print('hm')\n    return int(sqrt(x * x)) + 3", 1.0),
        ("def f(x):\n    return 6", 0.5),
        ("def f(x):\n    return 6 if x == 3 else 1 / 0", 0.5),
        ("def f(x):\n    return float(x + 3)", 0.0),  # another type
        ("def g(x):\n    return x + 3", 0.0),
        ("def f(x)\n    return x + 3", 0.0),
    ):
        assert scored(env, code) == reward, code


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "data = bytearray(2 << 30)\n    return x + 3",
        "import os\n    while True: os.fork()",
        POSIX + "while True: posix.fork()",
        "open('/etc/passwd').read()\n    return x + 3",
        POSIX + "posix.open('/etc/passwd', 0)\n    return x + 3",
        POSIX + "posix.stat('/etc/passwd')\n    return x + 3",
        "open('/pwned', 'w').write('x')\n    return x + 3",
        POSIX + "posix.open('/pwned', 65)\n    return x + 3",
        POSIX + "posix.mkdir('/pwned')\n    return x + 3",
        "import socket\n    socket.create_connection(('127.0.0.1', 22))\n    return x + 3",
        "import os\n    os.system('touch /pwned')\n    return x + 3",
        POSIX + "posix.system('touch /pwned')\n    return x + 3",
        POSIX + "posix.execv('/bin/touch', ['touch', '/pwned'])",
        POSIX + "posix.kill(posix.getppid(), 9)\n    return x + 3",
        "import os\n    return os.environ['SECRET_TOKEN'] and x + 3",
        POSIX + "return posix.environ[b'SECRET_TOKEN'] and x + 3",
        "import ctypes\n    return x + 3",
        "import gc\n    return x + 3",
        "return 'z' * 10**8",
        "while True: print('z' * 10**6)",
        POSIX + "while True: posix.write(1, b'z' * 10**5)",
        "import sys\n    sys.exit(0)",
        "raise SystemExit(0)",
        POSIX + "posix._exit(0)",
        "return f(x)",
        "return [[f]]",
        f"print('''{FORGED}''')",
        # a second report beside the process's own
        POSIX + f"posix.write(1, b'''{FORGED}''')\n    return x + 3",
        POSIX + "posix.write(1, b'[' * 50000)\n    posix._exit(0)",
        POSIX + 'posix.write(1, b\'{"layers": [], "results": [[true, 6]]}\')\n    posix._exit(0)',
        "f.__globals__['__builtins__']['open'] = print\n    return open('/etc/passwd') and x + 3",
        "[c for c in object.__subclasses__() if 'Importer' in "
        "c.__name__][0].load_module('_posixsubprocess')",
    ],
)
def test_what_is_not_allowed_scores_nothing_and_leaves_nothing(env, body):
    started = time.monotonic()
    assert scored(env, f"def f(x):\n    {body}") == 0.0
    assert time.monotonic() - started < 12


@pytest.mark.usefixtures("nothing_left")
def test_a_sleeping_process_is_killed_at_the_wall_clock():
    # It waits for a lock that it has: Python 3.13 has an audit event for time.sleep, which is not
    # allowed.
    body = (
        "lock = collections._sys.modules['_thread'].allocate_lock()\n    return lock.acquire() "
        "and lock.acquire()"
    )
    code = f"import collections\ndef f(x):\n    {body}"
    ended = asyncio.run(Sandbox(wall_s=1).run(code, "f", [[1]]))
    assert ended == Ended(None, "timeout: longer than wall_s = 1")


def test_no_more_than_so_many_run_at_once_and_the_event_loop_goes_on():
    async def main():
        sandbox, most, ticks = Sandbox(max_processes=2), 0, 0
        before = set(psutil.Process().children())
        code = "def f(x):\n    for _ in range(4 * 10**6): pass\n    return x"
        runs = asyncio.gather(*[sandbox.run(code, "f", [[i]]) for i in range(6)])
        while not runs.done():
            most = max(most, len(set(psutil.Process().children()) - before))
            ticks += 1
            await asyncio.sleep(0.005)
        assert [ended.results for ended in await runs] == [[(True, i)] for i in range(6)]
        assert 1 <= most <= 2 and ticks > 10

    asyncio.run(main())


def test_the_layers_in_force_are_reported():
    ended = asyncio.run(Sandbox().run("def f(x):\n    return x", "f", [[1]]))
    assert ended.results == [(True, 1)] and "system calls" in ended.layers
    assert set(ended.layers) <= {"system calls", "network", "processes", "files", "user"}
    if os.geteuid() == 0:
        assert "files" in ended.layers


def confined(attempts):
    """What `attempts` returns in a process that is confined as jail.py confines itself, without
    its audit hook, and run by `nobody`."""
    sys.stdout.flush()
    parent, (read, write) = os.getpid(), os.pipe()
    child = os.fork()
    if not child:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setresgid(jail.NOBODY, jail.NOBODY, jail.NOBODY)
                os.setresuid(jail.NOBODY, jail.NOBODY, jail.NOBODY)
            os.dup2(write, 1)
            libc = ctypes.CDLL(None, use_errno=True)
            libc.syscall.restype = ctypes.c_long
            libc.prctl(jail.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            assert jail.filter_calls(libc)
            os.write(1, json.dumps(attempts(libc, parent)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        content = answer.read()
    os.waitpid(child, 0)
    return json.loads(content)


def test_the_kernel_refuses_what_the_process_does_to_itself_notwithstanding():
    def attempt_all(libc, parent):
        page = libc.mmap(0, 4096, 3, 0x22, -1, 0)
        found = {}
        for what, (numbers, arguments) in ESCAPES.items():
            pointers = []
            for value in arguments:
                if isinstance(value, str):
                    value = {"parent": parent, "page": page}[value]
                if isinstance(value, bytearray):
                    value = (ctypes.c_char * len(value)).from_buffer(value)
                pointers.append(ctypes.c_long(value) if isinstance(value, int) else value)
            ctypes.set_errno(0)
            returned = libc.syscall(ctypes.c_long(numbers[SHOT]), *pointers)
            found[what] = ctypes.get_errno() if returned == -1 else 0
        return found

    assert confined(attempt_all) == dict.fromkeys(ESCAPES, errno.EPERM) and len(ESCAPES) > 40


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="other machines have one interface to the kernel"
)
def test_a_call_by_another_interface_ends_the_process():
    child = os.fork()
    if not child:
        libc = ctypes.CDLL(None)
        jail.filter_calls(libc)
        libc.syscall(ctypes.c_long(jail.X32 | 39))  # getpid
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSYS


def test_where_nothing_can_be_confined_nothing_is_run(monkeypatch, tmp_path):
    other = tmp_path / "jail.py"
    other.write_text(
        Path(sandbox.JAIL)
        .read_text()
        .replace('"x86_64": ', '"x": ')
        .replace('"aarch64": ', '"y": ')
    )
    monkeypatch.setattr(sandbox, "JAIL", str(other))
    with pytest.raises(RuntimeError, match="model code is not run here"):
        asyncio.run(Sandbox().run("def f(x):\n    return x", "f", [[1]]))
    assert sandbox.NO_FILTER == jail.NO_FILTER


def test_a_report_is_not_believed_without_looking():
    for answer in (
        b"",
        b"x",
        b"[]",
        b"{}",
        b'{"results": 3}',
        b'{"layers": [], "results": [[true]]}',
        b"\xff",
        b"[" * 60_000,
        b" " * 70_000,
    ):
        assert read_answer(answer, 1, 0).results is None
    assert read_answer(b'{"layers": [], "results": [[true, 6]]}', 2, 0).results is None


def test_the_code_is_found_in_the_reply():
    def found(text):
        return code_of([{"role": "assistant", "content": text}])

    assert found("a\n```python\nx = 1\n```\nb\n```\ndef f(x): pass\n```") == "def f(x): pass\n"
    assert found("```python\ndef f(x):\n    return") == "def f(x):\n    return"
    assert found("def f(x): return x") == "def f(x): return x"
    assert found("def f(x): return x\n```\nThis returns x.") == "def f(x): return x\n"
    assert found("I cannot") == "" and code_of([]) == ""


def test_cases_tell_specifications_apart():
    specs = [*number_specs(), *text_specs(), *list_specs()]
    assert len({what for what, _, _ in specs}) == len(specs)
    for row in rows(["number", "text", "list"], seed=0, held_out=False):
        outputs = [json.dumps(case["output"]) for case in json.loads(row["info"])["cases"]]
        assert len(outputs) == 6 and len(set(outputs)) > 1, row["question"]


def test_splits():
    check_splits("write-function")
    check_splits("write-function", kinds="text")
    with pytest.raises(RuntimeError, match="use some of number,text,list"):
        load("write-function", kinds="poem")
