"""All faults of single settings are told at once, and none that only follows from another."""

import pytest

from rl.config.check import check_loss, unused
from rl.config.command_line import from_toml, to_toml
from rl.config.loss import ClippedSettings
from rl.config.outside import outside_faults
from rl.config.run import RLConfig
from tests.flags import faults, made

ENV = ["--orchestrator.environment.id", "e"]


def config(*args):
    return made(*ENV, *args)


def test_faults_of_settings_are_told_at_once_and_then_those_between_them():
    single = "--trainer.loss.type clip --trainer.loss.clip_low x --max_steps 5 --steps 6 --nope.a 1"
    between = "--orchestrator.batch_size 3 --max_lag 9"
    said = faults(*f"{single} --nope.b 2 --name {between}".split())
    assert said.startswith("5 faults in the configuration\n")
    for text in (
        "max_steps = 5 (--max_steps) and steps = 6 (--steps)\n    set the same setting to "
        "two values",
        "trainer.loss.clip_low = 'x' (--trainer.loss.clip_low)\n    Input should be a valid number",
        "nope.a = 1 (--nope.a)\n    unknown key",
        "nope.b = 2 (--nope.b)\n    unknown key",
        "name (--name)\n    needs a value: str",
    ):
        assert text in said
    said = faults(*between.split())
    assert said.startswith("3 faults in the configuration\n")
    assert "orchestrator.environment = []\n    name what to train on" in said
    assert "batch_size = 3\n    is smaller than one group of 8 rollouts (group_size)" in said


def test_what_cannot_be_read_hides_nothing_that_is_there():
    said = faults(
        "@", "/nowhere.toml", "stray", "--trainer.optim.lrr 1 --orchestrator.batch_size 3"
    )
    assert said.startswith("3 faults")
    assert "/nowhere.toml: no such file" in said
    assert "stray: not understood" in said
    # which may be in the file
    assert "trainer.optim.lrr = 1" in said and "orchestrator.environment" not in said


def test_a_package_that_a_setting_needs_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = list(outside_faults(config("--trainer.weights.transport nixl")))
    assert [(key, "uv sync --extra nixl" in text) for key, _, text in found] == [
        ("trainer.weights.transport", True)
    ]


@pytest.mark.parametrize(
    ("line", "key", "text"),
    [
        ("--trainer.loss.type clip --trainer.loss.truncate 4", "trainer.loss.truncate", "several"),
        ("--trainer.loss.importance none --trainer.loss.truncate 4", "trainer.loss.truncate", "im"),
        ("--trainer.loss.constant_length 9", "trainer.loss.constant_length", "aggregation"),
        ("--trainer.loss.kl_reference m", "trainer.loss.kl_reference", "kl_coefficient is 0"),
        ("--trainer.router_replay trainer", "trainer.router_replay", "trainer.epochs"),
        ("--trainer.optim.offload --trainer-gpus 0", "trainer.optim.offload", "on the CPU"),
        (
            "--orchestrator.teacher.base_url http://t --trainer.loss.teacher_coefficient 0",
            "orchestrator.teacher.base_url",
            "teacher_coefficient is 0",
        ),
        ("--tinker.lora_rank 8", "tinker", "trainer.backend"),
        ("--serve --trainer.optim.lr 1e-3", "trainer.optim", "each call of its clients"),
        ("", "", ""),
        ("--trainer.loss.type clip --trainer.loss.truncate 4 --trainer.epochs 2", "", ""),
        ("--trainer.router_replay trainer --trainer.epochs 2 --trainer.loss clip", "", ""),
    ],
)
def test_settings_without_effect_are_warned_about(line, key, text):
    effects = dict(unused(config(*line.split())))
    assert list(effects) == [key] * bool(key) and text in "".join(effects.values())


def test_a_new_clipped_loss_has_its_clip_checked():
    """Regression: the losses that are checked were a list, which a new one was not in."""

    class OwnConfig(ClippedSettings):
        type: str = "own"

    assert [key for key, *_ in check_loss(OwnConfig(clip_low=0, clip_high=0))] == [
        "trainer.loss.clip_high"
    ]  # ty: ignore


def test_a_missing_key_is_told_alone():
    said = faults("--sft.epochs 1 --trainer.loss.type gspo")
    assert said == "1 fault in the configuration\n  sft.dataset\n    is missing; set it"


