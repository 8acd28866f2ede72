"""The server of `rl view`: who is let in, and what it answers, over real HTTP where that
matters."""

import json
import re
import shutil
import socket
import subprocess
import time
from hashlib import sha256

import msgspec
import pytest
from starlette.datastructures import QueryParams
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rl.orchestrator.groups.group_credit import Rules, credit_group
from rl.records.run import Run
from rl.run_dir.access_token import link
from rl.run_dir.metrics import SECTIONS, MetricsLog
from rl.run_dir.paths import BranchOrigin
from rl.run_dir.spans import Gauges, Span
from rl.run_dir.status import Phase, RoleStatus, RunEnd, write_status
from rl.system import linux, process_table
from rl.system.errors import RunError
from rl.view import responses, runs, tokens
from rl.view.access import PageGate
from rl.view.library import KEPT, Library
from rl.view.rollouts import Wanted, Which
from rl.view.server import PAGE, ROUTES, Handlers, make_app
from rl.wire.rollouts import Group
from tests.records.made import (
    clock,
    group,
    make_run,
    note,
    rollout,
    write_eval_of,
    write_lines,
    write_noisy,
    write_step,
)
from tests.view.made import HOSTILE, make_cluster_run, make_runs, write_numbers
from tests.view.serving import enter

SECRET = "a-secret-of-this-page"
HOST = "127.0.0.1:8411"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("view"))


def guarded(library):
    """A browser that was not let in yet, and the links that were printed so far."""
    links = list[str]()
    note_link = lambda number: links.append(link(SECRET, f"http://{HOST}/", number))  # noqa: E731
    gate = PageGate(make_app(library), SECRET, "127.0.0.1", note_link)
    return TestClient(gate, base_url=f"http://{HOST}"), links


def let_in(library):
    found, links = guarded(library)
    enter(found, links[0])
    return found


@pytest.fixture(scope="module")
def client(place):
    """A browser that was let in."""
    return let_in(Library([place]))


@pytest.fixture(scope="module")
def ask(place):
    """Asks for an answer as the page does."""
    return asking(Handlers(Library([place])))


def asking(handlers):
    routes = {route.name: route for route in ROUTES}

    def ask(route, run="first", **values):
        values |= {} if route == "runs" else {"run": run}
        pairs = [
            (name, str(each))
            for name, value in values.items()
            for each in (value if isinstance(value, list) else [value])
        ]
        return routes[route].ask(handlers, QueryParams(pairs))

    return ask


@pytest.fixture
def alone(tmp_path):
    """A run without anything yet, and who answers about it."""
    files = make_run(tmp_path / "x")
    for folder in (files.spans, files.status_dir):
        folder.mkdir()
    return files, Handlers(Library([tmp_path]))


def test_few_runs_stay_open_and_a_list_that_is_still_right_opens_none(tmp_path, monkeypatch):
    """Regression: every run that was ever shown stayed in memory."""
    count = KEPT + 4
    for i in range(count):
        make_run(tmp_path / f"x{i}").status_dir.mkdir()
    library, opened = Library([tmp_path]), []
    handlers, begin = Handlers(library), Run.__init__
    monkeypatch.setattr(
        Run, "__init__", lambda run, root: (opened.append(root.name), begin(run, root))[1]
    )
    assert len(handlers.runs().runs) == count == len(opened) and len(library.opened) == KEPT
    assert len(handlers.runs().runs) == count == len(opened)
    first = library.run("x0")
    for i in range(1, KEPT):
        library.run(f"x{i}")
    assert library.run("x0") is first and [*library.opened][-1] == "x0"
    library.run(f"x{KEPT}")
    assert library.run("x0") is first and "x1" not in library.opened


def test_a_branch_is_compared_as_one_and_environments_at_equal_shares(tmp_path):
    """Regression: `it learned faster per rollout` of a run that began with what another had
    learned."""
    for name in ("x", "y"):
        files = make_run(tmp_path / name)
        write_numbers(files, [0.9, 0.6])
        rewards = {"reward/sums/mean": 1.0, "reward/words/mean": 0.5}
        if name == "x":
            del rewards["reward/words/mean"]
        for step in (1, 2):
            MetricsLog(files.metrics, "orchestrator").write(step, rewards)
    files.origin.write_bytes(msgspec.json.encode(BranchOrigin("x", 40, 0.0, [])))
    handlers = Handlers(Library([tmp_path]))
    found = handlers.compare(run=["x", "y"])
    said = "y: branch of x at step 40; it began with what that run had learned"
    assert (found.notes, found.faults, found.learned[-1].rewards) == ([said], [], [0.6, 0.75])
    assert {row.key: row.reward for row in handlers.runs().runs} == {"x": 0.6, "y": 0.75}
    for run, names in (("x", ["mean"]), ("y", ["mean", "sums/mean", "words/mean"])):
        metrics = [each.name for each in handlers.metrics(run=[run]).metrics]
        assert [name[7:] for name in metrics if name.startswith("reward/")] == names


