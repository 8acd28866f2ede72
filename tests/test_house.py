"""The house: which room may know which, and the other rules of the code itself. CONTRIBUTING.md
says them in words."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "rl"
FILES = sorted(SRC.rglob("*.py"))
FLOORS = [
    ["system"],
    ["run_dir"],
    ["config", "wire"],
    ["models", "diagnosis", "homes"],
    ["launch", "inference", "envs", "orchestrator", "trainer", "records", "tinker"],
    ["cluster"],
    ["commands", "view"],
    ["main", "api"],
]
"""From the ground up. A room knows the floors below its own, and nobody on it."""
BUDGETS = {
    "trainer": 65_100,
    "orchestrator": 40_700,
    "commands": 35_300,
    "envs": 26_800,
    "config": 23_500,
    "launch": 26_200,
    "tinker": 23_200,
    "run_dir": 21_600,
    "inference": 19_200,
    "view": 18_100,
    "cluster": 14_700,
    "wire": 16_000,
    "diagnosis": 15_600,
    "records": 11_300,
    "system": 11_800,
    "homes": 6_500,
    "models": 10_700,
    "api": 1_400,
    "main": 700,
}
"""Tokens of each room."""
FUNCTION = 850
"""Tokens of a function."""
SCRIPTS = 20_000
"""Tokens of all scripts."""
EMPTY_NAMES = {
    "one",
    "found",
    "there",
    "own",
    "place",
    "made",
    "given",
    "said",
    "heard",
    "more",
    "parts",
}
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ONLY_IMPORTERS = {
    "vllm": ("inference/",),
    "verifiers": ("envs/",),
    "torch": ("trainer/", "inference/", "models/gguf.py", "models/tiny.py"),
    "tinker": ("tinker/client/",),
}
"""The only places that import these packages."""


def module_of(path):
    return ".".join(["rl", *path.relative_to(SRC).with_suffix("").parts])


MODULES = {module_of(path).removesuffix(".__init__"): path for path in FILES}


def imports(path):
    """Full names of all that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path):
    """Modules of ours that a file imports, lazily or not."""
    named = {name: name if name in MODULES else name.rpartition(".")[0] for name in imports(path)}
    return {module for module in named.values() if module in MODULES and module != "rl"}


def room_of(module):
    return module.split(".")[1]


def test_every_room_stands_on_a_floor():
    rooms = {path.relative_to(SRC).parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert rooms == set(FLOOR)


def test_imports_run_downwards_and_rooms_of_one_floor_never_meet():
    for module, path in MODULES.items():
        for other in own_imports(path) if module != "rl" else ():
            room, target = room_of(module), room_of(other)
            assert room == target or FLOOR[target] < FLOOR[room], f"{module} imports {other}"


def test_no_circle():
    """Modules can be taken away one by one, each after those that it imports."""
    left = {module: own_imports(path) - {module} for module, path in MODULES.items()}
    while free := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in free:
            del left[module]
    assert not left


@pytest.mark.parametrize("package", ONLY_IMPORTERS)
def test_a_heavy_package_has_few_importers(package):
    found = {
        path.relative_to(SRC).as_posix()
        for path in FILES
        if any(name.split(".")[0] == package for name in imports(path))
    }
    assert found and all(name.startswith(ONLY_IMPORTERS[package]) for name in found), found


def test_nothing_is_pickled():
    """But DCP's metadata of tensors, by a reader that makes nothing else."""
    packages = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    found = [
        path.relative_to(SRC).as_posix()
        for path in FILES
        if packages & {name.split(".")[0] for name in imports(path)}
    ]
    assert found == ["trainer/store/checkpoint.py"]


def test_nothing_that_is_loaded_can_run_code():
    """Weights are safetensors; torch.load and the like unpickle what they read.
    torch.distributed.checkpoint is given what it verified."""
    forbidden = {
        "torch": {"load"},
        "yaml": {"load", "load_all", "unsafe_load", "full_load"},
        "numpy": {"load"},
        "np": {"load"},
    }
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
            ):
                given = {
                    keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords
                }
                safe = given.get("weights_only") is True or (
                    node.func.value.id in ("np", "numpy") and not given.get("allow_pickle")
                )
                assert safe or node.func.attr not in forbidden.get(node.func.value.id, ()), (
                    f"{path}:{node.lineno}"
                )
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno}"


