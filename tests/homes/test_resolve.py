"""Which environments of a configuration have homes, and what becomes of the configuration."""

from pathlib import Path

import pytest

from rl.config.command_line import build, parse_args
from rl.homes.request import apis
from rl.homes.resolve import entries, homes_of, in_homes, needs_home, record, script_needs, unmade
from rl.orchestrator.workers.setups import env_spec
from rl.system.errors import ConfigError, RunError
from tests.homes.index import CLASSIC, V1, make_wheel

REWARD = "def f(completion):\n    return 1.0\n"


def configured(tmp_path, environments, *flags):
    words = ["--orchestrator.environment", f"[{', '.join(environments)}]"]
    return build(parse_args([*words, "--output_dir", str(tmp_path), "--name", "r", *flags]))


def test_from_a_configuration_to_interpreters_and_back(index, said, tmp_path, monkeypatch):
    make_wheel(index.folder / "ada", "some-sums", "1.0", {"sums_of_it.py": CLASSIC}, ["verifiers"])
    monkeypatch.chdir(tmp_path)
    Path("alone.py").write_text(V1)
    block = "# /// script\n# dependencies = ['verifiers>=0.2']\n# ///\n"
    Path("reward.py").write_text(block + REWARD)
    Path("rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    environments = [
        '{id = "ada/some-sums@1.0", kind = "classic"}',
        '{id = "alone"}',
        '{dataset = "rows.jsonl", reward = "reward.py:f"}',
        '{id = "elsewhere", python = "/opt/python"}',
        '{dataset = "rows.jsonl", head_server = "http://127.0.0.1:1", name = "gym"}',
    ]
    evals = '[{id = "alone"}, {id = "alone", args = {n = 3}, name = "more"}]'
    config = configured(tmp_path, environments, "--orchestrator.eval", evals)
    found = entries(config)
    names = ["some-sums", "alone", "rows", "elsewhere", "gym", "eval-more"]
    assert list(found) == names and found["alone"] is config.orchestrator.environment[1]
    assert [name for name in names if not needs_home(found[name])] == ["elsewhere", "gym"]
    assert unmade(config) == [
        f"environment {name}: its home does not exist yet; a start makes it, with {needs}"
        for name, needs in (
            (
                "some-sums",
                "ada/some-sums@1.0; `rl env install ada/some-sums@1.0` makes it now",
            ),
            ("alone", "verifiers>=0.3.1,<0.5"),
            ("rows", "verifiers>=0.3.1,<0.4"),
            ("more", "verifiers>=0.3.1,<0.5"),
        )
    ]
    homes = homes_of(config, said.append, recorded=True)
    assert unmade(config) == [] and homes["alone"].place == homes["eval-more"].place
    played = in_homes(config, homes)
    envs, evals = played.orchestrator.environment, played.orchestrator.eval
    assert [env.id for env in envs] == ["sums_of_it", "alone", None, "elsewhere", None]
    assert [env.label for env in envs] == names[:-1]
    pythons = [str(homes[name].interpreter) for name in names[:3]]
    assert [env.python for env in envs] == [*pythons, "/opt/python", None]
    assert evals[0].source == envs[1].source  # one set of workers still plays both
    assert evals[1].python == pythons[1]
    assert env_spec(envs[0], "x", played).kind == "classic"
    record(config, homes)
    written = (config.run_dir.environments / "some-sums.txt").read_text().splitlines()
    assert written[0].startswith("# Environment some-sums was played with")
    assert "# id = ada/some-sums@1.0" in written
    assert written[-3:] == ["# own = some-sums==1.0", "helper==1.0", "verifiers==0.3.1"]
    said.clear()
    assert homes_of(config, said.append, recorded=True) == homes and said == []
    for file in (Path("alone.py"), Path("reward.py")):
        file.write_text(file.read_text() + "# changed\n")
    homes_of(config, said.append, recorded=True)
    assert [line.partition(" has changed")[0] for line in said] == [
        f"warning: the code of environment {name}" for name in ("alone", "rows", "eval-more")
    ]


