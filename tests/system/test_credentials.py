"""Secrets are refused where they would be written to disk, looked up where they are used, and
redacted in messages."""

import io
import os

import msgspec
import pytest

from rl.config.command_line import build, parse_args, to_toml
from rl.system.credentials import (
    Redacting,
    hidden,
    redact,
    redact_json,
    resolve,
    resolved_names,
    secret_variables,
)
from rl.system.errors import ConfigError

KEY = "not-a-real-key-1234567890"
ENV = ["--orchestrator.environment.id", "e"]


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.setattr(
        "os.environ",
        {
            "JUDGE_API_KEY": KEY,
            "LONG_SECRET": f"{KEY}-and-more",
            "PATH": "/usr/bin",
            "OTHER": "other-value-1",
        },
    )
    resolved_names.clear()


def test_what_counts_as_a_secret_variable(monkeypatch):
    monkeypatch.setattr(
        "os.environ",
        {
            "HF_TOKEN": "abcdefgh1",
            "DB_PASSWORD": "correct horse",
            "MY_SECRET_2": "0123456789",
            "TOKENIZERS_PARALLELISM": "false-false-1",
            "KEYBOARD": "0123456789",
            "AWS_CREDENTIALS_FILE": "0123456789",
            "SSH_KEY": "/home/me/.ssh/id",
            "SOME_TOKEN": "disabled",
            "PASSWORD": "",
            "TOKEN": "x1",
        },
    )
    assert set(secret_variables().values()) == {"HF_TOKEN", "DB_PASSWORD", "MY_SECRET_2"}


def test_a_secret_that_begins_with_a_slash_is_one_unless_it_is_a_path(monkeypatch):
    """Regression: one key in base64 out of 64 was printed."""
    secrets = {"AWS_SECRET_KEY": "/bPxRfiCYEXAMPLE/KEY", "TWO_KEY": "//PxRfiCYEXAMPLE/KEY"}
    monkeypatch.setattr(
        "os.environ",
        secrets
        | {"SSH_KEY": "/home/me/.ssh/id", "HOST_KEY": "//etc/ssh/key", "JUDGE": "/usr/share"},
    )
    assert set(secret_variables()) == set(secrets.values())
    resolve("env:JUDGE", "args.key")  # given as a secret, whatever it looks like
    assert (
        redact("401 for /bPxRfiCYEXAMPLE/KEY or /usr/share")
        == "401 for [$AWS_SECRET_KEY] or [$JUDGE]"
    )


def test_texts_are_redacted_longest_first():
    assert redact(f"401 for {KEY}-and-more, {KEY}!") == "401 for [$LONG_SECRET], [$JUDGE_API_KEY]!"
    assert redact("nothing here") == "nothing here"


def test_json_stays_json_and_a_stream_has_no_secrets(monkeypatch):
    monkeypatch.setitem(os.environ, "MY_KEY", 'quo"te\\and\nline-1')
    encoded = redact_json(msgspec.json.encode([{"content": 'it is quo"te\\and\nline-1.'}]))
    assert msgspec.json.decode(encoded) == [{"content": "it is [$MY_KEY]."}]
    inner = io.StringIO()
    stream = Redacting(inner)
    print("key", KEY, file=stream)
    stream.writelines([KEY, "\n"])
    assert inner.getvalue() == "key [$JUDGE_API_KEY]\n[$JUDGE_API_KEY]\n" and not stream.isatty()


def test_references_are_looked_up_and_then_secret():
    table = {
        "api_key": "env:JUDGE_API_KEY",
        "n": 3,
        "nested": [{"x": "env:OTHER"}, "environment", "env: no"],
    }
    nested = [{"x": "other-value-1"}, "environment", "env: no"]
    assert resolve(table, "args") == {"api_key": KEY, "n": 3, "nested": nested}
    assert redact("other-value-1") == "[$OTHER]"
    with pytest.raises(
        ConfigError,
        match=r"args\.a\.b = 'env:NOWHERE': the environment variable NOWHERE is not set in this "
        r"process",
    ):
        resolve({"a": {"b": "env:NOWHERE"}}, "args")


