"""What `rl view --export` writes: within its size, without secrets, and with nothing that ends
its elements early."""

import json
import re
import socket
import time

import msgspec
import pytest

from rl.launch.children import Children
from rl.records.run import Run
from rl.run_dir.nodes import Nodes, NodeStatus
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Phase, RoleStatus, write_status
from rl.system.errors import RunError
from rl.view import tasks
from rl.view.export import Redaction, add_tasks, write_page
from rl.view.library import Library
from rl.view.main import main as view
from tests.records.made import group, make_run, note, write_step
from tests.view.made import make_runs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("export"))


def test_a_page_keeps_its_size_and_says_what_is_left_out(place, tmp_path):
    library = Library([place / "first"])
    whole, part = tmp_path / "whole.html", tmp_path / "part.html"
    assert len(write_page(library, whole, 20 << 20)) == 1
    _, left_out = write_page(library, part, 500_000)
    assert part.stat().st_size < 600_000 < whole.stat().st_size
    said = r"(\d+) of 30 rollouts are in this file, the newest steps first"
    kept, content = int(re.match(said, left_out)[1]), recorded(part)
    assert 6 <= kept < 30 and len(content["rollouts"]) == kept
    assert (content["left_out"], content["tasks_left_out"]) == (left_out, "")
    assert {"40/0", "40/1", "42/1"} <= content["rollouts"].keys()
    versions = content["task"]["train"]["sums/7"]["versions"]
    means = [(each["version"], each["mean"], each["count"]) for each in versions]
    assert means == [(version, 0.5, 2) for version in range(4)]
    assert len(content["tasks"]["train"]) == len(content["task"]["train"]) == 4
    with pytest.raises(RunError, match="curves and logs alone take"):
        write_page(library, part, 1000)


@pytest.mark.parametrize(("host", "home"), [("localhost", "/root"), ("localhost", "/"), ("", "/")])
def test_a_machine_without_a_name_or_a_home_of_its_own_changes_nothing(
    tmp_path, monkeypatch, host, home
):
    """Regression: the pattern of no names matched between any two signs."""
    monkeypatch.setattr("socket.gethostname", lambda: host)
    monkeypatch.setenv("HOME", home)
    text = "trainer: waiting (12 s), see https://example.org/x / logs, - and *"
    assert Redaction(Run(make_run(tmp_path / "x").root)).text(text) == text


def test_tasks_that_have_no_room_are_counted(place):
    run = Library([place / "first"]).run("first")
    rows = tasks.ordered(run, "train")
    task = tasks.one_task(run, "train", "sums", rows[0].task, with_rollouts=False)
    first = len(msgspec.json.encode([rows[0], task])) + len("sums")
    content = {}
    said = add_tasks(content, run, 2 * first + 60)
    assert said.startswith(
        "2 of 7 tasks are in this file, those that changed most; raise --max-mib"
    )
    assert content["tasks"]["train"] == tasks.with_prompts(run.rollouts("train"), rows[:1])
    assert [*content["task"]["train"]] == [f"sums/{rows[0].task}"]
    assert len(content["tasks"]["eval"]) == len(content["task"]["eval"]) == 1


def test_no_secret_is_in_it_and_no_text_ends_an_element(place, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "answer is 3 and")
    assert view([str(place / "first"), "--export", str(tmp_path / "x.html")], Children()) == 0
    text = (tmp_path / "x.html").read_text()
    assert "answer is 3 and" not in text and "the [$JUDGE_API_KEY] no more" in text
    assert (text.count("<script"), text.count("</script>")) == (4, 4)
    (policy,) = re.findall(r'http-equiv="content-security-policy" content="([^"]*)"', text)
    (nonce,) = re.findall("script-src 'nonce-([^']+)';", policy)
    assert text.count(f'nonce="{nonce}"') == 4  # three scripts and the styles
    assert "unsafe" not in policy and "connect-src" not in policy


