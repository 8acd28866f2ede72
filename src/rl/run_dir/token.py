"""The access token of a run, which every socket asks for, on loopback too: a machine has other users, and a browser that posts wherever a
page tells it to. Inference wants a bearer token, the orchestrator CURVE keys that are derived from it.

The token is the environment variable RL_TOKEN, or one that is made once and stored in `status/token`, readable by its owner alone. So all
processes that see the run directory have it, on every node.
"""

import contextlib
import ipaddress
import os
import re
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from rl.run_dir.files import write_file
from rl.run_dir.naming import TakenError
from rl.system.errors import RunError

VARIABLE = "RL_TOKEN"
PAGE_VARIABLE = "RL_VIEW_TOKEN"
"""The token of the browser page: never the run's, for it stands in an address."""
SHAPE = re.compile(r"[!-~]{16,256}")
"""Characters that an HTTP header takes as they are, and enough of them not to be guessed."""
REMEDY = "must be 16 to 256 printable characters without spaces; `openssl rand -hex 32` makes a good one"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a socket bound to `host`. Of names only `localhost` counts."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def hides_keys(url: str) -> bool:
    """Whether nobody on the way to an address can read what is sent: https, or this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or is_loopback(parts.hostname or "")


def token_file(status_dir: Path) -> Path:
    return status_dir / "token"


def given_token() -> str | None:
    """RL_TOKEN, None if it is not set. Raises RunError for one of the wrong form."""
    token = os.environ.get(VARIABLE)
    if token and not SHAPE.fullmatch(token):
        raise RunError(f"{VARIABLE} {REMEDY}")
    return token or None


def run_token(status_dir: Path) -> str:
    """The token that servers ask for: RL_TOKEN, or the run's own, made if need be. Raises RunError."""
    return given_token() or kept_token(status_dir)


def read_token(status_dir: Path) -> str | None:
    """The token that clients send: RL_TOKEN or the run's own; None if there is neither.

    Raises RunError for one that cannot be used, OSError for a fault of the disk that may pass.
    """
    if token := given_token():
        return token
    path = token_file(status_dir)
    try:
        token = path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise RunError(f"{path}: {error.strerror}; run as the user who started the run, or set {VARIABLE}") from None
    if not SHAPE.fullmatch(token):
        raise RunError(f"{path}: holds no token; delete it and start every process of the run again")
    return token


def kept_token(status_dir: Path) -> str:
    """The run's own token, made if there is none. Of processes that start together, even on several nodes, one makes it."""
    make_token(token_file(status_dir))
    token = read_token(status_dir)
    assert token is not None
    return token


def make_token(path: Path) -> None:
    """Writes a new token, readable by its owner alone, if there is none."""
    if not path.exists():
        with contextlib.suppress(TakenError):  # another process has just made it
            write_file(path, secrets.token_urlsafe(32).encode(), new=True, mode=0o600)


def page_token(status_dir: Path) -> str:
    """The token of the page beside a run: the same after a resume, so that a tab goes on. Raises OSError."""
    path = status_dir / "view.token"
    make_token(path)
    token = path.read_text(errors="replace")
    return token if SHAPE.fullmatch(token) else secrets.token_urlsafe(32)


def authorization(status_path: Path) -> dict[str, str]:
    """The HTTP headers with the token for inference; empty if there is none. `status_path` is a file in the run's status directory, or an
    empty path for servers that belong to no run. Raises what `read_token` raises."""
    token = read_token(status_path.parent) if status_path.name else given_token()
    return {"Authorization": f"Bearer {token}"} if token else {}
