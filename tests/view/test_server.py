"""The server of `rl view`: who is let in, and what it answers, over real HTTP where that
matters."""

import json
import re
import shutil
import socket
import subprocess
import time
from hashlib import sha256
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rl.orchestrator.groups.group_credit import Rules, credit_group
from rl.records.run import Run
from rl.run_dir.access_token import link
from rl.run_dir.events import Event, append_event
from rl.run_dir.metrics import MetricsLog
from rl.run_dir.origin import Origin
from rl.run_dir.spans import Gauges, Span, Start
from rl.run_dir.status import Phase, RoleStatus, RunEnd, write_status
from rl.system import linux, process_table
from rl.system.errors import RunError
from rl.view import responses, runs, tokens
from rl.view.access import PageGate
from rl.view.library import KEPT, Library
from rl.view.rollouts import Wanted, Which
from rl.view.routes import ROUTES, Handlers
from rl.view.server import PAGE, make_app
from rl.wire.rollouts import Group
from tests.records.made import group, make_run, rollout, write_eval_of, write_step
from tests.view.made import HOSTILE, make_cluster_run, make_runs, write_numbers
from tests.view.serving import enter, serving

SECRET = "a-secret-of-this-page"
HOST = "127.0.0.1:8411"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return make_runs(tmp_path_factory.mktemp("view"))


def guarded(library: Library) -> tuple[TestClient, list[str]]:
    """A browser that was not let in yet, and the links that were printed so far."""
    links = list[str]()
    gate = PageGate(
        make_app(library),
        SECRET,
        "127.0.0.1",
        lambda number: links.append(link(SECRET, f"http://{HOST}/", number)),
    )
    return TestClient(gate, base_url=f"http://{HOST}"), links


def let_in(library: Library) -> TestClient:
    found, links = guarded(library)
    enter(found, links[0])
    return found


@pytest.fixture(scope="module")
def client(place) -> TestClient:
    """A browser that was let in."""
    return let_in(Library([place]))


@pytest.fixture(scope="module")
def ask(place):
    """Asks for an answer as the page does."""
    handlers, routes = Handlers(Library([place])), {route.name: route for route in ROUTES}

    def asking(route: str, **values: object):
        pairs = [
            (name, str(one))
            for name, value in values.items()
            for one in (value if isinstance(value, list) else [value])
        ]
        return routes[route].ask(handlers, pairs)

    return asking


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
        log = MetricsLog(files.metrics, "orchestrator")
        for step in (1, 2):
            log.write(
                step,
                {"reward/sums/mean": 1.0} | ({"reward/words/mean": 0.5} if name == "y" else {}),
            )
    files.origin.write_bytes(msgspec.json.encode(Origin("x", 40, 0.0, [])))
    handlers = Handlers(Library([tmp_path]))
    found = handlers.compare(run=["x", "y"])
    assert (
        found.notes == ["y: branch of x at step 40; it began with what that run had learned"]
        and not found.faults
    )
    assert found.learned[-1].rewards == [0.6, 0.75]
    assert {row.key: row.reward for row in handlers.runs().runs} == {"x": 0.6, "y": 0.75}
    names = [
        {one.name for one in handlers.metrics(run=[run]).metrics if one.name.startswith("reward/")}
        for run in ("x", "y")
    ]
    assert names == [{"reward/mean"}, {"reward/mean", "reward/sums/mean", "reward/words/mean"}]


def test_the_place_of_a_run_has_no_detour(tmp_path):
    make_run(tmp_path / "x")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert (
        Library([tmp_path / "y" / ".." / "x"]).place
        == str(tmp_path / "x")
        == str(Run(tmp_path / "x" / "." / ".." / "x").root)
    )
    assert Library([tmp_path / "link"]).places == [tmp_path / "link"]


# Who is let in ------------------------------------------------------------------------------------


