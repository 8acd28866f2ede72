"""What holds for any messages, any configuration and any damage: hypothesis looks for the
exception."""

import math
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rl.config.command_line import build, from_toml, parse_args, to_toml
from rl.orchestrator.batches.batch_files import PendingLog
from rl.run_dir.files import HEADER, CorruptFileError, decode_records, encode_record
from rl.run_dir.metrics import Merger, MetricsLog, MetricsReader
from rl.system.errors import ConfigError
from rl.wire.batch_file import BatchFile, decode_batch, encode_batch
from rl.wire.messages import TrainBatch, VersionSpan
from rl.wire.rollouts import ENCODER, Group, Rollout, Turn
from tests.wire.samples import aligned_sample

FEW = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=30,
    phases=set(Phase) - {Phase.shrink},
    suppress_health_check=list(HealthCheck),
)
ENV = ["--orchestrator.environment.id", "e"]
INT64 = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


# Messages -----------------------------------------------------------------------------------------


@st.composite
def samples(draw):
    length = draw(st.integers(1, 8))
    mask = [False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]

    def floats():
        return draw(st.lists(st.floats(allow_nan=False), min_size=length, max_size=length))

    cut = draw(st.integers(0, sum(mask)))
    return aligned_sample(
        token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)),
        loss_mask=mask,
        logprobs=floats(),
        advantages=floats(),
        policy_versions=[
            VersionSpan(draw(st.integers(0, 9)), cut),
            VersionSpan(9, sum(mask) - cut),
        ],
        env=draw(TEXT),
        group_id=draw(INT64),
        rollout_id=draw(st.integers(0, 99)),
        temperature=draw(FINITE),
        teacher_logprobs=draw(st.none() | st.just(floats())),
    )


BATCHES = st.builds(TrainBatch, step=st.integers(1, 10**6), samples=st.lists(samples(), max_size=4))


# Files --------------------------------------------------------------------------------------------


def damaged(draw, data):
    """Cut short, or with one bit flipped."""
    if draw(st.booleans()):
        return data[: draw(st.integers(0, len(data) - 1))]
    place, bit = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 7))
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


@FEW
@given(BATCHES, st.dictionaries(TEXT, INT64, max_size=3), st.data())
def test_a_batch_is_read_as_it_was_written_or_not_at_all(batch, state, data):
    whole = encode_batch(batch, state)
    in_one_call = BatchFile(batch=batch, state=msgspec.Raw(msgspec.msgpack.encode(state)))
    assert whole == encode_record(msgspec.msgpack.encode(in_one_call))
    content = decode_batch(whole, "x")
    assert content.batch == batch and msgspec.msgpack.decode(content.state) == state
    try:
        decode_batch(data.draw(st.composite(damaged)(whole)), "x")
    except CorruptFileError:
        return
    raise AssertionError("the damage was not noticed")


@FEW
@given(st.lists(st.binary(max_size=40), max_size=5), st.binary(max_size=40))
def test_records_end_where_they_should(payloads, tail):
    data = b"".join(map(encode_record, payloads))
    assert list(decode_records(data, "x")) == payloads
    assert sum(len(payload) + HEADER.size for payload in payloads) == len(data)
    found = []
    try:
        found.extend(decode_records(data + tail, "x"))
    except CorruptFileError:
        pass
    else:
        assert not tail
    assert found == payloads  # those before the damage


def group(number, text):
    turn = Turn.of([1], [2, 3], [-1.0, -2.0], [VersionSpan(0, 2)])
    return Group(
        group_id=number, env="e", task=0, rollouts=[Rollout(turns=[turn], text=[{"content": text}])]
    )


@FEW
@given(st.lists(TEXT, min_size=1, max_size=4), st.data())
def test_a_damaged_pending_log_gives_whole_groups_and_says_what_it_lost(texts, data):
    groups = [group(number, text) for number, text in enumerate(texts)]
    records = b"".join(encode_record(ENCODER.encode(one)) for one in groups)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pending.log"
        path.write_bytes(data.draw(st.composite(damaged)(records)))
        size = path.stat().st_size
        log = PendingLog(path)
        remarks = log.load(set(), 1 << 62)
        ends = {
            sum(len(encode_record(ENCODER.encode(one))) for one in groups[:n])
            for n in range(len(groups))
        }
        assert all(one in groups for one in log.groups) and len(log.groups) < len(groups)
        # cut between two groups it looks as if the others had never come
        assert remarks or size in ends
        again = PendingLog(path)
        assert again.load(set(), 1 << 62) == [] and again.groups == log.groups


