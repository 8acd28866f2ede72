"""Feeds mutated messages and files to everything that decodes them, and to what then uses them:
only the errors foreseen may come.

    uv run -m tests.proofs.fuzz --seconds 600 --seed 1 [--targets request,batch] [--save]

Starts from real examples and from what it kept earlier in tests/corpus/. An input that ends in
another exception is a fault: it is printed and, with --save, kept in the corpus; so are the few
that ended in a message that none did before. tests/test_fuzz.py replays all of them.
"""

import argparse
import hashlib
import json
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from rl.config.command_line import build, parse_args
from rl.orchestrator.batches.batch_files import PendingLog, decode_state
from rl.orchestrator.batches.contents import group_samples
from rl.orchestrator.groups.group_credit import Rules, credit_group
from rl.orchestrator.workers.pool_worker import ANSWERS
from rl.run_dir.checksums import DIGESTS, MANIFEST, read_digests, verify_checkpoint
from rl.run_dir.files import CorruptFileError, encode_record
from rl.run_dir.lease import LockOwner
from rl.run_dir.metrics import MetricsReader, cut_metrics, environment_rewards, read_metrics
from rl.run_dir.safetensors import HASH, tensor_digests
from rl.run_dir.spans import read_events
from rl.run_dir.status import Phase, RoleStatus, last_seen, read_json, read_status
from rl.system.credentials import redact_json
from rl.system.errors import ConfigError, RunError
from rl.wire import messages
from rl.wire.batch_file import decode_batch, encode_batch
from rl.wire.inference_client import InferenceLostError, read
from rl.wire.messages import TrainBatch, VersionSpan
from rl.wire.rollouts import Group, Rollout, Turn, rollout_line
from rl.wire.transport import REPLIES, REQUESTS, UNREADABLE
from rl.wire.turns import Turns, pack_ids
from rl.wire.worker_messages import Description, Heartbeat, LoadFailed, Played, Ready
from tests.wire.samples import aligned_sample

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
ENCODER = msgspec.msgpack.Encoder()
MAX_BYTES = 1 << 16
MAX_KEPT = 24
"""Inputs of a target in the corpus that are no faults."""


class Target(NamedTuple):
    """Something that takes bytes from elsewhere."""

    take: Callable[[bytes, Path], object]
    """Decodes, and uses what came of it as the product does. The directory is an empty one of
    its own."""
    allowed: tuple[type[Exception], ...]
    examples: list[bytes]


TURN = Turn.of([1, 2], [3, 4], [-0.5, -1.5], [VersionSpan(3, 2)])
ROLLOUT = Rollout(
    turns=[TURN],
    text=[{"role": "user", "content": "hé"}],
    reward=1.0,
    metrics={"m": 0.5},
    stop="done",
)
GROUP = Group(group_id=7, env="e", task=1, rollouts=[ROLLOUT, ROLLOUT], advantages=[0.5, -0.5])
SAMPLE = aligned_sample(
    token_ids=[1, 2, 3],
    loss_mask=[False, True, True],
    logprobs=[0.0, -0.5, -1.5],
    advantages=[0.0, 0.5, 0.5],
    policy_versions=[VersionSpan(3, 2)],
    env="e",
    group_id=7,
    rollout_id=0,
)
BATCH = TrainBatch(step=4, samples=[SAMPLE, SAMPLE])


def packed(*values: object) -> list[bytes]:
    return [ENCODER.encode(value) for value in values]


def as_json(*values: object) -> list[bytes]:
    return [msgspec.json.encode(value) for value in values]


def from_worker(data: bytes, _: Path) -> None:
    """A worker's message, up to the line in rollouts/ and the samples of the batch."""
    message = ANSWERS.decode(data)
    if isinstance(message, Played) and message.rollouts:
        group = credit_group(Group(group_id=1, env="e", task=0, rollouts=message.rollouts), Rules())
        ENCODER.encode(group)
        for i in range(len(group.rollouts)):
            msgspec.json.encode(rollout_line(group, i, 1))
        ENCODER.encode(list(group_samples(group)))
    if isinstance(message, Description):
        redact_json(msgspec.json.encode(message))


def batch_file(data: bytes, _: Path) -> None:
    """Both the bytes of a file, and what might be within an intact record."""
    for content in (data, encode_record(data)):
        try:
            decode_state(decode_batch(content, "x").state)
        except CorruptFileError:
            continue


def pending_log(data: bytes, folder: Path) -> None:
    for content in (data, encode_record(data), encode_record(data) + data):
        (folder / "pending.log").write_bytes(content)
        log = PendingLog(folder / "pending.log")
        log.load(set(), 1 << 62)
        again = PendingLog(folder / "pending.log")
        assert again.load(set(), 1 << 62) == [] and len(again.groups) == len(log.groups)


def status_file(data: bytes, folder: Path) -> None:
    (folder / "status").mkdir(exist_ok=True)
    (folder / "status" / "trainer.json").write_bytes(data)
    read_status(folder / "status" / "trainer.json")
    last_seen(folder / "status" / "trainer.json")
    read_json(folder / "status" / "trainer.json", LockOwner)


