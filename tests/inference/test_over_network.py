"""Versions in the memory of a trainer's ranks, read over the network as a file would be; readers
and ranks that are killed or stopped."""

import signal
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from httpx import Response
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl.config.trainer import WeightsConfig
from rl.inference import weights as reading
from rl.inference.weight_files import WeightsGoneError
from rl.inference.weights import NetworkWeights, NixlReader, Piece, check_content
from rl.models.tiny import make_tiny_model
from rl.run_dir.checksums import content_id, content_of
from rl.run_dir.in_memory import OverNetwork
from rl.run_dir.lease import hold_role
from rl.run_dir.safetensors import digest
from rl.system import nixl
from rl.trainer.store import versions
from rl.trainer.store.publisher import Publisher, Registered
from rl.wire.messages import Acknowledged, WeightVersion
from rl.wire.transport import Wait
from tests.families import CONFIGS
from tests.inference.network_ranks import SIZE, content_in_halves, read_announced
from tests.inference.servers import assert_logprobs, start_server, write_digests
from tests.raised import run_error
from tests.trainer.parallel.test_sharding import free_ports
from tests.trainer.store.images import fill, image_like
from tests.zygote import Forked, trainer_zygote

pytest.importorskip(nixl.PACKAGE, reason="needs NIXL: uv sync --extra nixl", exc_type=ImportError)

PROMPT = list(range(10, 40))
MATRIX = torch.randn(64, 40_000)
GOOD = {"matrix": MATRIX, "numbers": 100 + torch.arange(7.0).bfloat16(), "none": torch.empty(0, 5)}
LIMIT_S = 10.0
"""For each order while a rank is killed: it waits for a read (4 s at most), and may wait for the
folder (5 s)."""


@pytest.fixture
def registered() -> Registered:
    return Registered(fill(image_like(GOOD), GOOD))


def announced(registered: Registered) -> OverNetwork:
    found = registered.announce()
    assert found
    return found


def test_tensors_are_those_in_memory_and_the_content_is_that_of_the_digests(registered, tmp_path):
    memory = announced(registered)
    weights = NetworkWeights(memory)
    tensors = dict(weights)
    assert all(tensors[name].equal(good) for name, good in GOOD.items())
    assert weights.bytes_read == sum(good.nbytes for good in GOOD.values())
    weights.confirm()
    expected = content_of(
        {
            name: digest(good.reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, good in GOOD.items()
        }
    )
    check_content(memory, tmp_path, weights.tensors, False, expected)
    for other in ("0" * 32, ""):
        with run_error("does not match its digests"):
            check_content(memory, tmp_path, weights.tensors, False, other)
    with run_error("does not fit the served model: other is missing"):
        check_content(
            memory, tmp_path, weights.tensors | {"other": weights.tensors["none"]}, False, expected
        )
    with run_error("no rank of the trainer has byte"):
        weights.fill(weights.reader, MATRIX.nbytes + 10, memoryview(bytearray(64)))
    with run_error(r"processes of its own host alone.*UCX_NET_DEVICES"):
        NetworkWeights(
            OverNetwork("elsewhere", memory.agent, memory.address, memory.size, memory.name)
        )


def test_memory_that_is_claimed_while_it_is_read_does_not_count(registered):
    image, memory = registered.image, announced(registered)
    image.before_change = registered.withdraw
    weights = NetworkWeights(memory)
    fill(image, GOOD | {"matrix": MATRIX + 1})
    assert dict(weights)["matrix"].equal(MATRIX + 1), "this is another version's"
    for late in (weights.confirm, lambda: NetworkWeights(memory)):
        with pytest.raises(WeightsGoneError, match="has begun to make its next version"):
            late()
    other = NetworkWeights(announced(registered))
    assert dict(other)["matrix"].equal(MATRIX + 1)
    other.confirm()


def test_what_the_publisher_announces_has_the_recorded_digests_until_the_next_version(
    run_dir, model
):
    announced: list[WeightVersion] = []

    class Client:
        def published(self, version: WeightVersion, wait: Wait) -> Acknowledged:
            announced.append(version)
            return Acknowledged(version.policy_version)

    lock = hold_role(run_dir.lock("trainer"), 5.0)
    publisher = Publisher(
        run_dir, WeightsConfig(transport="nixl"), Client(), Wait(60, lambda *_: None)
    )  # type: ignore[arg-type]
    policy, version = AutoModelForCausalLM.from_pretrained(model), None
    for number in (1, 2):
        version = versions.snapshot(policy, model, torch.bfloat16, {}, publisher.ranks, version)
        publisher.start(number, version, {0})
        publisher.free()
        memory = announced[-2].memory
        assert isinstance(memory, OverNetwork) and announced[-1].memory is None
        weights = NetworkWeights(memory)
        assert weights.content() == content_id(run_dir.digests(number))
        weights.confirm()
    first = announced[0].memory
    assert isinstance(first, OverNetwork)
    with pytest.raises(WeightsGoneError):
        NetworkWeights(first)
    publisher.finish()
    lock.close()
    other = Publisher(run_dir, WeightsConfig(transport="nixl"), None, Wait(60, lambda *_: None))
    assert not other.over_network, "a replay needs no NIXL"


def test_without_its_libraries_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, f"{nixl.PACKAGE}._api", None)
    with run_error("uv sync --extra nixl"):
        NixlReader()


