"""What a server says of a model or settings that vLLM cannot read. vLLM itself is not there."""

import sys
import types

import pytest
from pydantic import BaseModel, ValidationError

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
