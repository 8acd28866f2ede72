"""Every command and every TOML in README, CONTRIBUTING and docs/ is understood by what it is
for, up to where it would begin to work."""

import __future__

import argparse
import ast
import contextlib
import importlib
import os
import pkgutil
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rl.commands import environment, replay
from rl.commands.options import named_run
from rl.config.command_line import (
    SHORT_FLAGS,
    SWITCHES,
    build,
    load_config_or_exit,
    parse_args,
    take,
    to_toml,
)
from rl.config.fields import field_tree
from rl.config.help import COMMANDS
from rl.config.run import ALIASES, RLConfig
from rl.launch.children import Children

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROGRAMS = (
    "uv",
    "pip",
    "prime",
    "rl",
    "python",
    "pytest",
    "torchrun",
    "trainer",
    "orchestrator",
    "inference",
)
"""First words of what is a command; a block that begins with another one is a picture, or what
something printed."""
ANY_FLAG = {
    "--help",
    "--resume",
    "--version",
    *SWITCHES,
    *(f"--{name}" for name in (*SHORT_FLAGS, *ALIASES)),
}


class UnderstoodError(Exception):
    """A script has parsed its arguments; `rest` are those that it hands on to `rl`, if it does."""

    def __init__(self, rest):
        self.rest = rest


def blocks(text, language):
    """The fenced blocks of a page in one of the languages, and, of commands, those that are
    indented."""
    # all of them: the end of one looks like a beginning
    every = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    fenced = [block for name, block in every if re.fullmatch(language, name)]
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = [
        re.sub(r"(?m)^    ", "", block)
        for block in re.findall(r"(?:(?<=\n\n)(?:    .*\n)+)", outside)
    ]
    return fenced + (indented if "bash" in language else [])


def commands_in(block):
    """The commands of a block, each in one line, without comments."""
    for line in re.sub(r"\\\n *", "", block).splitlines():
        with contextlib.suppress(ValueError):  # a picture with quotes
            for part in re.split(r" && | > ", line):
                words = [
                    word
                    for word in shlex.split(part, comments=True)
                    if not re.match(r"RL_[A-Z_]+=", word)
                ]
                if words:
                    yield shlex.join(words)


def block_commands(page):
    found = []
    for block in blocks(page.read_text(), "bash|sh|"):
        commands = [command for command in commands_in(block) if not command.startswith("/")]
        found += commands if commands and commands[0].split()[0] in PROGRAMS else []
    return found


def spans(page):
    """What stands in the running text as code."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()).replace("\\|", "|") for span in re.findall(r"`([^`]+)`", text)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory that has what the pages take for granted: a clone, files of the user's own, a
    run."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "environments", "scripts", "tests", "docs"):
        (folder / name).symlink_to(ROOT / name)

    def shown(language, part):
        """The first block of a page with this in it."""
        every = (block for page in PAGES for block in blocks(page.read_text(), language))
        return next(block for block in every if part in block)

    rows = '{"prompt": "What is 7 + 5?", "answer": "12"}\n'
    for name, text in {
        "tasks.jsonl": rows,
        "held_out.jsonl": rows,
        "data.jsonl": rows.replace("answer", "completion"),
        "rollouts.jsonl": '{"reward": 1.0, "turns": []}\n',
        "rewards.py": shown("python", "def exact("),
        "my_loss.py": shown("python", "def topr("),
        "run.toml": '[orchestrator.environment]\nid = "e"\n[[orchestrator.eval]]\ninterval = 5\n',
        "t.toml": "learning_rate = 1e-6\n",
        "o.toml": '[environment]\nid = "e"\n',
        "i.toml": "port = 8000\n",
        "first.toml": shown("toml", 'name = "first"'),
        "my_run.toml": shown("toml", "./environments/my_env"),
    }.items():
        (folder / name).write_text(text)
    for name in ("x", "first", "learning_rate", "my_env-SmolLM2-135M-Instruct"):
        flags = f"@ {folder}/run.toml --output_dir {folder}/outputs --name {name}"
        config = build(parse_args(flags.split()))
        (folder / "outputs" / name / "checkpoints" / "000040").mkdir(parents=True)
        (folder / "outputs" / name / "config.toml").write_text(to_toml(config))
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def understood(command):
    """Fails unless the command's own program understands all of its arguments."""
    words = shlex.split(command)
    if words[0] == "uv" and words[1] == "run":
        words = words[2:]
        while words[0] in ("--group", "--no-group"):
            assert words[1] in PROJECT["dependency-groups"], command
            words = words[2:]
        return program(words, command)
    if words[0] in ("uv", "pip"):
        return None if words[0] == "pip" else program(words, command)
    if words[0] == "client/bin/python":  # another environment, which docs/tinker.md makes
        return script(Path(words[1]), words[2:])
    assert words[0] in ("prime", "mkdir", "cp"), f"{command}: what is installed by uv is run by uv"
    return None