def test_a_failed_read_keeps_its_buffer_as_long_as_something_may_write_into_it(registered):
    for piece in (Piece("nobody", 0, 64), Piece("", 0, 64)):
        reader = NixlReader()
        agent, buffer = reader.agent.agent, weakref.ref(reader.buffer)
        connected = reader.connect(announced(registered).agent)
        with run_error("cannot be read"):
            reader.copy(
                iter([piece._replace(agent=piece.agent or connected)]), memoryview(bytearray(64))
            )
        del reader
        assert buffer() is not None
        del agent
        assert buffer() is None


def test_a_rank_that_nobody_reads_needs_no_processor(registered):
    assert NetworkWeights(announced(registered)).content()
    since = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - since < 0.1


class Trainer:
    """Two ranks that have a version in memory."""

    def __init__(self, version: Path, folder: Path):
        folder.mkdir()
        self.file, port = folder / "announced", str(free_ports(1)[0])
        arguments = [(str(rank), port, str(version), str(self.file)) for rank in range(SIZE)]
        module = "tests.inference.network_ranks"
        self.ranks: list[Forked] = [
            trainer_zygote().fork(module, *given, log=folder / f"rank{given[0]}")
            for given in arguments
        ]

    def memory(self) -> OverNetwork:
        deadline = time.monotonic() + 120
        while not self.file.exists():
            assert time.monotonic() < deadline, self.ranks[0].log.read_text()
            time.sleep(0.02)
        return read_announced(self.file)

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait(30)


def listening(rank: Forked) -> set[int]:
    """The ports of a rank."""
    return {
        found.laddr.port
        for found in psutil.Process(rank.pid).net_connections()
        if found.status == psutil.CONN_LISTEN
    }


