"""`rl view`: shows in a browser what the model does, why the reward moves and where the time
goes; or exports it as one file."""

import contextlib
import os
import secrets
import signal
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Any

from rl.config.command_line import fail, option_lines, options, take
from rl.launch.children import Children
from rl.run_dir.access_token import PAGE_VARIABLE, is_loopback, link
from rl.run_dir.paths import is_model, is_run
from rl.system.errors import RunError
from rl.system.linux import die_with_parent

OPTIONS = options("""
host HOST: address to listen on; default: 127.0.0.1, which only this machine can reach
port N: default: 8411, or a free port if that is taken
no-browser: only print the address
export FILE: write one self-contained page (.html) of one run, or its timeline for Perfetto
    (.json), and exit
max-mib N: with --export: maximum MiB of the file; the page says what was left out to fit;
    default: 20
beside: for a page started by a run: exit with the run, and print only the numbers of links, as
    it knows the rest
""")
SHOWN = OPTIONS[:-1]
HELP = f"""usage: rl view [RUN or FOLDER ...] [--export FILE]

Shows runs in a browser, live or finished: curves, rollouts token by token, one task over all
versions, what each process did when, and the diagnosis of `rl doctor`. Without arguments, shows all
runs below outputs/. Never writes to run directories. The printed link lets one browser in; once it
is used, the next one is printed. For a remote machine: ssh -L 8411:localhost:8411 HOST.

{option_lines(SHOWN)}
"""
DEFAULT_MIB = 20


def main(args: list[str], _children: Children) -> int:
    values, rest = take("rl view", args, OPTIONS, HELP)
    if wrong := [word for word in rest if word.startswith(("-", "@"))]:
        fail(
            "rl view",
            f"{wrong[0]}: not understood. Give runs or folders with runs, and flags listed "
            "by `rl view --help`",
        )
    os.nice(19)
    places = [place_of(spec) for spec in rest or ["outputs"]]
    from rl.view.library import Library

    library = Library(places)
    if values["export"]:
        return export(library, Path(values["export"]), values["max_mib"] or DEFAULT_MIB)
    return show(library, values)


def place_of(spec: str) -> Path:
    """The path of a run or a folder with runs. Raises RunError if it is neither."""
    path = Path(spec).expanduser()
    path = path.parent if path.name == "config.toml" and path.is_file() else path
    for folder in (path, Path("outputs") / spec):
        if not folder.is_dir():
            continue
        run = next((parent for parent in folder.absolute().parents if is_run(parent)), None)
        if run and not is_model(folder.absolute()):
            raise RunError(f"{spec}: is inside the run {run}; give the run itself")
        return folder
    remedy = (
        "there is no run yet; start one, or name a folder with runs"
        if spec == "outputs"
        else "name a run's directory, or a folder with runs"
    )
    raise RunError(f"{spec}: there is no such folder; {remedy}")


def show(library: Any, values: dict[str, Any]) -> int:
    """Serves the page until Ctrl-C. Raises RunError."""
    from rl.view.server import serve

    host = values["host"] or "127.0.0.1"
    secret = os.environ.get(PAGE_VARIABLE) or secrets.token_urlsafe(32)
    port = int(values["port"]) if values["port"] else None
    printed = list[str]()
    if values["beside"]:
        die_with_parent()

    def new_link(address: str, number: str) -> None:
        is_first, is_beside = not printed, values["beside"]
        printed.append(number)
        shown = f"{address} {number}" if is_beside else link(secret, address, number)
        text = "a browser has used that link; the next one is"
        if is_first:
            count = len(library.keys())
            text = f"{count} run{'' if count == 1 else 's'} at"
        print("rl view:", text, shown, flush=True)
        if is_first and not is_loopback(host):
            print(
                "rl view: others on the network can read the traffic: there is no TLS; an "
                "ssh tunnel to loopback is safer",
                file=sys.stderr,
            )
        if is_first and not is_beside and not values["no_browser"] and has_browser():
            threading.Thread(target=webbrowser.open, args=(shown,), daemon=True).start()

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        serve(library, secret, host, port, new_link)
    return 0


def has_browser() -> bool:
    """Whether a browser can be opened where the user sees it."""
    return sys.stdout.isatty() and bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )


def export(library: Any, path: Path, max_mib: int) -> int:
    """Writes one run as a page or as a timeline. Raises RunError."""
    runs = {
        key: root
        for key, root in library.keys().items()
        if root in library.places or not is_model(root)
    }
    if len(runs) != 1:
        raise RunError(
            f"--export {path}: give one run; there are {len(runs)}: {', '.join(list(runs)[:10])}"
        )
    (root,) = runs.values()
    is_inside = path.absolute().resolve().is_relative_to(root.resolve())
    if path.suffix not in (".html", ".json") or is_inside:
        raise RunError(
            f"--export {path}: give a file that ends in .html or .json, outside the run's directory"
        )
    if not path.absolute().parent.is_dir():
        raise RunError(f"--export {path}: there is no folder {path.absolute().parent}")
    from rl.view.export import write_page, write_trace

    lines = (
        write_trace(library, path)
        if path.suffix == ".json"
        else write_page(library, path, max_mib << 20)
    )
    print("\n".join(f"rl view: {line}" for line in lines))
    return 0