@pytest.mark.parametrize(
    "args",
    [
        ["--orchestrator.environment.args.api_key", "literal-key-1"],
        [
            "--orchestrator.environment.args",
            "{ judge = { keys = [{ openai_api_key = 'literal-key-1' }] } }",
        ],
        ["--orchestrator.environment.set_kwargs.password", "literal-key-1"],
        ["--inference.vllm.api-key", "literal-key-1"],
        ["--inference.vllm.hf_token", "literal-key-1"],
        ["--orchestrator.environment.args.model", f"{KEY}"],
        ["--orchestrator.environment.args.note", f"Bearer {KEY}"],
        ["--orchestrator.environment.args.note", "sk-proj-literal-key-1-abcdefgh"],
        ["--orchestrator.environment.args.base_url", "https://me:literal-key-1@host/v1"],
        ["--orchestrator.inference_urls", "['http://me:literal-key-1@host:1']"],
        ["--wandb.api_key", "literal-key-1"],
        ["--wandb.name", KEY],
        [
            "--orchestrator.teacher.api_key",
            "literal-key-1",
            "--orchestrator.teacher.base_url",
            "http://h/v1",
        ],
    ],
)
def test_a_literal_secret_is_refused_and_not_shown(args):
    with pytest.raises(ConfigError) as error:
        build(parse_args([*ENV, *args]))
    said = str(error.value)
    assert "environment variable" in said and "(hidden)" in said
    assert "literal-key-1" not in said and KEY not in said
    if args[-1] == KEY and ".args." in args[0]:
        assert 'put it into an environment variable and write "env:JUDGE_API_KEY" here' in said


@pytest.mark.parametrize(
    "args",
    [
        [
            "--orchestrator.environment.args",
            "{ api_key = 'env:JUDGE_API_KEY', token = 'env:ANY', eos_token = '<|endoftext|>' }",
        ],
        [
            "--orchestrator.environment.args",
            "{ openai_api_key = 'EMPTY', key = 'answer_column', max_tokens = 100, secret = "
            "'apple' }",
        ],
        [
            "--orchestrator.teacher.api_key_var",
            "TEACHER_KEY",
            "--orchestrator.teacher.base_url",
            "http://h/v1",
            "--trainer.loss.teacher_coefficient",
            "1",
        ],
        ["--inference.vllm", "{ hf_token = true, api_key = ['env:JUDGE_API_KEY'] }"],
        [
            "--model.name",
            "sk-learn/hf_models-of-somebody",
            "--orchestrator.environment.args.url",
            "http://host:8000/a@b",
        ],
    ],
)
def test_what_is_no_secret_stays_as_it_is(args):
    dumped = to_toml(build(parse_args([*ENV, *args])))
    assert KEY not in dumped and "(hidden)" not in dumped


def test_hidden_values():
    table = {"api_key": "12345678", "inner": [{"password": "abcdefgh", "user": "me"}], "n": 1}
    inner = [{"password": "(hidden)", "user": "me"}]
    assert hidden("args", table) == {"api_key": "(hidden)", "inner": inner, "n": 1}
    assert hidden("x.token", "12345678") == "(hidden)"


@pytest.mark.parametrize("secret", ["12345678", "n4567890", "u000b123"])
def test_a_secret_in_json_is_looked_for_in_the_strings_and_not_in_numbers_or_escapes(
    monkeypatch, secret
):
    monkeypatch.setitem(os.environ, "DB_PASSWORD", secret)
    row = {"x": 0.12345678, "n": 12345678, "text": f"\n4567890 \x0b123 is {secret}"}
    assert msgspec.json.decode(redact_json(msgspec.json.encode(row))) == row | {
        "text": "\n4567890 \x0b123 is [$DB_PASSWORD]"
    }
