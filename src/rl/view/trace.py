"""A run's timeline as a file that Perfetto and chrome://tracing open."""

import json
from pathlib import Path

from rl.run_dir.files import write_file
from rl.system.errors import RunError
from rl.view.library import Library


def write_trace(library: Library, path: Path) -> list[str]:
    """Writes what the processes of the only run of a library did, as Chrome's trace events. Returns what is to be said. Raises RunError."""
    (key,) = library.keys()
    trace = library.run(key).timeline().trace()
    if not trace["traceEvents"]:
        raise RunError(f"{key}: there are no spans: it has not begun, or an older version of rl made it")
    write_file(path.absolute(), json.dumps(trace).encode())
    return [f"{path}: {len(trace['traceEvents']):,} events, for https://ui.perfetto.dev"]
