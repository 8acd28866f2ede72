"""Tables of how a machine is divided."""

import pytest

from rl.launch.devices import check_build, split
from rl.system.errors import ConfigError
from rl.system.machine import Machine
from tests.flags import made


def config(*args):
    return made("--orchestrator.environment.id e", *args)


def divide(num_gpus, *args, cores=4, **more):
    return split(
        config(*args), Machine([str(i) for i in range(num_gpus)], list(range(cores)), **more)
    )


TWO_REPLICAS = {"data_parallel_size": 2}


@pytest.mark.parametrize(
    ("num_gpus", "args", "trainer", "inference", "ranks", "vllm"),
    [
        (0, "", "", "", 1, {}),
        (0, "--trainer.ranks 2", "", "", 2, {}),
        (1, "", "0", "0", 1, {"gpu_memory_utilization": 0.35}),
        (1, "--inference.vllm.gpu_memory_utilization 0.5", "0", "0", 1, {}),
        (1, "--inference-gpus 0", "0", "", 1, {}),
        (2, "", "0", "1", 1, {}),
        (2, "--trainer-gpus 2 --inference-gpus 0", "01", "", 2, {}),
        (8, "", "0", "1234567", 1, {"data_parallel_size": 7}),
        (8, "--trainer-gpus 4", "0123", "4567", 4, {"data_parallel_size": 4}),
        (
            8,
            "--trainer-gpus 2 --inference-gpus 4",
            "01",
            "4567",
            2,
            {"data_parallel_size": 4},
        ),
        (8, "--inference-gpus 0,1", "2", "01", 1, {"data_parallel_size": 2}),
        (
            8,
            "--trainer-gpus 4 --inference.vllm.tensor_parallel_size 4",
            "0123",
            "4567",
            4,
            {},
        ),
        (
            8,
            "--trainer-gpus 4 --inference.vllm.tensor-parallel-size 2",
            "0123",
            "4567",
            4,
            TWO_REPLICAS,
        ),
        (
            8,
            "--trainer-gpus 4 --inference.vllm.data_parallel_size 2",
            "0123",
            "4567",
            4,
            {},
        ),
        (4, '--orchestrator.inference_urls ["http://a:1"]', "0", "", 1, {}),
    ],
)
def test_gpus(num_gpus, args, trainer, inference, ranks, vllm):
    division = divide(num_gpus, *args.split())
    trainer, inference = ([int(digit) for digit in gpus] for gpus in (trainer, inference))
    assert (division.trainer.gpus, division.inference.gpus, division.ranks) == (
        trainer,
        inference,
        ranks,
    )
    assert division.vllm == vllm
    for share, gpus in ((division.trainer, trainer), (division.inference, inference)):
        assert share.env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, gpus))


@pytest.mark.parametrize(
    ("num_gpus", "args", "message"),
    [
        (0, "--trainer-gpus 1", "trainer.gpus = 1\n    there are 0 free GPUs here"),
        (2, "--trainer-gpus 3", "trainer.gpus = 3\n    there are 2 free GPUs here"),
        (2, "--trainer-gpus [5]", "trainer.gpus = [5]\n    there are 2 GPUs here: [0, 1]"),
        (2, "--trainer-gpus [1,1]", "name each one once"),
        (2, "--inference-gpus 0,1", "trainer.gpus = 1\n    there are 0 free GPUs here"),
        (2, "--trainer-gpus 2", "takes all of them and inference has none"),
        (2, "--inference-gpus 2", "inference.gpus = 2\n    there are 1 free GPUs here"),
        (
            8,
            "--trainer-gpus 4 --trainer.ranks 2",
            "trainer.ranks = 2\n    must be the number of trainer GPUs, 4",
        ),
        (
            8,
            "--trainer-gpus 4 --trainer.dp-replicate 3",
            "trainer.dp_replicate = 3\n    must divide the trainer's ranks, 4",
        ),
        (
            0,
            "--trainer.ranks 2 --trainer.context-parallel 4",
            "trainer.context_parallel = 4\n    must divide the",
        ),
        (
            0,
            "--trainer.ranks 3 --trainer.expert-parallel 2",
            "trainer.expert_parallel = 2\n    must divide the trainer's ranks, 3",
        ),
        (
            0,
            "--trainer.ranks 4 --trainer.expert-parallel 4 --trainer.dp-replicate 2",
            "trainer.expert_parallel = 4\n    must divide the trainer's ranks / "
            "trainer.dp_replicate, 2",
        ),
        (4, "--inference.vllm.tensor_parallel_size 4", "needs 4 GPUs, inference has 3"),
        (
            4,
            "--inference.vllm.tensor_parallel_size 2",
            "of 2, the GPUs of one replica (inference.vllm): set it, or trainer.gpus",
        ),
        (0, "--trainer-cpus 9", "trainer.cpus = 9\n    there are 4 cores here"),
    ],
)
def test_what_is_not_there(num_gpus, args, message):
    with pytest.raises(ConfigError) as error:
        divide(num_gpus, *args.split())
    assert message in str(error.value)


