"""Who may talk to a run. On loopback nobody is asked. Bound wider, everyone must show the run's token: to inference as a bearer token, to
the orchestrator by CURVE keys that follow from it.

The token is the environment variable RL_TOKEN, or one that is made once and kept in `status/token`, which its owner alone may read. So all
processes that see the run directory have it, on every node.
"""

import contextlib
import ipaddress
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl.config import RLConfig

VARIABLE = "RL_TOKEN"
SHAPE = re.compile(r"[!-~]{16,256}")
"""What goes into an HTTP header as it is, and cannot be guessed."""
REMEDY = "must be 16 to 256 printable characters without spaces; `openssl rand -hex 32` makes a good one"


class AccessError(Exception):
    """There is no token to be used; the message names the remedy."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a socket bound to `host`. A name is believed only if it is localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def bound_wider(config: "RLConfig") -> dict[str, str]:
    """The settings that open a process of the run to other machines: key -> host."""
    hosts = {"inference.host": config.inference.host, "orchestrator.host": config.orchestrator.host}
    return {} if config.sft else {key: host for key, host in hosts.items() if not is_loopback(host)}


def exposure(config: "RLConfig") -> list[str]:
    """What is open to other machines and what guards it, a sentence each."""
    wider = bound_wider(config)
    guard = f"the token in ${VARIABLE}" if os.environ.get(VARIABLE) else f"the token in {token_file(config.run_dir.status('rl').parent)}"
    said = []
    if host := wider.get("inference.host"):
        said.append(
            f"inference.host = {host}: every path of the inference server is open to other machines that send {guard}; what is sent is not "
            "encrypted, so let it cross only a network that you trust"
        )
    if host := wider.get("orchestrator.host"):
        said.append(f"orchestrator.host = {host}: the orchestrator answers other machines that have {guard} (CURVE, encrypted)")
    return said


def token_file(status_dir: Path) -> Path:
    return status_dir / "token"


def given_token() -> str | None:
    """RL_TOKEN, if it is set. Raises AccessError for one that cannot be used."""
    token = os.environ.get(VARIABLE)
    if token and not SHAPE.fullmatch(token):
        raise AccessError(f"{VARIABLE} {REMEDY}")
    return token or None


def access_faults(config: "RLConfig") -> list[tuple[str, object, str]]:
    """What is wrong with hosts and token: (key, value, remedy). The token's value is not in it."""
    faults: list[tuple[str, object, str]] = []
    for key, host in (("inference.host", config.inference.host), ("orchestrator.host", config.orchestrator.host)):
        if not re.fullmatch(r"[\w.:%-]+", host):
            faults.append((key, host, "is no address; give 127.0.0.1, an address or name of this machine, or 0.0.0.0 for all"))
    for url in config.orchestrator.inference_urls:
        if not re.match(r"https?://[^/]", url):
            faults.append(("orchestrator.inference_urls", url, "give addresses like http://host:8000"))
    try:
        given_token()
    except AccessError:
        faults.append((VARIABLE, "(hidden)", REMEDY))
    return faults


def run_token(config: "RLConfig") -> str | None:
    """The token that whoever answers must be shown: RL_TOKEN, or the run's own when something is bound wider than loopback. It is made
    here if need be. None: nobody is asked. Raises AccessError."""
    if token := given_token():
        return token
    return kept_token(config.run_dir.status("rl").parent) if bound_wider(config) else None


def read_token(status_dir: Path) -> str | None:
    """The token that whoever asks shows: RL_TOKEN or the run's own; None if there is neither. Raises AccessError."""
    if token := given_token():
        return token
    path = token_file(status_dir)
    try:
        token = path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AccessError(f"{path}: {error.strerror}; run as the user who started the run, or set {VARIABLE}") from None
    if not SHAPE.fullmatch(token):
        raise AccessError(f"{path}: holds no token; delete it and start every process of the run again")
    return token


def kept_token(status_dir: Path) -> str:
    """The run's own token, made if it is not there. Of processes that start together, on several nodes even, one makes it."""
    status_dir.mkdir(parents=True, exist_ok=True)
    path = token_file(status_dir)
    if not path.exists():
        temporary = path.with_name(f".token.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(fd, "w") as file:
                file.write(secrets.token_urlsafe(32))
                file.flush()
                os.fsync(fd)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)  # unlike a rename it never replaces the token that another process has just made
        finally:
            temporary.unlink(missing_ok=True)
    token = read_token(status_dir)
    assert token is not None
    return token


def authorization(status_path: Path) -> dict[str, str]:
    """The headers that show the token to inference; empty when there is none. `status_path` is a file of the run's status directory, or
    an empty path for servers that belong to no run of ours."""
    token = read_token(status_path.parent) if status_path.name else given_token()
    return {"Authorization": f"Bearer {token}"} if token else {}
