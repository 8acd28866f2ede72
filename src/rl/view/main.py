"""`rl view`: what the model does, why the reward moves, where the time goes, in a browser; or as one file to send."""

import contextlib
import os
import secrets
import signal
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Any

from rl.config.command_line import fail
from rl.config.options import Option, option_lines, take
from rl.launch.children import Children
from rl.run_dir.paths import is_run
from rl.run_dir.token import PAGE_VARIABLE, is_loopback
from rl.system.errors import RunError
from rl.system.linux import die_with_parent

OPTIONS = (
    Option("host", "HOST", "where to listen; default: 127.0.0.1, which this machine alone reaches"),
    Option("port", "N", "default: 8411, or if that is taken one of the kernel's choice"),
    Option("no-browser", "", "print the address alone"),
    Option("export", "FILE", "write one self-contained page (.html) of one run, or its timeline for Perfetto (.json), and end"),
    Option("max-mib", "N", "with --export: most MiB of the file; what does not fit is left out, and the page says so; default: 20"),
    Option("beside", "", "of a run: end with it; the address is printed without the token, which the run knows"),
)
SHOWN = OPTIONS[:-1]
HELP = f"""usage: rl view [RUN or FOLDER ...] [--export FILE]

Shows runs in a browser, live or finished: curves, rollouts token by token, one task over all versions, what each process did when, and what
`rl doctor` says. Without arguments all runs below outputs/. It reads run directories and never writes to them. The printed address has a
token, without which nothing is shown; for a machine elsewhere: ssh -L 8411:localhost:8411 HOST.

{option_lines(SHOWN)}
"""
DEFAULT_MIB = 20


def main(args: list[str], _children: Children) -> int:
    values, rest = take("rl view", args, OPTIONS, HELP)
    if wrong := [word for word in rest if word.startswith(("-", "@"))]:
        fail("rl view", f"{wrong[0]}: not understood. Give runs or folders with runs, and flags of `rl view --help`")
    os.nice(19)
    places = [place_of(spec) for spec in rest or ["outputs"]]
    from rl.view.library import Library

    library = Library(places)
    if values["export"]:
        return export(library, Path(values["export"]), values["max_mib"] or DEFAULT_MIB)
    return show(library, values)


def place_of(spec: str) -> Path:
    """A run, or a folder with runs. Raises RunError for what is neither."""
    path = Path(spec).expanduser()
    path = path.parent if path.name == "config.toml" and path.is_file() else path
    for found in (path, Path("outputs") / spec):
        if found.is_dir() and (run := next((parent for parent in found.absolute().parents if is_run(parent)), None)):
            raise RunError(f"{spec}: is within the run {run}; give that")
        if found.is_dir():
            return found
    remedy = (
        "there is no run yet; start one, or name a folder with runs"
        if spec == "outputs"
        else "name a run's directory, or a folder with runs"
    )
    raise RunError(f"{spec}: there is no such folder; {remedy}")


def show(library: Any, values: dict[str, Any]) -> int:
    """Serves the page until Ctrl-C. Raises RunError."""
    from rl.view.server import serve

    host, token = values["host"] or "127.0.0.1", os.environ.get(PAGE_VARIABLE) or secrets.token_urlsafe(32)
    port = int(values["port"]) if values["port"] else None
    if values["beside"]:
        die_with_parent()

    def ready(address: str) -> None:
        count = len(library.keys())
        shown = address.partition("?")[0] if values["beside"] else address
        print(f"rl view: {count} run{'' if count == 1 else 's'} at {shown}", flush=True)
        if not is_loopback(host):
            print(
                "rl view: others can read what goes over the network: there is no TLS; an ssh tunnel to loopback is safer", file=sys.stderr
            )
        if not values["no_browser"] and not values["beside"] and has_browser():
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        serve(library, token, host, port, ready)
    return 0


def has_browser() -> bool:
    """Whether a browser can be opened where somebody sees it."""
    return sys.stdout.isatty() and bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def export(library: Any, path: Path, max_mib: int) -> int:
    """Writes one run as a page or as a timeline. Raises RunError."""
    runs = library.keys()
    if len(runs) != 1:
        raise RunError(f"--export {path}: give one run; there are {len(runs)}: {', '.join(list(runs)[:10])}")
    if path.suffix not in (".html", ".json") or path.absolute().resolve().is_relative_to(next(iter(runs.values())).resolve()):
        raise RunError(f"--export {path}: give a file that ends in .html or .json, outside of the run's directory")
    if not path.absolute().parent.is_dir():
        raise RunError(f"--export {path}: there is no folder {path.absolute().parent}")
    if path.suffix == ".json":
        from rl.view.trace import write_trace

        said = write_trace(library, path)
    else:
        from rl.view.export import write_page

        said = write_page(library, path, max_mib << 20)
    print("\n".join(f"rl view: {line}" for line in said))
    return 0