def test_a_link_lets_one_browser_in_and_the_next_one_another(place):
    (first, links), (second, _) = guarded(Library([place])), guarded(Library([place]))
    second._transport = first._transport  # another browser at the same server
    for path in (
        "/",
        "/api/runs",
        "/?link=wrong",
        "/?link=",
        f"/{'0' * 32}/",
        f"/{'0' * 32}/api/runs",
    ):
        answer = first.get(path)
        assert (
            answer.status_code == 401
            and "set-cookie" not in answer.headers
            and "has no access" in answer.text
        ), path
    # who only looks whether it is there does not use it
    assert first.head(links[0]).status_code == 401 and len(links) == 1
    answer = enter(first, links[0])
    assert (
        first.get("/api/runs").status_code == first.get("/").status_code == 200 and len(links) == 2
    )
    assert second.get(links[0]).status_code == 401 and not second.cookies and len(links) == 2
    enter(second, links[1])
    assert second.get("/api/runs").status_code == 200 and len({*links}) == 3
    cookie = answer.headers["set-cookie"]
    name, value, folder = re.match(
        r"(rl_view_\w{8})=(\w{32}); HttpOnly; Path=(/\w{32}/); SameSite=strict$", cookie
    ).groups()
    assert (
        folder == first.base_url.path and value not in folder and SECRET not in answer.text + cookie
    )
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
        assert (
            "default-src 'none'" in policy
            and "unsafe" not in policy
            and "script-src 'self'" in policy
        ), path
        assert (
            answer.headers["x-content-type-options"] == "nosniff"
            and answer.headers["referrer-policy"] == "no-referrer"
        )
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
    assert (
        client.get("/page/../server.py").status_code in (401, 404)
        and client.get("/page/%2e%2e/server.py").status_code == 404
    )


