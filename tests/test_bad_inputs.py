"""What users get wrong and what disks do, in one table: each case with the message that names it and the remedy."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from rl.commands.export import check_target
from rl.commands.options import CONCURRENCY
from rl.commands.policy_spec import resolve
from rl.config.command_line import build, from_toml, load_config_or_exit, parse_args
from rl.config.help import COMMANDS
from rl.config.options import take
from rl.config.run import ModelConfig, RLConfig
from rl.launch.children import Children
from rl.launch.prepare import prepare
from rl.main import subcommand
from rl.models.folder import resolve_model
from rl.orchestrator.batches.batch_selection import decode_state
from rl.orchestrator.groups.pending import PendingLog
from rl.run_dir.checksums import read_digests, read_manifest
from rl.run_dir.files import encode_record
from rl.run_dir.lease import hold_role
from rl.run_dir.safetensors import read_header
from rl.system.functions import load_function
from rl.trainer.sft.rows import Source, files_of, json_rows
from rl.wire.batch_file import decode_batch, encode_batch
from rl.wire.messages import TrainBatch

ENV = ["--orchestrator.environment.id", "e"]
LONG = "x" * 300


class Case(NamedTuple):
    """Something bad, and what must be said about it. `{tmp}` in a message is the test's directory."""

    do: Callable[[Path], object]
    message: str


def args(*given: str, message: str) -> Case:
    """A command line."""
    return Case(lambda _: build(parse_args([*ENV, *given])), message)


def run_args(*given: str, message: str) -> Case:
    """A command line, as `rl` itself takes it."""
    return Case(lambda _: load_config_or_exit([*ENV, *given]), message)


