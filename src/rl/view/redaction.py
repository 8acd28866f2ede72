"""Hides a machine's paths and host names in an exported page."""

import re
import socket
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

NEVER = r"(?!)"
"""Matches nothing; an empty pattern would match everywhere."""


class Redaction:
    """Replaces paths and hosts in an exported page: a path starts at the run or is cut to its
    last part, a host becomes HOST."""

    def __init__(self, run: Run):
        parents = {
            re.escape(f"{folder}/")
            for folder in (run.root.parent, run.root.resolve().parent)
            if folder.name
        }
        self.parents = re.compile("|".join(parents) or NEVER)
        home = Path.home()
        self.home = re.compile(re.escape(str(home)) + r"(?![\w.-])" if home.name else NEVER)
        statuses, machines = run.status, Nodes(run.run_dir).statuses().values()
        hosts = {
            socket.gethostname(),
            *(status.host for status in (*statuses.values(), *machines)),
        } - {"", "localhost", *statuses}
        self.hosts = re.compile(
            rf"(?<![^\W_])(?:{'|'.join(map(re.escape, sorted(hosts))) or NEVER})(?![^\W_])"
        )

    def hide(self, value: Any, said: bool = False) -> Any:
        """A value with all its texts replaced. said: whether it is from a conversation, where
        only the run's path and HOME are hidden."""
        if isinstance(value, str):
            return self.text(value, said)
        if isinstance(value, dict):
            return {
                name: self.hide(one, said or name in CONVERSATION) for name, one in value.items()
            }
        return [self.hide(one, said) for one in value] if isinstance(value, list) else value

    def text(self, text: str, said: bool = False) -> str:
        text = self.home.sub("~", self.parents.sub("", text))
        return text if said else self.hosts.sub("HOST", PATH.sub(r"...\1", text))
