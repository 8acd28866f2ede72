"""`rl serve` and the models of its clients, as `rl view` shows them."""

import os
import time

import pytest

from rl.launch.children import Children
from rl.records.run import Run
from rl.run_dir.metrics import MetricsLog
from rl.system.errors import RunError
from rl.view.library import Library
from rl.view.main import main as view
from rl.view.main import place_of
from rl.view.runs import fingerprint, watched
from rl.view.server import Handlers
from tests.records.made import make_run


@pytest.fixture
def server(tmp_path):
    """`outputs/serve-x` with two models, of which the first was trained, and a folder that is no
    model."""
    server = make_run(tmp_path / "outputs" / "serve-x", serve={}, orchestrator={})
    for name in ("s-0", "s-1", "none"):
        model = make_run(server.root / "models" / name, serve={}, orchestrator={})
        if name != "none":
            (model.root / "calls.log").touch()
        model.status_dir.mkdir()
    server.status_dir.mkdir()
    log = MetricsLog(server.root / "models" / "s-0" / "metrics.jsonl", "trainer")
    for step, loss in enumerate([3.0, 2.0], start=1):
        log.write(step, {"loss/mean": loss})
    return server


def test_the_models_of_a_server_are_listed_beside_it_with_their_loss(server):
    rows = {row.key: row for row in Handlers(Library([server.root.parent])).runs().runs}
    assert rows.keys() == {"serve-x", "serve-x/models/s-0", "serve-x/models/s-1"}
    trained = rows["serve-x/models/s-0"]
    assert (trained.step, trained.max_steps) == (2, 0)
    assert (trained.measure, trained.rewards) == ("loss/mean", [3.0, 2.0])


def test_a_model_is_looked_at_again_when_its_server_changes(server):
    model, now = Run(server.root / "models" / "s-0"), time.time()
    before = fingerprint(watched(model))
    os.utime(server.status_dir, (now + 5, now + 5))
    assert fingerprint(watched(model)) != before


def test_a_model_is_given_by_its_folder(server):
    models = server.root / "models"
    assert place_of(str(models / "s-0")) == models / "s-0"
    assert [*Library([models / "s-0"]).keys().values()] == [models / "s-0"]
    for inside in (models, models / "none", models / "s-0" / "status"):
        with pytest.raises(RunError, match="is inside the run"):
            place_of(str(inside))


def test_a_server_and_each_of_its_models_can_be_exported(server, tmp_path):
    for root in (server.root, server.root / "models" / "s-0"):
        page = tmp_path / f"{root.name}.html"
        assert view([str(root), "--export", str(page)], Children()) == 0
        assert f"<title>{root.name}" in page.read_text()