def write_metrics(files, *lines):
    with files.metrics.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def deaths(handlers, **axis):
    marks = handlers.curves(run=["x"], **axis).marks
    return [mark for mark in marks if mark.kind in ("death", "restart")]


# Who is let in ------------------------------------------------------------------------------------


def test_a_link_lets_one_browser_in_and_the_next_one_another(place):
    (first, links), (second, _) = guarded(Library([place])), guarded(Library([place]))
    second._transport = first._transport  # another browser at the same server
    none = f"/{'0' * 32}/"
    for path in ("/", "/api/runs", "/?link=wrong", "/?link=", none, f"{none}api/runs"):
        answer = first.get(path)
        assert answer.status_code == 401 and "has no access" in answer.text, path
        assert "set-cookie" not in answer.headers, path
    # who only looks whether it is there does not use it
    assert first.head(links[0]).status_code == 401 and len(links) == 1
    answer = enter(first, links[0])
    assert first.get("/api/runs").status_code == first.get("/").status_code == 200
    assert len(links) == 2
    assert second.get(links[0]).status_code == 401 and not second.cookies and len(links) == 2
    enter(second, links[1])
    assert second.get("/api/runs").status_code == 200 and len({*links}) == 3
    cookie = answer.headers["set-cookie"]
    name, value, folder = re.match(
        r"(rl_view_\w{8})=(\w{32}); HttpOnly; Path=(/\w{32}/); SameSite=strict$", cookie
    ).groups()
    assert folder == first.base_url.path
    assert value not in folder
    assert SECRET not in answer.text + cookie
    first.cookies.clear()
    first.cookies.set(name, value[:-1] + "x")
    assert first.get("/api/runs").status_code == 401


def test_a_server_that_was_started_again_knows_the_cookie_and_no_link_of_before(place):
    (browser, links), (again, _) = guarded(Library([place])), guarded(Library([place]))
    unused = links[0]
    enter(browser, unused)
    browser._transport = again._transport
    assert browser.get("/api/runs").status_code == 200
    assert browser.get(unused).status_code == browser.get(links[1]).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "localhost:8411"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": f"http://{HOST}"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_other_pages_and_other_names_are_refused(client, headers, status):
    assert client.get("/api/runs", headers=headers).status_code == status


