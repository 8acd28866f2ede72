"""The Environments Hub: finds out where its packages are installed from.

Public packages are in their owner's package index. Private packages, and those without an index,
are fetched as source by the Hub's command `prime`, if that is installed and logged in.

Modelled on the Hub's own clients and tested against a server with its layout, never against the Hub
itself.
"""

import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rl.config.environment_id import Source, module_name
from rl.homes.uv import Job, NetworkError, last_lines
from rl.run_dir.access_token import hides_keys
from rl.run_dir.files import make_directory
from rl.system.errors import RunError

HUB_VARIABLE = "RL_ENVIRONMENTS_HUB"
HUB = "https://api.primeintellect.ai/api/v1/environmentshub"
TIMEOUT_S = 30.0
PULL_TIMEOUT_S = 300.0


class Location(NamedTuple):
    """Where an environment comes from."""

    words: str
    """For messages."""
    requirement: str = ""
    """What uv installs; empty: nothing, or a module or folder as it lies there."""
    index: str = ""
    """Address of the owner's index, which is asked only for this package; empty: the usual one."""


def hub_url() -> str:
    return os.environ.get(HUB_VARIABLE, "").strip("/ ") or HUB


def find(source: Source, folder: Path, job: Job) -> Location:
    """Finds the location of a package of the Hub. `folder`: for the source of a private package.
    Raises RunError if it is not found, and NetworkError if the Hub does not answer."""
    import httpx

    address = f"{hub_url()}/{source.owner}/{source.name}/@{source.version or 'latest'}"
    hub = f"environment {source.text}: the Environments Hub"
    try:
        answer = httpx.get(address, timeout=TIMEOUT_S, follow_redirects=True)
        details = answer.json() if answer.status_code == 200 else {}
        details = details.get("data", details)
        index, wheel = map(web_address, map(details.get, ("simple_index_url", "wheel_url")))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fault = f"{address}: {error or type(error).__name__}"
        raise NetworkError(f"{hub} does not answer ({fault}); check the network") from None
    except (ValueError, AttributeError):
        raise NetworkError(
            f"environment {source.text}: the answer of {address} is not the Hub's; "
            f"is {HUB_VARIABLE} the Hub's address?"
        ) from None
    if answer.status_code >= 500:
        raise NetworkError(f"{hub} answered {answer.status_code} ({address}); try again later")
    words = f"{source.text} from the Environments Hub ({index or wheel or 'by `prime`'})"
    if index:
        pinned = f"{source.name}=={source.version}"
        return Location(words, pinned if source.version else source.name, index)
    if not wheel:
        lacks = "has no public package of it" if details else f"answered {answer.status_code}"
        wheel = pull(source, folder, f"environment {source.text}: {address} {lacks}", job)
    return Location(words, f"{source.name} @ {wheel}")


def web_address(value: object) -> str:
    """The address if it is https or on this machine, and has no user name or password; else empty.
    Anybody on the way could replace what comes over plain http."""
    text = value if isinstance(value, str) else ""
    is_web = re.fullmatch(r"https?://[^/?#@\s]+([/?#]\S*)?", text)
    return text if is_web and hides_keys(text) else ""


def pull(source: Source, folder: Path, fault: str, job: Job) -> str:
    """Fetches the source of a package that is not public with `prime`, and returns its address.
    Raises RunError."""
    prime = shutil.which("prime")
    if not prime:
        raise RunError(
            f"{fault}; check owner, name and version. "
            "If it is private: `uv tool install prime`, `prime login`, then try again"
        )
    target = folder / module_name(source.name)
    job.say(f"{fault}; trying `prime env pull`")
    make_directory(folder)
    shutil.rmtree(target, ignore_errors=True)
    command = [prime, "env", "pull", source.text, "--target", str(target)]
    limited = replace(job, deadline=time.monotonic() + PULL_TIMEOUT_S)
    code, output = limited.run(command, dict(os.environ))
    if code != 0 or not (target / "pyproject.toml").is_file():
        raise RunError(
            f"{fault}, and `prime env pull` ended with code {code}; "
            "check owner, name and version, and `prime login`. "
            f"{last_lines('prime', output)}"
        )
    return target.as_uri()
