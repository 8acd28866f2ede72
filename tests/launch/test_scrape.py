"""`/metrics` of `rl`: no metric is lost, and Prometheus' own parser reads the page."""

import math
import re

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rl.config.run import PrometheusConfig
from rl.launch.scrape import Scrape, series
from rl.run_dir.metrics import LEFT_OUT, METRICS, matching
from tests.raised import run_error

TOKEN = "t" * 16


def read(page):
    """Returns the value of each series: its name and sorted labels."""
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    values = {(s.name, *sorted(s.labels.items())): s.value for s in samples}
    assert len(values) == len(samples)
    return values


def test_every_metric_is_a_series_of_its_own():
    names = {re.sub(r"<(\w+)>", r"my-\1", name): name for name in METRICS}
    names |= {'own "loss"\\\n': "", "reward/e/a/b/<c>": "reward/<env>/<metric>", "ratio/e": ""}
    assert len(names) == len(METRICS) + 3
    known = {name: matching(name)[1] for name in names}
    assert known == names | {"ratio/e": "ratio/<quantile>"}
    assert series("reward/e/agent_a/b") == ("rl_reward_agent", {"env": "e", "agent": "a/b"})
    assert series("eval/e/pass@4_stderr") == ("rl_eval_pass_stderr", {"env": "e", "k": "4"})
    scrape = Scrape('a "run"\n')
    scrape.note([{"step": 7, "source": "trainer", **dict.fromkeys(names, 1.5)}])
    values = read(generate_latest(scrape).decode())
    assert len(values) == len(names) + 1  # and the step
    assert METRICS.keys() >= LEFT_OUT
    assert all(re.fullmatch("rl_[a-z0-9_]+", name) for name, *_ in values)
    labels = ("run", 'a "run"\n'), ("source", "trainer")
    assert values["rl_step", *labels] == 7
    assert values["rl_other", ("name", 'own "loss"\\\n'), *labels] == 1.5
    assert values["rl_reward_mean", *labels] == values["rl_reward_mean", ("env", "my-env"), *labels]


def test_the_newest_value_of_each_metric_is_kept():
    scrape = Scrape("r")
    scrape.note([{"step": 2, "source": "trainer", "loss/mean": 0.5, "time/checkpoint": 3.0}])
    scrape.note([{"step": 2, "source": "orchestrator", "tokens/dropped_stale": 5}])
    scrape.note([{"step": 3, "source": "trainer", "loss/mean": None}])
    scrape.note([{"step": 2, "source": "trainer", "loss/mean": 0.25, "time/checkpoint": 4.0}])
    scrape.note([{"step": 1, "source": "eval", "loss/mean": 9}])
    values = read(generate_latest(scrape).decode())
    run, trainer, other = ("run", "r"), ("source", "trainer"), ("source", "eval")
    assert math.isnan(values.pop(("rl_loss_mean", run, trainer)))
    assert values == {
        ("rl_step", run, trainer): 3,
        ("rl_step", run, other): 1,
        ("rl_step", run, ("source", "orchestrator")): 2,
        ("rl_tokens_dropped", run, ("source", "orchestrator"), ("why", "stale")): 5,
        ("rl_time_checkpoint", run, trainer): 4.0,
        ("rl_loss_mean", run, other): 9,
    }
    scrape.note([{"step": 3, "source": "orchestrator", "tokens/sampled": 4}])  # none was dropped
    values = read(generate_latest(scrape).decode())
    assert values["rl_tokens_dropped", run, ("source", "orchestrator"), ("why", "stale")] == 0


def test_the_page_wants_the_token_and_is_on_loopback_by_default():
    scrape = Scrape("r")
    scrape.note([{"step": 2, "source": "trainer", "loss/mean": 0.5}])
    url = scrape.serve(PrometheusConfig(port=0), TOKEN)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
    key = {"authorization": f"Bearer {TOKEN}"}
    answer = httpx.get(url, headers=key, timeout=60)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert read(answer.text)["rl_loss_mean", ("run", "r"), ("source", "trainer")] == 0.5
    for headers, code in (({}, 401), (key | {"host": "evil.example"}, 403)):
        assert httpx.get(url, headers=headers, timeout=60).status_code == code
    with run_error("prometheus.port = .*: Address already in use; choose another"):
        Scrape("r").serve(PrometheusConfig(port=int(url.split(":")[2].split("/")[0])), TOKEN)


@pytest.mark.parametrize("name", ["reward/e/length_penalty", "reward/e/mean", "ratio/e/p01"])
def test_a_metric_is_described_by_the_name_that_fits_best(name):
    assert matching(name)[1] == name.replace("/e/", "/<env>/").replace("p01", "<quantile>")