def rows_and_reward(dataset: str, reward: str, message: str, *given: str) -> Case:
    """Rows with a reward function beside `rewards.py`, in a dry run."""

    def do(tmp: Path) -> None:
        (tmp / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
        (tmp / "empty.jsonl").touch()
        (tmp / "sheet.jsonl").write_text("prompt,answer\nx,1\n")
        (tmp / "array.jsonl").write_text('[{"prompt": "x"}]\n')
        (tmp / "texts.jsonl").write_text('{"text": "x", "answer": "1"}\n')
        (tmp / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
        (tmp / "blank.jsonl").write_text("\n \n")
        (tmp / "rewards.py").write_text("def exact(completion, *, answer, more=1, **others): ...\ndef asks(completion, anser): ...\n")
        (tmp / "broken.py").write_text("def exact(:\n")
        keys = ["--orchestrator.environment.dataset", f"{tmp}/{dataset}", "--orchestrator.environment.reward", f"{tmp}/{reward}"]
        load_config_or_exit([*keys, *given, "--dry-run"], variables={})

    return Case(do, message)


def toml(content: str | bytes, *given: str, message: str) -> Case:
    """A configuration file."""

    def do(tmp: Path) -> None:
        (tmp / "run.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
        build(parse_args(["@", str(tmp / "run.toml"), *given]))

    return Case(do, message)


def the_run(tmp: Path, *given: str) -> RLConfig:
    words = [word.replace("{tmp}", str(tmp)) for word in given]
    return build(parse_args([*ENV, "--name", "r", "--output_dir", str(tmp), *words])).with_absolute_paths()


def start(tmp: Path, *given: str, resume: int | None = None, clean: bool = False) -> None:
    prepare(the_run(tmp, *given), resume=resume, clean=clean).lease.close()


def second_start(*given: str, resume: int | None = None, clean: bool = False, batches: tuple[int, ...] = (1,), message: str) -> Case:
    """A run that exists, of so many batches, and what is asked of it."""

    def do(tmp: Path) -> None:
        start(tmp)
        run_dir = the_run(tmp).run_dir
        run_dir.batches.mkdir(exist_ok=True)
        for step in batches:
            run_dir.batch(step).write_bytes(encode_batch(TrainBatch(step=step, samples=[]), {}))
        start(tmp, *given, resume=resume, clean=clean)

    return Case(do, message)


def first_start(prepare_it: Callable[[Path], object], message: str, *given: str, resume: int | None = None) -> Case:
    """A new run in a directory where something is amiss."""

    def do(tmp: Path) -> None:
        prepare_it(tmp)
        start(tmp, *given, resume=resume)

    return Case(do, message)


def written(name: str, content: str | bytes, read: Callable[[Path], object], message: str) -> Case:
    """A file with this content, read by what reads it."""

    def do(tmp: Path) -> None:
        path = tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        read(path)

    return Case(do, message)


def batch(change: Callable[[bytes], bytes], message: str) -> Case:
    whole = encode_batch(TrainBatch(step=3, samples=[]), {"some": "state"})
    return Case(lambda _: decode_batch(change(whole), "batches/000003.batch"), message)


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


class RemarkError(Exception):
    """What is no error, but is said."""


def remarks_of(path: Path) -> None:
    raise RemarkError("; ".join(PendingLog(path).load(set(), 9)))


def policy(spec: str, message: str) -> Case:
    return Case(lambda tmp: resolve(spec.replace("{tmp}", str(tmp)), RLConfig(), None, None), message)


def run_with(files: dict[str, str], spec: str, message: str) -> Case:
    """A policy out of a run that has these files beside its configuration."""

    def do(tmp: Path) -> None:
        start(tmp)
        for name, content in files.items():
            (tmp / "r" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp / "r" / name).write_text(content)
        resolve(f"{tmp}/r{spec}", RLConfig(), None, None)

    return Case(do, message)


def model(files: dict[str, str], message: str, **settings: str) -> Case:
    """A folder with these files as the model."""

    def do(tmp: Path) -> None:
        for name, content in files.items():
            (tmp / name).write_text(content)
        resolve_model(ModelConfig(name=str(tmp), **{key: value.format(tmp=tmp) for key, value in settings.items()}))

    return Case(do, message)


WHOLE_MODEL = {
    "config.json": "{}",
    "tokenizer.json": '{"model": {}, "added_tokens": []}',
    "model.safetensors": "",
    "tokenizer_config.json": "{}",
}


def rows(content: str | bytes, message: str) -> Case:
    return written("data.jsonl", content, lambda path: list(json_rows([path])), message)


def locked(tmp: Path) -> None:
    hold_role(the_run(tmp).run_dir.lock("rl"))


def of_another_run(tmp: Path) -> None:
    (tmp / "memory" / "r" / "000002").mkdir(parents=True)


def old_configuration(tmp: Path) -> None:
    (tmp / "r" / "status").mkdir(parents=True)
    (tmp / "r" / "config.toml").write_text("a_key_of_the_past = 1\n")


KEYS = [
    args("--bogus", "1", message="bogus = 1 (--bogus)\n    unknown key; see --help all"),
    args(
        "--trainer.optim.lrr", "1", message="trainer.optim.lrr = 1 (--trainer.optim.lrr)\n    unknown key; did you mean trainer.optim.lr?"
    ),
    args("--group_size", "4", message="unknown key; did you mean orchestrator.group_size or orchestrator.environment.group_size?"),
    args("--max-step", "4", message="max_step = 4 (--max-step)\n    unknown key; did you mean max_steps?"),
    args("--temperature", "1", message="did you mean orchestrator.sampling.temperature or orchestrator.environment"),
    args("--seed.x", "1", message="seed = {'x': 1} (--seed.x)\n    Input should be a valid integer"),
    args("--seed", "1", "--seed.x", "1", message="seed.x = 1 (--seed.x)\n    `seed` is a value, not a table"),
    args("--\x1b[31mred", "1", message="'\\x1b[31mred' = 1 (--'\\x1b[31mred')\n    unknown key"),
    args(
        "--wandb.api_key", "literal-key-1", message="wandb.api_key = '(hidden)' (--wandb.api_key)\n    unknown key; secrets are read from"
    ),
    args("--orchestrator.environment.args.api_key", "literal-key-1", message='an environment variable and write "env:NAME" here'),
    args(
        "--max_steps",
        "5",
        "--steps",
        "6",
        message="max_steps = 5 (--max_steps) and steps = 6 (--steps)\n    set the same setting to two values",
    ),
    args("--trainer.max_steps", "5", "--max_steps", "6", message="trainer.max_steps = 5 (--trainer.max_steps) and max_steps = 6"),
    args("--learning_rate", "1", "--trainer.optim.lr", "2", message="learning_rate = 1 (--learning_rate) and trainer.optim.lr = 2"),
]
VALUES = [
    args("--max_steps", "0", message="max_steps = 0 (--max_steps)\n    Input should be greater than or equal to 1"),
    args("--max_steps", "many", message="max_steps = 'many' (--max_steps)\n    Input should be a valid integer"),
    args("--max_steps", "1000000", message="max_steps = 1000000 (--max_steps)\n    Input should be less than or equal to 999999"),
    args(
        "--orchestrator.batch_size",
        "99999999999999999999",
        message="(--orchestrator.batch_size)\n    is too large; give a number below 2^63",
    ),
    args("--max_steps", "nan", message="max_steps = nan (--max_steps)\n    Input should be a finite number"),
    args("--steps", "0", message="max_steps = 0 (--steps)"),
    args("--seed", "-1", message="seed = -1 (--seed)\n    Input should be greater than or equal to 0"),
    args("--seed", "4294967296", message="seed = 4294967296 (--seed)\n    Input should be less than 4294967296"),
    args("--seed", message="seed (--seed)\n    needs a value: int"),
    args("--name", "--seed", "1", message="name (--name)\n    needs a value: str"),
    args("--trainer-gpus", message="trainer.gpus (--trainer-gpus)\n    needs a value: int|list[int]"),
    args("--trainer-gpus", "a,b", message="trainer.gpus = 'a,b' (--trainer-gpus)\n    give a count (2) or a list of ids (\"0,1\")"),
    args("--trainer-gpus", "²,1", message="trainer.gpus = '²,1' (--trainer-gpus)\n    give a count (2) or a list of ids (\"0,1\")"),
    args("--learning_rate", "-1", message="trainer.optim.lr = -1 (--learning_rate)\n    Input should be greater than 0"),
    args("--model.dtype", "int4", message="model.dtype = 'int4' (--model.dtype)\n    Input should be 'bfloat16' or 'float32'"),
    args("--trainer.optim.schedule", "step", message="Input should be 'constant', 'linear' or 'cosine'"),
    args("--trainer.optim.betas", "[0.9]", message="trainer.optim.betas = [0.9] (--trainer.optim.betas)\n    give two numbers: [0.5, 0.9]"),
    args("--trainer.loss.token_mask", "0.5", message="trainer.loss.token_mask = 0.5 (--trainer.loss.token_mask)\n    give two numbers"),
    args("--trainer.optim.betas", "0.9,1", message="trainer.optim.betas.1 = '1' (--trainer.optim.betas)\n    Input should be less than 1"),
    args(
        "--trainer.loss.token_mask", "0.5,nan", message="trainer.loss.token_mask.1 = 'nan' (--trainer.loss.token_mask)\n    give a number"
    ),
    args("--trainer-gpus", "[0, 'a']", message="trainer.gpus.1 = 'a' (--trainer-gpus)\n    Input should be a valid integer"),
    args("--orchestrator.environment.args", "3", message="give a table, { key = value }, or its keys one by one: --orchestrator."),
    args("--orchestrator.group_size", "1", message="orchestrator.group_size = 1 (--orchestrator.group_size)"),
    args("--orchestrator.sampling.temperature", "0", message="orchestrator.sampling.temperature = 0"),
    args("--orchestrator.sampling.top_p", "1.5", message="orchestrator.sampling.top_p = 1.5"),
    args("--inference.port", "70000", message="inference.port = 70000 (--inference.port)\n    Input should be less than or equal to 65535"),
    args("--trainer.checkpoint.interval", "0", message="trainer.checkpoint.interval = 0"),
    args("--trainer.weights.keep_last", "1", message="trainer.weights.keep_last = 1"),
    args("--supervisor.quarantine_after", "0", message="supervisor.quarantine_after = 0 (--supervisor.quarantine_after)"),
    args("--trainer.loss.type", "dpo", message="trainer.loss.type = 'dpo' (--trainer.loss.type)\n    give one of "),
    args(
        "--orchestrator.environment",
        "3",
        message="orchestrator.environment = 3 (--orchestrator.environment)\n    give a list: [a, b]",
    ),
    args("--output_dir", "a\0b", message="output_dir = 'a\\x00b'\n    contains a NUL character; remove it"),
    args("--output_dir", "a\udcffb", message="output_dir = 'a\\udcffb'\n    is not valid UTF-8; encode it as UTF-8"),
]
COMBINATIONS = [
    args("--orchestrator.batch_size", "7", message="orchestrator.batch_size = 7\n    is smaller than one group of 8 rollouts (group_size)"),
    args("--max_lag", "9", message="allows rollouts older than orchestrator.max_off_policy_steps = 8; lower it or raise that"),
    args("--orchestrator.sampling.max_tokens", "2048", message="leaves no room for a prompt in model.max_model_len = 2048"),
    args("--trainer.optim.offload", "--trainer.gpus", "0", message="trainer.gpus = 0 already trains on the CPU: leave it out"),
    args("--trainer.loss.token_mask", "[2, 8]", message="trainer.loss.token_mask = [2.0, 8.0]\n    excludes r = 1"),
    args("--trainer-gpus", "0,1", "--inference-gpus", "1,2", message="inference.gpus = [1, 2]\n    shares [1] with trainer.gpus"),
    args(
        "--trainer.lora.targets",
        "[]",
        message='trainer.lora.targets = []\n    names no layer; give some ("q_proj", "v_proj"), or all-linear',
    ),
    args(
        "--orchestrator.environment.dataset",
        "d",
        message="orchestrator.environment.0.id = 'e'\n    give either id (an environment's package)",
    ),
    args(
        "--orchestrator.environment.reward", "r.py:f", message="reward = 'r.py:f'\n    applies only to rows (dataset): a package has reward"
    ),
    args("--orchestrator.host", "", message="orchestrator.host = ''\n    is not a valid address; give 127.0.0.1"),
    args("--inference.host", "http://a", message="inference.host = 'http://a'\n    is not a valid address"),
    args(
        "--orchestrator.inference_urls",
        "['10.0.0.1:8000']",
        message="orchestrator.inference_urls = '10.0.0.1:8000'\n    give addresses like",
    ),
]
OUTSIDE = [
    rows_and_reward("rows.jsonl", "reward.py:exact", "reward.py:exact'\n    names a file that does not exist: {tmp}/reward.py"),
    rows_and_reward("rows.jsonl", "rewards.py:exat", "names no function: {tmp}/rewards.py has no function exat; did you mean exact?"),
    rows_and_reward("rows.jsonl", "broken.py:exact", "cannot be read: {tmp}/broken.py:1: invalid syntax; correct it"),
    rows_and_reward("rows.jsonl", "rewards.py:asks", "rewards.py:asks'\n    asks for anser, which is not a column of {tmp}/rows.jsonl"),
    rows_and_reward("row.jsonl", "rewards.py:exact", "dataset = '{tmp}/row.jsonl'\n    is not a file ({tmp}/row.jsonl); give a JSONL file"),
    rows_and_reward("empty.jsonl", "rewards.py:exact", "empty.jsonl'\n    is empty; write one JSON object per line"),
    rows_and_reward("sheet.jsonl", "rewards.py:exact", "sheet.jsonl'\n    does not begin with a JSON object (Expecting value"),
    rows_and_reward("array.jsonl", "rewards.py:exact", "array.jsonl'\n    begins with a list; write one JSON object per line"),
    rows_and_reward("texts.jsonl", "rewards.py:exact", "texts.jsonl'\n    has no column prompt or question, only text, answer; write"),
    rows_and_reward("latin.jsonl", "rewards.py:exact", "latin.jsonl'\n    does not begin with a JSON object ('utf-8' codec"),
    rows_and_reward("blank.jsonl", "rewards.py:exact", "blank.jsonl'\n    does not begin with a JSON object (Expecting value: line 1"),
    rows_and_reward("row.jsonl", "reward.py:exact", "rl: 2 faults in the configuration"),
    rows_and_reward("rows.jsonl", "rewards.py:exact", "rl: 1 fault in the configuration\n  orchestrator.eval.0.reward = 'math.py:f'",
                    "--orchestrator.eval.dataset", "owner/rows", "--orchestrator.eval.reward", "math.py:f"),
]  # fmt: skip
NAMES = [
    args("--name", "a/b", message="name: must not contain a slash or start with a dot; use output_dir for the location"),
    args("--name", "..", message="name = '..'\n    is used as a directory name"),
    args("--name", ".hidden", message="name = '.hidden'\n    is used as a directory name: must not contain a slash or start with a dot"),
    args("--name", "a\\b", message="name = 'a\\\\b'\n    is used as a directory name: must not contain a backslash"),
    args("--name= a", message="must not contain a backslash, start with a dash, or start or end with a space"),
    args("--name=-rf", message="name = '-rf'\n    is used as a directory name: must not contain a backslash, start with a dash"),
    args("--name", "a\nb", message="name = 'a\\nb'\n    is used as a directory name: must not contain control characters or look-alikes"),
    args("--name", "a\u202eb", message="name = 'a\\u202eb'\n    is used as a directory name: must not contain control characters"),
    args("--name", "a\uff0fb", message="must not contain control characters or look-alikes of other characters"),
    args("--name", "a\0b", message="name = 'a\\x00b'\n    is used as a directory name"),
    args("--name", LONG, message="is 300 bytes long; at most 200 are allowed; use output_dir for the location"),
    args(
        "--orchestrator.environment.name",
        "a/b",
        message="orchestrator.environment.0.name = 'a/b'\n    is part of file names: must not contain",
    ),
    args("--orchestrator.environment.name", LONG, message="is part of file names: is 300 bytes long; at most 100 are allowed"),
    args("--orchestrator.environment.id", "a/..@1", message="orchestrator.environment.0.name = '..'\n    is part of file names: is not"),
    args(
        "--orchestrator.environment.id=@1",
        message="orchestrator.environment.0.name = ''\n    is part of file names: is not a valid file name",
    ),
    args(
        "--orchestrator.environment.id",
        "a\nb",
        message="orchestrator.environment.0.name = 'a\\nb'\n    is part of file names: must not contain control characters",
    ),
    args(
        "--orchestrator.eval",
        "{ id = 'x', name = '../../etc/passwd' }",
        message="orchestrator.eval.0.name = '../../etc/passwd'\n    is part",
    ),
    Case(lambda tmp: check_target(tmp / "r" / "x" / ".." / "weights", None, tmp / "r"), "is inside the run's own directory"),
]
COMMAND_LINES = [
    args("stray", message="stray: not understood; give files as `@ file.toml` and settings as `--key value`"),
    args("--", message="--: not understood"),
    args("--=1", message="--=1: not understood"),
    args("@", message="@ needs a file name after it"),
    args("--trainer", "@", message="--trainer @ needs a file name after it"),
    args("--resume", "1000000", message="--resume 1000000: no such step; the highest possible step is 999999"),
    args("--resume", "²", message="²: not understood"),
    args("--x", "[" * 20000, message="unknown key"),
    args(
        "--orchestrator.environment.0.id",
        "x",
        message="(--orchestrator.environment.0.id)\n    there is no list with an element 0; for "
        "one: --orchestrator.environment.id, for several: [[orchestrator.environment]] in a file",
    ),
    args(
        "--orchestrator.environment",
        "['a', 'b']",
        "--orchestrator.environment.0.weight",
        "2",
        message="(--orchestrator.environment.0.weight)\n    only elements that are tables have keys; to change another element, give the",
    ),
    args(
        "--trainer.lora.targets",
        '["a"]',
        "--trainer.lora.targets.0",
        "b",
        message="trainer.lora.targets.0 = 'b' (--trainer.lora.targets.0)",
    ),
    run_args("--bogus", "1", message="rl: 1 fault in the configuration\n  bogus = 1 (--bogus)"),
    Case(lambda _: subcommand("trian", [], Children()), "rl: trian: no such command; "),
    Case(lambda _: subcommand("evl", [], Children()), "did you mean `rl eval`? "),
    Case(lambda _: subcommand("run.toml", [], Children()), "did you mean `rl @ run.toml`?"),
    Case(lambda _: subcommand("trainer.optim.lr=1e-6", [], Children()), "did you mean `rl --trainer.optim.lr 1e-6`?"),
    Case(lambda _: take("rl eval", ["--concurrency", "0"], (CONCURRENCY,)), "rl eval: --concurrency 0: needs an integer of at least 1"),
    Case(lambda _: take("rl eval", ["--concurrency", "²"], (CONCURRENCY,)), "rl eval: --concurrency ²: needs an integer of at least 1"),
    Case(lambda _: take("rl eval", ["--concurrency"], (CONCURRENCY,)), "rl eval: --concurrency needs a value: N"),
    Case(lambda _: subcommand("export", [], Children()), "rl export: which run? Give its directory first"),
    Case(lambda _: subcommand("export", ["x"], Children()), "rl export: where to? Give a directory: rl export x --to DIR"),
]
FILES = [
    args("@", "/nowhere/x.toml", message="/nowhere/x.toml: no such file"),
    args("@/tmp", message="/tmp: is a folder; give a TOML file, such as /tmp/run.toml"),
    written("run.yaml", "max_steps: 3\n", lambda path: build(parse_args(["@", str(path)])), "column 10); write it as TOML: [section]"),
    written("run.json", '{"max_steps": 3}', lambda path: build(parse_args(["@", str(path)])), "column 1); write it as TOML: [section]"),
    args("@/dev/zero", message="/dev/zero: not a configuration file: larger than 16 MiB"),
    args("@", "a\0b", message="not readable as TOML: embedded null byte"),
    toml("max_steps = \n", message="{tmp}/run.toml: not readable as TOML: Invalid value (at line 1"),
    toml(b"name = '\xff'", message="{tmp}/run.toml: not readable as TOML: 'utf-8' codec can't decode"),
    toml("a = 1\na = 2", message="{tmp}/run.toml: not readable as TOML: Cannot overwrite a value"),
    toml("a = " + "[" * 20000, message="{tmp}/run.toml: not readable as TOML: nested too deeply"),
    toml("seed = " + "1" * 5000, message="{tmp}/run.toml: not readable as TOML: Exceeds the limit"),
    toml("trainer = 3\n", message="trainer = 3 ({tmp}/run.toml)\n    is a section; give its keys: --trainer.KEY VALUE"),
    toml("", message="orchestrator.environment = []\n    name what to train on: --orchestrator.environment.id owner/name"),
    toml('[[orchestrator.environment]]\nid = "a/x"\n[[orchestrator.environment]]\nid = "b/x@2"\n',
         message="orchestrator.environment.1.name = 'x'\n    is already taken"),
    toml("[[orchestrator.environment]]\n", message="give either id (an environment's package), or dataset (rows)"),
    toml('[[orchestrator.environment]]\nid = "x"\n[[orchestrator.environment]]\nid = "y"\n', "--orchestrator.environment.weight", "2",
         message="which of the 2 entries? Put its number before `weight`: 0 to 1"),
]  # fmt: skip
RUNS = [
    second_start(message="{tmp}/r exists: continue that run with --resume, delete it with --clean, or choose another --name"),
    second_start(resume=-1, clean=True, message="--clean deletes the run and --resume continues it: give only one of them"),
    second_start("--seed", "1", resume=-1, message="{tmp}/r was made with another configuration, 1 setting differs:\n  seed: 0 -> 1"),
    second_start(
        resume=7, batches=(1, 2, 4), message="--resume 7: needs batches 1 to 7 of {tmp}/r, 3, 5-7 missing; there are batches 1-2, 4"
    ),
    first_start(lambda tmp: (tmp / "r").write_text("x"), "{tmp}/r"),
    first_start(lambda tmp: (tmp / "r" / "thesis").mkdir(parents=True), "{tmp}/r is not a run directory, and has thesis"),
    first_start(
        of_another_run,
        "{tmp}/memory/r holds versions 2 to 2 of another run; delete them with --clean",
        "--trainer.weights.dir",
        "{tmp}/memory",
    ),
    first_start(lambda _: None, "--resume: there is no run in {tmp}/r. Leave it out to start one, or give another run", resume=-1),
    first_start(locked, "{tmp}/r: rl of this run is already running (pid "),
    first_start(old_configuration, "{tmp}/r/config.toml was not written by this version of rl:\n2 faults", resume=-1),
]
RECORDS = [
    batch(lambda data: data[:-1], "batches/000003.batch: damaged record at byte 0 (magic, length or checksum does not match)"),
    batch(lambda data: data[:10], "batches/000003.batch: cut short at byte 0"),
    batch(lambda data: b"", "batches/000003.batch: holds 0 records instead of one"),
    batch(lambda data: data + data, "batches/000003.batch: holds 2 records instead of one"),
    batch(lambda data: flipped(data, 0), "batches/000003.batch: damaged record at byte 0"),
    batch(lambda data: flipped(data, len(data) - 1), "batches/000003.batch: damaged record at byte 0"),
    batch(lambda _: encode_record(b"\x80"), "batches/000003.batch: not a batch of this version of rl: Object missing required field"),
    batch(lambda _: encode_record(b"\x91" * 99_999), "batches/000003.batch: not a batch of this version of rl"),
    Case(lambda _: decode_state(msgspec.Raw(b"\x81\xa5tasks\x01")), "the orchestrator's state in the newest batch was written by another"),
    written("batches/pending.log", encode_record(b"\x80"), remarks_of, "sampled again"),
    written("batches/pending.log", encode_record(b"\x80")[:-1], remarks_of, "damaged record at byte 0"),
    written("checkpoints/000001/manifest.json", "{}", lambda path: read_manifest(path.parent), "manifest.json: missing or damaged"),
    written("checkpoints/000001/manifest.json", '{"step": 1, "world_size": 1, "model": "", "files": {"../../x": {}}}',
            lambda path: read_manifest(path.parent), "manifest.json: missing or damaged"),
    written(
        "weights/000001/digests.json",
        '{"hash": "crc32", "tensors": {}}',
        read_digests,
        "{tmp}/weights/000001/digests.json: its hash is 'crc32', which this rl does not know: a newer rl wrote it",
    ),
    written("weights/000001/digests.json", '{"tensors": [', read_digests, "{tmp}/weights/000001/digests.json: missing or damaged"),
    written("x.safetensors", b"\xff" * 100, lambda path: read_header(path), "x.safetensors: not a safetensors file (a header of 1"),
    rows("{}\n[1]\n", "{tmp}/data.jsonl:2: a list; write one object a line"),
    rows(b'{"a": "\xff"}\n', "{tmp}/data.jsonl:1: not JSON ("),
]  # fmt: skip
MODELS_AND_ENVIRONMENTS = [
    Case(
        lambda _: resolve_model(ModelConfig(name="/nowhere/model")), "model.name = '/nowhere/model': no such folder; give an existing one"
    ),
    Case(lambda _: resolve_model(ModelConfig(name="a b c")), "model.name = 'a b c': neither a folder nor an id on the hub (owner/name)"),
    model({}, "is not a complete Hugging Face model, it lacks config.json, a tokenizer (one of"),
    model(WHOLE_MODEL | {"config.json": "{"}, "{tmp}/config.json: not readable as JSON"),
    model(WHOLE_MODEL | {"tokenizer.json": '{"model": {'}, "{tmp}/tokenizer.json: not readable as JSON"),
    model(WHOLE_MODEL | {"model.safetensors.index.json": "{"}, "model.safetensors.index.json: not readable as JSON"),
    model(WHOLE_MODEL | {"tokenizer_config.json": "[]"}, "tokenizer_config.json: expected a JSON object, not list; copy the model again"),
    model(WHOLE_MODEL, "its tokenizer has no chat template; set --model.chat_template to chatml or a Jinja file"),
    model(WHOLE_MODEL, "model.chat_template = '{tmp}/t.jinja': no such file", chat_template="{tmp}/t.jinja"),
    Case(lambda _: load_function("reward", "here.py"), "reward here.py names no function; write file.py:function or module:function"),
    Case(lambda _: load_function("reward", "/nowhere.py:f"), "reward /nowhere.py:f names a file that does not exist: /nowhere.py"),
    Case(lambda _: load_function("reward", "nobody_has.this:f"), "names a module that is not installed"),
    Case(
        lambda _: files_of(Source("/nowhere.jsonl", "train", "sft.dataset")), "sft.dataset = '/nowhere.jsonl': there is no /nowhere.jsonl"
    ),
    policy("{tmp}/nowhere", "nowhere"),
    run_with({}, "@x", "r@x: give a version number, or best"),
    run_with({}, "@7", "version 7 is not in {tmp}/r/weights; there are none (and 0, the base model)"),
    run_with({}, "@best", "the run has no finished evaluation ({tmp}/r/evals/best.json); name a version"),
    run_with({"evals/best.json": "{"}, "@best", "{tmp}/r/evals/best.json: not readable as JSON"),
    run_with({"evals/best.json": '{"e": {"policy_version": "x"}}'}, "@best", "{tmp}/r/evals/best.json: names no version"),
    written(
        "adapter_config.json", "[]", lambda path: resolve(str(path.parent), RLConfig(), None, None), "expected a JSON object, not list"
    ),
]
CASES = [*KEYS, *VALUES, *COMBINATIONS, *OUTSIDE, *NAMES, *COMMAND_LINES, *FILES, *RUNS, *RECORDS, *MODELS_AND_ENVIRONMENTS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.message[:60].splitlines()[0])
def test_what_is_said_about(case, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rl.launch.prepare.ROLE_WAIT_S", 0.1)
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
        assert type(error).__module__.startswith("rl.") or isinstance(error, RemarkError), repr(error)
        said = str(error)
    assert case.message.replace("{tmp}", str(tmp_path)) in said


def test_what_cannot_be_told_without_an_import_passes(tmp_path, capsys, monkeypatch):
    """A function out of a star import, a module beside `rl`, and what a run that was made already names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_rl.py").write_text("from os.path import *\n")  # no other test's file on the import path is called so
    for reward in ("beside_rl.py:star", "beside_rl:star", "json.decoder:scanner"):
        keys = ["--orchestrator.environment.dataset", "owner/rows", "--orchestrator.environment.reward", reward]
        with pytest.raises(SystemExit) as end:
            load_config_or_exit([*keys, "--dry-run"], variables={})
        assert end.value.code == 0
    assert build(parse_args([*keys[:3], "gone.py:f"])).orchestrator.environment[0].reward == "gone.py:f"


def test_there_are_many_and_they_differ():
    assert len(CASES) >= 60 and len({case.message for case in CASES}) > 100


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
