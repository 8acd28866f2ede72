"""Lint, format, and the shape that keeps the code readable: CONTRIBUTING.md says the rules."""

import ast
import subprocess
import sys
from pathlib import Path

SOURCES = sorted(Path("src").rglob("*.py"))


def test_ruff():
    for command in (["check"], ["format", "--check"]):
        folders = ["src", "tests", "environments", "scripts"]
        done = subprocess.run([sys.executable, "-m", "ruff", *command, *folders], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_functions_and_files_stay_short():
    for path in SOURCES:
        text = path.read_text()
        assert text.count("\n") <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 80, f"{path}: {node.name}"


def test_every_module_and_public_class_says_what_it_is():
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        assert not tree.body or ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}: {node.name}"