def events_file(data: bytes, folder: Path) -> None:
    (folder / "events.jsonl").write_bytes(data)
    read_events(folder / "events.jsonl")


def metrics_file(data: bytes, folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_bytes(data)
    MetricsReader(path).new()
    for line in read_metrics(path).values():
        environment_rewards(line)
    cut_metrics(path, 3)
    assert all(line["step"] <= 3 for line in read_metrics(path).values())


def manifest(data: bytes, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(data)
    verify_checkpoint(folder)


def digests(data: bytes, folder: Path) -> None:
    (folder / DIGESTS).write_bytes(data)
    read_digests(folder / DIGESTS)


def safetensors(data: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(data)
    for digest in tensor_digests(folder / "model.safetensors").values():
        assert len(digest) == 64


def from_inference(data: bytes, _: Path) -> None:
    """Each of the server's answers in turn; the first that it is not decides."""
    answer = read(data, Turn)
    Turns.of([msgspec.structs.replace(answer, packed_prompt=pack_ids([1]))])


def configuration(data: bytes, folder: Path) -> None:
    (folder / "run.toml").write_bytes(data)
    build(parse_args(["@", str(folder / "run.toml")]))


def header(table: object, size: int) -> bytes:
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


TARGETS = {
    "request": Target(
        lambda data, _: REQUESTS.decode(data),
        UNREADABLE,
        packed(
            messages.GetBatch(3),
            messages.Published(messages.WeightVersion(4, "/w/000004")),
            messages.GetProbe(2),
        ),
    ),
    "reply": Target(
        lambda data, _: REPLIES.decode(data),
        UNREADABLE,
        packed(
            messages.BatchReady(3, bytes(16)),
            messages.NotReady(
                RoleStatus(process="orchestrator", pid=12, phase=Phase.FILLING_BATCH, step=3)
            ),
            messages.RunEnded("solved"),
            messages.Acknowledged(2, [1]),
            messages.Probe([SAMPLE]),
        ),
    ),
    "worker": Target(
        from_worker,
        UNREADABLE,
        packed(
            Played(3, [ROLLOUT, ROLLOUT]),
            Ready(10, None),
            LoadFailed("no"),
            Heartbeat(),
            Description({"kind": "x"}, [{"prompt": "p"}]),
        ),
    ),
    "batch": Target(
        batch_file,
        (),
        [
            encode_batch(BATCH, {"tasks": {}}),
            *packed({"batch": BATCH, "state": {"tasks": {"n": 1}}}, {"batch": BATCH}),
        ],
    ),
    "state": Target(
        lambda data, _: decode_state(msgspec.Raw(data)),
        (CorruptFileError,),
        packed(*[{"tasks": {}, "settled": [1, 2]}] * 1),
    ),
    "pending": Target(pending_log, (), [*packed(GROUP), encode_record(ENCODER.encode(GROUP)) * 2]),
    "status": Target(
        status_file,
        (),
        as_json(
            {
                "process": "trainer",
                "pid": 12,
                "phase": "training",
                "step": 3,
                "heartbeat": 1.5,
                "address": "tcp://a:1",
            }
        ),
    ),
    "events": Target(
        events_file,
        (),
        as_json(
            {
                "time": 1.5,
                "event": "death",
                "process": "trainer",
                "phase": "training",
                "step": 3,
                "reason": "x",
                "lines": ["y"],
            }
        ),
    ),
    "metrics": Target(
        metrics_file,
        (),
        [
            b"\n".join(
                as_json(
                    {"step": 1, "time": 1.5, "source": "trainer", "reward/e/mean": 1.0},
                    {"step": 5, "source": "eval"},
                )
            )
            + b"\n"
        ],
    ),
    "manifest": Target(
        manifest,
        (RunError,),
        as_json(
            *[
                {
                    "step": 1,
                    "world_size": 1,
                    "model": "x",
                    "files": {"manifest.json": {"size": 3, n: "00"}},
                }
                for n in (HASH, "sha256")
            ]
        ),
    ),
    "digests": Target(
        digests,
        (RunError,),
        as_json({"hash": HASH, "tensors": {"a.weight": "00"}, "files": {"config.json": "00"}}),
    ),
    "safetensors": Target(
        safetensors,
        (CorruptFileError,),
        [
            header(
                {
                    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                    "__metadata__": {"k": "v"},
                },
                8,
            )
        ],
    ),
    "inference": Target(
        from_inference,
        (InferenceLostError, ValueError),
        [msgspec.msgpack.encode(TURN)],
    ),
    "config": Target(
        configuration,
        (ConfigError,),
        [
            b'max_steps = 3\n[model]\nname = "m"\n[[orchestrator.environment]]\nid = '
            b'"a/b@1"\nargs = { x = [1, 2.5], y.z = "t" }\n[sft]\n',
            b"wandb = true\n[trainer.optim]\nlr = 1e-6\n[orchestrator.environment]\nid = "
            b'"e"\n[inference.vllm]\nmax_num_seqs = 4\n',
        ],
    ),
}

PIECES = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\x91" * 3000,
    b"\x81\xa1a" * 2000,
    b"\xc1",
    b"\xc0",
    b"\xca\x7f\xc0\x00\x00",
    b"\xcb\x7f\xf0" + bytes(6),
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
    b"null",
    b"NaN",
    b"1e999",
    b"-1",
    b"9" * 400,
    b"[" * 3000,
    b'{"a":' * 3000,
    b'"\\ud800"',
    b"\xff\xfe",
    b"\0",
    b'"',
    b"]",
    b"}",
    b"\n",
    b"=",
    b"true",
    b"{}",
    b"[]",
    b"../../x",
    b"18446744073709551616",
    b"0.1",
    b"\xed\xa0\x80",
    b"rl1\n",
]
"""What decoders have tripped over before: huge lengths, depth, odd numbers, half characters."""


def mutated(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """The data with a few random changes."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        start = rng.randint(0, len(data))
        end = min(len(data), start + rng.choice([0, 1, 1, 2, 4, 16, 64]))
        other = rng.choice(others)
        cut = rng.randint(0, len(other))
        data = rng.choice(
            [
                lambda d, s, e: d[:s] + bytes([rng.randrange(256)]) + d[max(e, s + 1) :],
                lambda d, s, e: (
                    d[:s]
                    + bytes([(d[s] if s < len(d) else 0) ^ 1 << rng.randrange(8)])
                    + d[s + 1 :]
                ),
                lambda d, s, e: d[:s] + rng.choice(PIECES) + d[e:],
                lambda d, s, e: d[:s] + d[e:],
                lambda d, s, e: d[:s] + d[s:e] * rng.choice([2, 3, 50]) + d[e:],
                lambda d, s, e, o=other, c=cut: d[:s] + o[c:],
                lambda d, s, e, o=other, c=cut: d[:s] + o[c : c + 20] + d[e:],
                lambda d, s, e: re.sub(
                    rb"[0-9]+",
                    lambda m: rng.choice([m[0], b"-1", b"0", b"1e9", b'"x"', b"null"]),
                    d,
                ),
            ]
        )(data, start, end)[:MAX_BYTES]
    return data


def outcome(target: Target, data: bytes, folder: Path) -> tuple[str, Exception | None]:
    """(what came of it, in general words; the exception if it is none of those allowed)."""
    try:
        target.take(data, folder)
    except target.allowed as error:
        general = re.sub(
            r"0x\w+|-?\d+|'[^']*'|`[^`]*`|\(.*|'.*", "_", str(error).replace(str(folder), "")
        )
        return f"{type(error).__name__}: {general[:30]}", None
    except Exception as error:  # whatever it is: that is what is looked for
        return f"{type(error).__name__}", error
    return "fine", None


def saved(name: str) -> list[bytes]:
    """What an earlier run kept."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def save(name: str, data: bytes) -> Path:
    path = CORPUS / name / hashlib.sha256(data).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def fuzz(
    name: str, folder: Path, rng: random.Random, go_on: Callable[[int], bool], keep: bool = False
) -> tuple[int, list[str]]:
    """Mutates one target's inputs as long as `go_on(inputs so far)`. Returns how many there
    were, and an account of each new fault."""
    target = TARGETS[name]
    pool = [*target.examples, *saved(name)]
    known = {outcome(target, data, folder)[0] for data in pool}
    faults: dict[str, str] = {}
    count = 0
    while go_on(count):
        data = mutated(rng.choice(pool), pool, rng)
        said, fault = outcome(target, data, folder)
        count += 1
        if fault:
            place = traceback.extract_tb(fault.__traceback__)[-1]
            said = f"{said} at {Path(place.filename).name}:{place.lineno}"
            if said not in faults:
                faults[said] = (
                    f"{name}: {said}: {str(fault)[:200]}; input "
                    f"{data[:200]!r}{f', kept as {save(name, data)}' if keep else ''}"
                )
        elif said not in known:
            pool.append(data)
            if keep and len(data) < 300 and len(saved(name)) < MAX_KEPT:
                save(name, data)
        known.add(said)
    return count, list(faults.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--save", action="store_true", help="keep what is new in tests/corpus/")
    args = parser.parse_args()
    names = args.targets.split(",")
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    os.fsync = lambda fd: None  # nothing here has to outlive a power cut
    faults = []
    for name in names:
        end = time.monotonic() + args.seconds / len(names)
        with tempfile.TemporaryDirectory(
            prefix="rl-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
        ) as folder:
            rng = random.Random(f"{args.seed} {name}")
            count, found = fuzz(
                name, Path(folder), rng, lambda _, end=end: time.monotonic() < end, args.save
            )
        print(f"{name:12} {count:8} inputs, {len(found)} faults", flush=True)
        faults += found
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