def test_at_most_two_broad_excepts():
    broad = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                if any(
                    kind is None
                    or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))
                    for kind in caught
                ):
                    broad.append(f"{path.relative_to(SRC)}:{node.lineno}")
    assert len(broad) <= 2, broad


@pytest.mark.parametrize(
    "module",
    [
        "rl.run_dir.access_token",
        "rl.system.credentials",
        "rl.config.run",
        "rl.config.command_line",
        "rl.main",
        "rl.system.children",
        "rl.wire.messages",
        "rl.launch.prepare",
        "rl.launch.devices",
        "rl",
    ],
)
def test_light_imports(module):
    """`--help` has to answer at once."""
    heavy = (
        "torch",
        "vllm",
        "verifiers",
        "transformers",
        "numpy",
        "matplotlib",
        "wandb",
        "rich",
        "zmq",
        "pydantic_settings",
    )
    code = f"import {module}, sys; print(*[name for name in {heavy} if name in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "\n"
    )


def num_tokens(text):
    """Python's tokens without comments, docstrings and the ends of lines."""
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
    ]
    is_docstring = [
        token.type == tokenize.STRING and before.type == after.type == tokenize.NEWLINE
        for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False)
    ]
    ends = (tokenize.NEWLINE, tokenize.ENDMARKER)
    return sum(token.type not in ends for token in tokens) - sum(is_docstring)


@pytest.mark.parametrize("room", BUDGETS)
def test_rooms_keep_their_budgets(room):
    """Who needs more changes the table in the same commit, and says in its message why."""
    paths = [path for path in FILES if path.relative_to(SRC).parts[0].removesuffix(".py") == room]
    assert sum(num_tokens(path.read_text()) for path in paths) <= BUDGETS[room]


def test_functions_and_files_stay_short():
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 600, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                code = ast.get_source_segment(text, node) or ""
                assert num_tokens(code) <= FUNCTION, f"{path}: {node.name}"


def test_scripts_keep_their_budget():
    assert sum(num_tokens(path.read_text()) for path in Path("scripts").rglob("*.py")) <= SCRIPTS


def test_names_say_what_they_hold():
    """But fields of classes that are fields of files."""
    for path in FILES:
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        fields = {
            id(line.target)
            for node in nodes
            if isinstance(node, ast.ClassDef)
            for line in node.body
            if isinstance(line, ast.AnnAssign)
        }
        stored = {
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            if id(node) not in fields
        }
        assert not stored & EMPTY_NAMES, path


def test_no_two_classes_have_one_name():
    names = Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, number in names.items() if number > 1]


def test_every_module_and_public_class_says_what_it_is():
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert not tree.body or ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}: {node.name}"


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *map(str, sorted(Path("docs").glob("*.md")))]
)
def test_files_and_tests_that_a_page_names_are_there(page):
    if page == "docs/log.md":  # tells what was, too
        return
    text = Path(page).read_text()
    named = set(re.findall(r"`((?:src/rl/|tests/|scripts/)?[a-z_0-9]+/[\w/]+\.py)\b", text))
    missing = {
        name
        for name in named
        if not Path(name).exists() and not (SRC / name.removeprefix("rl/")).exists()
    }
    assert not missing
    files = [*Path("tests").rglob("test_*.py")]
    names, tests = {path.stem for path in files}, "".join(path.read_text() for path in files)
    assert not {
        name
        for name in re.findall(r"`(test_\w+_\w+)`", text)
        if name not in names and f"def {name}(" not in tests
    }


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/decisions.md"])
def test_functions_that_a_page_places_in_a_file_are_there(page):
    """`name` in `file.py`, and `file.py` (`name`)."""
    text = " ".join(Path(page).read_text().split())
    pairs = [
        *re.findall(r"`(\w+)` (?:in|of) `([\w/]+\.py)`", text),
        *((name, path) for path, name in re.findall(r"`([\w/]+\.py)` \(`(\w+)`\)", text)),
    ]
    assert pairs
    for name, path in pairs:
        file = SRC / path if (SRC / path).exists() else Path(path)
        if file.exists():
            assert re.search(rf"\b{name}\b", file.read_text()), f"{name} in {path}"
