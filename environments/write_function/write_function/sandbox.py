"""Runs a function that a model wrote, in a process of its own that can compute and nothing else.

What holds where, strongest first:

* Always: a seccomp filter, by which the kernel refuses every system call but two dozen that
  computing takes (memory that is not executable, the time, random bytes, writing to stdout, the
  end). No file, socket, process, signal or namespace can be had, whatever the process does to its
  own memory. Where the kernel has no such filter, or the machine is neither x86_64 nor aarch64,
  nothing is run.
* Always: a fresh Python without site packages, environment variables or inherited files; kernel
  limits on CPU seconds, memory, size of files (0), open files (none beyond the pipes) and processes
  (0); a wall clock after which the whole process group is killed, as it is when its parent ends; an
  audit hook that refuses files, sockets, processes, signals, ctypes, gc and imports.
* As root, or for anyone where the kernel allows user namespaces: an empty root directory, no
  capabilities, a network without an interface, and a process table in which it is alone. As root it
  becomes `nobody`. `Ended.layers` says what of it was in force.

The answers expected are never in the process, only the inputs: code that forges results must still
know them. It shares a process with what reports the results, so a report is believed no further
than that.

What this is not: a boundary against someone who has a hole in the kernel itself, behind one of
those two dozen calls. Where that is too little, put the trainer in a virtual machine. Bubblewrap is
not used: it makes the same namespaces, and the filter would be ours all the same.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from write_function.jail import NO_FILTER

JAIL = str(Path(__file__).with_name("jail.py"))
MAX_READ = 64_000
END_S = 2.0
"""How long a process may take to end when it is told to."""


@dataclass
class Ended:
    """How a run ended: `results` has a pair (whether it returned, value or name of the
    exception) for each input, or is None."""

    results: list[tuple[bool, Any]] | None
    why: str = "finished"
    layers: list[str] = field(default_factory=list)


class Sandbox:
    """Runs at most `max_processes` at once; the others wait in the event loop.

    A process gets `cpu_s` seconds of CPU time for all inputs together, `memory_mib` of address
    space, and `wall_s` seconds in all.
    """

    def __init__(
        self, max_processes: int = 2, cpu_s: int = 2, wall_s: int = 20, memory_mib: int = 256
    ):
        self.limits = {"cpu_s": cpu_s, "memory_mib": memory_mib}
        self.wall_s = wall_s
        self.places = asyncio.Semaphore(max_processes)

    async def run(self, code: str, name: str, inputs: list[list[Any]]) -> Ended:
        """Defines `code` and calls its function `name` with each list of arguments. Raises
        RuntimeError where nothing can be confined."""
        request = json.dumps({"code": code, "name": name, "inputs": inputs, **self.limits}).encode()
        async with self.places:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", JAIL),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(self.wall_s):
                    answer = await exchange(process, request)
                    if len(answer) <= MAX_READ:  # else it goes on writing
                        await process.wait()
            except TimeoutError:
                return Ended(None, f"timeout: longer than wall_s = {self.wall_s}")
            finally:
                await end(process)
        if process.returncode == NO_FILTER:
            raise RuntimeError(
                "this kernel filters no system calls (seccomp), or this is no x86_64 or "
                "aarch64: model code is not run here"
            )
        return read_answer(answer, len(inputs), process.returncode)


async def end(process: asyncio.subprocess.Process) -> None:
    """Ends a process with its child: it ends that itself, if it can."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
                await process.stdout.read()  # what nobody wants would keep the pipe open
                return


async def exchange(process: asyncio.subprocess.Process, request: bytes) -> bytes:
    """Writes the request and reads the answer, of which no more than MAX_READ is kept or waited
    for."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(request)
        await process.stdin.drain()
    process.stdin.close()
    answer = b""
    while len(answer) <= MAX_READ and (part := await process.stdout.read(MAX_READ)):
        answer += part
    return answer


def read_answer(answer: bytes, num_inputs: int, status: int) -> Ended:
    """What the process reported, if it is exactly one report of the right shape: it comes from
    untrusted code."""
    if not answer or len(answer) > MAX_READ:
        return Ended(None, f"no usable answer of {len(answer)} bytes, exit status {status}")
    try:
        report = json.loads(answer)
        results = [(bool(returned), value) for returned, value in report["results"]]
        layers = [str(layer) for layer in report["layers"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return Ended(None, f"garbled answer: {type(error).__name__}")
    if len(results) != num_inputs:
        return Ended(None, f"{len(results)} results for {num_inputs} inputs")
    return Ended(results, layers=layers)
