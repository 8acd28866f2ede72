"""`/metrics` of `rl`: no metric is lost, and Prometheus' own parser reads the page."""

import math
import re
import socket
from types import SimpleNamespace

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rl.config.run import PrometheusConfig
from rl.launch.scrape import Scrape
from rl.run_dir.metrics import METRICS, matching, series
from rl.run_dir.paths import RunDir
from rl.system.linux import bind
from tests.raised import run_error

TOKEN = "t" * 16
RUN, TRAINER = ("run", 'a "run"\n'), ("source", "trainer")
ORCHESTRATOR = ("source", "orchestrator")


def scrape_of(tmp_path, said=None, port=0):
    config = SimpleNamespace(name=RUN[1], prometheus=PrometheusConfig(port=port))
    return Scrape(config, RunDir(tmp_path, tmp_path / "weights"), (said or []).append)


def read(page):
    """Returns the value of each series: its name and sorted labels."""
    families = text_string_to_metric_families(page.decode())
    samples = [sample for family in families for sample in family.samples]
    values = {(s.name, *sorted(s.labels.items())): s.value for s in samples}
    assert len(values) == len(samples)
    return values


def test_every_metric_is_a_series_of_its_own(tmp_path):
    names = {re.sub(r"<(\w+)>", r"my-\1", name): name for name in METRICS}
    names |= {'own "loss"\\\n': "", "reward/e/a/b/<c>": "reward/<env>/<metric>"}
    assert len(names) == len(METRICS) + 2
    assert {name: matching(name)[0] for name in names} == names
    assert series("reward/e/agent_a/b") == (
        "rl_reward_env_agent_agent",
        {"env": "e", "agent": "a/b"},
    )
    assert len({series(name)[0] for name in METRICS}) == len(METRICS)
    scrape = scrape_of(tmp_path)
    scrape.send([{"step": 7, "source": "trainer", **dict.fromkeys(names, 1.5)}])
    values = read(scrape.page(None).body)
    assert len(values) == len(names) + 1  # and the step
    assert all(re.fullmatch("rl_[a-z0-9_]+", name) for name, *_ in values)
    assert values["rl_other", ("name", "step"), RUN, TRAINER] == 7
    assert values["rl_other", ("name", 'own "loss"\\\n'), RUN, TRAINER] == 1.5
    assert values["rl_reward_mean", RUN, TRAINER] == 1.5
    assert values["rl_reward_env_mean", ("env", "my-env"), RUN, TRAINER] == 1.5


def test_the_newest_value_of_each_metric_is_kept(tmp_path):
    scrape = scrape_of(tmp_path)
    scrape.send([{"step": 2, "source": "trainer", "loss/mean": 0.5, "time/checkpoint": 3.0}])
    scrape.send([{"step": 2, "source": "orchestrator", "tokens/dropped_stale": 5}])
    scrape.send([{"step": 3, "source": "trainer", "loss/mean": None}])
    values = read(scrape.page(None).body)
    assert math.isnan(values.pop(("rl_loss_mean", RUN, TRAINER)))
    step, why = ("name", "step"), ("why", "stale")
    assert values == {
        ("rl_other", step, RUN, TRAINER): 3,
        ("rl_other", step, RUN, ORCHESTRATOR): 2,
        ("rl_tokens_dropped_why", RUN, ORCHESTRATOR, why): 5,
        ("rl_time_checkpoint", RUN, TRAINER): 3.0,
    }
    scrape.send([{"step": 3, "source": "orchestrator", "tokens/sampled": 4}])  # none was dropped
    after = read(scrape.page(None).body)
    assert values.keys() - after.keys() == {("rl_tokens_dropped_why", RUN, ORCHESTRATOR, why)}
    assert after["rl_time_checkpoint", RUN, TRAINER] == 3.0


def test_the_page_wants_the_token_and_is_on_loopback_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_TOKEN", TOKEN)
    said = [""]
    scrape = scrape_of(tmp_path, said)
    scrape.send([{"step": 2, "source": "trainer", "loss/mean": 0.5}])
    scrape.start()
    url = re.fullmatch(r"metrics   (http://127\.0\.0\.1:\d+/metrics) .*", said[-1])[1]
    key = {"authorization": f"Bearer {TOKEN}"}
    answer = httpx.get(url, headers=key, timeout=60)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert read(answer.content)["rl_loss_mean", RUN, TRAINER] == 0.5
    for headers, code in (({}, 401), (key | {"host": "evil.example"}, 403)):
        assert httpx.get(url, headers=headers, timeout=60).status_code == code
    health = httpx.get(url.replace("metrics", "health"), timeout=60)
    assert health.status_code == 404, "which needs no token"
    with run_error("prometheus.port = .*: Address already in use; choose another"):
        scrape_of(tmp_path, port=int(url.split(":")[2].split("/")[0])).start()


def test_two_runs_that_start_together_do_not_share_a_port(tmp_path, monkeypatch):
    """Regression: both bound it before either listened, and the page of one was missing."""
    monkeypatch.setenv("RL_TOKEN", TOKEN)
    said, slow = [""], []
    monkeypatch.setattr("uvicorn.Server.run", lambda _, sockets: slow.append(sockets))
    scrape_of(tmp_path, said).start()
    port = int(re.search(r":(\d+)/", said[-1])[1])
    with run_error("Address already in use"):
        bind("127.0.0.1", port, "prometheus.port", wait_s=0.0)


def test_the_address_of_a_page_on_ipv6_has_brackets(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_TOKEN", TOKEN)
    monkeypatch.setattr("rl.launch.scrape.bind", lambda *_: socket.create_server(("127.0.0.1", 0)))
    said = [""]
    scrape = scrape_of(tmp_path, said)
    scrape.settings.host = "::1"
    scrape.start()
    assert said[-1].startswith("metrics   http://[::1]:")


def test_a_metric_is_described_by_the_name_that_fits_best():
    for name in ("reward/<env>/length_penalty", "reward/<env>/mean", "ratio/<env>/<quantile>"):
        assert matching(name.replace("<env>", "e").replace("<quantile>", "p01"))[0] == name
