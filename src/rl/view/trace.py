"""Exports a run's timeline as a file for Perfetto and chrome://tracing."""

import json
from pathlib import Path

from rl.run_dir.files import write_file
from rl.system.errors import RunError
from rl.view.library import Library
from rl.view.redaction import Redaction


def write_trace(library: Library, path: Path) -> list[str]:
    """Writes the timeline of a library's only run as Chrome trace events. Returns messages for the user. Raises RunError."""
    (key,) = library.keys()
    run = library.run(key)
    trace = run.timeline().trace()
    if not trace["traceEvents"]:
        raise RunError(f"{key}: has no spans: the run has not begun")
    write_file(path.absolute(), json.dumps(Redaction(run).hide(trace)).encode())
    return [f"{path}: {len(trace['traceEvents']):,} events, for https://ui.perfetto.dev"]