def program(words, command):
    name, *args = words
    if name == "rl":
        rl(args)
    elif name in ("trainer", "orchestrator", "inference"):
        dry_run(args, name)
    elif name == "torchrun":
        assert args[args.index("-m") + 1] == "rl.trainer.main"
        dry_run(args[args.index("@") :], "trainer")
    elif name == "pytest":
        assert all(Path(word).exists() for word in args if "/" in word), command
        assert [word for word in args if "/" not in word] in (
            [],
            ["-m", "proof"],
            ["-m", "cluster"],
        ), command
    elif name.startswith("scripts/"):
        script(Path(name), args)
    elif name == "-m":
        script(Path(args[0].replace(".", "/") + ".py"), args[1:])
    elif name == "uv":
        assert args[0] in ("build", "venv", "sync", "pip", "tool"), command
    else:
        raise AssertionError(command)


def dry_run(args, name):
    """What `load_config_or_exit` makes of the arguments: the end of a dry run."""
    args = [
        "run.toml"
        if word
        in ("/shared/run.toml", "~/ourcluster.toml", str(Path("~/ourcluster.toml").expanduser()))
        else word
        for word in args
    ]
    with pytest.raises(SystemExit) as end:
        load_config_or_exit(args if "--help" in args else [*args, "--dry-run"], name)
    assert end.value.code == 0, args


def rl(args):
    """A dry run of the command; of those that have none, what they do before anything starts."""
    command, *rest = args if args and args[0] in COMMANDS else ("", *args)
    if not command:
        assert not rest or rest[0].startswith(("-", "@")), args
        return dry_run(rest, "rl")
    function = pkgutil.resolve_name(COMMANDS[command][0])
    module = sys.modules[function.__module__]
    if command == "env" and rest[0] in environment.VERBS:
        options = environment.VERB_OPTIONS[rest[0]]
        assert len(take("rl env", rest[1:], options)[1]) == (rest[0] != "list")
    elif command == "replay":
        _, (run,) = take("rl replay", rest, replay.OPTIONS)
        replay.open_run(named_run(run))
    elif command == "view":
        _, places = take("rl view", rest, module.OPTIONS)
        assert all(place.startswith("outputs/") for place in places)
    elif command in ("watch", "stop", "logs"):
        _, places = take(
            f"rl {command}",
            [{"-f": "--follow", "-n": "--lines"}.get(word, word) for word in rest],
            getattr(module, "OPTIONS", ()),
        )
        assert places[0].startswith("outputs/") and len(places) <= 1 + (command == "logs")
    elif command == "recipe":
        _, recipe = take("rl recipe", rest, module.OPTIONS)
        assert len(recipe) < 2 and set(recipe) <= set(module.names())
    elif command in ("show", "compare"):
        _, runs = take(f"rl {command}", rest, getattr(module, "OPTIONS", ()))
        assert len(runs) == (2 if command == "compare" else 1)
    elif command == "doctor" and (not rest or not rest[0].startswith(("-", "@"))):
        _, run = take("rl doctor", rest, module.OPTIONS)
        assert not run or named_run(run[0]).is_dir()
    else:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
            patch.setattr("rl.cluster.submit.resolve_model", lambda *_, **__: "")
            function(rest if "--help" in rest else [*rest, "--dry-run"], Children())
        assert end.value.code == 0, args
    return None