def test_numbers_are_finite_but_for_bounds_that_inf_switches_off():
    keys = (
        "trainer.optim.lr",
        "trainer.optim.eps",
        "trainer.optim.weight_decay",
        "trainer.lora.alpha",
        "trainer.batch_timeout_s",
        "trainer.loss.kl_coefficient",
        "trainer.loss.entropy_coefficient",
        "orchestrator.sampling.temperature",
        "orchestrator.environment.weight",
        "orchestrator.rollout_timeout_s",
        "orchestrator.credit.length_penalty",
        "supervisor.stall_s",
        "inference.startup_timeout_s",
    )
    for value in ("inf", "nan"):
        said = faults(*ENV, *(f"--{key} {value}" for key in keys))
        assert said.startswith(f"{len(keys)} faults")
        assert said.count("Input should be a finite number") == len(keys)
    bounds = (
        "trainer.loss.truncate",
        "trainer.optim.max_grad_norm",
        "trainer.checkpoint.interval_s",
        "orchestrator.eval.target",
        "orchestrator.worker_memory_gib",
        "orchestrator.environment.difficulty.easy_above",
    )
    config(*(f"--{key} inf" for key in bounds), "--trainer.loss.token_mask 0,inf")
    said = faults(*ENV, *(f"--{key} nan" for key in bounds))
    assert said.startswith(f"{len(bounds)} faults")


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("</a>,</b>", ["</a>", "</b>"]),
        ("</a>, </b>", ["</a>", "</b>"]),
        (r"\nObservation:", ["\nObservation:"]),
        (r"\n", ["\n"]),
        (" Human", [" Human"]),
        (r'[",", "\\n"]', [",", r"\n"]),
        ("[]", []),
        ("42", ["42"]),
    ],
)
def test_stop_strings_are_written_as_a_text_or_as_a_list(text, stops):
    given = ("--orchestrator.sampling.stop", text)
    built = config(*given, "--orchestrator.environment.sampling.stop", text)
    assert built.orchestrator.sampling.stop == stops
    assert built.orchestrator.environment[0].sampling.stop == stops
    # as its config.toml is read again
    assert RLConfig.model_validate(built.model_dump()).orchestrator.sampling.stop == stops


@pytest.mark.parametrize("text", ["", ",", "a,,b", '["a", ""]'])
def test_an_empty_stop_string_is_refused_at_once(text):
    said = faults(*ENV, "--orchestrator.sampling.stop", text)
    assert (
        "an empty text would end every answer at once; leave it out, or give a text with a "
        "comma in a list" in said
    )


def test_lists_have_commas():
    texts = {"wandb.tags": "a,b"} | {
        f"orchestrator.environment.{key}": text
        for key, text in (
            ("requirements", "sympy>=1.13,<2,x[a,b], y"),
            ("read", "a.py,b"),
            ("isolation", "sandbox"),
        )
    }
    built = config(*(word for key, text in texts.items() for word in (f"--{key}", text)))
    (env,) = built.orchestrator.environment
    assert built.wandb.tags == ["a", "b"]
    assert env.requirements == ["sympy>=1.13,<2", "x[a,b]", "y"]
    assert env.read == ["a.py", "b"]


def test_what_people_type_is_understood(tmp_path):
    args = "--model owner/m --orchestrator.environment reverse-text --orchestrator.eval e --trainer.loss gspo --orchestrator.credit rloo --trainer.optim.betas 0.9,0.99 --orchestrator.sampling.stop . --orchestrator.inference_urls http://a,http://b --model.dtype float32"
    config = made(args)
    settings = config.orchestrator
    assert (config.model.name, config.model.dtype, config.trainer.optim.betas) == (
        "owner/m",
        "float32",
        (0.9, 0.99),
    )
    assert ([env.id for env in settings.environment], [env.id for env in settings.eval]) == (
        ["reverse-text"],
        ["e"],
    )
    assert (config.trainer.loss.type, settings.credit.type, settings.sampling.stop) == (
        "gspo",
        "rloo",
        ["."],
    )
    assert settings.inference_urls == ["http://a", "http://b"]
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert from_toml(tmp_path / "c.toml") == config
    (tmp_path / "short.toml").write_text('model = "m"\n[orchestrator]\nenvironment = ["a", "b"]\n')
    short = made("@", str(tmp_path / "short.toml"), "--model.max_model_len", "512")
    assert (short.model.name, [env.id for env in short.orchestrator.environment]) == (
        "m",
        ["a", "b"],
    )
    assert "model.name = 'n'" in faults(*ENV, "--model m --model.name n")


def test_a_file_of_rollouts_may_have_a_name_like_a_pattern(tmp_path):
    (tmp_path / "runs[1].jsonl").write_text("{}\n")
    for name, count in (("runs[1].jsonl", 0), ("runs*", 0), ("runs[2].jsonl", 1)):
        built = config(f"--recorded.rollouts {tmp_path / name}")
        assert [fault[0] for fault in outside_faults(built)].count("recorded.rollouts") == count
