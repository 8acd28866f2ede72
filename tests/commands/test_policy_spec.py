"""From a SPEC to a policy, or to a message with the remedy."""

import json
import re

import pytest

from rl.commands import options
from rl.commands.options import PolicySource, resolve
from rl.commands.play_session import server_config
from rl.config.command_line import to_toml
from rl.system.errors import RunError
from tests.commands.servers import KEY, Endpoint
from tests.flags import made
from tests.web import serving


def config(*flags):
    return made("--orchestrator.environment.id e --model.name owner/base", *flags)


def look(spec, *, model=None, key_var=None, evals=(), flags=()):
    return resolve(spec, config(*flags), model, key_var, evals)


def fault(spec, **options):
    with pytest.raises(RunError) as error:
        look(spec, **options)
    return str(error.value)


@pytest.fixture
def run(tmp_path):
    """A run directory with the versions 3 and 12."""
    root = tmp_path / "outputs" / "r"
    for version in (3, 12):
        (root / "weights" / f"{version:06d}").mkdir(parents=True)
    (root / "weights" / ".000013.tmp").mkdir()
    (root / "config.toml").write_text(to_toml(config("--name r --output_dir /elsewhere")))
    return root


def test_models(tmp_path):
    assert look(None) == PolicySource("base", "owner/base")
    assert look("owner/other") == PolicySource("other", "owner/other")
    folder = tmp_path / "m"
    folder.mkdir()
    assert look(str(folder)) == PolicySource("m", str(folder))


def test_versions_of_a_run(run):
    assert (
        look(str(run))
        == look(f"{run}@12")
        == PolicySource("r@12", str(run / "weights" / "000012"), policy_version=12)
    )
    assert look(f"{run}@3").model.endswith("weights/000003")
    assert look(f"{run}@0") == PolicySource("r@0", "owner/base", policy_version=0)
    assert (
        f"{run}@4: version 4 is not in {run}/weights; there are 3, 12 (and 0, the base model)"
        in fault(f"{run}@4")
    )
    assert "give a version number, or best" in fault(f"{run}@x")


def test_the_best_version(run):
    assert f"{run}@best: the run has no finished evaluation" in fault(f"{run}@best")
    best = {
        "a": {"policy_version": 3, "reward_mean": 0.5},
        "b": {"policy_version": 12, "reward_mean": 0.9},
    }
    (run / "evals").mkdir()
    (run / "evals" / "best.json").write_text(json.dumps(best))
    assert f"differs between evaluations; name one: {run}@best:a, {run}@best:b" in fault(
        f"{run}@best"
    )
    assert look(f"{run}@best:a").policy_version == 3
    assert look(f"{run}@best", evals=("c", "b")).policy_version == 12
    assert f"{run}@best:x: the run has no such evaluation; there are a, b" in fault(f"{run}@best:x")


def test_a_run_that_is_not_there(run):
    near = run.parent / "rr"
    assert (
        fault(str(near)) == f"{near}: no such run or model folder; {run.parent} contains the runs r"
    )
    assert "contains the runs r" in fault(f"{near}@12")
    assert "give a model's folder, its id on the hub, or a run" in fault("/nowhere/at/all")


def test_an_endpoint(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("OTHER_KEY", KEY)
    with serving(Endpoint("good")) as one, serving(Endpoint("good", "bad", key=KEY)) as two:
        source = look(one.url + "/")
        assert source.label == "good"
        assert source.endpoint.base_url == one.url
        assert source.endpoint.model == "good"
        assert "has no model goood; did you mean good?" in fault(one.url, model="goood")
        assert (
            f"{two.url}: answered 401; the key comes from $OPENAI_API_KEY, which is not set "
            "(--api-key-var OPENAI_API_KEY)" == fault(two.url)
        )
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        assert "$OPENAI_API_KEY, which was refused" in fault(two.url)
        with monkeypatch.context() as patch:
            patch.setattr(options, "hides_keys", lambda _url: False)
            assert (
                "is not sent over plain http to another machine unless you name its variable"
                in fault(two.url)
            )
            assert look(f"{two.url}#bad", key_var="OTHER_KEY").endpoint.api_key_var == "OTHER_KEY"
            assert look(one.url).endpoint.api_key_var == ""
        assert "has several models; choose one with --endpoint-model; there are good, bad" in fault(
            two.url, key_var="OTHER_KEY"
        )
        chosen = look(f"{two.url}#bad", key_var="OTHER_KEY").endpoint
        assert (chosen.base_url, chosen.model, chosen.api_key_var) == (two.url, "bad", "OTHER_KEY")
        unlisted = one.url.removesuffix("/v1")
        assert "does not list its models (status 404) (most addresses end with /v1)" in fault(
            unlisted
        )
        assert look(unlisted, model="m").endpoint.model == "m"
        url = one.url
    assert re.match(f"{url}: no answer .* is the server running", fault(url))


def test_inference_servers_that_run_already():
    with serving(Endpoint("good")) as other:
        assert "is not an inference server of rl; for other servers use --policy http" in fault(
            None, flags=("--orchestrator.inference_urls", f'["{other.url}"]')
        )
    assert "no inference server answers at http://127.0.0.1:9" in fault(
        None, flags=("--orchestrator.inference_urls", '["http://127.0.0.1:9"]')
    )


def test_adapters_are_served_with_their_base(run, tmp_path):
    """A version of a run with the run's own base; a folder with the base that it names."""
    folder = run / "weights" / "000012"
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "/gone", "r": 4, "lora_alpha": 8.0})
    )
    assert look(f"{run}@12") == PolicySource("r@12", "owner/base", str(folder), 12)
    assert look(str(folder)) == PolicySource("000012", "/gone", str(folder))
    served = server_config(config(), "owner/base", tmp_path / "work", str(folder))
    assert (served.trainer.lora.rank, served.trainer.lora.alpha, served.model.name) == (
        4,
        8.0,
        "owner/base",
    )
    (folder / "adapter_config.json").write_text("{}")
    assert "do not name their base model" in fault(str(folder))