def script(path, args):
    """What the script's own parser makes of the arguments; what it leaves is for `rl`."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_stop(parser, given=None, namespace=None):
        if given is not None and given != args:  # a subcommand's own parser, below the script's
            return parse(parser, given, namespace)
        raise UnderstoodError(parse(parser, given, namespace)[1])

    def next_script(_python, argv):
        script(Path(argv[1]).relative_to(ROOT), argv[2:])
        raise UnderstoodError([])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *args])
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
        patch.setattr(os, "execv", next_script)
        with pytest.raises((UnderstoodError, SystemExit)) as stopped:
            run_parts(path)
    if isinstance(stopped.value, UnderstoodError) and stopped.value.rest:
        dry_run(stopped.value.rest, "rl")
    # without arguments it may say what there is
    assert isinstance(stopped.value, UnderstoodError) or not args, stopped.value


def run_parts(path):
    """Runs a script without what needs packages beyond Python's own and those of ours that are
    light: torch alone takes seconds."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(ROOT / path), "__doc__": None}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            if not all(
                name.split(".")[0] in sys.stdlib_module_names or name.startswith("rl.config")
                for name in modules
            ):
                continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            names["__doc__"] = names["__doc__"] or node.value.value
        else:
            code = compile(
                ast.Module([node], []),
                str(path),
                "exec",
                flags=__future__.annotations.compiler_flag,
            )
            try:
                exec(code, names)
            except NameError:  # of a package that was left out
                names |= {
                    target.id: {}
                    for target in getattr(node, "targets", [])
                    if isinstance(target, ast.Name)
                }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_understood(page, place, monkeypatch, capsys):
    monkeypatch.setattr("rl.launch.children.Children.stop_on_signals", lambda self: None)
    for command in [
        *block_commands(page),
        *(span for span in spans(page) if re.match(r"(uv run|uv pip|pip|python) [^=]", span)),
    ]:
        for part in command.split(" && "):
            try:
                understood(part)
            except (Exception, SystemExit) as error:
                raise AssertionError(
                    f"{page.name}: {command}\n{capsys.readouterr().err}"
                ) from error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_that_a_text_names_are_there(page):
    keys = {f"--{key}" for key in field_tree(RLConfig)}
    for span in spans(page):
        program, *words = span.split()
        if program != "rl" or page.name in ("log.md", "migrating.md"):
            continue
        command = words[0] if words else ""
        assert command in COMMANDS or not command.isalpha(), f"{page.name}: `{span}`"
        options = (
            getattr(importlib.import_module(COMMANDS[command][0].partition(":")[0]), "OPTIONS", ())
            if command in COMMANDS
            else ()
        )
        known = ANY_FLAG | keys | {f"--{option.name}" for option in options}
        for flag in (word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)):
            assert flag in known or re.match(r"--(args|inference\.vllm)\.", flag), (
                f"{page.name}: `{span}`: {flag}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_configuration_is_one(page, place):
    for number, text in enumerate(blocks(page.read_text(), "toml")):
        path = place / f"{page.stem}-{number}.toml"
        path.write_text(text)
        environment = (
            []
            if re.search(r"environment\]|\[sft", text)
            else ["--orchestrator.environment.id", "e"]
        )
        build(parse_args(["@", str(path), *environment]))


def test_pages_have_commands_and_all_are_in_the_index():
    assert sum(len(block_commands(page)) for page in PAGES) >= 65
    index = (ROOT / "docs" / "README.md").read_text()
    assert {page.name for page in PAGES if page.parent.name == "docs"} - {"README.md"} <= set(
        re.findall(r"\]\((\w+\.md)\)", index)
    )
