"""From arguments and files to a configuration, or to a message with every fault;
test_bad_inputs.py has the table of faults."""

import json
import os
import subprocess
import sys

import pytest

from rl.config.command_line import build, from_toml, load_config_or_exit, parse_args, to_toml
from rl.config.fields import field_tree, models_in
from rl.config.help import COMMANDS, PROCESS_USAGE
from rl.config.run import RLConfig
from rl.system.errors import ConfigError
from tests.bounds import children_cpu_s, imports_s
from tests.flags import faults, flags, made

ENV = ["--orchestrator.environment.id", "e"]


def config(*args, **variables):
    return made(*ENV, *args, **variables)


@pytest.fixture
def file(tmp_path):
    """Writes a TOML file and returns its path."""

    def write(name, text):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_a_flag_and_a_variable_into_one_of_several_environments(file):
    args = [
        "--orchestrator",
        "@",
        file("o.toml", '[[environment]]\nid = "x"\n[[environment]]\nid = "y"\n'),
    ]
    flags = ["--orchestrator.environment.1.weight", "2"]
    for line in (
        parse_args([*args, *flags]),
        parse_args(args, {"RL__ORCHESTRATOR__ENVIRONMENT__1__WEIGHT": "2"}),
    ):
        assert [env.weight for env in build(line).orchestrator.environment] == [1.0, 2.0]


def test_a_section_as_a_whole_and_its_keys_in_different_layers(file):
    both = file(
        "two.toml",
        '[[orchestrator.environment]]\nid = "x"\n[[orchestrator.environment]]\nid = '
        '"y"\n[inference.vllm]\na = 1\n',
    )
    one = file("one.toml", '[orchestrator.environment]\nid = "x"\nweight = 2\n')
    off = file("off.toml", "[wandb]\nproject = 'p'\ntags = ['t']\n")

    def played(*args):
        return [(env.id, env.weight) for env in made(*args).orchestrator.environment]

    several = ("--orchestrator.environment", "[{id = 'a'}, {id = 'b'}]")
    assert played("@", both, "--orchestrator.environment.1.weight 3") == [("x", 1.0), ("y", 3.0)]
    # a list replaces what a file says of another one
    assert played("@", one, *several) == [("a", 1.0), ("b", 1.0)]
    assert made("@", both, "--inference.vllm", "{}").inference.vllm == {}
    assert config("@", off, "--wandb").wandb.project == "p"
    assert config("@", off, "--wandb false").wandb is None
    assert config("--wandb.project q", RL__WANDB="false").wandb.project == "q"


def test_two_files_may_say_the_same_about_one_setting_and_nothing_different(file):
    t, o = (file(f"{number}.toml", f"max_steps = {number}\n") for number in (10, 11))
    assert config("--trainer @", t, "--orchestrator", f"@{t}").max_steps == 10
    assert f"trainer.max_steps = 10 ({t}) and orchestrator.max_steps = 11 ({o})" in faults(
        "--trainer @", t, "--orchestrator @", o
    )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_a_file_may_begin_with_the_mark_of_its_encoding(tmp_path, encoding):
    """Regression: what editors of Windows write was `Invalid statement`."""
    path = tmp_path / "run.toml"
    path.write_bytes(("\ufeff" * encoding.endswith("le") + "name = 'ü'\n").encode(encoding))
    assert config("@", str(path)).name == "ü"


def test_one_and_several_environments(file):
    one = file(
        "one.toml", '[environment]\nid = "owner/name@0.1.0"\nargs = { difficulty = "hard" }\n'
    )
    built = made("--orchestrator", "@", one)
    assert [(env.id, env.args, env.label) for env in built.orchestrator.environment] == [
        ("owner/name@0.1.0", {"difficulty": "hard"}, "name")
    ]
    assert built.name == "name-SmolLM2-135M-Instruct"
    several = file(
        "two.toml",
        '[[environment]]\nid = "x"\n[[environment]]\nid = "y"\nweight = '
        "3\n[[eval]]\ninterval = 5\n",
    )
    built = made("--orchestrator", "@", several)
    assert built.name == "x+y-SmolLM2-135M-Instruct"
    assert [(entry.id, entry.label, entry.interval) for entry in built.orchestrator.eval] == [
        ("x", "x", 5)
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("3", 3),
        ("true", True),
        ("abc", "abc"),
        ("[1, 2]", [1, 2]),
        ("1979-05-27", "1979-05-27"),
        ("a b", "a b"),
        ("'3'", "3"),
    ],
)
def test_flag_values(text, value):
    assert (
        parse_args(["--orchestrator.environment.args.x", text]).flags[
            "orchestrator.environment.args.x"
        ][0]
        == value
    )
    assert (
        parse_args([f"--orchestrator.environment.args.x={text}"]).flags[
            "orchestrator.environment.args.x"
        ][0]
        == value
    )


