"""Writes the exact version of every dependency, as uv has resolved it, into pyproject.toml: `uv run
scripts/constraints.py [--upgrade]`.

uv.lock is not kept, for it names the package index of whoever made it. These constraints do what it
would: two users, on CPUs or GPUs, with any Python that is supported, get the same versions.
`--upgrade` forgets them first and takes the newest versions that fit.
"""

import argparse
import re
import subprocess
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
BLOCK = re.compile(r"constraint-dependencies = \[\n.*?\n\]\n", re.DOTALL)
LINE = re.compile(r"(?P<name>[\w.-]+)(\[.*\])?==(?P<version>[^ ;]+)( ; (?P<marker>.*))?")
GROUPS = ("cpu", "gpu")
"""Where both have a package, the first says its version; that this suits the other is checked by
resolving once more."""
TIMEOUT_S = 600


def uv(*args: str) -> str:
    """What uv prints; its complaints go to the terminal."""
    return subprocess.run(
        ["uv", *args],
        cwd=PYPROJECT.parent,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
    ).stdout


def resolved(group: str) -> list[re.Match[str]]:
    """Name, version and marker of all that is installed anywhere with a group: one line each, or
    several for different Pythons."""
    others = [flag for other in GROUPS if other != group for flag in ("--no-group", other)]
    export = [
        "export",
        "--quiet",
        "--frozen",
        "--no-hashes",
        "--no-header",
        "--no-annotate",
        "--no-emit-project",
        "--no-emit-local",
    ]
    lines = uv(*export, "--group", group, *others).splitlines()
    return [
        match
        for line in lines
        if (match := LINE.fullmatch(line.strip())) and "'never'" not in (match["marker"] or "")
    ]


def constraints() -> list[str]:
    """A requirement for each package, or for each Python that needs a version of its own."""
    found: dict[str, dict[str, str]] = {}
    for group in GROUPS:
        here: dict[str, dict[str, str]] = {}
        for match in resolved(group):
            here.setdefault(match["name"], {})[match["version"]] = match["marker"] or ""
        found = here | found
    return [
        f"{name}=={version}" + (f" ; {marker}" if len(versions) > 1 else "")
        for name, versions in sorted(found.items())
        for version, marker in versions.items()
    ]


def write(lines: list[str]) -> None:
    """Puts the requirements into pyproject.toml."""
    block = "constraint-dependencies = [\n" + "".join(f'    "{line}",\n' for line in lines) + "]\n"
    text = PYPROJECT.read_text()
    assert len(BLOCK.findall(text)) == 1, "pyproject.toml has one list of constraints"
    PYPROJECT.write_text(BLOCK.sub(lambda _: block, text))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    if parser.parse_args().upgrade:
        write(["uv>=0.5"])
        uv("lock", "--upgrade", "--quiet")
    else:
        uv("lock", "--quiet")
    write(lines := constraints())
    uv("lock", "--quiet")
    print(f"{len(lines)} constraints written to {PYPROJECT.name}; `uv sync` installs them")


if __name__ == "__main__":
    main()
