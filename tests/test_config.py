"""Rules of the code itself: what may import what, and how rarely errors are caught broadly."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "rl"
FILES = sorted(SRC.rglob("*.py"))
PACKAGES = ("inference", "orchestrator", "trainer")


def imports(path: Path, *, at_top: bool = False) -> Iterator[str]:
    """Full names of the modules that a file imports, anywhere or (`at_top`) when it is imported itself."""
    tree = ast.parse(path.read_text())
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(package: str) -> set[str]:
    return {str(path.relative_to(SRC)) for path in FILES if any(name.split(".")[0] == package for name in imports(path))}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_three_packages_do_not_import_each_other(package):
    others = tuple(f"rl.{other}." for other in PACKAGES if other != package)
    for path in (SRC / package).rglob("*.py"):
        wrong = [name for name in imports(path) if f"{name}.".startswith(others)]
        assert not wrong, f"{path}: {wrong}"


def test_shared_code_knows_the_packages_only_by_their_configuration():
    for path in SRC.glob("*.py"):
        inside = [name for name in imports(path) if name.split(".")[1:2] and name.split(".")[1] in PACKAGES and name.startswith("rl.")]
        assert all(name.split(".")[2].endswith("config") for name in inside), f"{path}: {inside}"


def test_verifiers_is_imported_in_one_package():
    assert all(name.startswith("orchestrator/envs/") or name == "orchestrator/env_ids.py" for name in importers("verifiers"))


def test_vllm_is_imported_in_one_package():
    assert all(name.startswith("inference/") for name in importers("vllm"))


def test_torch_stays_out_of_orchestrator_messages_and_configuration():
    allowed = {"models.py"}  # lazily, to convert a model
    assert all(name.startswith(("trainer/", "inference/")) or name in allowed for name in importers("torch")), importers("torch")


def test_nothing_is_pickled():
    for package in ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"):
        assert not importers(package)


def test_nothing_that_is_loaded_can_run_code():
    """Weights are safetensors; torch.load and the like unpickle what they read. torch.distributed.checkpoint is given what it verified."""
    forbidden = {"torch": {"load"}, "yaml": {"load", "load_all", "unsafe_load", "full_load"}, "numpy": {"load"}, "np": {"load"}}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
                safe = given.get("weights_only") is True or (node.func.value.id in ("np", "numpy") and not given.get("allow_pickle"))
                assert safe or node.func.attr not in forbidden.get(node.func.value.id, ()), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno}"


def test_at_most_two_broad_excepts():
    broad = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                if any(kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in caught):
                    broad.append(f"{path.relative_to(SRC)}:{node.lineno}")
    assert len(broad) <= 2, broad


@pytest.mark.parametrize(
    "module", ["rl.access", "rl.credentials", "rl.config", "rl.cli", "rl.main", "rl.processes", "rl.messages", "rl.prepare", "rl.devices"]
)
def test_light_imports(module):
    """`--help` has to answer at once."""
    heavy = ("torch", "vllm", "verifiers", "transformers", "numpy", "matplotlib", "wandb", "rich", "zmq")
    code = f"import {module}, sys; print(*[name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