def test_switches_and_resume():
    line = parse_args(flags("--clean --resume 40 --wandb"))
    assert (line.switches, line.resume, line.flags["wandb"][0]) == ({"clean"}, 40, True)
    assert parse_args(["--resume"]).resume == -1 and parse_args([]).resume is None
    assert parse_args(["--resume", "@", "/dev/null"]).resume == -1
    assert parse_args(["--resume=40"]).resume == 40
    for word in ("--resume=x", "--resume=", "--resume=-1"):
        assert parse_args([word]).faults == [
            f"{word}: give a step (0 or more), or --resume alone for the newest checkpoint"
        ]


def test_a_dry_run_names_the_data_sets_that_only_the_start_looks_for(capsys, tmp_path):
    (tmp_path / "rows [1].jsonl").touch()
    names = ["--sft.dataset", f"{tmp_path}/rows [1].jsonl", "--sft.validation", "owner/name"]
    with pytest.raises(SystemExit):
        load_config_or_exit([*names, "--dry-run"], "rl sft", variables={})
    told = "not on this machine; only the start looks for it elsewhere"
    assert capsys.readouterr().err == f"rl sft: sft.validation = owner/name: {told}\n"


def test_a_switch_that_a_command_has_not_is_a_fault(capsys):
    for args in (["--resume"], ["--clean"], ["--quick"]):
        with pytest.raises(SystemExit) as end:
            load_config_or_exit([*ENV, *args], "rl export", usage="usage: rl export")
        assert end.value.code == 2
        assert f"{args[0]}: `rl export` has no such switch; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("switch", ["--resume", "--clean"])
def test_a_process_of_a_run_neither_resumes_nor_cleans(switch, capsys):
    with pytest.raises(SystemExit) as end:
        load_config_or_exit([*ENV, switch], "trainer", usage=PROCESS_USAGE)
    said = (
        f"{switch}: `trainer` has no such switch; leave it out: a process continues its run; "
        "only `rl` resumes or deletes a run"
    )
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_what_truncates_sampling_is_warned_about_if_the_trainer_is_not_told(capsys):
    load_config_or_exit([*ENV, "--orchestrator.sampling.top_p", "0.9"], "rl eval")
    assert not capsys.readouterr().err
    unknown = [*ENV, "--trainer.max_kept", "0"]
    load_config_or_exit([*unknown, "--orchestrator.sampling.top_p", "0.9"], "rl eval")
    (line,) = capsys.readouterr().err.splitlines()  # a sentence, without a line of our source
    assert line.startswith("rl eval: warning: orchestrator.sampling.top_p = 0.9 truncates ")
    assert "importance ratios come out below 1" in line
    load_config_or_exit([*unknown, "--orchestrator.environment.sampling.min_p", "0.1"], "rl eval")
    assert (
        "rl eval: warning: orchestrator.environment.0.sampling.min_p = 0.1 truncates "
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "sampling",
    ["top_p 1.0", "top_k 0", "min_p 0", "top_p 0.9 --orchestrator.environment.sampling.top_p 1.0"],
)
def test_what_leaves_out_no_token_truncates_nothing(sampling, capsys):
    """top_p = 1.0 was warned about, and switched off that a wrong trainer ends the run."""
    config, _ = load_config_or_exit(
        [*ENV, *f"--orchestrator.sampling.{sampling}".split()], "rl eval"
    )
    assert not capsys.readouterr().err and not config.truncates(9, replayed=True)
    assert config.sampling_of(config.orchestrator.environment[0]).keys() == {
        "max_tokens",
        "temperature",
    }