def test_it_serves_over_a_socket_and_the_same_answer_twice_is_sent_once(place):
    """As the command does it, with uvicorn and a port of the kernel's choice."""
    with serving(place) as links, httpx.Client() as browser:
        enter(browser, links[0])
        answer = browser.get("/api/curves", params={"run": "first", "name": "reward/mean"})
        assert answer.json()["series"][0]["values"] == [0.1, 0.3, 0.4, 0.7]
        again = browser.get(answer.url, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


# What is answered ---------------------------------------------------------------------------------


def test_runs_with_their_state_and_numbers(ask):
    first, second = sorted(ask("runs").runs, key=lambda row: row.key)
    assert (first.key, second.key, first.step, first.max_steps, first.rewards) == (
        "first",
        "second",
        4,
        9,
        [0.1, 0.3, 0.4, 0.7],
    )
    assert (first.reward, first.lag, first.tokens_per_s, first.state) == (
        0.7,
        0.5,
        100.0,
        "died",
    ) and "trainer" in first.why
    assert second.state == "stopped" and first.bytes > 300_000
    (held_out,) = first.evals
    assert (held_out.name, held_out.first, held_out.last, held_out.last_version) == (
        "held-out",
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
        4,
    )


def test_curves_over_every_axis_with_what_happened(ask):
    names = ["reward/mean", "eval/held-out/reward_mean"]
    by_axis = {
        axis: ask("curves", run=["first"], name=names, axis=axis)
        for axis in ("step", "rollouts", "tokens", "time")
    }
    assert by_axis["step"].series[0].x == [1, 2, 3, 4] and by_axis["rollouts"].series[0].x == [
        8,
        16,
        24,
        32,
    ]
    assert by_axis["tokens"].series[0].x == [200, 400, 600, 800] and by_axis["time"].series[0].x[
        0
    ] == pytest.approx(60, abs=2)
    assert by_axis["rollouts"].series[1].x == [0, 32]  # evaluations of versions 0 and 4
    assert {mark.kind for mark in by_axis["step"].marks} == {"eval", "death"}
    part = ask("curves", run=["first"], name=["reward/mean"], begin=2.5, end=3).series[0]
    # with a point beyond on each side
    assert (part.steps, part.values, part.each) == ([2, 3, 4], [0.3, 0.4, 0.7], 1)
    assert {metric.section for metric in ask("metrics", run=["first"]).metrics} == {
        "Rewards",
        "Rollouts, tasks and lag",
        "Evaluations",
        "Loss and agreement",
        "Seconds and throughput",
        "Other",
    }


def test_rollouts_are_filtered_counted_sorted_and_paged_by_the_server(ask):
    every = ask("rollouts", run="first")
    assert (every.total, every.facets["why"], len(every.rows)) == (
        24,
        {"trained": 16, "no_signal": 8},
        24,
    )
    assert [row.step for row in every.rows[::6]] == [4, 3, 2, 1]
    some = ask(
        "rollouts",
        run="first",
        begin=2,
        end=3,
        why="trained",
        lowest=0.5,
        sort="task",
        descending="false",
        limit=3,
        offset=1,
    )
    newest_of_equals = [(3, 1, 1.0), (3, 7, 1.0), (2, 7, 1.0)]
    assert (some.total, [(row.step, row.task, row.reward) for row in some.rows]) == (
        4,
        newest_of_equals,
    )
    assert some.facets["why"] == {"no_signal": 4, "trained": 4} and sum(some.histogram.counts) == 8
    found = ask("rollouts", run="first", q="THE ANSWER IS 3")
    assert (found.total, found.searched, found.complete) == (2, 24, True)
    assert ask("rollouts", run="first", tool_errors="true").total == 8
    assert ask("rollouts", run="first", kind="eval", begin=4).total == 3


def test_a_rollout_says_why_it_was_not_trained(ask):
    silent = ask("rollout", run="first", group=11, rollout=0)
    assert (
        silent.explanation
        == "Not trained: all 2 rewards of its group are 1, so no answer was better than the "
        "others and there is nothing to learn from it."
    )
    trained = ask("rollout", run="first", group=10, rollout=1)
    assert (
        trained.explanation
        == "Trained in step 1 with advantage +0.500: its reward is above the mean of its group, "
        "0.500."
    )
    assert (
        [row.rollout for row in trained.group] == [0, 1]
        and trained.metrics == {"exact": 1.0}
        and trained.has_tokens
    )


def test_a_conversation_has_thinking_and_calls_apart_and_no_character_that_acts(ask):
    system, user, assistant, tool, odd = ask("rollout", run="first", group=12, rollout=0).messages
    assert (assistant.thinking, assistant.text) == (f"let me see {HOSTILE[1]}", "calling")
    assert (assistant.calls[0].name, json.loads(assistant.calls[0].arguments)) == (
        "<b>tool</b>",
        {"code": HOSTILE[1]},
    )
    assert (
        (tool.name, odd.role, odd.left_out) == ("c", "<i>odd</i>", 100_000)
        and "image_url" in user.text
        and system.role == "system"
    )
    texts = " ".join(
        message.text for message in ask("rollout", run="first", group=12, rollout=1).messages
    )
    assert (
        "\\x1b[2J" in texts
        and "\\u202egnp.exe" in texts
        and not re.search(r"[\x00-\x08\x1b\u202e]", texts)
    )


def test_tokens_with_what_sampler_and_trainer_made_of_them(ask):
    whole = ask("tokens", run="first", step=2, group=20, rollout=0)
    assert whole.pieces == ["2", "+", "<script>", "four", "</span>"] and whole.trained == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert whole.values["gap"] == [None, None, 0.0, 0.25, -1.0] and whole.values["stopped"] == [
        None,
        None,
        0,
        0,
        1,
    ]
    assert whole.values["ratio"][2:] == [1.0, 1.28403, 0.367879] and whole.values["versions"][
        2:
    ] == [1, 1, 1]
    assert (
        whole.values["advantages"][2:] == [1.0, 1.0, 1.0]
        and "teacher_gap" not in whole.values.keys() | whole.signals.keys()
    )
    part = ask("tokens", run="first", step=2, group=20, rollout=0, offset=3, limit=1)
    assert (part.total, part.starts, part.offset, part.pieces, part.values["gap"]) == (
        5,
        [0],
        3,
        ["four"],
        [0.25],
    )
    assert part.signals == whole.signals and (
        part.signals["gap"].most,
        part.signals["versions"].values,
    ) == (1.0, [1.0])


def test_the_mismatch_of_a_model_in_float32_is_not_rounded_away():
    gaps = np.array([-2.0004e-5, 3e-5, np.nan, -12.3456, 0.0], np.float32)
    assert tokens.rounded(gaps, 4) == [-2e-5, 3e-5, None, -12.35, 0.0]
    assert tokens.rounded(np.exp(gaps[:2]), tokens.DIGITS["ratio"]) == [0.99998, 1.00003]


def test_the_words_of_tokens_are_those_of_a_model_that_is_here_and_nothing_is_fetched(
    tmp_path, monkeypatch
):
    files = make_run(tmp_path / "x", model={"name": "owner/big"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found, note = tokens.tokenizer_of(Run(files.root))
    assert found is None and note.startswith(
        "tokens are shown by their ids: the tokenizer of owner/big is neither on this "
        "machine nor in "
    )
    assert note.endswith("weights: `hf download owner/big tokenizer.json` gets it")
    folder = tmp_path / "cache/rl/models/owner--big"
    folder.mkdir(parents=True)
    Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    assert tokens.tokenizer_of(Run(files.root))[0].id_to_token(0) == "<unk>"


def test_a_task_over_time(ask):
    rows = {row.task: row for row in ask("tasks", run="first").rows}
    assert {task: row.rollouts for task, row in rows.items()} == {0: 4, 1: 4, 2: 8, 7: 8} and rows[
        2
    ].change == 0.0
    one = ask("task", run="first", env="sums", task=1)
    assert [(version.version, version.mean, len(version.rows)) for version in one.versions] == [
        (0, 0.5, 2),
        (2, 0.5, 2),
    ]
    assert [message.text for message in one.prompt] == ["2 + 2"]


def test_time_health_logs_and_differences(ask):
    found = ask("timeline", run="first")
    assert {(lane.process, lane.name) for lane in found.lanes} == {
        ("trainer", "step"),
        ("orchestrator", "step"),
    } and len(found.lanes[0].spans) == 6
    assert ("death", "death: <b>killed</b>") in {
        (moment.kind, moment.text) for moment in found.moments
    }
    assert (
        ask("health", run="first").state == "died"
        and "trainer" in ask("health", run="first").bottleneck
    )
    assert ask("log", run="first", process="trainer").lines == [
        "<script>window.hacked = 1</script>",
        "ValueError: \\x1b[31mred",
    ]
    compared = ask("compare", run=["first", "second"])
    assert [(row.key, row.values) for row in compared.settings] == [
        ("trainer.optim.lr", ["1e-06", "5e-06"])
    ]
    assert [(point.version, point.means[1]) for point in compared.evals] == [(0, None), (4, None)]


def test_machines_of_a_cluster_have_rows_and_no_lines(tmp_path):
    make_cluster_run(tmp_path / "x")
    found = Handlers(Library([tmp_path / "x"])).health(run="x")
    assert [(row.index, row.host, row.does, row.facts, row.state) for row in found.machines] == [
        (0, "<b>host0", "trains and leads", "8 GPUs, 8 ranks in generation 0", "lost"),
        (1, "<b>host1", "serves", "8 GPUs", "lost"),
        (2, "", "serves", "", "absent"),
    ]
    assert [row.processes for row in found.machines] == [
        ["rl", "trainer-node0"],
        ["trainer-node1"],
        [],
    ]
    first = found.machines[0]
    assert (
        first.since
        and first.heard
        and 6590 < first.heard - first.since < 6610
        and time.time() - first.heard > 599
    )
    assert found.machines[2].since is None and not any(
        line.startswith("machine ") for line in found.lines
    )


def test_nobody_is_said_to_do_nothing_while_a_step_is_trained(alone):
    """What is under way is in no span yet: the trainer's phase, requests in flight, a process
    that starts."""
    files, handlers = alone
    now = time.time()
    for process, lines in {
        "inference": [
            Span(name="sampling", begin=20.0, end=30.0, lane="requests"),
            Gauges(at=30.5, values={"requests": 0}),
        ],
        "trainer": [
            Span(name="waiting_for_batch", begin=12.0, end=30.0, lane="phase"),
            Gauges(at=98.0, values={"progress": 3}),
        ],
    }.items():
        data = [
            Start(process=process, pid=1, host="h", place="", time=now, monotonic=100.0),
            *lines,
        ]
        (files.spans / f"{process}.jsonl").write_bytes(
            b"".join(msgspec.json.encode(line) + b"\n" for line in data)
        )
    append_event(files.events, Event(time=now - 99, event="start", process="rl"))
    append_event(files.events, Event(time=now - 95, event="start", process="inference"))

    def status(phase: Phase, since: float) -> list[tuple[float, float]]:
        fields = {
            "pid": 1,
            "host": "elsewhere",
            "waiting_for": phase.waits_for,
            "since": now + since - 100,
            "heartbeat": now,
        }
        write_status(
            files.status("trainer"), RoleStatus(process="trainer", phase=phase, step=1, **fields)
        )
        quiet = handlers.timeline(run="x").quiet
        return [(round(one.begin - now + 100, 1), round(one.end - now + 100, 1)) for one in quiet]

    assert status(Phase.TRAINING, 30.0) == []
    assert status(Phase.TRAINING, 60.0) == [(30.0, 60.0)]
    # the phase before has ended since the last that was written
    assert status(Phase.PUBLISHING, 98.5) == []
    # and what is behind is not written yet
    assert status(Phase.WAITING_FOR_BATCH, 30.0) == [(30.0, 98.0)]
    with (files.spans / "inference.jsonl").open("ab") as file:
        file.writelines(
            msgspec.json.encode(Gauges(at=at, values={"requests": 61})) + b"\n"
            for at in (60.0, 62.0, 64.0)
        )
    assert status(Phase.WAITING_FOR_BATCH, 30.0) == [(30.0, 60.0), (68.0, 98.0)]
    with pytest.raises(RunError, match=r"^begin = 1795402589.404 is after end = 1$"):
        handlers.timeline(run="x", begin=1795402589.404, end=1.0)


def test_of_many_equal_spans_as_many_are_shown_as_may_be(alone, monkeypatch):
    monkeypatch.setattr("rl.view.timeline.MOST_SPANS", 6)
    files, handlers = alone
    clock = Start(process="trainer", pid=1, host="h", place="", time=1000.0, monotonic=0.0)
    lines = [
        Span(name="step", begin=2.0 * i, end=2.0 * i + (1.5 if i == 8 else 0.5), lane="step")
        for i in range(10)
    ]
    (files.spans / "trainer.jsonl").write_bytes(
        b"".join(msgspec.json.encode(line) + b"\n" for line in (clock, *lines))
    )
    found = handlers.timeline(run="x")
    assert [span.begin - 1000 for lane in found.lanes for span in lane.spans] == [0, 2, 4, 6, 8, 16]
    assert found.note.startswith(
        "the 6 longest of 10 spans: some of 0.5 s or less are missing here"
    )


def test_rewards_after_as_many_rollouts_are_those_of_the_newest_step_at_least():
    at, values = np.array([100.0, 200.0, 300.0]), np.array([0.1, 0.2, 0.3])
    assert [runs.mean_before(at, values, place, 48.0) for place in (50.0, 120.0, 290.0, 300.0)] == [
        None,
        0.1,
        0.2,
        0.3,
    ]
    assert runs.mean_before(at, values, 300.0, 150.0) == pytest.approx(0.25)


def test_reading_a_run_leaves_it_as_it_is(ask, place):
    def looks() -> str:
        files = sorted(path for path in (place / "first").rglob("*") if path.is_file())
        return sha256(
            b"".join(
                f"{path} {path.stat().st_mtime_ns}".encode() + path.read_bytes() for path in files
            )
        ).hexdigest()

    before = looks()
    for route, values in {
        "runs": {},
        "rollouts": {"q": "x"},
        "tasks": {},
        "health": {},
        "timeline": {},
        "metrics": {},
    }.items():
        ask(
            route,
            **({} if route == "runs" else {"run": ["first"] if route == "metrics" else "first"}),
            **values,
        )
    assert looks() == before


def test_a_run_of_another_version_of_rl_is_shown_as_far_as_it_can_be(tmp_path):
    run = make_runs(tmp_path) / "first"
    (run / "config.toml").write_text("bogus = [1]\n")
    handlers, routes = Handlers(Library([run])), {route.name: route for route in ROUTES}
    (row,) = routes["runs"].ask(handlers, []).runs
    assert (row.key, row.state, row.step) == (
        "first",
        "unreadable",
        4,
    ) and "was not written by this version" in row.why
    assert routes["rollouts"].ask(handlers, [("run", "first")]).total == 24
    assert (
        routes["rollout"]
        .ask(handlers, [("run", "first"), ("group", "10"), ("rollout", "1")])
        .explanation.startswith("Trained in step 1")
    )
    assert (
        routes["tokens"]
        .ask(handlers, [("run", "first"), ("step", "2"), ("group", "20"), ("rollout", "0")])
        .total
        == 5
    )
    found = routes["health"].ask(handlers, [("run", "first")])
    assert found.state == "unreadable" and found.processes[0].name == "trainer"
    assert (
        routes["timeline"].ask(handlers, [("run", "first")]).lanes
        and routes["compare"].ask(handlers, [("run", "first")]).faults
    )


def test_the_state_of_a_run_is_followed(alone, monkeypatch):
    """Live, killed, live again, ended, as its files and processes say it."""
    monkeypatch.setattr(runs, "LIVE_S", 0.0)
    (files, handlers), said = alone, []

    def state() -> None:
        (row,) = handlers.runs().runs
        assert row.state == handlers.health(run="x").state
        said.append((row.state, row.why))

    for _ in range(2):
        process = subprocess.Popen(["sleep", "60"])
        fields = {
            "pid": process.pid,
            "host": socket.gethostname(),
            "place": linux.pid_scope(),
            "start_ticks": process_table.entry(process.pid).start,
            "heartbeat": time.time(),
            "phase": Phase.TRAINING,
        }
        write_status(files.status("trainer"), RoleStatus(process="trainer", step=3, **fields))
        state()
        process.kill()
        process.wait()
        state()
    files.run_end.write_bytes(msgspec.json.encode(RunEnd("9 steps done", time.time())))
    files.checkpoint(9).mkdir(parents=True)
    (files.checkpoint(9) / "manifest.json").write_text(
        '{"step": 9, "world_size": 1, "model": {}, "files": {}}'
    )
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
        failed = {"error": "boom", "cause": "environment"}
        rollouts = [
            rollout(1.0, step, episode=0),
            rollout(0.0, turns=[], episode=1, **failed),
            rollout(0.5, step, episode=2),
        ]
        one = Group(group_id=step, env="sums", task=1, rollouts=rollouts)
        write_step(
            files,
            step,
            [credit_group(one, Rules()), group(10 + step, [1.0, 1.0], task=2, version=step - 1)],
        )
    write_eval_of(files, 0, [0.0, 1.0])
    write_eval_of(files, 8, [0.0, 1.0])
    rows = handlers.tasks(run="x", number=1).rows
    assert [(row.rollouts, row.first, row.last, row.change) for row in rows] == [
        (6, 0.75, 0.75, 0.0)
    ]
    assert [row.change for row in handlers.tasks(run="x", kind="eval").rows] == [
        0.0,
        0.0,
    ]
    one = handlers.task(run="x", env="sums", task=1)
    assert [(version.version, version.mean) for version in one.versions] == [
        (1, 0.75),
        (2, 0.75),
        (3, 0.75),
    ] and one.without_version == 3
    found = handlers.rollouts(Wanted(run="x", why="error"))
    assert (found.total, found.facets["why"]["error"]) == (9, 9)
    assert {(row.why, row.reward) for row in found.rows} == {
        ("environment", None),
        ("error", 1.0),
        ("error", 0.5),
    }
    assert handlers.rollouts(Wanted(run="x", lowest=-1.0)).total == 12  # of 15


def test_a_change_of_an_evaluation_is_clear_beyond_twice_its_error(tmp_path):
    files, log = make_run(tmp_path / "x"), MetricsLog(tmp_path / "x" / "metrics.jsonl", "eval")
    files.status_dir.mkdir()
    for version, noise, gain in ((0, 0.1332, 0.5), (8, 0.1333, 0.75)):
        means = {
            "eval/noise/reward_mean": noise,
            "eval/gain/reward_mean": gain,
            "eval/alone/reward_mean": gain,
        }
        log.write(
            version,
            means
            | {"eval/noise/reward_mean_stderr": 0.003, "eval/gain/reward_mean_stderr": 0.0625},
        )
    (row,) = Handlers(Library([tmp_path / "x"])).runs().runs
    assert {one.name: one.clear for one in row.evals} == {
        "noise": False,
        "gain": True,
        "alone": True,
    }


def test_worked_examples_belong_to_the_prompt(alone):
    files, handlers = alone
    talk = [
        {"role": role, "content": role[0] + str(i)}
        for i in range(2)
        for role in ("user", "assistant")
    ]
    write_step(
        files,
        1,
        [
            group(1, [0.0, 1.0], task=1, messages=talk, num_prompt_messages=3),
            group(2, [0.0, 1.0], task=2, messages=talk),
        ],
    )
    for task, prompt, shown in ((1, 3, ["u0", "a0", "u1"]), (2, 0, ["u0"])):
        detail = handlers.rollout(Which(run="x", group=task, rollout=1))
        assert detail.prompt == prompt and [message.text for message in detail.messages] == [
            "u0",
            "a0",
            "u1",
            "a1",
        ]
        assert [
            message.text for message in handlers.task(run="x", env="sums", task=task).prompt
        ] == shown


def test_a_bar_of_the_histogram_finds_what_it_counts(alone):
    files, handlers = alone
    write_step(files, 1, [group(i, [i / 6, 2 / 3]) for i in range(7)])
    histogram = handlers.rollouts(Wanted(run="x")).histogram
    for count, ends in zip(histogram.counts, histogram.ranges, strict=True):
        if count:
            lowest, highest = (float(json.loads(json.dumps(end))) for end in ends)
            assert handlers.rollouts(Wanted(run="x", lowest=lowest, highest=highest)).total == count
    assert (
        sum(histogram.counts) == 14 and histogram.ranges.count([]) == histogram.counts.count(0) > 0
    )


def test_a_long_curve_says_that_it_is_means_and_has_every_step_when_it_is_zoomed(alone):
    files, handlers = alone
    lines = [
        {"step": step, "time": 1000.0 + step, "source": "orchestrator", "reward/mean": step % 2}
        for step in range(1, 3001)
    ]
    lines.append({"step": 0, "time": 1.0, "source": "eval", "eval/e/reward_mean": 0.0})
    files.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    append_event(files.events, Event(time=1003.5, event="death", process="trainer"))
    (whole,) = handlers.curves(run=["x"], name=["reward/mean"]).series
    (part,) = handlers.curves(run=["x"], name=["reward/mean"], begin=2500, end=2502).series
    assert (len(whole.steps), whole.each, whole.values[0], part.lows, part.firsts) == (
        1500,
        2,
        0.5,
        [],
        [],
    )
    assert (whole.firsts[0], whole.steps[0], {*whole.lows}, {*whole.highs}) == (1, 2, {0.0}, {1.0})
    assert (part.steps, part.values, part.each) == (
        [2499, 2500, 2501, 2502, 2503],
        [1, 0, 1, 0, 1],
        1,
    )
    for seconds in (1000.0, 1005.5):
        append_event(files.events, Event(time=seconds, event="start", process="rl"))
    death, again = [
        mark
        for mark in handlers.curves(run=["x"], axis="time").marks
        if mark.kind in ("death", "restart")
    ]
    # a run that was killed and resumed
    assert (again.step, again.x, again.text) == (5, 1004.5, "rl: restart")
    # a quarter of an hour behind the evaluation of the base model, with which the run began
    assert (death.step, death.x) == (3, 1002.5)


def test_a_step_that_was_trained_once_more_stands_where_it_was_trained_first(alone):
    """A trainer that comes back from a checkpoint trains the batches since then again. A batch
    that was made anew is another one."""
    files, handlers = alone
    batch = {"source": "orchestrator", "reward/mean": 0.5}
    step = {"source": "trainer", "loss/mean": 0.1}
    lines = [
        {"step": n, "time": 1000.0 + 10 * n + late, **what}
        for n in (1, 2, 3)
        for late, what in ((0, batch), (5, step))
    ]
    lines += [{"step": n, "time": 1100.0 + n, **step} for n in (2, 3)]
    files.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    append_event(files.events, Event(time=1000.0, event="start", process="rl"))
    append_event(files.events, Event(time=1036.0, event="death", process="trainer", step=4))
    append_event(files.events, Event(time=1037.0, event="restart", process="trainer"))
    (loss,) = handlers.curves(run=["x"], name=["loss/mean"], axis="time").series
    assert loss.x == [15, 25, 35]
    marks = [
        (mark.kind, mark.step, mark.x)
        for mark in handlers.curves(run=["x"]).marks
        if mark.kind in ("death", "restart")
    ]
    assert marks == [("death", 4, 4), ("restart", 4, 4)]
    with files.metrics.open("a") as file:
        file.writelines(
            json.dumps({"step": 3, "time": 1200.0 + late, **what}) + "\n"
            for late, what in ((0, batch), (5, step))
        )
    append_event(files.events, Event(time=1190.0, event="start", process="rl"))
    (loss,) = handlers.curves(run=["x"], name=["loss/mean"], axis="time").series
    assert loss.x == [15, 25, 205]
    happened = [
        (moment.process, moment.kind)
        for moment in handlers.timeline(run="x").moments
        if moment.process == "rl"
    ]
    assert happened == [("rl", "start"), ("rl", "restart")]


def test_over_time_a_metric_stands_where_its_own_line_was_written(alone):
    """A batch is committed long before it is trained, and the step's first line is the commit's."""
    files, handlers = alone
    append_event(files.events, Event(time=1000.0, event="start", process="rl"))
    times = {
        "orchestrator": (1010.0, 1030.0),
        "trainer": (1025.0, 1110.0),
        "eval": (1005.0, 1120.0),
    }
    names = {"orchestrator": "reward/mean", "trainer": "loss/mean", "eval": "eval/e/reward_mean"}
    for source, two in times.items():
        for step, second in enumerate(two, start=source != "eval"):
            with files.metrics.open("a") as file:
                file.write(
                    json.dumps({"step": step, "time": second, "source": source, names[source]: 0.5})
                    + "\n"
                )
    found = handlers.curves(run=["x"], name=[*names.values()], axis="time")
    places = {one.name: one.x for one in found.series}
    assert places == {
        "reward/mean": [10, 30],
        "loss/mean": [25, 110],
        "eval/e/reward_mean": [5, 120],
    }
    assert [mark.x for mark in found.marks if mark.kind == "eval"] == [5, 120]


def test_a_run_lasted_until_its_end_record(alone):
    files, handlers = alone
    for at in (1000.0, 1080.0):
        append_event(files.events, Event(time=at, event="start", process="rl"))
    files.run_end.write_bytes(msgspec.json.encode(RunEnd("4 steps done", 1090.0)))
    assert (
        handlers.runs().runs[0].seconds,
        handlers.timeline(run="x").last,
    ) == (90.0, 1090.0)
    files.run_end.write_bytes(msgspec.json.encode(RunEnd("4 steps done", 1e300)))
    assert handlers.timeline(run="x").last == 1080.0


def test_two_runs_of_one_name_are_both_shown(tmp_path):
    for name in ("one", "two"):
        make_run(tmp_path / name / "outputs" / "x").status_dir.mkdir()
    places = [tmp_path / "one" / "outputs", tmp_path / "two" / "outputs"]
    assert Library(places).keys() == {str(place / "x"): place / "x" for place in places}
    assert [*Library([places[0], places[0] / "x"]).keys().values()] == [places[0] / "x"]


def test_wrong_questions_are_answered_with_what_is_wrong(client):
    for path, status, words in (
        ("rollouts?run=first&sort=nothing", 409, "nothing"),
        (
            "rollouts?run=first&limit=100000",
            400,
            "limit = 100000: give a whole number from 1 to 500",
        ),
        ("rollouts?run=first&begin=1.5", 400, "begin = 1.5: give a whole number"),
        (
            "rollouts?run=first&tool_errors=perhaps",
            400,
            "tool_errors = perhaps: give true or false",
        ),
        ("rollout?run=first&group=xyz&rollout=0", 400, "group = xyz: give a whole number"),
        ("timeline?run=first&begin=x", 400, "begin = x: give a number"),
        ("rollout?run=first&group=1", 400, "rollout: is missing; give a whole number"),
        ("curves?run=first&axis=y", 400, "axis = y: give one of step, rollouts, tokens, time"),
        ("rollout?run=first&group=999&rollout=0", 409, "group 999"),
        ("health?run=first&other=1", 400, "no such parameter"),
        (
            "log?run=first&process=trainer&lines=-5",
            400,
            "lines = -5: give a whole number from 1 to 2000",
        ),
        (
            "log?run=first&process=trainer&lines=2001",
            400,
            "lines = 2001: give a whole number from 1 to 2000",
        ),
        ("rollouts?run=first&lowest=nan", 400, "lowest = nan: give a number"),
        (
            "rollouts?run=first&lowest=1&highest=0",
            409,
            "reward = (1.0, 0.0): give the minimum and the maximum, in this order",
        ),
        ("timeline?run=first&begin=inf", 400, "begin = inf: give a number"),
        (
            "tokens?run=first&step=-1&group=10&rollout=0",
            409,
            "step = -1: give a whole number from 1",
        ),
    ):
        answer = client.get(f"/api/{path}")
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), (
            answer.text
        )


# What the page uses -------------------------------------------------------------------------------


def test_the_page_asks_for_what_there_is_and_the_answers_fit_it(client, ask):
    used = {
        name
        for path in PAGE.glob("*.js")
        for name in re.findall(r'(?:useAnswer|ask)\(\s*"(\w+)"', path.read_text())
    }
    assert used == {route.name for route in ROUTES}
    assert msgspec.json.decode(client.get("/api/runs").content, type=responses.Runs).runs
    lists = {"runs": "runs", "rollouts": "rows", "tasks": "rows"}
    for route in ROUTES:
        if route.name in lists:
            assert getattr(
                ask(route.name, **({} if route.name == "runs" else {"run": "first"})),
                lists[route.name],
            )


def test_the_libraries_are_as_they_were_taken_and_small():
    vendored = [
        path for path in (PAGE / "vendor").iterdir() if path.suffix in (".mjs", ".js", ".css")
    ]
    assert sum(path.stat().st_size for path in vendored) < 150_000 and {
        path.name for path in vendored
    } == set(
        re.findall(
            r"[\w.]+\.(?:mjs|js|css)(?= \||, uPlot| \|)",
            (PAGE / "vendor" / "VERSIONS.md").read_text(),
        )
    )
    assert {path.name for path in (PAGE / "vendor").glob("LICENSE-*")} == {
        "LICENSE-preact",
        "LICENSE-htm",
        "LICENSE-uPlot",
    }


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
    command = [
        "npm",
        "exec",
        "--yes",
        "--package",
        "typescript@5.9.3",
        "--",
        "tsc",
        "-p",
        str(PAGE / "jsconfig.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode and "error TS" not in done.stdout:
        pytest.skip(f"npm does not get TypeScript: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stdout
