"""Which environments of a configuration have homes, and what becomes of the configuration."""

from pathlib import Path

import pytest

from rl.config.command_line import build, parse_args
from rl.homes.probe import lacking, probe
from rl.homes.resolve import entries, homes_of, in_homes, needs_home, record, script_needs, unmade
from rl.orchestrator.workers.setups import env_spec
from rl.system.errors import ConfigError, RunError
from tests.homes.index import CLASSIC, V1, make_wheel


def configured(tmp_path, environments, *flags):
    return build(
        parse_args(
            [
                "--orchestrator.environment",
                environments,
                "--output_dir",
                str(tmp_path),
                "--name",
                "r",
                *flags,
            ]
        )
    )


def test_from_a_configuration_to_interpreters_and_back(index, said, tmp_path, monkeypatch):
    make_wheel(index.folder / "ada", "some-sums", "1.0", {"sums_of_it.py": CLASSIC}, ["verifiers"])
    monkeypatch.chdir(tmp_path)
    Path("alone.py").write_text(V1)
    Path("reward.py").write_text(
        "# /// script\n# dependencies = ['verifiers>=0.2']\n# ///\ndef f(completion):\n    "
        "return 1.0\n"
    )
    Path("rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    environments = """[{id = "ada/some-sums@1.0", kind = "classic"}, {id = "alone"}, {dataset = "rows.jsonl", reward = "reward.py:f"},
        {id = "elsewhere", python = "/opt/python"}, {dataset = "rows.jsonl", head_server = "http://127.0.0.1:1", name = "gym"}]"""
    config = configured(
        tmp_path,
        " ".join(environments.split()),
        "--orchestrator.eval",
        '[{id = "alone"}, {id = "alone", args = {n = 3}, name = "more"}]',
    )
    assert list(entries(config)) == ["some-sums", "alone", "rows", "elsewhere", "gym", "eval-more"]
    assert [needs_home(entry) for entry in entries(config).values()] == [
        True,
        True,
        True,
        False,
        False,
        True,
    ]
    assert [line.partition(";")[0] for line in unmade(config)] == [
        f"environment {name}: its home does not exist yet"
        for name in ("some-sums", "alone", "rows", "more")
    ]
    found = homes_of(config, said.append, recorded=True)
    assert unmade(config) == [] and found["alone"].home == found["eval-more"].home
    played = in_homes(config, found)
    envs, evals = played.orchestrator.environment, played.orchestrator.eval
    assert [env.id for env in envs] == ["sums_of_it", "alone", None, "elsewhere", None]
    assert [env.label for env in envs] == ["some-sums", "alone", "rows", "elsewhere", "gym"]
    assert [env.python for env in envs] == [
        str(found[name].home.interpreter) for name in ("some-sums", "alone", "rows")
    ] + [
        "/opt/python",
        None,
    ]
    assert evals[0].source == envs[1].source  # one set of workers still plays both
    assert env_spec(envs[0], "x", played).kind == "classic"
    record(config, found)
    written = (config.run_dir.environments / "some-sums.txt").read_text().splitlines()
    assert (
        written[0].startswith("# Environment some-sums was played with")
        and "# id = ada/some-sums@1.0" in written
    )
    assert written[-3:] == ["# own = some-sums==1.0", "helper==1.0", "verifiers==0.3.1"]
    said.clear()
    assert homes_of(config, said.append, recorded=True) == found and said == []
    for file in (Path("alone.py"), Path("reward.py")):
        file.write_text(file.read_text() + "# changed\n")
    homes_of(config, said.append, recorded=True)
    assert [line.partition(" has changed")[0] for line in said] == [
        f"warning: the code of environment {name}" for name in ("alone", "rows", "eval-more")
    ]


def test_rows_share_a_home_and_not_their_code(index, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    for name in ("a.py", "b.py"):
        Path(name).write_text(f"def f(completion):  # {name}\n    return 1.0\n")
    config = configured(
        tmp_path,
        '[{dataset = "rows.jsonl", reward = "a.py:f", name = "x"}, {dataset = "rows.jsonl", '
        'reward = "b.py:f", name = "y"}]',
    )
    record(config, homes_of(config, said.append, recorded=False))
    said.clear()
    homes_of(config, said.append, recorded=True)
    assert said == []


@pytest.mark.parametrize("env_id", [".", "./", "..", "../my_words"])
def test_the_folder_that_one_is_in_has_its_name_and_stays_the_same(tmp_path, monkeypatch, env_id):
    """Also for a resume, which may be typed elsewhere."""
    inside = tmp_path / "my_words" / "inside"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside.parent if env_id != ".." else inside)
    env = (
        configured(tmp_path, f'[{{id = "{env_id}"}}]')
        .with_absolute_paths()
        .orchestrator.environment[0]
    )
    assert (env.id, env.label) == (str(inside.parent), "my_words")


def test_ids_that_mean_nothing_are_all_told(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_ENVIRONMENTS", str(tmp_path / "homes"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    monkeypatch.chdir(tmp_path)
    ids = (
        '[{id = "nope"}, {id = "./nowhere"}, {id = "./rows.jsonl", name = "z"}, {id = "pypi:-x", '
        'name = "x"}, '
    )
    ids += '{id = "pypi:two words", name = "y"}, {id = "a/b/c"}]'
    with pytest.raises(RunError) as error:
        homes_of(configured(tmp_path, ids), print, recorded=False)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(
        "environment nope is not installed: there is no ./nope.py, no ./environments/nope, "
        "and nothing of that name in"
    )
    assert lines[1:] == [
        "environment nowhere: the folder does not exist; give the folder that contains its "
        "pyproject.toml",
        "environment rows.jsonl: this is a dataset, not an environment; set `dataset` and "
        "`reward` instead of `id`",
        "environment pypi:-x: not a valid requirement; write pypi:name or pypi:name==1.0",
        "environment pypi:two words: not a valid requirement; write pypi:name or pypi:name==1.0",
        "environment a/b/c: not a valid id; write owner/name, owner/name@version, pypi:name, "
        "or ./folder",
    ]
    assert not (tmp_path / "homes").exists()


@pytest.mark.parametrize(
    ("block", "needs"),
    [
        ("x = 1\n", ((), "")),
        (
            '# /// script\n# requires-python = ">=3.11"\n# dependencies = [\n#   '
            '"sympy>=1.13",\n# ]\n# ///\nx = 1\n',
            (("sympy>=1.13",), ">=3.11"),
        ),
        ("# /// other\n# a = 1\n# ///\n", ((), "")),
        ("# /// script\n# dependencies = [\n# ///\n", "cannot be read"),
        ("# /// script\n# dependencies = [1]\n# ///\n", "give one block, with a list of texts"),
        ('# /// script\n# dependencies = "sympy"\n# ///\n', "give one block, with a list of texts"),
        (
            '# /// script\n# requires-python = "3.12"\n# ///\n',
            "cannot be read: Invalid specifier: '3.12'; see PEP 723",
        ),
        ('# /// script\n# requires-python = [">=3.12"]\n# ///\n', "a text as requires-python"),
    ],
)
def test_what_a_reward_file_says_it_needs(tmp_path, block, needs):
    path = tmp_path / "reward.py"
    path.write_text(block)
    if isinstance(needs, str):
        with pytest.raises(RunError, match=needs):
            script_needs(f"{path}:f")
    else:
        assert script_needs(f"{path}:f") == needs
    assert script_needs("module:f") == script_needs(None) == ((), "")


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (
            '[{id = "a", python = "/x", requirements = ["b"]}]',
            "python names an interpreter that you manage; leave one out",
        ),
        (
            '[{dataset = "x.jsonl", reward = "r.py:f", kind = "v1"}]',
            "applies only to packages; leave it out, or give the package's id",
        ),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, environment, text):
    with pytest.raises(ConfigError, match=text):
        configured(tmp_path, environment)


@pytest.mark.parametrize(
    ("code", "classic", "v1"),
    [
        (CLASSIC, True, False),
        (V1, False, True),
        (V1 + CLASSIC, True, True),
        ("from somewhere import load_environment\n", True, False),
        ("import verifiers.v1 as vf\n", False, False),  # a helper of such a package
        ("from verifiers import v1\n__all__ = ['X']\n", False, True),
        (
            "import verifiers.v1\n__all__ = ['load_environment']\ndef load_environment(): ...\n",
            True,
            False,
        ),
        (
            "import verifiers.v1\n__all__ = ['load_environment', 'score']\ndef "
            "load_environment(): ...\ndef score(): ...\n",
            True,
            False,
        ),
        ("def broken(:\n", False, False),
        ("", False, False),
    ],
)
def test_what_source_text_shows(tmp_path, code, classic, v1):
    (tmp_path / "m.py").write_text(code)
    found = probe(tmp_path / "m.py")
    assert (found.classic, found.v1) == (classic, v1)


def test_imports_of_a_whole_package_and_what_is_lacking(tmp_path):
    package, verifiers = tmp_path / "p", tmp_path / "verifiers"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from p.inner.deep import Words\n__all__ = ['Words']\n")
    (package / "inner" / "deep.py").write_text(
        "import verifiers.v1 as vf\nfrom verifiers.v1.types import Turn\nfrom "
        "verifiers.legacy import X\n"
    )
    (verifiers / "v1").mkdir(parents=True)
    found = probe(package / "__init__.py")
    assert found.v1 and lacking(found, verifiers) == ["verifiers.legacy", "verifiers.v1.types"]
    (verifiers / "v1" / "types.py").write_text("")
    assert lacking(found, verifiers) == ["verifiers.legacy"]
