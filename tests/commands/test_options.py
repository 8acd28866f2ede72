"""The commands' own flags, the choice of the command, and --quick."""

import subprocess
from functools import partial

import pytest

from rl.commands import collect, environment, evaluate
from rl.commands.options import PolicySource, load, name_of_play
from rl.config.command_line import build, parse_args, take
from rl.config.fields import field_tree
from rl.config.help import COMMANDS
from rl.config.run import RLConfig
from rl.main import commit
from rl.system.linux import bind
from tests.bounds import children_cpu_s, imports_s
from tests.commands.driver import called, rl, words
from tests.flags import made


def test_a_git_that_does_not_answer_leaves_the_version_without_a_commit(monkeypatch):
    def hang(command, **_):
        raise subprocess.TimeoutExpired(command, 10)

    monkeypatch.setattr(subprocess, "run", hang)
    assert commit() == ""


HELP_CODE = """
import sys, atexit
from rl.main import main
HEAVY = ("torch", "vllm", "verifiers", "transformers", "zmq", "pydantic_settings")
atexit.register(lambda: print("heavy:", [name for name in HEAVY if name in sys.modules]))
sys.exit(main())
"""
MODULES = (evaluate, collect, environment)


def test_own_flags_are_split_off():
    values, rest = take(
        "rl eval",
        words("@ x --limit=5 --policy a@3 --seed 1 --endpoint_model m"),
        evaluate.OPTIONS,
    )
    assert (values["limit"], values["policy"], values["endpoint_model"], values["compare"]) == (
        5,
        "a@3",
        "m",
        None,
    )
    assert rest == words("@ x --seed 1")
    values, rest = take("rl collect", ["--tokens", "--seed", "1"], collect.OPTIONS)
    assert values["tokens"] is True and rest == ["--seed", "1"]


def test_what_is_played_names_the_folder():
    """The default name has the configuration's model, which --policy may not be; a name that is
    given holds."""
    given = ["--orchestrator.environment.id", "owner/sums"]
    for args, policy, name in (
        (given, None, "sums-SmolLM2-135M-Instruct"),
        (given, "outputs/x@best", "sums-x-12"),
        ([*given, "--name", "mine"], "outputs/x@best", "mine"),
        ([*given, "--trainer.name", "mine"], "outputs/x@best", "mine"),
    ):
        line = parse_args(args)
        assert name_of_play(build(line), line, ["sums"], PolicySource("x 12"), policy) == name


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--limit", "0"], "--limit 0: needs an integer of at least 1"),
        (["--policy"], "--policy needs a value: SPEC"),
    ],
)
def test_faults_of_own_flags(args, said, capsys):
    with pytest.raises(SystemExit) as error:
        take("rl eval", args, evaluate.OPTIONS)
    assert error.value.code == 2 and said in capsys.readouterr().err


def test_no_flag_has_the_name_of_a_setting():
    settings = {name.split(".")[0] for name in field_tree(RLConfig)} | {"steps", "learning_rate"}
    for module in MODULES:
        assert not settings & {option.key for option in module.OPTIONS}


def test_a_run_that_is_played_lends_its_configuration(tmp_path):
    (tmp_path / "config.toml").write_text('seed = 7\n[orchestrator.environment]\nid = "e"\n')
    config, _, _ = load(
        "rl eval", ["--policy", f"{tmp_path}@3", "--max_lag", "4"], evaluate.OPTIONS, ""
    )
    assert (config.seed, config.max_lag, config.orchestrator.environment[0].id) == (7, 4, "e")
    (tmp_path / "other.toml").write_text('[orchestrator.environment]\nid = "f"\n')
    config, _, _ = load(
        "rl eval",
        ["--policy", str(tmp_path), "@", str(tmp_path / "other.toml")],
        evaluate.OPTIONS,
        "",
    )
    assert (config.seed, config.orchestrator.environment[0].id) == (0, "f")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_quick(tmp_path, command):
    before = children_cpu_s()
    code, out, err = rl(tmp_path, command, "--help", code=HELP_CODE)
    took_s = children_cpu_s() - before
    assert (code, err) == (0, "") and f"usage: rl {command} " in out
    assert len(out.splitlines()) < 56 and max(map(len, out.splitlines())) <= 120
    assert ("trainer.optim" in out) == (command in ("sft", "train", "doctor"))
    # which has its settings
    of_a_run = ("replay", "show", "compare", "branch", "view", "watch", "stop", "node", "recipe")
    assert ("orchestrator" in out) == (command not in ("sft", "serve", "export", *of_a_run))
    assert ("--max_steps int" in out) == (command in ("sft", "train"))
    assert ("--model.name" in out) == (command not in ("doctor", "logs", *of_a_run))
    assert ("--policy SPEC" in out) == (command in ("eval", "collect", "env"))
    assert out.endswith("heavy: []\n")
    assert took_s < 7 * imports_s()  # 3.5 seen; torch alone would be 10 more


def test_a_dry_run_of_a_play_looks_at_model_and_port(tmp_path, monkeypatch, capsys):
    """Regression: only that of `rl` did."""
    monkeypatch.setattr("rl.commands.options.bind", partial(bind, wait_s=0.0))
    keys = f"--model.name {tmp_path}/none --orchestrator.environment.id e --dry-run"
    code, out, err = called(capsys, "eval", keys)
    assert code == 0 and f"{tmp_path}/none': no such folder" in err and "[model]" in out
    for no_model in ("eval --policy http://127.0.0.1:9/v1", "env"):
        assert "no such folder" not in called(capsys, no_model, keys)[2]
    with bind("127.0.0.1", 0, "x") as taken:
        taken.listen()
        port = f"--inference.port {taken.getsockname()[1]}"
        code, _, err = called(capsys, "collect", keys, port)
    assert code == 1 and "Address already in use" in err


QUICK = """
name = "n"
[orchestrator]
batch_size = 512
group_size = 16
[orchestrator.sampling]
max_tokens = 4096
[model]
max_model_len = 8192
[[orchestrator.environment]]
id = "a"
group_size = 6
sampling = { max_tokens = 8 }
[[orchestrator.environment]]
id = "b"
group_size = 3
sampling = { max_tokens = 2000 }
[[orchestrator.eval]]
samples = 8
[[orchestrator.eval]]
id = "c"
num_examples = 2
"""


def test_quick_makes_any_run_tiny(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(QUICK)
    config = made("@", str(path), "--quick")
    settings = config.orchestrator
    assert (config.name, config.max_steps, settings.group_size, settings.batch_size) == (
        "n-quick",
        2,
        4,
        8,
    )
    assert [(env.group_size, env.sampling.max_tokens) for env in settings.environment] == [
        (4, 8),
        (3, 32),
    ]
    assert settings.sampling.max_tokens == 32
    assert [(one.id, one.num_examples, one.samples) for one in settings.eval] == [
        ("a", 4, 1),
        ("c", 2, 1),
    ]
    several = ["--trainer.minibatches", "4"]
    small = made(
        "--orchestrator.environment.id e --orchestrator.group_size 2 --max_steps 1 --quick",
        *several,
    )
    assert (small.max_steps, small.orchestrator.group_size, small.orchestrator.batch_size) == (
        1,
        2,
        4,
    )
    assert small.trainer.minibatches == 2
