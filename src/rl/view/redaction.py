"""Hides a machine's paths and host names in an exported page."""

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.records.run import Run
from rl.run_dir.nodes import Nodes

CONVERSATION = ("messages", "prompt", "pieces")
"""Fields with texts of a model, a tool or a task: a word there may equal a host name by chance,
and a path may belong to the task."""
PATH = re.compile(r"(?:(?<=\bfile://)|(?<![\w./~-]))(?:/[\w.@+%=-]+)+(/[\w.@+%=-]+)")
"""An absolute path of at least two parts, with its last part as a group; not a part of a URL,
except of one of a file."""


class Redaction:
    """Replaces paths and hosts in an exported page: a path starts at the run or is cut to its
    last part, a host becomes HOST."""

    def __init__(self, run: Run):
        parents = [folder for folder in (run.root.parent, run.root.resolve().parent) if folder.name]
        self.parents = any_of("", [f"{folder}/" for folder in parents], "")
        self.home = any_of("", [str(Path.home())] if Path.home().name else [], r"(?![\w.-])")
        processes, machines = run.status, Nodes(run.run_dir).statuses()
        hosts = {status.host for status in (*processes.values(), *machines.values())}
        hosts = {socket.gethostname(), *hosts} - {"", "localhost", *processes}
        self.hosts = any_of(r"(?<![^\W_])", sorted(hosts), r"(?![^\W_])")

    def hide(self, value: Any, is_said: bool = False) -> Any:
        """A value with all its texts replaced. is_said: whether it is from a conversation, where
        only the run's path and HOME are hidden."""
        if isinstance(value, str):
            return self.text(value, is_said)
        if isinstance(value, dict):
            return {
                name: self.hide(entry, is_said or name in CONVERSATION)
                for name, entry in value.items()
            }
        return [self.hide(entry, is_said) for entry in value] if isinstance(value, list) else value

    def text(self, text: str, is_said: bool = False) -> str:
        text = self.home.sub("~", self.parents.sub("", text))
        return text if is_said else self.hosts.sub("HOST", PATH.sub(r"...\1", text))


def any_of(before: str, texts: Sequence[str], after: str) -> re.Pattern[str]:
    """A pattern of any of some texts between two patterns; of nothing if there are none."""
    return re.compile(f"{before}(?:{'|'.join(map(re.escape, texts))}){after}" if texts else r"(?!)")
