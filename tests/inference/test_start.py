"""What a server says of a model or settings that vLLM cannot read, and its name among others.
vLLM itself is not there."""

import socket
import sys
import types
from contextlib import nullcontext

import pytest
from pydantic import BaseModel, ValidationError

from rl.inference import main
from rl.inference.engine_args import common_environment
from rl.inference.server import check_experts, engine_config, running_engine
from rl.run_dir.checksums import Mirror
from rl.system.errors import GIVE_UP, WRONG_SETTINGS, ConfigError
from rl.wire.messages import WeightVersion
from tests.flags import made
from tests.raised import run_error

space = types.SimpleNamespace


class Limits(BaseModel):
    """As vLLM's own configuration, a pydantic model."""

    max_model_len: int


def stand_in(monkeypatch, **modules: object) -> None:
    """Puts these in place of modules of vLLM."""
    for name in ("vllm", "vllm.engine", "vllm.usage"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_sockets_of_a_server_have_short_paths_wherever_temporary_files_are(monkeypatch):
    """Regression: with a longer TMPDIR, as of a job of Slurm, vLLM ended at its start."""
    for length, base in ((70, "/" + "x" * 69), (71, "/tmp")):
        monkeypatch.setattr("tempfile.tempdir", "/" + "x" * (length - 1))
        assert common_environment()["VLLM_RPC_BASE_PATH"] == base


def unreadable(*_: object, **__: object) -> None:
    raise KeyError("num_heads")


def refused(*_: object, **__: object) -> None:
    Limits(max_model_len="many")


@pytest.mark.parametrize(
    ("create", "code", "said"),
    [
        (
            unreadable,
            GIVE_UP,
            r"vLLM, reading the model's .*, raised KeyError: 'num_heads' \(at .*\); give a "
            r"model that vLLM serves$",
        ),
        (
            refused,
            WRONG_SETTINGS,
            "vLLM refuses the model or its settings: Input should be a valid integer, .*$",
        ),
    ],
)
def test_another_start_would_end_the_same_way(monkeypatch, create, code, said):
    args = space(AsyncEngineArgs=space(from_cli_args=lambda _: space(create_engine_config=create)))
    usage = space(UsageContext=space(OPENAI_API_SERVER="server"))
    engine = space(VersionedEngine=None)
    stand_in(
        monkeypatch,
        **{
            "vllm.engine.arg_utils": args,
            "vllm.usage.usage_lib": usage,
            "rl.inference.engine": engine,
        },
    )
    with run_error(said) as error, running_engine(space()):
        pass
    assert error.value.exit_code == code and not isinstance(error.value, ValidationError)


def test_the_server_of_rl_is_inference_and_any_other_has_a_name_lock_and_status_of_its_own(
    tmp_path, monkeypatch
):
    """Before, a second server of a run waited for the first one's lock and ended."""
    monkeypatch.setattr(main, "ROLE_WAIT_S", 0.1)
    monkeypatch.delenv(main.MARKER, raising=False)
    config = made("--name r --orchestrator.environment.id e --output_dir", tmp_path)
    config.run_dir.status_dir.mkdir(parents=True)
    config.run_dir.status("inference-gone-1").write_text("{}")  # a server that was killed
    taken = [main.take_role(config) for _ in range(2)]
    monkeypatch.setenv(main.MARKER, "1:2:inference:1")
    taken.append(main.take_role(config))
    names, ports = [name for name, _, _ in taken], [sock.getsockname()[1] for _, _, sock in taken]
    assert names == [
        *(f"inference-{socket.gethostname()}-{port}" for port in ports[:2]),
        "inference",
    ]
    assert len(set(ports)) == 3
    assert not config.run_dir.status("inference-gone-1").exists()
    with run_error("inference of this run is already running"):
        main.take_role(config)
    for _, lease, sock in taken:
        lease.close()
        sock.close()


def test_a_server_starts_with_what_it_has_read(run_dir, monkeypatch):
    """The trainer writes the record of a version that it trains again before the version itself.
    A server that took the record's word for the folder's kept the old weights, and its tokens
    had the new version's name."""
    run_dir.weights(1).mkdir(parents=True)
    monkeypatch.setattr(main, "read_tensors", lambda path: None)
    monkeypatch.setattr(main, "check_version", lambda path, record: "what the folder has")
    found = main.newest_sound_version(run_dir, Mirror(), lambda version: None)
    assert found == WeightVersion(1, str(run_dir.weights(1)), content="what the folder has")


@pytest.mark.parametrize(
    ("device", "mode", "model", "keeps"),
    [
        ("cpu", "align", {"mamba_chunk_size": 256}, False),
        ("cpu", "align", {"chunk_size": 16}, False),
        ("cpu", "align", {"chunk_size": None}, True),
        ("cpu", "none", {"chunk_size": 16}, True),
        ("cuda", "align", {"chunk_size": 16}, True),
    ],
)
def test_prefixes_are_not_kept_where_vllm_confuses_their_states(
    monkeypatch, capsys, device, mode, model, keeps
):
    """Before, a request of a Mamba-2 model ended the server: IndexError: index 3 is out of
    bounds for dimension 0 with size 2."""
    args = space(enable_prefix_caching=None)

    def create(**_):
        asked.append(args.enable_prefix_caching)
        cache = space(mamba_cache_mode=mode if args.enable_prefix_caching is None else "none")
        return space(
            cache_config=cache,
            device_config=space(device_type=device),
            model_config=space(hf_text_config=space(**model)),
        )

    asked: list[bool | None] = []
    stub = space(AsyncEngineArgs=space(from_cli_args=lambda _: space(create_engine_config=create)))
    stand_in(monkeypatch, **{"vllm.engine.arg_utils": stub})
    config = engine_config(args, None)
    assert asked == (
        [None] if keeps else [None, False]
    ) and config.cache_config.mamba_cache_mode == (mode if keeps else "none")
    assert ("enable_prefix_caching: off" in capsys.readouterr().out) is not keeps


@pytest.mark.parametrize(
    ("engines", "tensor", "more", "said"),
    [
        (7, 1, {}, "refused"),
        (4, 1, {}, "warned"),
        (2, 2, {}, "warned"),
        (7, 1, {"enable_expert_parallel": True}, ""),
        (1, 4, {}, ""),
        (7, 1, {"is_moe": False}, ""),
    ],
)
def test_engines_that_cut_experts_are_told_or_refused(engines, tensor, more, said, capsys):
    """The default of eight GPUs, seven engines, ended twice while loading, with an error of
    vLLM's alone."""
    more = {"enable_expert_parallel": False, "is_moe": True} | more
    parallel = space(
        data_parallel_size=engines,
        tensor_parallel_size=tensor,
        enable_expert_parallel=more["enable_expert_parallel"],
    )
    config = space(
        parallel_config=parallel,
        model_config=space(is_moe=more["is_moe"], hf_text_config=space(moe_intermediate_size=768)),
    )
    refused = pytest.raises(
        ConfigError,
        match=r"= 7 splits each expert \(width 768\) across 7 GPUs, which .* or "
        r"enable_expert_parallel, or start",
    )
    with refused if said == "refused" else nullcontext():
        check_experts(config)
    assert ("WARNING: inference.vllm.data_parallel_size" in capsys.readouterr().err) == (
        said == "warned"
    )
