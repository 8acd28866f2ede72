"""The access token of a run. Every socket requires it, even on loopback: a machine has other users,
and browsers that post wherever a page tells them to. Inference requires a bearer token, the
orchestrator CURVE keys derived from the token.

The token is the environment variable RL_TOKEN, or is generated once and stored in `status/token`,
readable by its owner alone, where all processes that see the run directory find it, on every node.
"""

import contextlib
import hmac
import ipaddress
import os
import re
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from rl.run_dir.files import TakenError, write_file
from rl.system.errors import RunError

VARIABLE = "RL_TOKEN"
PAGE_VARIABLE = "RL_VIEW_SECRET"
"""The secret of the browser page, which is never the run's token: browsers get values derived
from it."""
SHAPE = re.compile(r"[!-~]{16,256}")
"""Characters that an HTTP header accepts unescaped, and enough of them not to be guessed."""
REMEDY = (
    "must be 16 to 256 printable characters without spaces; `openssl rand -hex 32` makes a good one"
)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches a socket bound to `host`. The only name that
    counts is `localhost`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def hides_keys(url: str) -> bool:
    """Returns whether data sent to a URL cannot be read on the way: https, or this machine."""
    address = urlsplit(url)
    return address.scheme == "https" or is_loopback(address.hostname or "")


def token_file(status_dir: Path) -> Path:
    return status_dir / "token"


def given_token() -> str | None:
    """Returns RL_TOKEN, None if it is not set. Raises RunError if it has the wrong form."""
    token = os.environ.get(VARIABLE)
    if token and not SHAPE.fullmatch(token):
        raise RunError(f"{VARIABLE} {REMEDY}")
    return token or None


def run_token(status_dir: Path) -> str:
    """Returns the token that servers require: RL_TOKEN, or the run's own. If there is none, one
    of the processes that start together, even on several nodes, generates it. Raises RunError."""
    if token := given_token():
        return token
    make_token(token_file(status_dir))
    token = read_token(status_dir)
    assert token is not None
    return token


def read_token(status_dir: Path) -> str | None:
    """Returns the token that clients send: RL_TOKEN or the run's own; None if there is neither.

    Raises RunError if the token cannot be used, OSError for a disk fault that may pass.
    """
    if token := given_token():
        return token
    path = token_file(status_dir)
    try:
        token = path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise RunError(
            f"{path}: {error.strerror}; run as the user who started the run, or set {VARIABLE}"
        ) from None
    if not SHAPE.fullmatch(token):
        raise RunError(
            f"{path}: does not hold a token; delete it and restart every process of the run"
        )
    return token


def make_token(path: Path) -> None:
    """Writes a new token, readable by its owner alone, if there is none."""
    if not path.exists():
        with contextlib.suppress(TakenError):  # another process has just made it
            write_file(path, secrets.token_urlsafe(32).encode(), new=True, mode=0o600)


def page_secret(status_dir: Path) -> str:
    """Returns the secret of a run's page, which stays the same after a resume, so that open tabs
    keep working. Raises OSError."""
    path = status_dir / "view.secret"
    make_token(path)
    secret = path.read_text(errors="replace")
    return secret if SHAPE.fullmatch(secret) else secrets.token_urlsafe(32)


def derived(secret: str, purpose: str) -> str:
    """Derives what a browser is given for a purpose from the secret without revealing it: 128
    bits in hexadecimal."""
    return hmac.digest(secret.encode(), purpose.encode(), "sha256").hex()[:32]


def link(secret: str, address: str, number: str) -> str:
    """Returns the link that admits one browser to the page at an address. number: the server's
    number of the link, which is not secret."""
    return f"{address}?link={derived(secret, f'link {number}')}"


def authorization(status_path: Path) -> dict[str, str]:
    """Returns the HTTP headers with the token for inference; empty if there is none.
    `status_path` is a file in the run's status directory, or an empty path for servers that
    belong to no run. Raises as `read_token` does."""
    token = read_token(status_path.parent) if status_path.name else given_token()
    return {"Authorization": f"Bearer {token}"} if token else {}