def connected(ports: set[int]) -> int:
    """Connections to ports of this host. psutil would look through the files of all processes
    for their owners."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(
        state == "01" and int(remote.rpartition(":")[2], 16) in ports
        for _, _, remote, state, *_ in lines
    )


@pytest.mark.proof
def test_ranks_that_are_killed_in_the_middle_of_a_read_leave_the_old_version_served_and_the_next_try_exact(
    tmp_path,
):
    """Ten times a rank is stopped, so that the read of a server with two workers is certainly
    under way, and killed. What the server then finds in the folder is another version, or in one
    round nothing, in two the version itself. If it is not, the next order has it read other
    ranks."""
    config = CONFIGS["llama"] | {"tie_word_embeddings": False}
    models = [make_tiny_model(tmp_path / f"{number:06d}", config, number) for number in range(3)]
    contents = [content_in_halves(load_file(version / "model.safetensors")) for version in models]
    write_digests(models[0])
    server = start_server(tmp_path / "server", models, inference__vllm="{tensor_parallel_size = 2}")
    took: list[float] = []
    trainers: list[Trainer] = []

    def order(version: int, trainer: Trainer, folder: Path, content: str) -> Response:
        since = time.monotonic()
        answer = server.load(version, folder, memory=trainer.memory(), content=content)
        took.append(time.monotonic() - since)
        return answer

    def check(version: int) -> None:
        answer = server.generate(PROMPT, max_tokens=8)
        assert [span[0] for span in answer["policy_versions"]] == [version]
        assert_logprobs(server, PROMPT, answer)

    def kill_a_rank(number: int, version: int, served: int, folder: Path) -> Response:
        """Returns what the server answers to an order during which a rank is killed."""
        trainer = trainers[-1]
        trainer.memory()
        victim = trainer.ranks[number // 2 % SIZE]
        ports = listening(victim)
        victim.send_signal(signal.SIGSTOP)
        before, deadline = connected(ports), time.monotonic() + 60
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(order, version, trainer, folder, contents[version])
            while connected(ports) <= before:
                assert not answer.done() and time.monotonic() < deadline, (
                    "nobody has tried to read the rank"
                )
                time.sleep(0.005)
            check(served)
            victim.kill()
        return answer.result()

    served = 0
    try:
        server.wait_ready()
        check(served)
        for number in range(10):
            version = 1 + number % 2
            folder = (
                tmp_path / "none" if number % 10 == 3 else models[version if number % 5 == 4 else 0]
            )
            trainers += [
                Trainer(models[version], tmp_path / f"{number} {kind}")
                for kind in ("again", "killed")
            ]
            loaded = kill_a_rank(number, version, served, folder)
            trainers.pop().end()
            if folder != models[version]:
                assert (loaded.status_code, server.status()["policy_version"]) == (404, served), (
                    loaded.text
                )
                check(served)
                if number % 4 == 2:
                    wrong = order(version, trainers[-1], models[0], contents[0])
                    assert wrong.status_code == 404, wrong.text
                loaded = order(version, trainers[-1], tmp_path / "none", contents[version])
            trainers.pop().end()
            assert loaded.json().get("policy_version") == version, loaded.text
            served = version
            check(served)
        print("seconds", [round(each, 2) for each in took])
        assert max(took) < LIMIT_S, took
    finally:
        server.end()
        for trainer in trainers:
            trainer.end()
    log = (tmp_path / "server" / "log").read_text()
    assert log.count("cannot be read over the network") >= 10
    assert "does not match its digests" in log


@pytest.mark.proof
def test_readers_that_are_killed_in_the_middle_do_not_disturb_the_ranks(tmp_path):
    version = make_tiny_model(
        tmp_path / "model", CONFIGS["llama"] | {"hidden_size": 512, "intermediate_size": 4096}
    )
    expected, trainer = (
        content_in_halves(load_file(version / "model.safetensors")),
        Trainer(version, tmp_path / "ranks"),
    )
    try:
        memory = trainer.memory()
        for number in range(10):
            began = tmp_path / f"began{number}"
            reader = trainer_zygote().fork(
                "tests.inference.network_readers",
                str(trainer.file),
                str(began),
                log=tmp_path / "reader",
            )
            deadline = time.monotonic() + 60
            while not began.exists():
                assert time.monotonic() < deadline and reader.poll() is None, reader.log.read_text()
                time.sleep(0.001)
            reader.kill()
            reader.wait(30)
            weights = NetworkWeights(memory)
            assert weights.content() == expected
            weights.confirm()
        trainer.ranks[1].send_signal(signal.SIGSTOP)
        since = time.monotonic()
        with run_error("waited 4 s for"):
            NetworkWeights(memory).content()
        assert reading.READ_S <= time.monotonic() - since < LIMIT_S
        trainer.ranks[1].send_signal(signal.SIGCONT)
        assert NetworkWeights(memory).content() == expected
    finally:
        trainer.end()