def test_a_top_k_of_the_whole_vocabulary_truncates_nothing(capsys):
    """It switched off that a wrong trainer ends the run, as a smaller one does."""
    flags = [*ENV, "--orchestrator.sampling.top_k", "49152", "--trainer.max_kept"]
    config, _ = load_config_or_exit([*flags, "0"], "rl eval")
    assert (
        "sampling.top_k = 49152 truncates what inference samples, but the trainer does not know "
        "which tokens are left" in capsys.readouterr().err
    )
    told, _ = load_config_or_exit([*flags, "512"], "rl eval")
    assert (
        "orchestrator.sampling.top_k = 49152 is above trainer.max_kept = 512: a token of which "
        "more ids are kept" in capsys.readouterr().err
    )
    load_config_or_exit([*flags, "49152"], "rl eval")
    assert not capsys.readouterr().err
    for some, replayed in ((config, False), (told, True)):
        truncated = [some.truncates(size, replayed=replayed) for size in (49151, 49152, 49153)]
        assert truncated == [False, False, True]
        assert not some.truncates(49153, replayed=not replayed)


@pytest.mark.parametrize("place", ["m [1]", "hub/models--owner--m/snapshots/1f"])
def test_a_model_s_own_limit_is_the_default_length(monkeypatch, tmp_path, capsys, place):
    """2048, which nobody had set, was an error on a model of 1024."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    file = tmp_path / place / "config.json"
    file.parent.mkdir(parents=True)
    name = str(file.parent) if place == "m [1]" else "owner/m"
    for text, longest in (
        ('{"max_position_embeddings": 1024}', 1024),
        ('{"max_position_embeddings": 9999}', 2048),
        ("damaged", 2048),
    ):
        file.write_text(text)
        config, _ = load_config_or_exit([*ENV, "--model", name], "rl")
        assert config.model.max_model_len == longest
        said = "rl: warning: model.max_model_len = 1024 is the longest sequence of this model\n"
        assert capsys.readouterr().err == (said if longest == 1024 else "")
    file.write_text('{"max_position_embeddings": 1024}')
    assert (
        load_config_or_exit([*ENV, "--model", name, "--model.max_model_len", "2048"], "rl")[
            0
        ].model.max_model_len
        == 2048
    )


def command(*args):
    """What `rl` printed, and the CPU seconds that it took: wall time would be that of the
    machine's other work, too."""
    began = children_cpu_s()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from rl.main import main; sys.exit(main())",
            *flags(*args),
        ],
        capture_output=True,
        text=True,
    )
    return done, children_cpu_s() - began


def test_help_is_quick_and_fits_a_screen():
    results = [command("--help") for _ in range(3)]
    done = results[0][0]
    assert done.returncode == 0 and done.stderr == ""
    keys = (
        "--trainer.optim.lr float = 1e-06",
        "--max_steps int = 100",
        "orchestrator.eval,",
        "--resume [STEP]",
        "--inference.vllm",
    )
    for text in (*keys, "--quick", *(f"rl {name} " for name in COMMANDS)):
        assert text in done.stdout
    assert "sft.dataset" not in done.stdout and len(done.stdout.splitlines()) <= 74
    # 3.5 seen; torch alone would be 10 more
    assert min(seconds for _, seconds in results) < 7 * min(imports_s() for _ in range(3))


