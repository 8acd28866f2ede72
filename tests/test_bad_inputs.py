"""What users get wrong and what disks do, in one table: each case with the message that names it
and the remedy."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from rl.commands.export import check_target
from rl.commands.options import resolve
from rl.config.command_line import build, from_toml, load_config_or_exit, parse_args
from rl.config.help import COMMANDS
from rl.config.run import ModelConfig, RLConfig
from rl.launch.children import Children
from rl.launch.prepare import prepare
from rl.main import subcommand
from rl.models.folder import resolve_model
from rl.orchestrator.batches.batch_files import decode_state
from rl.run_dir.checksums import read_manifest
from rl.run_dir.files import encode_record
from rl.trainer.sft.rows import DataSource, files_of, json_rows
from rl.wire.batch_file import decode_batch

ENV = ["--orchestrator.environment.id", "e"]
LONG = "x" * 300
TEACHER = "--orchestrator.teacher.base_url http://host:8000/v1"
GROUPS = "--orchestrator.batch_size 60 --orchestrator.group_size 8"


class Case(NamedTuple):
    """Something bad, and what must be said about it. `{tmp}` in a message is the test's
    directory."""

    do: Callable[[Path], object]
    message: str


def args(line, message):
    """A command line, as a shell reads it."""
    return Case(lambda _: build(parse_args([*ENV, *shlex.split(line)])), message)


def rows_and_reward(dataset, reward, message, *given):
    """Rows with a reward function beside `rewards.py`, in a dry run."""

    def do(tmp):
        (tmp / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
        (tmp / "empty.jsonl").touch()
        (tmp / "sheet.jsonl").write_text("prompt,answer\nx,1\n")
        (tmp / "texts.jsonl").write_text('{"text": "x", "answer": "1"}\n')
        (tmp / "broken.jsonl").write_text(
            '{"prompt": "x", "answer": "1"}\n' * 5 + '{"prompt": "x"\n'
        )
        (tmp / "rewards.py").write_text("def exact(completion, answer): ...\n")
        (tmp / "broken.py").write_text("def exact(:\n")
        keys = [
            "--orchestrator.environment.dataset",
            f"{tmp}/{dataset}",
            "--orchestrator.environment.reward",
            f"{tmp}/{reward}",
        ]
        load_config_or_exit([*keys, *given, "--dry-run"], variables={})

    return Case(do, message)


def toml(content, *given, message):
    """A configuration file."""

    def do(tmp):
        (tmp / "run.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
        build(parse_args(["@", str(tmp / "run.toml"), *given]))

    return Case(do, message)


def start(tmp, resume=None):
    config = build(
        parse_args([*ENV, "--name", "r", "--output_dir", str(tmp)])
    ).with_absolute_paths()
    prepare(config, resume=resume, clean=False).lease.close()


def written(name, content, read, message):
    """A file with this content, read by what reads it."""

    def do(tmp):
        path = tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        read(path)

    return Case(do, message)


def best(content, message):
    """The best version of a run whose evals/best.json is that."""

    def do(tmp):
        start(tmp)
        (tmp / "r" / "evals").mkdir()
        (tmp / "r" / "evals" / "best.json").write_text(content)
        resolve(f"{tmp}/r@best", RLConfig(), None, None)

    return Case(do, message)


WHOLE_MODEL = {
    "config.json": "{}",
    "tokenizer.json": '{"model": {}, "added_tokens": []}',
    "model.safetensors": "",
    "tokenizer_config.json": "{}",
}


def model(files, message):
    """A folder with these files in those of a model."""

    def do(tmp):
        for name, content in (WHOLE_MODEL | files).items():
            (tmp / name).write_text(content)
        resolve_model(ModelConfig(name=str(tmp)))

    return Case(do, message)


def resume_old_configuration(tmp):
    (tmp / "r" / "status").mkdir(parents=True)
    (tmp / "r" / "config.toml").write_text("a_key_of_the_past = 1\n")
    start(tmp, resume=-1)


KEYS = [
    args("--bogus 1", "bogus = 1 (--bogus)\n    unknown key; see --help all"),
    args(
        "--group_size 4",
        "unknown key; did you mean orchestrator.group_size or orchestrator.environment.group_size?",
    ),
    args("--seed 1 --seed.x 1", "seed.x = 1 (--seed.x)\n    `seed` is a value, not a table"),
    args("'--\x1b[31mred' 1", "'\\x1b[31mred' = 1 (--'\\x1b[31mred')\n    unknown key"),
    args(
        "--wandb.api_key literal-key-1",
        "wandb.api_key = '(hidden)' (--wandb.api_key)\n    unknown key; secrets are read from",
    ),
    args(
        "--orchestrator.environment.args.api_key literal-key-1",
        'an environment variable and write "env:NAME" here',
    ),
    args(
        "--learning_rate 1 --trainer.optim.lr 2",
        "learning_rate = 1 (--learning_rate) and trainer.optim.lr = 2",
    ),
]
VALUES = [
    args(
        "--orchestrator.batch_size 99999999999999999999",
        "(--orchestrator.batch_size)\n    is too large; give a number below 2^63",
    ),
    args("--max_steps nan", "max_steps = nan (--max_steps)\n    Input should be a finite number"),
    args("--seed", "seed (--seed)\n    needs a value: int"),
    args(
        "--trainer-gpus a,b",
        "trainer.gpus = 'a,b' (--trainer-gpus)\n    give a count (2) or a list of ids (\"0,1\")",
    ),
    args(
        "--trainer-gpus '²,1'",
        "trainer.gpus = '²,1' (--trainer-gpus)\n    give a count (2) or a list of ids (\"0,1\")",
    ),
    args(
        "--trainer.optim.betas '[0.9]'",
        "trainer.optim.betas = [0.9] (--trainer.optim.betas)\n    give two numbers: [0.5, 0.9]",
    ),
    args(
        "--orchestrator.environment.args 3",
        "give a table, { key = value }, or its keys one by one: --orchestrator.",
    ),
    args(
        "--orchestrator.group_size 1",
        "greater than or equal to 2. Episodes per task, of which one alone has nothing to be "
        "compared with",
    ),
    args(
        "--orchestrator.sampling.temperature 0",
        "is greedy: all rollouts of a group would be identical; raise it",
    ),
    args(
        "--orchestrator.sampling.top_k 1",
        "is greedy: all rollouts of a group would be identical; raise it",
    ),
    args(
        "--orchestrator.sampling.min_p 1",
        "is greedy: all rollouts of a group would be identical; lower it",
    ),
    args(
        "--trainer.loss.type dpo",
        "trainer.loss.type = 'dpo' (--trainer.loss.type)\n    give one of ",
    ),
    args(
        "--trainer.loss.type ppo",
        'is called trainer.loss.type = "clip" here: give one of policy_gradient, clip',
    ),
    args(
        "--orchestrator.credit ppo",
        "orchestrator.credit.type = 'ppo' (--orchestrator.credit)\n    give one of dr_grpo",
    ),
    args("--model.name_or_path m", "unknown key; is called model.name here"),
    args("--qick", "--qick: there is no such flag; did you mean --quick?"),
    args("--output_dir ''", "output_dir = ''\n    is empty; give a folder, such as outputs"),
    args(
        "--output_dir 'a\udcffb'",
        "output_dir = 'a\\udcffb'\n    is not valid UTF-8; encode it as UTF-8",
    ),
]
COMBINATIONS = [
    args(
        "--orchestrator.batch_size 7",
        "orchestrator.batch_size = 7\n    is smaller than one group of 8 rollouts (group_size)",
    ),
    args(
        "--max_lag 9",
        "allows rollouts older than orchestrator.max_off_policy_steps = 8; lower it or raise that",
    ),
    args(
        "--orchestrator.sampling.max_tokens 2048",
        "leaves no room for a prompt in model.max_model_len = 2048",
    ),
    args(
        "--trainer.optim.lr 1e30",
        "usually 1e-7 to 1e-3; more than 1 would destroy the model in the first step",
    ),
    args(
        "--trainer.weights.anchor_every 5 --trainer.lora.rank 4",
        "trainer.lora publishes adapters, which are small: leave it out",
    ),
    args(
        "--trainer.loss.token_mask '[2, 8]'",
        "trainer.loss.token_mask = [2, 8] (--trainer.loss.token_mask)\n    excludes r = 1",
    ),
    args(
        "--trainer-gpus 0,1 --inference-gpus 1,2",
        "inference.gpus = [1, 2]\n    shares [1] with trainer.gpus",
    ),
    args(
        "--trainer.lora.targets '[]'",
        'trainer.lora.targets = [] (--trainer.lora.targets)\n    names no layer; give some ("q_proj", "v_proj"), or '
        "all-linear",
    ),
    args(
        "--orchestrator.environment.dataset d",
        "orchestrator.environment.0.id = 'e'\n    give either id (an environment's package)",
    ),
    args(
        "--orchestrator.environment.reward r.py:f",
        "reward = 'r.py:f'\n    applies only to rows (dataset): a package has reward",
    ),
    args(
        "--orchestrator.environment.credit.epsilon 1",
        "is only valid with orchestrator.environment.credit.type = grpo",
    ),
    args(
        "--orchestrator.credit.type none",
        "orchestrator.credit.type = 'none'\n    leaves environment e nothing to learn from",
    ),
    args(
        f"{TEACHER} --orchestrator.environment.sampling.temperature 0.7",
        "orchestrator.environment.0.sampling.temperature = 0.7\n",
    ),
    args(
        f"{TEACHER} --orchestrator.sampling.temperature 0.7",
        "orchestrator.sampling.temperature = 0.7\n    does not work with a teacher",
    ),
    args(
        "--orchestrator.environment.teacher.base_url host",
        "teacher.base_url)\n    give an address like",
    ),
    args(
        "--orchestrator.environment.difficulty.easy_above 0.1",
        "difficulty.easy_above = 0.1\n    is below hard_up_to = 0.25",
    ),
    args(
        "--orchestrator.environment.network false",
        "network = False\n    has an effect only in a sandbox: set isolation",
    ),
    args(
        f"{GROUPS} --trainer.minibatches 9",
        "exceeds the 8 groups of a batch, and a minibatch needs whole groups; lower it, or raise",
    ),
    args(
        "--trainer.data.fake.samples 8 --trainer.data.fake.group_size 4 --trainer.minibatches 3",
        "exceeds the 2 groups",
    ),
    args("--sft.dataset x.jsonl --trainer.minibatches 2", "lower sft.batch_size instead"),
    args(
        "--orchestrator.host ''",
        "orchestrator.host = '' (--orchestrator.host)\n    is not a valid address; give 127",
    ),
    args(
        "--orchestrator.inference_urls 10.0.0.1:8000",
        "'10.0.0.1:8000' (--orchestrator.inference_urls)\n    give an address like",
    ),
]
OUTSIDE = [
    rows_and_reward(
        "rows.jsonl",
        "reward.py:exact",
        "reward.py:exact'\n    names a file that does not exist: {tmp}/reward.py",
    ),
    rows_and_reward(
        "rows.jsonl",
        "rewards.py:exat",
        "names no function: {tmp}/rewards.py has no function exat; did you mean exact?",
    ),
    rows_and_reward(
        "rows.jsonl",
        "broken.py:exact",
        "cannot be read: {tmp}/broken.py:1: invalid syntax; correct it",
    ),
    rows_and_reward(
        "row.jsonl",
        "rewards.py:exact",
        "row.jsonl'\n    is not a file ({tmp}/row.jsonl); did you mean {tmp}/rows.jsonl?",
    ),
    rows_and_reward(
        "empty.jsonl",
        "rewards.py:exact",
        "empty.jsonl'\n    {tmp}/empty.jsonl: no rows; write one JSON object per line",
    ),
    rows_and_reward(
        "sheet.jsonl",
        "rewards.py:exact",
        "sheet.jsonl'\n    {tmp}/sheet.jsonl:1: not JSON (Expecting value",
    ),
    rows_and_reward(
        "texts.jsonl",
        "rewards.py:exact",
        "texts.jsonl'\n    {tmp}/texts.jsonl:1: no prompt or question, only text, answer",
    ),
    rows_and_reward(
        "broken.jsonl",
        "rewards.py:exact",
        "broken.jsonl'\n    {tmp}/broken.jsonl:6: not JSON (Expecting",
    ),
    rows_and_reward("row.jsonl", "reward.py:exact", "rl: 2 faults in the configuration"),
    rows_and_reward(
        "rows.jsonl",
        "rewards.py:exact",
        "rl: 1 fault in the configuration\n  orchestrator.eval.0.reward = 'math.py:f'",
        "--orchestrator.eval.dataset",
        "owner/rows",
        "--orchestrator.eval.reward",
        "math.py:f",
    ),
]
NAMES = [
    args(
        "--name a/b",
        "name: must not contain a slash or start with a dot; use output_dir for the location",
    ),
    args(
        "--name .hidden",
        "name = '.hidden'\n    is used as a directory name: must not contain a slash or "
        "start with a dot",
    ),
    args(
        "--name 'a\\b'",
        "name = 'a\\\\b'\n    is used as a directory name: must not contain a backslash",
    ),
    args(
        "'--name= a'",
        "must not contain a backslash, start with a dash, or start or end with a space",
    ),
    args(
        "--name=-rf",
        "name = '-rf'\n    is used as a directory name: must not contain a backslash, start "
        "with a dash",
    ),
    args(
        "--name 'a\nb'",
        "name = 'a\\nb'\n    is used as a directory name: must not contain control "
        "characters or look-alikes",
    ),
    args(
        "--name 'a\u202eb'",
        "name = 'a\\u202eb'\n    is used as a directory name: must not contain control characters",
    ),
    args(
        "--name 'a\uff0fb'",
        "must not contain control characters or look-alikes of other characters",
    ),
    args("--name 'a\x00b'", "name = 'a\\x00b'\n    is used as a directory name"),
    args(
        f"--name {LONG}",
        "is 300 bytes long; at most 200 are allowed; use output_dir for the location",
    ),
    args(
        "--orchestrator.environment.name a/b",
        "orchestrator.environment.0.name = 'a/b'\n    'a/b' is part of file names: must not contain",
    ),
    args(
        f"--orchestrator.environment.name {LONG}",
        "is part of file names: is 300 bytes long; at most 100 are allowed",
    ),
    args(
        "--orchestrator.environment.id a/..@1",
        "orchestrator.environment.0.name = None\n    '..' is part of file names: is not",
    ),
    args(
        "--orchestrator.eval.id x --orchestrator.eval.name ../../etc/passwd",
        "orchestrator.eval.0.name = '../../etc/passwd'\n    '../../etc/passwd' is part",
    ),
    Case(
        lambda tmp: check_target(tmp / "r" / "x" / ".." / "weights", None, tmp / "r"),
        "is inside the run's own directory",
    ),
]
COMMAND_LINES = [
    args(
        "stray", "stray: not understood; give files as `@ file.toml` and settings as `--key value`"
    ),
    args("--", "--: not understood"),
    args("@", "@ needs a file name after it"),
    args("--resume 1000000", "--resume 1000000: no such step; the highest possible step is 999999"),
    args("--resume '²'", "²: not understood"),
    args(f"--x {'[' * 20000}", "unknown key"),
    args(
        "--orchestrator.environment.0.id x",
        "(--orchestrator.environment.0.id)\n    there is no list with an element 0; for "
        "one: --orchestrator.environment.id, for several: [[orchestrator.environment]] in a file",
    ),
    args(
        "--orchestrator.environment '[3, 4]' --orchestrator.environment.0.weight 2",
        "(--orchestrator.environment.0.weight)\n    only elements that are tables have keys; "
        "to change another element, give the",
    ),
    args(
        "--trainer.lora.targets '[\"a\"]' --trainer.lora.targets.0 b",
        "trainer.lora.targets.0 = 'b' (--trainer.lora.targets.0)",
    ),
    Case(lambda _: subcommand("trian", [], Children()), "rl: trian: no such command; "),
    Case(lambda _: subcommand("evl", [], Children()), "did you mean `rl eval`? "),
    Case(lambda _: subcommand("run.toml", [], Children()), "did you mean `rl @ run.toml`?"),
    Case(
        lambda _: subcommand("trainer.optim.lr=1e-6", [], Children()),
        "did you mean `rl --trainer.optim.lr 1e-6`?",
    ),
]
FILES = [
    args("@ /nowhere/x.toml", "/nowhere/x.toml: no such file"),
    args("@/tmp", "/tmp: is a folder; give a TOML file, such as /tmp/run.toml"),
    written(
        "run.yaml",
        "max_steps: 3\n",
        lambda path: build(parse_args(["@", str(path)])),
        "column 10); write it as TOML: [section]",
    ),
    args("@/dev/zero", "/dev/zero: not a configuration file: larger than 16 MiB"),
    args("@ 'a\x00b'", "not readable as TOML: embedded null byte"),
    toml(
        "max_steps = \n", message="{tmp}/run.toml: not readable as TOML: Invalid value (at line 1"
    ),
    toml(
        b"name = '\xff'", message="{tmp}/run.toml: not readable as TOML: 'utf-8' codec can't decode"
    ),
    toml("a = 1\na = 2", message="{tmp}/run.toml: not readable as TOML: Cannot overwrite a value"),
    toml("a = " + "[" * 20000, message="{tmp}/run.toml: not readable as TOML: nested too deeply"),
    toml("seed = " + "1" * 5000, message="{tmp}/run.toml: not readable as TOML: Exceeds the limit"),
    toml(
        "trainer = 3\n",
        message="trainer = 3 ({tmp}/run.toml)\n    is a section; give its keys: --trainer.KEY "
        "VALUE",
    ),
    toml(
        "name = 1.10\n",
        message="name = 1.1 ({tmp}/run.toml)\n    must be a string; write it in quotes",
    ),
    toml(
        "",
        message="orchestrator.environment = []\n    name what to train on: "
        "--orchestrator.environment.id owner/name",
    ),
    toml(
        '[[orchestrator.environment]]\nid = "a/x"\n[[orchestrator.environment]]\nid = "b/x@2"\n',
        message="orchestrator.environment.1.name = None\n    x is already taken",
    ),
    toml(
        "[[orchestrator.environment]]\n",
        message="give either id (an environment's package), or dataset (rows)",
    ),
    toml(
        '[[orchestrator.environment]]\nid = "x"\n[[orchestrator.environment]]\nid = "y"\n',
        "--orchestrator.environment.weight",
        "2",
        message="which of the 2 entries? Put its number before `weight`: 0 to 1",
    ),
]
RUNS = [
    Case(lambda tmp: ((tmp / "r").write_text("x"), start(tmp)), "{tmp}/r"),
    Case(
        resume_old_configuration,
        "{tmp}/r/config.toml was not written by this version of rl:\n1 fault",
    ),
]
RECORDS = [
    Case(
        lambda _: decode_batch(encode_record(b"\x80"), "b"),
        "b: not a batch of this version of rl: Object missing required field",
    ),
    Case(
        lambda _: decode_batch(encode_record(b"\x91" * 99_999), "b"),
        "b: not a batch of this version of rl",
    ),
    Case(
        lambda _: decode_state(msgspec.Raw(b"\x81\xa5tasks\x01")),
        "the orchestrator's state in the newest batch was written by another",
    ),
    written(
        "checkpoints/000001/manifest.json",
        "{}",
        lambda path: read_manifest(path.parent),
        "manifest.json: missing or damaged",
    ),
    written(
        "checkpoints/000001/manifest.json",
        '{"step": 1, "world_size": 1, "model": "", "files": {"../../x": {}}}',
        lambda path: read_manifest(path.parent),
        "manifest.json: missing or damaged",
    ),
    written(
        "data.jsonl",
        b'{"a": "\xff"}\n',
        lambda path: list(json_rows([path])),
        "{tmp}/data.jsonl:1: not JSON (",
    ),
]
MODELS_AND_ENVIRONMENTS = [
    Case(
        lambda _: resolve_model(ModelConfig(name="/nowhere/model")),
        "model.name = '/nowhere/model': no such folder; give an existing one",
    ),
    Case(
        lambda _: resolve_model(ModelConfig(name="a b c")),
        "model.name = 'a b c': neither a folder nor an id on the hub (owner/name)",
    ),
    model({"config.json": "{"}, "{tmp}/config.json: not readable as JSON"),
    model({"tokenizer.json": '{"model": {'}, "{tmp}/tokenizer.json: not readable as JSON"),
    model(
        {"model.safetensors.index.json": "{"}, "model.safetensors.index.json: not readable as an"
    ),
    model(
        {"tokenizer_config.json": "[]"},
        "tokenizer_config.json: expected a JSON object, not list; copy the model again",
    ),
    Case(
        lambda _: files_of(DataSource("/nowhere.jsonl", "train", "sft.dataset")),
        "sft.dataset = '/nowhere.jsonl': there is no /nowhere.jsonl",
    ),
    best("{", "{tmp}/r/evals/best.json: not readable as JSON"),
    best('{"e": {"policy_version": "x"}}', "{tmp}/r/evals/best.json: names no version"),
    written(
        "adapter_config.json",
        "[]",
        lambda path: resolve(str(path.parent), RLConfig(), None, None),
        "expected a JSON object, not list",
    ),
]
CASES = [
    *KEYS,
    *VALUES,
    *COMBINATIONS,
    *OUTSIDE,
    *NAMES,
    *COMMAND_LINES,
    *FILES,
    *RUNS,
    *RECORDS,
    *MODELS_AND_ENVIRONMENTS,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.message[:60].splitlines()[0])
def test_what_is_said_about(case, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((Exception, SystemExit)) as caught:
        case.do(tmp_path)
    error = caught.value
    if isinstance(error, SystemExit):
        assert error.code == 2
        said = capsys.readouterr().err
    elif isinstance(error, OSError):
        said = f"{error.filename}: {error.strerror}"  # as `rl` shows it
    else:
        # Whatever is not one of our own would show the user a traceback.
        assert type(error).__module__.startswith("rl."), repr(error)
        said = str(error)
    assert case.message.replace("{tmp}", str(tmp_path)) in said


def test_what_cannot_be_told_without_an_import_passes(tmp_path, monkeypatch):
    """A function out of a star import, a module beside `rl`, and what a run that was made
    already names."""
    monkeypatch.chdir(tmp_path)
    # no other test's file on the import path is called so
    (tmp_path / "beside_rl.py").write_text("from os.path import *\n")
    for reward in ("beside_rl.py:star", "beside_rl:star", "json.decoder:scanner"):
        keys = [
            "--orchestrator.environment.dataset",
            "owner/rows",
            "--orchestrator.environment.reward",
            reward,
        ]
        with pytest.raises(SystemExit) as end:
            load_config_or_exit([*keys, "--dry-run"], variables={})
        assert end.value.code == 0
    assert (
        build(parse_args([*keys[:3], "gone.py:f"])).orchestrator.environment[0].reward
        == "gone.py:f"
    )


def test_every_command_says_what_it_misses_without_a_traceback(capsys):
    """With an argument that none of them knows."""
    for name in COMMANDS:
        with pytest.raises(SystemExit) as end:
            subcommand(name, ["--no-such-key", "1"], Children())
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith(f"rl {name}: "), said


def test_a_stored_configuration_is_checked_as_any_other(tmp_path):
    (tmp_path / "config.toml").write_text('name = "../x"\n[orchestrator.environment]\nid = "e"\n')
    with pytest.raises(Exception, match=r"name = '\.\./x'\n    is used as a directory name"):
        from_toml(tmp_path / "config.toml")