def test_no_place_and_no_name_of_a_machine_leaves_it(tmp_path, monkeypatch):
    home, output_dir = tmp_path / "home" / "ada lovelace", tmp_path / "disk" / "runs"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(socket, "gethostname", lambda: "lab-pc")
    run_dir = RunDir(make_runs(output_dir) / "first", output_dir / "first" / "weights")
    elsewhere = (
        f"{output_dir}/first/a.py {home}/b.py /scratch/bob/env/c.py on lab-pc, c23 and node17, "
        "see https://example.org/a/b/c, 3/4/5, file:///scratch/bob/d.py, "
        "PATH=/opt/e:/scratch/bob/f http://[::1]:80/a/b"
    )
    (run_dir.logs / "inference-node17-8000-1.log").write_text(f"{elsewhere}\n")
    name, now = "inference-node17-8000", time.time()
    status = RoleStatus(process=name, pid=1, host="node17", heartbeat=now, phase=Phase.SERVING)
    write_status(run_dir.status(name), status)
    about = dict.fromkeys(("address", "software", "config", "place"), "")
    about |= dict.fromkeys(("index", "ranks", "gpus"), 0) | dict.fromkeys(
        ("port", "lease", "pid"), 1
    )
    machine = NodeStatus(host="c23", roles=[], started=0.0, heartbeat=0.0, **about)
    Nodes(run_dir).write(Nodes(run_dir).status_path(0), machine)
    note(run_dir, now, "death", "trainer", step=3, reason=f"in {elsewhere}")
    said = group(99, [0.0, 1.0], text=f"node17 is a word, /usr/lib/x.so a file, {home}/x is not")
    said.rollouts[0].error = f"OSError: {elsewhere}"
    write_step(run_dir, 5, [said])
    for name in ("x.html", "x.json"):
        assert view([str(run_dir.root), "--export", str(tmp_path / name)], Children()) == 0
        text = (tmp_path / name).read_text().replace("node17 is a word", "")
        for place in (str(tmp_path), "lovelace", "/scratch", "bob", "lab-pc", "c23", "node17"):
            assert place not in text, (name, place)
        assert (
            "first/a.py ~/b.py .../c.py on HOST, HOST and HOST, see "
            "https://example.org/a/b/c, 3/4/5" in text
        )
        assert "3/4/5, file://.../d.py, PATH=.../e:.../f http://[::1]:80/a/b" in text
    content = recorded(tmp_path / "x.html")
    health = content["health"]
    assert "first/logs/trainer-1.log" in health["bottleneck"] + str(health["findings"])
    assert content["logs"].keys() == {
        process["name"] for process in health["processes"] if process["attempts"]
    }
    shown = str(content["rollouts"]["99/1"]["messages"])
    assert "node17 is a word, /usr/lib/x.so a file, ~/x is not" in shown


def recorded(path):
    """What a page has in place of a server."""
    (data,) = re.findall(
        r'<script type="application/json" id="recorded">(.*?)</script>', path.read_text(), re.DOTALL
    )
    return json.loads(data)


def test_a_timeline_for_perfetto(place, tmp_path, capsys, priority):
    assert view([str(place / "first"), "--export", str(tmp_path / "trace.json")], Children()) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 12
    assert {event["dur"] for event in spans} == {3e6}
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert priority == [19]


def test_what_is_not_understood_names_the_remedy(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = str(place / "first")
    for args, words in (
        ([], "start one, or name a folder"),
        (["nothing"], "nothing: there is no such folder"),
        ([str(place), "--export", "x.html"], "give one run; there are 2: first, second"),
        ([first, "--export", f"{first}/x.html"], "outside the run's directory"),
        ([first, "--export", "metrics.jsonl"], "ends in .html or .json"),
        ([str(place), "--port", "99999"], "a port is a number from 1 to 65535"),
    ):
        with pytest.raises(RunError, match=words):
            view(args, Children())
    with pytest.raises(SystemExit):
        view(["--bogus"], Children())