def test_a_reader_that_leaves_is_no_good_end():
    """Else `rl @ run.toml | head` would end with 0, and the run with it."""
    program = "import sys; from rl.main import main; sys.exit(main())"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as output:
        done = subprocess.run(
            [sys.executable, "-c", program, "--help", "all"],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_shell_may_close_the_output(closed):
    """Regression: an AttributeError of None."""
    program = (
        f"{sys.executable} -c 'import sys; from rl.main import main; sys.exit(main())' --version"
    )
    done = subprocess.run(
        ["bash", "-c", f"{program} {closed}"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def help_on(capsys, *topic, program="rl"):
    with pytest.raises(SystemExit) as end:
        load_config_or_exit(flags("--help", *topic), program)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_on_everything_has_every_key_once(capsys):
    printed = [
        line.split()[0] for line in help_on(capsys, "all").splitlines() if line.startswith("  --")
    ]
    keys = [key for key, info in field_tree(RLConfig).items() if not models_in(info.annotation)]
    missing = {f"--{key}" for key in keys if not key.endswith(".type")} - set(printed)
    assert not missing and len(printed) > 200


def test_help_on_a_section_and_on_a_key(capsys):
    section = help_on(capsys, "trainer.optim")
    assert section.startswith("\n[trainer.optim]  AdamW")
    assert "  --trainer.optim.betas" in section
    assert "trainer.loss" not in section
    union = help_on(capsys, "trainer.loss", "--seed 1")
    assert union.count("--trainer.loss.kl_coefficient") == 1
    assert union.count("--trainer.loss.clip_high") == 3
    assert "type = 'gspo'" in union
    assert "token_mask [float, float] = [0.125, 8.0]  (policy_gradient)\n" in union
    assert "token_mask [float, float] = [0.0, inf]  (clip" in union
    assert "aggregation token|sequence|constant = sequence  (gspo)\n" in union
    assert help_on(capsys, "seed").startswith("  --seed int = 0\n      Seed for the order of tasks")
    of_sft = help_on(capsys, program="rl sft")
    assert "--sft.dataset str  " in of_sft
    assert "--trainer.optim.lr float = 2e-05 " in of_sft
    assert "--orchestrator." not in of_sft
    assert "perf/mfu  Model FLOP/s utilisation" in help_on(capsys, "metrics")


def test_variables_win_over_files_and_flags_over_variables(file):
    path = file("run.toml", "seed = 1\nmax_steps = 10\nmax_lag = 3\n[trainer.optim]\nlr = 1e-5\n")
    built = config(
        "@",
        path,
        "--max_lag 0",
        RL__MAX_STEPS="20",
        RL__MAX_LAG="2",
        RL__TRAINER__OPTIM__LR="1e-4",
    )
    assert (built.seed, built.max_steps, built.max_lag, built.trainer.optim.lr) == (1, 20, 0, 1e-4)
    assert config("--steps 3", RL__TRAINER__MAX_STEPS="20").max_steps == 3


def test_values_of_variables_are_written_as_those_of_flags():
    built = config(
        RL__TRAINER__LOSS__TYPE="gspo",
        RL__TRAINER__LOSS__TOKEN_MASK="[0.5, 2]",
        RL__TRAINER__GPUS="0,1",
        RL__WANDB="true",
        RL__WANDB__PROJECT="p",
        RL__INFERENCE__VLLM="{ max_num_seqs = 8 }",
        RL__INFERENCE__VLLM__DTYPE="half",
        RL__ORCHESTRATOR__ENVIRONMENT__WEIGHT="2",
        RL_TOKEN="not a setting",
    )
    assert (built.trainer.loss.type, built.trainer.loss.token_mask, built.trainer.gpus) == (
        "gspo",
        (0.5, 2.0),
        [0, 1],
    )
    assert (built.wandb.project, built.inference.vllm) == (
        "p",
        {"max_num_seqs": 8, "dtype": "half"},
    )
    assert [(env.id, env.weight) for env in built.orchestrator.environment] == [("e", 2.0)]


def test_every_fault_in_variables_is_listed_at_once_with_the_variable_as_its_place():
    with pytest.raises(ConfigError) as error:
        config(
            "--max_lag x",
            RL__BOGUS="1",
            RL__TRAINER__OPTIM__LRR="1",
            RL__SEED="many",
            RL__MODEL__NAME="true",
            RL__TRAINER__LOSS__TYPE="dpo",
            RL__ORCHESTRATOR__ENVIRONMENT__IDD="e",
            RL__WANDB__API_KEY="literal-key-1",
        )
    message = str(error.value)
    assert message.startswith("8 faults") and "literal-key-1" not in message
    for fault in (
        "max_lag = 'x' (--max_lag)\n    Input should be a valid integer",
        "bogus = 1 (RL__BOGUS)\n    unknown key; see --help all",
        "trainer.optim.lrr = 1 (RL__TRAINER__OPTIM__LRR)\n    unknown key; did you mean "
        "trainer.optim.lr?",
        "seed = 'many' (RL__SEED)\n    Input should be a valid integer",
        "model.name (RL__MODEL__NAME)\n    needs a value: str",
        "trainer.loss.type = 'dpo' (RL__TRAINER__LOSS__TYPE)\n    give one of ",
        "orchestrator.environment.0.idd = 'e' (RL__ORCHESTRATOR__ENVIRONMENT__IDD)\n    "
        "unknown key; did you mean",
        "wandb.api_key = '(hidden)' (RL__WANDB__API_KEY)\n    unknown key; secrets are read "
        "from environment variables",
    ):
        assert fault in message
    with pytest.raises(
        ConfigError,
        match=r"max_steps = 5 \(RL__MAX_STEPS\) and steps = 6 \(RL__STEPS\)\n    set the same "
        r"setting",
    ):
        config(RL__MAX_STEPS="5", RL__STEPS="6")


def test_a_run_that_exists_is_read_from_its_file_alone(monkeypatch, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config("--seed 3")))
    monkeypatch.setenv("RL__SEED", "9")
    monkeypatch.setenv("RL__BOGUS", "9")
    assert from_toml(path).seed == 3
    assert load_config_or_exit(["@", str(path)], "trainer")[0].seed == 3
    monkeypatch.delenv("RL__BOGUS")
    done, _ = command("@", str(path), "--dry-run --output_dir", str(tmp_path / "o"))
    assert "\nseed = 9\n" in done.stdout and not (tmp_path / "o").exists()


def test_a_variable_that_names_a_setting_is_no_secret(monkeypatch):
    monkeypatch.setenv("RL__TRAINER__LOSS__TOKEN_MASK", "[0.25, 4.0]")
    monkeypatch.setenv("RL__ORCHESTRATOR__TEACHER__API_KEY_VAR", "TEACHER_KEY_9")
    built = build(
        parse_args(
            [*ENV, "--orchestrator.teacher.base_url", "http://t/v1", "--name", "TEACHER_KEY_9"],
            os.environ,
        )
    )
    assert (built.trainer.loss.token_mask, built.orchestrator.teacher.api_key_var) == (
        (0.25, 4.0),
        "TEACHER_KEY_9",
    )


def test_schema_is_json_with_the_docstrings():
    done, _ = command("--schema")
    schema = json.loads(done.stdout)
    assert (
        schema["properties"]["max_steps"]["description"]
        == "Batches to train on; batch N makes policy version N. `steps` is an alias."
    )
    assert schema["additionalProperties"] is False and "OptimConfig" in schema["$defs"]


def test_a_text_keeps_its_text_whatever_number_it_looks_like():
    """`--name 1.10` was the run 1.1."""
    words = [
        "--name",
        "1.10",
        "--wandb.name",
        "1e3",
        "--wandb.tags",
        '["0x10"]',
        "--wandb.notes",
        "-0",
        "--seed",
        "0x10",
    ]
    env = flags("--orchestrator.environment.id 0x10 --orchestrator.environment.args.version 3.10")
    config = build(parse_args([*words, *env], {"RL__WANDB__GROUP": "007.0"}))
    assert (config.name, config.wandb.name, config.wandb.tags, config.wandb.notes) == (
        "1.10",
        "1e3",
        ["0x10"],
        "-0",
    )
    assert (config.wandb.group, config.seed, config.orchestrator.environment[0].id) == (
        "007.0",
        16,
        "0x10",
    )
    # an argument may be anything: there it is a number
    assert config.orchestrator.environment[0].args == {"version": 3.1}
    assert made("--name", '"1.10"', *env).name == "1.10"


def test_a_text_setting_may_begin_with_an_at_sign(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("max_steps = 7")
    line = parse_args(["--wandb.group", "@home", "@", str(path), "--wandb", f"@{path}"])
    assert line.faults == [] and line.flags["wandb.group"][0] == "@home"
    assert line.files["max_steps"][0] == 7 and line.flags["wandb"][0] is True
