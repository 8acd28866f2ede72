"""What a server says of a model or settings that vLLM cannot read, and its name among others. vLLM itself is not there."""

import socket
import sys
import types

import pytest
from pydantic import BaseModel, ValidationError

from rl.config.command_line import build, parse_args
from rl.inference import main
from rl.inference.server import running_engine
from rl.system.errors import GIVE_UP, WRONG_SETTINGS, RunError


class Limits(BaseModel):
    """As vLLM's own configuration, a pydantic model."""

    max_model_len: int


def unreadable(*_: object, **__: object) -> None:
    raise KeyError("num_heads")


def refused(*_: object, **__: object) -> None:
    Limits(max_model_len="many")


@pytest.mark.parametrize(
    ("create", "code", "said"),
    [
        (unreadable, GIVE_UP, r"vLLM, reading the model's .*, raised KeyError: 'num_heads' \(at .*\); give a model that vLLM serves$"),
        (refused, WRONG_SETTINGS, "vLLM refuses the model or its settings: Input should be a valid integer, .*$"),
    ],
)
def test_another_start_would_end_the_same_way(monkeypatch, create, code, said):
    args = types.SimpleNamespace(from_cli_args=lambda _: types.SimpleNamespace(create_engine_config=create))
    usage = types.SimpleNamespace(UsageContext=types.SimpleNamespace(OPENAI_API_SERVER="server"))
    stubs = {"vllm.engine.arg_utils": {"AsyncEngineArgs": args}, "vllm.usage.usage_lib": vars(usage), "rl.inference.engine": {}}
    for name, content in stubs.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(VersionedEngine=None, **content))
    for name in ("vllm", "vllm.engine", "vllm.usage"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(RunError, match=said) as error, running_engine(types.SimpleNamespace(), 1.0):
        pass
    assert error.value.exit_code == code and not isinstance(error.value, ValidationError)


def test_the_server_of_rl_is_inference_and_any_other_has_a_name_lock_and_status_of_its_own(tmp_path, monkeypatch):
    """Before, a second server of a run waited for the first one's lock and ended."""
    monkeypatch.setattr(main, "ROLE_WAIT_S", 0.1)
    monkeypatch.delenv(main.MARKER, raising=False)
    config = build(parse_args(["--name", "r", "--output_dir", str(tmp_path), "--orchestrator.environment.id", "e"]))
    config.run_dir.status_dir.mkdir(parents=True)
    config.run_dir.status("inference-gone-1").write_text("{}")  # a server that was killed
    taken = [main.take_role(config) for _ in range(2)]
    monkeypatch.setenv(main.MARKER, "1:2:inference:1")
    taken.append(main.take_role(config))
    names, ports = [name for name, _, _ in taken], [sock.getsockname()[1] for _, _, sock in taken]
    assert names == [*(f"inference-{socket.gethostname()}-{port}" for port in ports[:2]), "inference"] and len(set(ports)) == 3
    assert not config.run_dir.status("inference-gone-1").exists()
    with pytest.raises(RunError, match="inference of this run is already running"):
        main.take_role(config)
    for _, lease, sock in taken:
        lease.close()
        sock.close()
