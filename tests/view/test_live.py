"""A run that is killed and resumed while a browser watches it: `rl` is real, its processes are
scripts that write what real ones do."""

import os
import signal
import time

import pytest

from tests.launch.test_run import Run
from tests.view.browser import Tab
from tests.view.browser import browser as browser
from tests.view.serving import serving

pytestmark = pytest.mark.proof
STEPS = 9
TRAINER = """
from rl.run_dir.paths import RunDir
from rl.run_dir.status import RunEnd
import msgspec
files, status = RunDir(root, root / "weights"), Status(root / "status/trainer.json", name)
log = MetricsLog(root / "metrics.jsonl", name)
done = len(list(files.root.glob("done-*")))
for step in range(done + 1, config.max_steps + 1):
    status.enter(Phase.TRAINING, step=step)
    time.sleep(0.4)
    while step == 7 and not (root / "resumed").exists():
        time.sleep(0.1)
    log.write(step, {"loss/mean": 1.0 / step, "time/step": 0.4})
    (root / f"done-{step}").touch()
files.checkpoint(config.max_steps).mkdir(parents=True)
(files.checkpoint(config.max_steps) / "manifest.json").write_text('{"step": 9, "world_size": 1, "model": {}, "files": {}}')
files.run_end.write_bytes(msgspec.json.encode(RunEnd("all steps done", time.time())))
"""
ORCHESTRATOR = """
Status(root / "status/orchestrator.json", name).enter(Phase.FILLING_BATCH, step=1)
log = MetricsLog(root / "metrics.jsonl", name)
while not (root / f"done-{config.max_steps}").exists():
    done = len(list(root.glob("done-*")))
    log.write(done + 1, {"reward/mean": 0.01 * done})
    time.sleep(0.4)
"""


@pytest.fixture
def run(tmp_path, classic_home):
    found = Run(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.wait()


def test_a_run_is_watched_while_it_is_killed_and_resumed(browser, run, tmp_path):
    scripts = {"trainer": TRAINER, "orchestrator": ORCHESTRATOR}
    process = run.start("--max_steps", str(STEPS), **scripts)
    while not (run.root / "done-2").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    with serving(tmp_path / "outputs") as links:
        tab = Tab(browser, links)
        curve = tab.context.new_page()
        curve.goto(f"{tab.base}/#/curves?run=r&q=loss/mean")

        def state():
            return tab.page.locator(".state").inner_text().split()[-1]

        def until(wanted):
            tab.until(f"document.querySelector('.state').innerText.includes('{wanted}')", 40)

        until("live")
        curve.wait_for_selector(".chart canvas")
        late = [seconds_until_shown(tab, run, step) for step in (5, 6)]
        assert min(late) < 3.0, late  # the other one may have met a machine that was busy
        process.send_signal(signal.SIGKILL)
        process.wait()
        until("died")
        assert "was killed" in tab.page.locator(".why").inner_text()
        assert "--resume" in tab.page.locator(".why").inner_text()
        (run.root / "resumed").touch()
        process = run.start("--max_steps", str(STEPS), "--resume", **scripts)
        until("live")
        until("ended")
        assert f"{STEPS}/{STEPS}" in tab.page.locator("td[data-label=Step]").inner_text()
        assert state() == "ended"
        assert process.wait(timeout=30) == 0, process.communicate()
        tab.close()


def seconds_until_shown(tab, run, step):
    """From the moment at which a step was written until the list of runs has it."""
    path = run.root / f"done-{step}"
    while not path.exists():
        tab.page.wait_for_timeout(10)
    tab.until(f"parseInt(document.querySelector('td[data-label=Step]').innerText) >= {step}")
    return time.time() - os.stat(path).st_mtime