def test_nothing_can_be_changed_and_every_answer_has_the_policy(client):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/api/runs").status_code == 405
    for path in ("/", "/api/runs", "/page/main.js", "/page/no-such", "/api/curves?nothing=1"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy, path
        assert "unsafe" not in policy and answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-content-type-options"] == "nosniff"
    # no script within the page, no handler
    assert "<script>" not in client.get("/").text and " on" not in client.get("/").text


def test_a_metric_that_is_none_is_told_and_one_that_is_not_there_yet_is_not(client):
    """The answer was no curve, and no word."""
    answer = client.get("/api/curves?run=first&name=rewrd/mean")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(
        "rewrd/mean: there is no such metric; similar: reward/mean"
    )
    assert client.get("/api/curves?run=first&name=validation/loss").json()["series"] == []


@pytest.mark.parametrize("key", ["../second", "/etc", "nothing", "first/../../x", ""])
def test_only_runs_that_are_shown_are_opened(client, key):
    answer = client.get("/api/health", params={"run": key})
    assert answer.status_code in (400, 404) and "lines" not in answer.text
    assert client.get("/page/../server.py").status_code in (401, 404)
    assert client.get("/page/%2e%2e/server.py").status_code == 404


def test_the_same_answer_twice_is_sent_once(client):
    path = "/api/curves?run=first&name=reward/mean"
    again = client.get(path, headers={"if-none-match": client.get(path).headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


# What is answered ---------------------------------------------------------------------------------


def test_runs_with_their_state_and_numbers(ask):
    first, second = sorted(ask("runs").runs, key=lambda row: row.key)
    assert (first.key, second.key, first.step, first.max_steps) == ("first", "second", 4, 9)
    assert (first.rewards, first.reward, first.lag) == ([0.1, 0.3, 0.4, 0.7], 0.7, 0.5)
    assert (first.tokens_per_s, first.state, second.state) == (100.0, "died", "stopped")
    assert "trainer" in first.why and first.bytes > 300_000
    (held_out,) = first.evals
    assert (held_out.name, held_out.last_version) == ("held-out", 4)
    assert (held_out.first, held_out.last) == pytest.approx((1 / 3, 2 / 3))


def test_curves_over_every_axis_with_what_happened(ask):
    names = ["reward/mean", "eval/held-out/reward_mean"]
    axes = ("step", "rollouts", "tokens", "time")
    by_axis = {axis: ask("curves", name=names, axis=axis) for axis in axes}
    x = {axis: answer.series[0].x for axis, answer in by_axis.items()}
    assert (x["step"], x["rollouts"]) == ([1, 2, 3, 4], [8, 16, 24, 32])
    assert x["tokens"] == [200, 400, 600, 800] and x["time"][0] == pytest.approx(60, abs=2)
    assert by_axis["rollouts"].series[1].x == [0, 32]  # evaluations of versions 0 and 4
    assert {mark.kind for mark in by_axis["step"].marks} == {"eval", "death"}
    sections = {metric.section for metric in ask("metrics").metrics}
    assert sections == {*SECTIONS} - {"Supervised fine-tuning", "What it cost"} | {"Other"}


def test_rollouts_are_filtered_counted_sorted_and_paged_by_the_server(ask):
    every = ask("rollouts")
    assert (every.total, len(every.rows)) == (24, 24)
    assert every.facets["why"] == {"trained": 16, "no_signal": 8}
    assert [row.step for row in every.rows[::6]] == [4, 3, 2, 1]
    wanted = {"begin": 2, "end": 3, "why": "trained", "lowest": 0.5, "sort": "task"}
    page = ask("rollouts", descending="false", limit=3, offset=1, **wanted)
    newest_of_equals = [(3, 1, 1.0), (3, 7, 1.0), (2, 7, 1.0)]
    assert [(row.step, row.task, row.reward) for row in page.rows] == newest_of_equals
    assert (page.total, page.facets["why"]) == (4, {"no_signal": 4, "trained": 4})
    assert sum(page.histogram.counts) == 8
    hits = ask("rollouts", q="THE ANSWER IS 3")
    assert (hits.total, hits.searched, hits.complete) == (2, 24, True)
    assert ask("rollouts", tool_errors="true").total == 8
    assert ask("rollouts", kind="eval", begin=4).total == 3


def test_a_rollout_says_why_it_was_not_trained(ask):
    assert ask("rollout", group=11, rollout=0).explanation == (
        "Not trained: all 2 rewards of its group are 1, so no answer was better than the others "
        "and there is nothing to learn from it."
    )
    trained = ask("rollout", group=10, rollout=1)
    assert trained.explanation == (
        "Trained in step 1 with advantage +0.500: its reward is above the mean of its group, 0.500."
    )
    assert [row.rollout for row in trained.group] == [0, 1] and trained.has_tokens
    assert trained.metrics == {"exact": 1.0}


def test_a_conversation_has_thinking_and_calls_apart_and_no_character_that_acts(ask):
    system, user, assistant, tool, odd = ask("rollout", group=12, rollout=0).messages
    assert (assistant.thinking, assistant.text) == (f"let me see {HOSTILE[1]}", "calling")
    (call,) = assistant.calls
    assert (call.name, json.loads(call.arguments)) == ("<b>tool</b>", {"code": HOSTILE[1]})
    assert (tool.name, odd.role, odd.left_out) == ("c", "<i>odd</i>", 100_000)
    assert "image_url" in user.text and system.role == "system"
    messages = ask("rollout", group=12, rollout=1).messages
    texts = " ".join(message.text for message in messages)
    assert "\\x1b[2J" in texts and "\\u202egnp.exe" in texts
    assert not re.search(r"[\x00-\x08\x1b\u202e]", texts)


def test_tokens_with_what_sampler_and_trainer_made_of_them(ask):
    whole = ask("tokens", step=2, group=20, rollout=0)
    assert whole.pieces == ["2", "+", "<script>", "four", "</span>"]
    assert whole.trained == [False, False, True, True, True]
    values = {name: signal[2:] for name, signal in whole.values.items()}
    assert whole.values["gap"][:2] == whole.values["stopped"][:2] == [None, None]
    assert (values["gap"], values["stopped"]) == ([0.0, 0.25, -1.0], [0, 0, 1])
    assert (values["ratio"], values["versions"]) == ([1.0, 1.28403, 0.367879], [1, 1, 1])
    assert values["advantages"] == [1.0, 1.0, 1.0]
    assert "teacher_gap" not in whole.values.keys() | whole.signals.keys()
    part = ask("tokens", step=2, group=20, rollout=0, offset=3, limit=1)
    assert (part.total, part.starts, part.offset, part.pieces) == (5, [0], 3, ["four"])
    assert part.values["gap"] == [0.25] and part.signals == whole.signals
    assert (part.signals["gap"].most, part.signals["versions"].values) == (1.0, [1.0])


def test_the_words_of_tokens_are_those_of_a_model_that_is_here_and_nothing_is_fetched(
    tmp_path, monkeypatch
):
    files = make_run(tmp_path / "x", model={"name": "owner/big"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found, note = tokens.tokenizer_of(Run(files.root))
    assert found is None
    assert note.startswith(
        "tokens are shown by their ids: the tokenizer of owner/big is neither on this "
        "machine nor in "
    )
    assert note.endswith("weights: `hf download owner/big tokenizer.json` gets it")
    folder = tmp_path / "cache/rl/models/owner--big"
    folder.mkdir(parents=True)
    Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    assert tokens.tokenizer_of(Run(files.root))[0].id_to_token(0) == "<unk>"


def test_time_health_logs_and_differences(ask):
    found = ask("timeline")
    lanes = {(lane.process, lane.name): len(lane.spans) for lane in found.lanes}
    assert lanes == {("trainer", "step"): 6, ("orchestrator", "step"): 6}
    moments = [(moment.kind, moment.text) for moment in found.moments]
    assert ("death", "death: <b>killed</b>") in moments
    health = ask("health")
    assert health.state == "died" and "trainer" in health.bottleneck
    lines = ["<script>window.hacked = 1</script>", "ValueError: \\x1b[31mred"]
    assert ask("log", process="trainer").lines == lines
    compared = ask("compare", run=["first", "second"])
    (setting,) = compared.settings
    assert (setting.key, setting.values) == ("trainer.optim.lr", ["1e-06", "5e-06"])
    assert [(point.version, point.means[1]) for point in compared.evals] == [(0, None), (4, None)]


def test_mismatch_by_place_has_tables_and_a_finding(tmp_path):
    run_dir = make_run(tmp_path / "x", model={"name": "none", "dtype": "bfloat16"})
    turns = [[(100, 300), (300, 600)]] * 20 + [[(900, 300)]] * 20
    write_noisy(run_dir, 1, turns, lambda _, turn, __: 1.0 if turn else 0.1)
    found = Handlers(Library([tmp_path / "x"])).health(run="x")
    assert [(row.kind, row.first, row.last, row.tokens) for row in found.mismatch] == [
        ("depth in the context", 0, 127, 560),
        ("depth in the context", 128, 255, 2560),
        ("depth in the context", 256, 511, 2880),
        ("depth in the context", 512, 1023, 8960),
        ("depth in the context", 1024, 2047, 9040),
        ("turn", 1, 1, 12000),
        ("turn", 2, 2, 12000),
    ]
    assert " after turn 1, else 0.00" in found.findings[-1].text


def test_machines_of_a_cluster_have_rows_and_no_lines(tmp_path):
    make_cluster_run(tmp_path / "x")
    found = Handlers(Library([tmp_path / "x"])).health(run="x")
    assert [(row.index, row.host, row.does, row.facts, row.state) for row in found.machines] == [
        (0, "<b>host0", "trains and leads", "8 GPUs, 8 ranks in generation 0", "lost"),
        (1, "<b>host1", "serves", "8 GPUs", "lost"),
        (2, "", "serves", "", "absent"),
    ]
    processes = [row.processes for row in found.machines]
    assert processes == [["rl", "trainer-node0"], ["trainer-node1"], []]
    first, _, absent = found.machines
    assert 6590 < first.last_sign - first.since < 6610 and time.time() - first.last_sign > 599
    assert absent.since is None
    assert not any(line.startswith("machine ") for line in found.lines)


def test_nobody_is_said_to_do_nothing_while_a_step_is_trained(alone):
    """What is under way is in no span yet: the trainer's phase, requests in flight, a process
    that starts."""
    files, handlers = alone
    now = time.time()
    sampling = Span(name="sampling", begin=20.0, end=30.0, lane="requests")
    waiting = Span(name="waiting_for_batch", begin=12.0, end=30.0, lane="phase")
    for process, span, gauges in (
        ("inference", sampling, Gauges(at=30.5, values={"requests": 0})),
        ("trainer", waiting, Gauges(at=98.0, values={"progress": 3})),
    ):
        write_lines(files.spans / f"{process}.jsonl", clock(process, now, 100.0), span, gauges)
    note(files, now - 99, "start")
    note(files, now - 95, "start", "inference")

    def status(phase, since):
        fields = {"pid": 1, "host": "elsewhere", "step": 1, "heartbeat": now}
        fields |= {"waiting_for": phase.waits_for, "since": now + since - 100}
        write_status(files.status("trainer"), RoleStatus(process="trainer", phase=phase, **fields))
        quiet = handlers.timeline(run="x").quiet
        return [
            (round(span.begin - now + 100, 1), round(span.end - now + 100, 1)) for span in quiet
        ]

    assert status(Phase.TRAINING, 30.0) == []
    assert status(Phase.TRAINING, 60.0) == [(30.0, 60.0)]
    # and what is behind is not written yet
    assert status(Phase.WAITING_FOR_BATCH, 30.0) == [(30.0, 98.0)]
    gauges = [Gauges(at=at, values={"requests": 61}) for at in (60.0, 62.0, 64.0)]
    write_lines(files.spans / "inference.jsonl", *gauges)
    assert status(Phase.WAITING_FOR_BATCH, 30.0) == [(30.0, 60.0), (68.0, 98.0)]
    with pytest.raises(RunError, match=r"^begin = 1795402589.404 is after end = 1$"):
        handlers.timeline(run="x", begin=1795402589.404, end=1.0)


def test_of_many_equal_spans_as_many_are_shown_as_may_be(alone, monkeypatch):
    monkeypatch.setattr("rl.view.timeline.MOST_SPANS", 6)
    files, handlers = alone
    spans = [
        Span(name="step", begin=2.0 * i, end=2.0 * i + (1.5 if i == 8 else 0.5), lane="step")
        for i in range(10)
    ]
    write_lines(files.spans / "trainer.jsonl", clock("trainer"), *spans)
    found = handlers.timeline(run="x")
    assert [span.begin - 1000 for lane in found.lanes for span in lane.spans] == [0, 2, 4, 6, 8, 16]
    assert found.note.startswith(
        "the 6 longest of 10 spans: some of 0.5 s or less are missing here"
    )


def test_reading_a_run_leaves_it_as_it_is(ask, place):
    def looks():
        files = sorted(path for path in (place / "first").rglob("*") if path.is_file())
        return sha256(
            b"".join(
                f"{path} {path.stat().st_mtime_ns}".encode() + path.read_bytes() for path in files
            )
        ).hexdigest()

    before = looks()
    for route in ("runs", "tasks", "health", "timeline", "metrics"):
        ask(route)
    ask("rollouts", q="x")
    assert looks() == before


def test_a_run_of_another_version_of_rl_is_shown_as_far_as_it_can_be(tmp_path):
    run = make_runs(tmp_path) / "first"
    (run / "config.toml").write_text("bogus = [1]\n")
    ask = asking(Handlers(Library([run])))
    (row,) = ask("runs").runs
    assert (row.key, row.state, row.step) == ("first", "unreadable", 4)
    assert "was not written by this version" in row.why and ask("rollouts").total == 24
    explanation = ask("rollout", group=10, rollout=1).explanation
    assert explanation.startswith("Trained in step 1")
    assert ask("tokens", step=2, group=20, rollout=0).total == 5
    health = ask("health")
    assert health.state == "unreadable" and health.processes[0].name == "trainer"
    assert ask("timeline").lanes and ask("compare").faults


def test_the_state_of_a_run_is_followed(alone, monkeypatch):
    """Live, killed, live again, ended, as its files and processes say it."""
    monkeypatch.setattr(runs, "LIVE_S", 0.0)
    (files, handlers), said = alone, []

    def state():
        (row,) = handlers.runs().runs
        assert row.state == handlers.health(run="x").state
        said.append((row.state, row.why))

    for _ in range(2):
        process = subprocess.Popen(["sleep", "60"])
        fields = {"pid": process.pid, "host": socket.gethostname(), "heartbeat": time.time()}
        fields |= {"place": linux.pid_scope(), "phase": Phase.TRAINING, "step": 3}
        start = process_table.entry(process.pid).start
        status = RoleStatus(process="trainer", start_ticks=start, **fields)
        write_status(files.status("trainer"), status)
        state()
        process.kill()
        process.wait()
        state()
    files.run_end.write_bytes(msgspec.json.encode(RunEnd("9 steps done", time.time())))
    files.checkpoint(9).mkdir(parents=True)
    manifest = {"step": 9, "world_size": 1, "model": {}, "files": {}}
    (files.checkpoint(9) / "manifest.json").write_text(json.dumps(manifest))
    state()
    assert [state for state, _ in said] == ["live", "died", "live", "died", "ended"]
    assert said[3][1].startswith(
        "the run was killed at step 0: the trainer was training step 3; continue it with `rl @ "
    )
    assert said[4][1] == "the run ended well: 9 steps done"


def test_failed_rollouts_have_no_reward_and_a_tasks_change_is_by_version(alone):
    """A failed one has a reward of 0 in its file that says nothing, and no version if no token
    was sampled."""
    files, handlers = alone
    for step in (1, 2, 3):
        failed = rollout(0.0, turns=[], episode=1, error="boom", cause="environment")
        rollouts = [rollout(1.0, step, episode=0), failed, rollout(0.5, step, episode=2)]
        odd = credit_group(Group(group_id=step, env="sums", task=1, rollouts=rollouts), Rules())
        equal = group(10 + step, [1.0, 1.0], task=2, version=step - 1)
        write_step(files, step, [odd, equal])
    write_eval_of(files, 0, [0.0, 1.0])
    write_eval_of(files, 8, [0.0, 1.0])
    (row,) = handlers.tasks(run="x", number=1).rows
    assert (row.rollouts, row.first, row.last, row.change) == (6, 0.75, 0.75, 0.0)
    assert [row.change for row in handlers.tasks(run="x", kind="eval").rows] == [0.0, 0.0]
    task = handlers.task(run="x", env="sums", task=1)
    means = [(version.version, version.mean) for version in task.versions]
    assert means == [(1, 0.75), (2, 0.75), (3, 0.75)] and task.without_version == 3
    found = handlers.rollouts(Wanted(run="x", why="error"))
    assert (found.total, found.facets["why"]["error"]) == (9, 9)
    shown = {("environment", None), ("error", 1.0), ("error", 0.5)}
    assert {(row.why, row.reward) for row in found.rows} == shown
    assert handlers.rollouts(Wanted(run="x", lowest=-1.0)).total == 12  # of 15


def test_a_change_of_an_evaluation_is_clear_beyond_twice_its_error(tmp_path):
    files, log = make_run(tmp_path / "x"), MetricsLog(tmp_path / "x" / "metrics.jsonl", "eval")
    files.status_dir.mkdir()
    errors = {"noise/reward_mean_stderr": 0.003, "gain/reward_mean_stderr": 0.0625}
    for version, noise, gain in ((0, 0.1332, 0.5), (8, 0.1333, 0.75)):
        means = {"noise": noise, "gain": gain, "alone": gain}
        values = {f"{name}/reward_mean": value for name, value in means.items()} | errors
        log.write(version, {f"eval/{name}": value for name, value in values.items()})
    (row,) = Handlers(Library([tmp_path / "x"])).runs().runs
    clear = {change.name: change.clear for change in row.evals}
    assert clear == {"noise": False, "gain": True, "alone": True}


def test_worked_examples_belong_to_the_prompt(alone):
    files, handlers = alone
    talk = [{"role": role, "content": role[0] + i} for i in "01" for role in ("user", "assistant")]
    marked = group(1, [0.0, 1.0], task=1, messages=talk, num_prompt_messages=3)
    write_step(files, 1, [marked, group(2, [0.0, 1.0], task=2, messages=talk)])
    texts = lambda messages: [message.text for message in messages]  # noqa: E731
    for task, prompt, shown in ((1, 3, ["u0", "a0", "u1"]), (2, 0, ["u0"])):
        detail = handlers.rollout(Which(run="x", group=task, rollout=1))
        assert detail.prompt == prompt and texts(detail.messages) == ["u0", "a0", "u1", "a1"]
        assert texts(handlers.task(run="x", env="sums", task=task).prompt) == shown


def test_a_bar_of_the_histogram_finds_what_it_counts(alone):
    files, handlers = alone
    write_step(files, 1, [group(i, [i / 6, 2 / 3]) for i in range(7)])
    histogram = handlers.rollouts(Wanted(run="x")).histogram
    for count, ends in zip(histogram.counts, histogram.ranges, strict=True):
        if count:
            lowest, highest = (float(json.loads(json.dumps(end))) for end in ends)
            assert handlers.rollouts(Wanted(run="x", lowest=lowest, highest=highest)).total == count
    assert sum(histogram.counts) == 14
    assert histogram.ranges.count([]) == histogram.counts.count(0) > 0


def test_a_long_curve_says_that_it_is_means_and_has_every_step_when_it_is_zoomed(alone):
    files, handlers = alone
    reward = {"source": "orchestrator", "reward/mean": 0.0}
    write_metrics(
        files,
        *(reward | {"step": n, "time": 1000.0 + n, "reward/mean": n % 2} for n in range(1, 3001)),
        {"step": 0, "time": 1.0, "source": "eval", "eval/e/reward_mean": 0.0},
    )
    note(files, 1003.5, "death", "trainer")
    (whole,) = handlers.curves(run=["x"], name=["reward/mean"]).series
    (part,) = handlers.curves(run=["x"], name=["reward/mean"], begin=2500, end=2502).series
    assert (len(whole.steps), whole.each, whole.values[0]) == (1500, 2, 0.5)
    assert (whole.firsts[0], whole.steps[0], {*whole.lows}, {*whole.highs}) == (1, 2, {0.0}, {1.0})
    assert part.steps == [2499, 2500, 2501, 2502, 2503] and part.values == [1, 0, 1, 0, 1]
    assert (part.each, part.lows, part.firsts) == (1, [], [])
    for seconds in (1000.0, 1005.5):
        note(files, seconds, "start")
    death, again = deaths(handlers, axis="time")
    # a run that was killed and resumed
    assert (again.step, again.x, again.text) == (5, 1004.5, "rl: restart")
    # a quarter of an hour behind the evaluation of the base model, with which the run began
    assert (death.step, death.x) == (3, 1002.5)


def test_a_step_that_was_trained_once_more_stands_where_it_was_trained_first(alone):
    """A trainer that comes back from a checkpoint trains the batches since then again."""
    files, handlers = alone
    batch = {"source": "orchestrator", "reward/mean": 0.5}
    step = {"source": "trainer", "loss/mean": 0.1}

    def lines(n, time):
        return [{"step": n, "time": time, **batch}, {"step": n, "time": time + 5, **step}]

    write_metrics(files, *(line for n in (1, 2, 3) for line in lines(n, 1000.0 + 10 * n)))
    write_metrics(files, *({"step": n, "time": 1100.0 + n, **step} for n in (2, 3)))
    note(files, 1000.0, "start")
    note(files, 1036.0, "death", "trainer", step=4)
    note(files, 1037.0, "restart", "trainer")
    (loss,) = handlers.curves(run=["x"], name=["loss/mean"], axis="time").series
    assert loss.x == [15, 25, 35]
    marks = [(mark.kind, mark.step, mark.x) for mark in deaths(handlers)]
    assert marks == [("death", 4, 4), ("restart", 4, 4)]
    note(files, 1190.0, "start")
    moments = handlers.timeline(run="x").moments
    assert [each.kind for each in moments if each.process == "rl"] == ["start", "restart"]


def test_over_time_a_metric_stands_where_its_own_line_was_written(alone):
    """A batch is committed long before it is trained, and the step's first line is the commit's."""
    files, handlers = alone
    note(files, 1000.0, "start")
    times = {"reward/mean": [10, 30], "loss/mean": [25, 110], "eval/e/reward_mean": [5, 120]}
    for source, (name, seconds) in zip(
        ("orchestrator", "trainer", "eval"), times.items(), strict=True
    ):
        for step, second in enumerate(seconds, start=source != "eval"):
            write_metrics(
                files, {"step": step, "time": 1000.0 + second, "source": source, name: 0.5}
            )
    found = handlers.curves(run=["x"], name=[*times], axis="time")
    assert [series.x for series in found.series] == [*times.values()]
    assert [mark.x for mark in found.marks if mark.kind == "eval"] == [5, 120]


def test_a_run_lasted_until_its_end_record(alone):
    files, handlers = alone
    for at in (1000.0, 1080.0):
        note(files, at, "start")
    files.run_end.write_bytes(msgspec.json.encode(RunEnd("4 steps done", 1090.0)))
    assert handlers.runs().runs[0].seconds == 90.0 and handlers.timeline(run="x").last == 1090.0
    files.run_end.write_bytes(msgspec.json.encode(RunEnd("4 steps done", 1e300)))
    assert handlers.timeline(run="x").last == 1080.0


def test_two_runs_of_one_name_are_both_shown(tmp_path):
    for name in ("one", "two"):
        make_run(tmp_path / name / "outputs" / "x").status_dir.mkdir()
    places = [tmp_path / "one" / "outputs", tmp_path / "two" / "outputs"]
    keys = {f"{name}/outputs/x": tmp_path / name / "outputs/x" for name in ("one", "two")}
    assert Library(places).keys() == keys
    assert [*Library([places[0], places[0] / "x"]).keys().values()] == [places[0] / "x"]


def test_wrong_questions_are_answered_with_what_is_wrong(client):
    for path, status, words in (
        ("rollouts?sort=nothing", 404, "nothing"),
        ("rollouts?limit=100000", 400, "Expected `int` <= 500 - at `$.limit`"),
        ("rollouts?begin=1.5", 400, "Expected `int | null`, got `str` - at `$.begin`"),
        ("rollouts?tool_errors=perhaps", 400, "Expected `bool`, got `str` - at `$.tool_errors`"),
        ("timeline?begin=x", 400, "Expected `float | null`, got `str` - at `$.begin`"),
        ("timeline?begin=inf", 400, "Expected `float` <= 1e+300 - at `$.begin`"),
        ("rollout?group=1", 400, "missing required field `rollout`"),
        ("curves?axis=y", 400, "Invalid enum value 'y' - at `$.axis`"),
        ("rollout?group=999&rollout=0", 404, "group 999"),
        ("health?other=1", 400, "unknown field `other`"),
        ("log?process=trainer&lines=-5", 400, "Expected `int` >= 1 - at `$.lines`"),
        ("rollouts?lowest=nan", 400, "$.lowest"),
        ("rollouts?lowest=1&highest=0", 404, "give the minimum and the maximum, in this order"),
        ("tokens?step=-1&group=10&rollout=0", 404, "no such batch"),
    ):
        answer = client.get(f"/api/{path}&run=first")
        assert answer.status_code == status, answer.text
        assert words in answer.json()["error"]["message"]


# What the page uses -------------------------------------------------------------------------------


def test_the_page_asks_for_what_there_is_and_the_answers_fit_it(client, ask):
    used = {
        name
        for path in PAGE.glob("*.js")
        for name in re.findall(r'(?:useAnswer|ask)\(\s*"(\w+)"', path.read_text())
    }
    assert used == {route.name for route in ROUTES}
    assert msgspec.json.decode(client.get("/api/runs").content, type=responses.Runs).runs
    for route in ("rollouts", "tasks"):
        assert ask(route).rows


def test_the_libraries_are_as_they_were_taken_and_small():
    vendored = [
        path for path in (PAGE / "vendor").iterdir() if path.suffix in (".mjs", ".js", ".css")
    ]
    versions = (PAGE / "vendor" / "VERSIONS.md").read_text()
    listed = re.findall(r"[\w.]+\.(?:mjs|js|css)(?= \||, uPlot| \|)", versions)
    assert {path.name for path in vendored} == {*listed}
    assert sum(path.stat().st_size for path in vendored) < 150_000


def test_the_dark_theme_is_the_same_whether_chosen_or_of_the_system():
    blocks = re.findall(r"\{([^{}]*--paper: #[^{}]*)\}", (PAGE / "style.css").read_text())
    light, dark, chosen = (
        dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", block)) for block in blocks
    )
    assert dark == chosen and light.keys() == dark.keys()


def test_scripts_are_short_and_make_no_markup_out_of_text():
    for path in [*PAGE.glob("*.js"), *PAGE.glob("*.css")]:
        text = path.read_text()
        assert text.count("\n") <= 400, path
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|dangerously|\beval\(|new "
            r"Function|srcdoc",
            text,
        ), path


@pytest.mark.proof
def test_types_of_the_scripts():
    """TypeScript reads the comments. It comes from npm, once."""
    if not shutil.which("npm"):
        pytest.skip("npm is not there")
    compiler = ["npm", "exec", "--yes", "--package", "typescript@5.9.3", "--", "tsc"]
    command = [*compiler, "-p", str(PAGE / "jsconfig.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode and "error TS" not in done.stdout:
        pytest.skip(f"npm does not get TypeScript: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stdout
