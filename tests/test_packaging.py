"""What is installed: exact versions of everything, and a wheel that works in an empty
environment."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from rl.main import DISTRIBUTION

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())
LOCAL = {DISTRIBUTION}


def test_everything_that_is_installed_has_the_version_that_the_constraints_say():
    lines = [Requirement(line) for line in PROJECT["tool"]["uv"]["constraint-dependencies"]]
    lines += [Requirement(line) for line in PROJECT["project"]["optional-dependencies"]["nixl"]]
    here = {
        line.name: line.specifier for line in lines if line.marker is None or line.marker.evaluate()
    }
    installed = {
        canonicalize_name(found.name): Version(found.version).public
        for found in metadata.distributions(path=[sysconfig.get_path("purelib")])
    }
    wrong = {
        name: version
        for name, version in installed.items()
        if name not in LOCAL and str(here.get(name)) != f"=={version}"
    }
    assert not wrong, "`uv sync`, or after a change of dependencies `uv run scripts/constraints.py`"
    assert len(here) > 200
    assert all(re.fullmatch(r"==[\w.!+]+", str(line.specifier)) and not line.url for line in lines)


def test_the_distribution_is_called_as_the_command_says_and_its_switches_are_all_documented():
    assert PROJECT["project"]["name"] == DISTRIBUTION
    assert metadata.version(DISTRIBUTION) == PROJECT["project"]["version"]
    extras, groups = dict(PROJECT["project"]["optional-dependencies"]), PROJECT["dependency-groups"]
    assert extras.pop("tensorboard")[0] in groups["dev"]
    assert extras.pop("tinker")[0] in groups["dev"]
    assert extras.pop("ray") and extras.pop("nixl"), (
        "large packages, which their own tests do without"
    )
    assert extras == {name: groups[name] for name in ("cpu", "gpu")}
    pages = [Path("README.md"), *Path("docs").glob("*.md")]
    # that package is somebody else's
    assert not [page for page in pages if re.search(r"pip install ['\"]?rl\b", page.read_text())]


@pytest.mark.proof
@pytest.mark.timeout(420)
def test_the_wheel_runs_in_an_empty_environment(tmp_path, model):
    """Built, installed with the versions of this project, and run as its user would: a model,
    rows and a reward function."""
    uv, dist, env = (
        shutil.which("uv") or sys.executable.replace("python", "uv"),
        tmp_path / "dist",
        tmp_path / "env",
    )
    clean = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")
    } | {"HF_HUB_OFFLINE": "1"}

    def run(*command, cwd=tmp_path):
        done = subprocess.run(
            list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    # tests start in a folder of links, of which no package can be built
    root = Path("pyproject.toml").resolve().parent
    run(uv, "build", "--quiet", "--out-dir", dist, root)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "rl",
        wheel.name.split("-py3")[0] + ".dist-info",
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)
    page = {
        path.relative_to("src").as_posix()
        for path in Path("src/rl/view/page").rglob("*")
        if path.is_file()
    }
    assert page and page <= set(names)
    examples = [
        path
        for folder in ("configs/recipes", "environments")
        for path in Path(folder).rglob("*")
        if path.is_file()
    ]
    examples = [path.as_posix() for path in examples if path.suffix != ".pyc"]
    assert len(examples) > 20
    assert {f"rl/{name.removeprefix('configs/')}" for name in examples} <= set(names)
    with tarfile.open(sdist) as archive:
        assert {"LICENSE", "README.md", "configs", "docs", "environments", "src", "tests"} <= {
            name.split("/")[1] for name in archive.getnames()
        }
    run(uv, "venv", "--quiet", "--python", sys.executable, env)
    run(uv, *f"pip install --quiet --python {env}/bin/python {wheel}[cpu]".split(), cwd=root)
    rl = env / "bin" / "rl"
    assert run(rl, "--version") == f"rl {metadata.version(DISTRIBUTION)}\n"
    assert "usage: rl " in run(rl, "--help")
    assert "One-digit sums" in run(rl, "recipe")
    assert run(rl, "recipe", "sums").endswith("cd sums\nrl @ run.toml\n")
    assert (
        tmp_path / "sums" / "environments" / "single_digit_addition" / "pyproject.toml"
    ).is_file()
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def length(completion):\n    return float(len(completion[-1]['content']) % 2)\n"
    )
    flags = (
        f"--model {model} --model.dtype float32 --model.max_model_len 256 --name tiny --quick "
        "--orchestrator.environment.dataset tasks.jsonl "
        "--orchestrator.environment.reward rewards.py:length"
    )
    run(rl, *flags.split())
    assert (
        tmp_path / "outputs" / "tiny-quick" / "weights" / "000002" / "model.safetensors"
    ).is_file()