@FEW
@given(
    st.lists(st.tuples(st.integers(1, 9), FINITE), max_size=5),
    st.integers(0, 60),
    st.binary(max_size=10),
)
def test_metrics_behind_a_torn_line_are_not_lost(written, cut, tail):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        log = MetricsLog(path, "a")
        for i, (step, value) in enumerate(written):
            # no two lines are the same: those of a run bear their milliseconds
            log.write(step, {"x": value, "i": i})
        torn = log.path.read_bytes()[: max(0, log.path.stat().st_size - cut)]
        log.path.write_bytes(torn + tail.replace(b"\n", b"") * bool(cut))
        path.write_bytes(torn[: len(torn) // 2])  # by a merger that was killed, too
        MetricsLog(path, "a").write(10, {"x": 0.0})
        Merger(path).merge()
        lines = [(line["step"], line["x"]) for line in MetricsReader(path).new()]
        assert lines == [*written[: torn.count(b"\n")], (10, 0.0)]


# Configuration ------------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[st.SearchStrategy[Any], list[str]]] = {
    "max_steps": (
        st.integers(1, 999_999),
        ["max_steps", "steps", "trainer.max_steps", "orchestrator.max_steps"],
    ),
    "seed": (st.integers(0, 2**32 - 1), ["seed", "trainer.seed", "inference.seed"]),
    "trainer.optim.lr": (
        st.floats(1e-9, 1.0),
        ["trainer.optim.lr", "learning_rate", "trainer.learning_rate"],
    ),
    "model.dtype": (
        st.sampled_from(["bfloat16", "float32"]),
        ["model.dtype", "trainer.model.dtype", "inference.model.dtype"],
    ),
    "orchestrator.group_size": (st.integers(2, 8), ["orchestrator.group_size"]),
    "trainer.loss.truncate": (st.floats(1.5, math.inf), ["trainer.loss.truncate"]),
    "supervisor.silence_s": (st.floats(1, 1e6), ["supervisor.silence_s"]),
    "trainer.strict_parity": (st.booleans(), ["trainer.strict_parity"]),
}
"""Setting -> (its values, how it may be spelled)."""
DEFAULTS = build(parse_args(ENV))


def at(config, key):
    for name in key.split("."):
        config = getattr(config, name)
    return config


def nested(settings):
    table: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return table


@FEW
@given(st.data())
def test_files_merge_left_to_right_and_flags_win_however_they_are_spelled(data):
    files: list[dict[str, Any]] = [{}, {}]
    flags: list[str] = []
    expected: dict[str, Any] = {}
    for key in data.draw(st.permutations(list(SETTINGS))):
        values, spellings = SETTINGS[key]
        spelled = data.draw(st.sampled_from(spellings))
        for file in files:
            if data.draw(st.booleans()):
                file[spelled] = expected[key] = data.draw(values)
        if data.draw(st.booleans()):
            expected[key] = data.draw(values)
            flag = data.draw(st.sampled_from(spellings))
            text = (
                str(expected[key]).lower()
                if isinstance(expected[key], bool)
                else str(expected[key])
            )
            place = data.draw(st.integers(0, len(flags)))
            flags.insert(
                place, f"--{data.draw(st.sampled_from([flag, flag.replace('_', '-')]))}={text}"
            )
    with tempfile.TemporaryDirectory() as folder:
        words = []
        for number, file in enumerate(files):
            (Path(folder) / f"{number}.toml").write_text(tomli_w.dumps(nested(file)))
            words.append(f"@{folder}/{number}.toml")
        place = data.draw(st.integers(0, 2))
        config = build(parse_args([*ENV, *words[:place], *flags, *words[place:]]))
    assert {key: at(config, key) for key in SETTINGS} == {
        key: expected.get(key, at(DEFAULTS, key)) for key in SETTINGS
    }


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@FEW
@given(st.dictionaries(TEXT, VALUES, max_size=4), st.dictionaries(TEXT, VALUES, max_size=3), TEXT)
def test_a_stored_configuration_is_the_one_that_was_resolved(args, engine, prompt):
    config = build(parse_args(ENV))
    config.orchestrator.environment[0].args = args
    config.orchestrator.environment[0].system_prompt = prompt
    config.inference.vllm = engine
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config), newline="")
        assert from_toml(path) == config
        assert to_toml(from_toml(path)) == to_toml(config)


WORDS = [
    "@",
    "--",
    "--seed",
    "--resume",
    "--trainer",
    "1",
    "=",
    "--name=",
    "--x.0.y",
    "[",
    "--wandb",
    "--model.name",
    "{a=1}",
]


@settings(FEW, max_examples=200)
@given(st.lists(TEXT | st.sampled_from(WORDS), max_size=5))
def test_any_arguments_make_a_configuration_or_a_message(words):
    try:
        build(parse_args([*ENV, *words]))
    except ConfigError as error:
        assert str(error)