def test_cpu_only_shares_all_cores_and_keeps_freed_memory():
    division = divide(0, cores=4)
    assert division.trainer.cores == division.inference.cores == [0, 1, 2, 3]
    assert (
        division.trainer.env["OMP_NUM_THREADS"] == division.inference.env["OMP_NUM_THREADS"] == "4"
    )
    assert (
        division.trainer.env["MALLOC_TOP_PAD_"]
        == division.inference.env["MALLOC_TOP_PAD_"]
        == "268435456"
    )
    on_gpus = divide(2)
    assert "MALLOC_TOP_PAD_" not in on_gpus.trainer.env
    assert "OMP_NUM_THREADS" not in on_gpus.inference.env
    assert divide(0, "--trainer.ranks 2", cores=4).trainer.env["OMP_NUM_THREADS"] == "2"
    assert divide(0, "--trainer.ranks 8", cores=4).trainer.env["OMP_NUM_THREADS"] == "1"


def test_cores_are_split_from_both_ends():
    division = divide(0, "--trainer-cpus 1 --inference-cpus 3", cores=4)
    assert (division.trainer.cores, division.inference.cores) == ([0], [1, 2, 3])
    assert division.inference.env["OMP_NUM_THREADS"] == "3"
    assert divide(0, "--trainer-cpus 1,2").trainer.cores == [1, 2]


def test_a_containers_quota_bounds_threads():
    assert divide(0, cores=64, quota=2.5).inference.env["OMP_NUM_THREADS"] == "2"
    assert divide(0, cores=64, quota=0.5).inference.env["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], True),
        (["--inference-gpus", "0"], False),
        (["--orchestrator.inference_urls", '["http://a:1"]'], False),
    ],
)
def test_the_cpu_build_of_vllm_beside_gpus_is_told(args, told):
    """Regression: seven of eight GPUs were idle without a warning."""
    said = check_build(config(*args), Machine(["0", "1"], [0], gpu_inference=False))
    assert bool(said) == told and (not told or "`uv sync --no-group cpu --group gpu`" in said)
    for box in (Machine(["0", "1"], [0]), Machine([], [0], gpu_inference=False)):
        assert not check_build(config(*args), box)
    assert divide(2, gpu_inference=False).inference.gpus == []
    with pytest.raises(
        ConfigError,
        match=r"inference.gpus = 1\n.* the installed vLLM is the one for CPUs: `uv sync --no-group "
        r"cpu",
    ):
        check_build(config("--inference-gpus 1"), Machine(["0"], [0], gpu_inference=False))


def test_ids_count_among_the_visible_ones():
    division = split(config("--trainer-gpus [1]"), Machine(["4", "GPU-ab"], [0]))
    assert division.trainer.env["CUDA_VISIBLE_DEVICES"] == "GPU-ab"
    assert division.inference.env["CUDA_VISIBLE_DEVICES"] == "4"


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 8])
def test_a_process_knows_the_division_by_its_flags(num_gpus):
    box = Machine([str(i) for i in range(num_gpus)], [0, 1])
    division = split(config(), box)
    known = config(*division.flags)
    assert known.trainer.gpus == (division.trainer.gpus or 0)
    assert known.inference.gpus == (division.inference.gpus or 0)
    assert known.inference.vllm == division.vllm
