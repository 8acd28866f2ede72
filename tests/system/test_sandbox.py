"""The bubblewrap sandbox seen from inside, attempt by attempt, and the message if there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.system import sandbox
from rl.system.sandbox import Sandbox
from tests.system import escapes
from tests.system.escapes import ESCAPES, SHOT

APPLY = """
change a setting of the kernel
change what the kernel runs
ask the kernel by its magic key
make a file beside the devices
move interrupts
read how pages are used
list private keys
create a file
make a directory
delete a file
make a link
make a symbolic link
rename
make a device
change permissions
kill the parent
stop the parent
kill a thread of the parent
queue a signal
open the parent
trace the parent
change the parent's limits
raise a limit of its own
mount
change the root
pivot the root
a new user namespace
another's namespace
become root
become root in every sense
take capabilities
load a module
name the machine
reboot
""".strip().splitlines()
"""Those of write_function's attempts that are refused by a sandbox that allows programs, threads
and sockets."""
HERE = frozenset({Path(sys.prefix), Path(sys.base_prefix), Path(escapes.__file__)})
needs_bwrap = pytest.mark.skipif(bool(sandbox.fault()), reason=sandbox.fault())


def inside(box, *command):
    return subprocess.run(box.wrap(command), capture_output=True, text=True, timeout=30)


@needs_bwrap
def test_what_a_process_asks_of_the_kernel_is_refused(tmp_path):
    attempts = {}
    for what in APPLY:
        numbers, arguments = ESCAPES[what]
        values = [os.getpid() if value == "parent" else value for value in arguments]
        texts = [
            bytes(value).decode("latin-1") if isinstance(value, (bytes, bytearray)) else value
            for value in values
        ]
        attempts[what] = numbers[SHOT], texts
    file = tmp_path / "attempts.json"
    file.write_text(json.dumps(attempts))
    ended = inside(Sandbox(HERE | {file}), sys.executable, "-S", escapes.__file__, str(file))
    found = json.loads(ended.stdout)
    assert (
        len(found) == len(APPLY) > 20
        and [what for what, error in found.items() if error == 0] == []
    ), ended.stderr
    assert not Path("/pwned").exists()


@needs_bwrap
def test_what_is_seen_of_the_file_system(tmp_path):
    """The inner path wins: a hidden directory in a visible one, a visible file in a hidden
    directory."""
    for name in ("seen/hidden/kept", "seen/a", "seen/hidden/secret", "other"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    box = Sandbox(
        frozenset({tmp_path / "seen", tmp_path / "seen/hidden/kept"}),
        frozenset({tmp_path / "seen/hidden"}),
        tmp_path,
    )
    ended = inside(
        box,
        "/bin/sh",
        "-c",
        "pwd; find . -type f | sort; echo x > seen/a; echo x > seen/hidden/x; echo x > /x; "
        "echo x > /tmp/x; id -u",
    )
    sizes = (
        "import os; print(*(os.statvfs(p).f_blocks * os.statvfs(p).f_frsize >> 20 for p in "
        "('/tmp', '/dev/shm')))"
    )
    keys = "import os; print(sorted(os.listdir('/etc/ssl')) if os.path.isdir('/etc/ssl') else [])"
    shown = inside(Sandbox(HERE), sys.executable, "-S", "-c", f"{sizes}\n{keys}").stdout
    assert shown.startswith("1024 64\n") and "private" not in shown
    assert ended.stdout.split() == [str(tmp_path), "./seen/a", "./seen/hidden/kept", "65534"]
    assert ended.stderr.count("Read-only file system") == 3
    assert (tmp_path / "seen/a").read_text() == "seen/a"
    assert inside(box, "/bin/sh", "-c", "exit 7").returncode == 7
    linked = Sandbox(frozenset(), links={tmp_path / "bin" / "sh": Path("/bin/sh")})
    assert (
        inside(linked, f"{tmp_path}/bin/sh", "-c", f"readlink {tmp_path}/bin/sh").stdout
        == "/bin/sh\n"
    )


def test_a_machine_without_bubblewrap_is_told_what_to_do(monkeypatch, tmp_path):
    program = tmp_path / "bwrap"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no bwrap here" in sandbox.fault.__wrapped__()
    assert "apt-get install bubblewrap" in sandbox.REMEDY
    program.write_text("#!/bin/sh\necho no permissions to create a new namespace >&2; exit 1\n")
    program.chmod(0o755)
    assert (
        "cannot make one here (no permissions to create a new namespace)"
        in sandbox.fault.__wrapped__()
    )
