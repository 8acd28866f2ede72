"""The Environments Hub: finds out where its packages are installed from. Public packages are in
their owner's package index; private packages, and those without an index, are fetched as source by
the Hub's command `prime`, if that is installed and logged in.

Modelled on the Hub's own clients and tested against a server with its layout, never against the Hub
itself.
"""

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rl.config.environment_id import Source, module_name
from rl.homes.uv import Say, last_lines, run
from rl.run_dir.access_token import hides_keys
from rl.system.errors import RunError

HUB_VARIABLE, HUB = "RL_ENVIRONMENTS_HUB", "https://api.primeintellect.ai/api/v1/environmentshub"
TIMEOUT_S = 30.0
PULL_TIMEOUT_S = 300.0


class HubLostError(RunError):
    """The Hub does not answer. Caught where an older home can be used."""


@dataclass(frozen=True)
class Place:
    """Where a package of the Hub is installed from."""

    requirement: str
    """The requirement that uv installs."""
    index: str = ""
    """Address of the owner's index, which is asked only for this package; empty: the requirement
    has the address."""
    where: str = ""
    """The place in words, for messages."""


def hub_url() -> str:
    return os.environ.get(HUB_VARIABLE, "").strip().rstrip("/") or HUB


def find(source: Source, work: Path, say: Say) -> Place:
    """Finds the place of a package of the Hub. `work`: a directory for the source of a private
    package. Raises RunError if it is not found, and HubLostError if the Hub does not answer."""
    import httpx

    address = f"{hub_url()}/{source.owner}/{source.name}/@{source.version or 'latest'}"
    what = f"environment {source.text}"
    try:
        answer = httpx.get(address, timeout=TIMEOUT_S, follow_redirects=True)
        details = answer.json() if answer.status_code == 200 else {}
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise HubLostError(
            f"{what}: the Environments Hub does not answer ({address}: "
            f"{error or type(error).__name__}); check the network"
        ) from None
    except ValueError:
        raise HubLostError(
            f"{what}: the answer of {address} is not JSON; is {HUB_VARIABLE} the Hub's address?"
        ) from None
    if answer.status_code >= 500:
        raise HubLostError(
            f"{what}: the Environments Hub answered {answer.status_code} ({address}); try "
            "again later"
        )
    details = details.get("data", details) if isinstance(details, dict) else {}
    details = details if isinstance(details, dict) else {}
    if index := web_address(details.get("simple_index_url")):
        version = f"=={source.version}" if source.version else ""
        return Place(f"{source.name}{version}", index, f"the Environments Hub ({index})")
    if wheel := web_address(details.get("wheel_url")):
        return Place(f"{source.name} @ {wheel}", "", f"the Environments Hub ({wheel})")
    found = (
        f"answered {answer.status_code}"
        if answer.status_code != 200
        else "has no public package of it"
    )
    return pull(source, work, f"{what}: {address} {found}", say)


def web_address(value: object) -> str:
    """The address if it is https or on this machine, and has no user name or password; else
    empty. Anybody on the way could replace what comes over plain http."""
    parts = (
        urlsplit(value) if isinstance(value, str) and not re.search(r"\s", value) else urlsplit("")
    )
    web = parts.scheme in ("http", "https") and parts.netloc and "@" not in parts.netloc
    return str(value) if web and hides_keys(str(value)) else ""


def pull(source: Source, work: Path, found: str, say: Say) -> Place:
    """Fetches the source of a package that is not public with `prime`. Raises RunError."""
    version = f"@{source.version}" if source.version else ""
    check = "check owner, name and version"
    prime = shutil.which("prime")
    if not prime:
        raise RunError(
            f"{found}; {check}. If it is private: `uv tool install prime`, `prime login`, "
            "then try again"
        )
    target, log = work / module_name(source.name), work / "prime.log"
    command = [
        prime,
        "env",
        "pull",
        f"{source.owner}/{source.name}{version}",
        "--target",
        str(target),
    ]
    say(f"{found}; trying `prime env pull`")
    shutil.rmtree(target, ignore_errors=True)
    code, output = run(
        command, dict(os.environ), log, source.text, say, time.monotonic() + PULL_TIMEOUT_S
    )
    if code != 0 or not (target / "pyproject.toml").is_file():
        why = (
            f"did not end within {PULL_TIMEOUT_S:.0f} s"
            if code is None
            else f"ended with code {code}"
        )
        raise RunError(
            f"{found}, and `prime env pull` {why}; {check}, and `prime login`. "
            f"{last_lines('prime', output)}"
        )
    return Place(f"{source.name} @ {target.as_uri()}", "", "the Environments Hub (by `prime`)")