def test_rows_share_a_home_and_not_their_code(index, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    environments = []
    for name in ("x", "y"):
        Path(f"{name}.py").write_text(f"{REWARD}# {name}\n")
        entry = f'{{dataset = "rows.jsonl", reward = "{name}.py:f", name = "{name}"}}'
        environments.append(entry)
    config = configured(tmp_path, environments)
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
    config = configured(tmp_path, [f'{{id = "{env_id}"}}']).with_absolute_paths()
    env = config.orchestrator.environment[0]
    assert (env.id, env.label) == (str(inside.parent), "my_words")


def test_ids_that_mean_nothing_are_all_told(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_ENVIRONMENTS", str(tmp_path / "homes"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    monkeypatch.chdir(tmp_path)
    faults = {
        "nope": "is not installed: there is no ./nope.py, no ./environments/nope, and nothing of",
        "./nowhere": "the folder does not exist; give the folder that contains its pyproject",
        "./rows.jsonl": "this is a dataset, not an environment; set `dataset` and `reward`",
        "pypi:-x": "not a valid requirement; write pypi:name or pypi:name==1.0",
        "pypi:two words": "not a valid requirement; write pypi:name or pypi:name==1.0",
        "a/b/c": "not a valid id; write owner/name, owner/name@version, pypi:name, or ./folder",
    }
    entries = [f'{{id = "{env_id}", name = "n{i}"}}' for i, env_id in enumerate(faults)]
    with pytest.raises(RunError) as error:
        homes_of(configured(tmp_path, entries), print, recorded=False)
    lines = str(error.value).splitlines()
    for line, (env_id, fault) in zip(lines, faults.items(), strict=True):
        assert line.startswith(f"environment {env_id.removeprefix('./')}") and fault in line
    assert not (tmp_path / "homes").exists()


@pytest.mark.parametrize(
    ("block", "needs"),
    [
        ("", ([], "")),
        ('requires-python = ">=3.11"\ndependencies = [\n  "a>=1",\n]\n', (["a>=1"], ">=3.11")),
        ("dependencies = [\n", "cannot be read"),
        ("dependencies = [1]\n", "Expected `str`, got `int`"),
        ('dependencies = "sympy"\n', "Expected `array`, got `str`"),
        ('requires-python = "3.12"\n', "cannot be read: Invalid specifier: '3.12'; see PEP 723"),
        ('requires-python = [">=3.12"]\n', "Expected `str`, got `array`"),
        ("a = 1\n# ///\nx = 1\n# /// script\na = 1\n", "give one block"),
    ],
)
def test_what_a_reward_file_says_it_needs(tmp_path, block, needs):
    path = tmp_path / "reward.py"
    lines = [f"# {line}\n" if line[0] not in "#x" else line + "\n" for line in block.splitlines()]
    text = f"# /// script\n{''.join(lines)}# ///\n" if block else "# /// other\n# a = 1\n# ///\n"
    path.write_text(f"{text}x = 1\n")
    if isinstance(needs, str):
        with pytest.raises(RunError, match=needs):
            script_needs(f"{path}:f")
    else:
        assert script_needs(f"{path}:f") == needs
    assert script_needs("module:f") == script_needs(None) == ([], "")


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (
            '{id = "a", python = "/x", requirements = ["b"]}',
            "which it does not with python; leave one out",
        ),
        (
            '{dataset = "x.jsonl", reward = "r.py:f", kind = "v1"}',
            "applies only to packages; leave it out, or give the package's id",
        ),
        ('{id = "a", requirements = ["<2"]}', "'<2' is not a requirement .*; write name, or name"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, environment, text):
    with pytest.raises(ConfigError, match=text):
        configured(tmp_path, [environment])


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (CLASSIC, {"classic"}),
        (V1, {"v1"}),
        (V1 + CLASSIC, {"classic", "v1"}),
        ("from somewhere import (\n    load_environment,\n)\n", {"classic"}),
        ("environment = vf.load_environment('gsm8k')\n", set()),
        ("import verifiers.v1 as vf\n", set()),  # a helper of such a package
        ("from verifiers import v1\n__all__: list[str] = [\n    'X',\n]\n", {"v1"}),
        ("import verifiers.v1\n__all__ = ['load_environment', 'score']\n", {"classic"}),
        ("", set()),
    ],
)
def test_what_source_text_shows(code, shown):
    assert apis(code) == shown
