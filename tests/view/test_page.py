"""The page in a real browser: what it shows, that its links lead there, that no text of a
rollout becomes more than text."""

import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product

import msgspec
import pytest
from starlette.datastructures import QueryParams

from rl.launch.children import Children
from rl.orchestrator.groups.group_credit import credit_group
from rl.run_dir.paths import RunDir
from rl.system.errors import RunError
from rl.view.export import recorded
from rl.view.library import Library
from rl.view.main import main as view
from rl.view.server import ROUTES, Handlers
from rl.view.tasks import SORTS
from rl.wire.rollouts import Group
from tests.records import made
from tests.view.browser import Tab
from tests.view.browser import browser as browser
from tests.view.made import HOSTILE, make_cluster_run, make_runs, write_numbers
from tests.view.serving import serving

FITS = "document.documentElement.scrollWidth <= innerWidth"


def leave(tab):
    """To the list of runs, until nothing more is asked of a run that goes."""
    tab.go("#/runs")
    tab.page.wait_for_selector(".runs tbody tr")
    tab.page.wait_for_load_state("networkidle")


PAGES = {
    "runs": ("#/runs", ".runs tbody tr"),
    "curves": ("#/curves?run=first", ".chart canvas"),
    "rollouts": ("#/rollouts?run=first", ".rows li"),
    "tokens": ("#/rollouts?run=first&at=10/0&tab=tokens", ".tokens .t"),
    "tasks": ("#/tasks?run=first&env=sums&task=7", ".side"),
    "timeline": ("#/timeline?run=first", ".lanes rect"),
    "health": ("#/health?run=first&process=trainer", ".log pre span"),
    "compare": ("#/compare?run=first&run=second", ".chart canvas"),
}
"""The address of each, and what is there when it is shown."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def links(place):
    with serving(place) as found:
        yield found


@pytest.fixture(scope="module")
def opened(browser, links):
    found = Tab(browser, links)
    yield found
    found.close()


@pytest.fixture
def tab(opened):
    """One tab for all tests: to open one takes a second."""
    yield opened
    assert not opened.faults and opened.page.evaluate("window.hacked") is None


def test_the_cookie_is_sent_to_no_other_server_of_this_host(tab):
    """A browser sends a cookie to every port of its host, but not to every folder."""
    sent = list[tuple[str, str | None]]()

    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            sent.append((self.path, self.headers["cookie"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever).start()
        page = tab.context.new_page()
        for path in ("", "api/runs", "page/"):
            page.goto(f"http://127.0.0.1:{server.server_port}/{path}")
        page.close()
        server.shutdown()
    assert {cookie for _, cookie in sent} == {None}
    assert {"/", "/api/runs", "/page/"} <= {path for path, _ in sent}


def test_the_address_no_longer_has_the_link_and_runs_are_listed(tab):
    assert "link" not in tab.page.url and tab.page.evaluate("document.cookie") == ""
    assert sorted(tab.page.locator(".runs .name a").all_inner_texts()) == ["first", "second"]
    row = tab.page.locator(".runs tbody tr", has_text="first")
    assert all(text in row.inner_text() for text in ("died", "0.700", "0.333 → 0.667"))
    for box in tab.page.locator(".runs input[type=checkbox]").all():
        box.check()
    tab.page.get_by_role("button", name="Compare 2").click()
    assert "trainer.optim.lr" in tab.text(".sides table")
    assert sorted(tab.text(".legend").split()) == ["first", "second"]
    tab.page.wait_for_selector(".chart canvas")


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_every_page_fits_its_window_and_has_names_for_a_screen_reader(browser, links, width, theme):
    found = Tab(browser, links, viewport={"width": width, "height": 800}, color_scheme=theme)
    for name, (where, shown) in PAGES.items():
        found.go(where)
        found.page.wait_for_selector(shown)
        assert found.count("main h1") == 1
        assert found.page.evaluate(FITS), name
        assert found.page.evaluate(UNNAMED) == [], name
        if name == "tokens":
            assert found.page.evaluate(SAMPLES) == 27
        assert found.page.evaluate(PALE) == [], name
        left, right = found.page.evaluate(
            "{const box = document.querySelector('nav "
            "[aria-current]').getBoundingClientRect(); [box.left, box.right]}"
        )
        assert 0 <= left < right <= width, name
    found.close()


UNNAMED = """() => [...document.querySelectorAll('button, a, select, input')].filter((one) => one.checkVisibility() && !(
  one.textContent.trim() || one.ariaLabel || one.title || one.labels?.[0]?.textContent.trim())).map((one) => one.outerHTML.slice(0, 200))"""
"""Controls without a name."""
SAMPLES = """() => {
  const add = (kind, colour) => { const one = document.createElement('span'); [one.className, one.textContent, one.style.color] = [kind, 'x', colour]; document.querySelector('.tokens').append(one); };
  const kinds = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).map((rule) => /^\\.([qsv]-?\\d)$/.exec(rule.selectorText ?? '')?.[1]).filter(Boolean);
  kinds.forEach((kind) => add(`t ${kind}`, ''));
  for (let i = 0; i < 8; i++) add('', `var(--c${i})`);
  return kinds.length + 8;
}"""
"""Adds a token of each colour, and text in the colour of each line of a chart."""
PALE = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const grounds = (one) => one ? [...grounds(one.parentElement), rgb(getComputedStyle(one).backgroundColor)] : [[255, 255, 255, 255]];
  const behind = (one) => grounds(one).reduce((below, above) => below.map((c, i) => c + (above[i] - c) * above[3] / 255));
  const found = new Set();
  for (const one of document.querySelectorAll('main *, header *')) {
    if (!one.checkVisibility() || one.closest('button:disabled, svg, .sr') || ![...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
    const [a, b] = [light(rgb(getComputedStyle(one).color)), light(behind(one))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.add(`${one.className || one.tagName}: ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
  }
  return [...found];
}"""
"""Text whose contrast is below that of WCAG's AA, 4.5."""


def test_of_many_runs_each_has_a_row_and_the_best_is_in_sight(tab, place):
    for i in range(6):
        run = made.make_run(place / f"many{i}", trainer={"optim": {"lr": 5e-6 * (i + 1)}})
        write_numbers(run, [0.1, 0.2, 0.3, 0.31 + i / 10])
    for width in (390, 1280):
        tab.page.set_viewport_size({"width": width, "height": 800})
        tab.go("#/compare?" + "&".join(f"run=many{i}" for i in range(6)))
        tab.until(
            "document.querySelectorAll('.compared table').length === 2 && "
            "!!document.querySelector('.chart .reading')"
        )
        learned = tab.page.locator(".compared table").last
        assert learned.locator("tbody tr").count() == 6
        assert learned.locator("td.best").all_inner_texts() == ["0.810"]
        assert tab.page.evaluate(FITS)
    assert "many5" in learned.locator("tr", has=tab.page.locator("td.best")).inner_text()
    assert "4 of 6 runs" in tab.text(".chart .reading")
    tab.go("#/compare?run=first&run=first")
    assert tab.text(".fault") == "Select at least two runs in Runs to compare them."
    leave(tab)
    for i in range(6):
        shutil.rmtree(place / f"many{i}")
    tab.until("document.querySelectorAll('.runs tbody tr').length === 2")


def test_curves_are_searched_and_lead_to_the_rollouts_of_a_step(tab):
    tab.go(PAGES["curves"][0])
    tab.page.wait_for_selector(".chart canvas")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("reward/mean")
    tab.until(
        "document.querySelectorAll('.chart').length === 1 && location.hash.includes('q=reward')"
    )
    box = tab.page.locator(".chart .u-over").bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 40)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 60, steps=4)
    tab.page.mouse.up()
    tab.until("/from=(1.9|2.0)/.test(location.hash)")
    tab.page.get_by_role("button", name="Whole run").click()
    tab.until("!location.hash.includes('from=')")
    box = tab.page.locator(".chart .u-over").bounding_box()
    tab.page.mouse.click(box["x"] + box["width"] - 3, box["y"] + 50)
    tab.until("location.hash.startsWith('#/rollouts') && location.hash.includes('begin=4')")
    tab.until("document.querySelector('.list [aria-live]').innerText === '6 rollouts'")


def test_charts_are_read_and_opened_by_keys(tab):
    tab.go("#/curves?run=first&q=reward%2Fmean&from=1.5&to=4.2")
    tab.page.wait_for_selector(".chart canvas")
    tab.page.locator("select").last.focus()
    for _ in range(8):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate("document.activeElement.matches('.plot')"):
            break
    # the last as far as one sees
    for times, said in ((1, "step 4 0.7"), (1, "step 3 0.4"), (4, "step 2 0.3")):
        for _ in range(times):
            tab.page.keyboard.press("ArrowLeft")
        tab.until(f"document.querySelector('.chart [aria-live]').innerText === '{said}'")
    tab.page.keyboard.press("Home")
    tab.until("!location.hash.includes('from=')")
    tab.page.keyboard.press("ArrowLeft")
    tab.page.keyboard.press("ArrowLeft")
    tab.page.keyboard.press("Enter")
    tab.until("location.hash.startsWith('#/rollouts') && location.hash.includes('begin=3')")


def test_keys_of_pages_do_nothing_behind_the_help_and_no_time_of_day_is_said_to_be_none(tab):
    tab.go(PAGES["timeline"][0])
    tab.page.wait_for_selector(".lanes rect")
    tab.page.keyboard.press("?")
    assert "from point to point" in tab.text("dialog")
    for key in "1236jk/":
        tab.page.keyboard.press(key)
    assert tab.page.url.endswith(PAGES["timeline"][0]) and tab.count("dialog[open]") == 1
    tab.page.keyboard.press("Escape")
    clock = tab.page.locator("[data-search]")
    clock.fill("25:99")
    clock.press("Enter")
    assert tab.text(".bad[role=alert]") == "give a time of day, such as 10:41 or 10:41:30"


def test_each_section_of_the_curves_opens_from_its_title_and_from_an_address(tab):
    tab.go("#/curves?run=first&sections=none")
    tab.page.wait_for_selector("details.section")
    for summary in tab.page.locator("details.section > summary").all():
        summary.click()
        tab.until(
            "[...document.querySelectorAll('details.section')].every((one) => !one.open || "
            "one.querySelector('canvas'))"
        )
    titles = tab.page.locator("details.section > summary h2").all_inner_texts()
    assert "Rollouts, tasks and lag" in titles and tab.count("details.section[open]") == len(titles)
    tab.go("#/curves?run=first&sections=Rewards")  # as the address was before
    tab.until("document.querySelectorAll('details.section[open]').length === 1")


def test_a_run_that_is_gone_is_said_to_be_gone(tab, place):
    tab.go("#/rollouts?run=second")
    tab.page.wait_for_selector(".list")
    (place / "second").rename(place.parent / "second")
    tab.until(
        "document.querySelector('.fault')?.innerText.includes('second: no such run here; it "
        "may have been deleted')"
    )
    assert tab.count(".list") == 0
    (place.parent / "second").rename(place / "second")
    tab.until("!document.querySelector('.fault')")
    # what was asked meanwhile
    tab.faults[:] = [
        fault for fault in tab.faults if "run=second: Failed to load resource" not in fault
    ]


@pytest.fixture
def more_steps(place):
    """Ten steps of 6 rollouts more in the first run, as long as a test needs them."""
    run = RunDir(place / "first", place / "first/weights")
    for step in range(5, 15):
        made.write_step(run, step, [made.group(100 * step + i, [0.0, 1.0]) for i in range(3)])
    yield
    for step in range(5, 15):
        (place / f"first/rollouts/{step:06d}.jsonl").unlink()


def test_j_goes_on_to_the_next_page_and_back(tab, more_steps):
    tab.go("#/rollouts?run=first")
    tab.until("document.querySelectorAll('.rows li').length === 50")
    pressed = "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'j', bubbles: true}))"
    # before the page has drawn the click
    tab.page.evaluate(f"document.querySelector('.rows li:last-child a').click(); {pressed}")
    tab.until(
        "location.hash.includes('offset=50') && !!document.querySelector('.rows "
        "li:first-child [aria-current=true]')"
    )
    tab.page.keyboard.press("k")
    tab.until(
        "!location.hash.includes('offset=') && !!document.querySelector('.rows li:last-child "
        "[aria-current=true]')"
    )
    tab.go("#/rollouts?run=first&at=10/0")  # as of a list that has moved on
    tab.until(
        "document.querySelectorAll('.rows li').length === 50 && "
        "!document.querySelector('.rows [aria-current=true]')"
    )
    tab.page.keyboard.press("j")
    tab.until("location.hash.includes('at=10%2F1') && location.hash.includes('offset=50')")
    tab.go("#/rollouts?run=first&offset=37")  # as typed
    tab.until("document.querySelectorAll('.rows li').length === 47")
    tab.page.keyboard.press("j")
    tab.page.keyboard.press("k")
    tab.until(
        "!location.hash.includes('offset=') && !!document.querySelector('.rows "
        "li:nth-child(37) [aria-current=true]')"
    )
    tab.go("#/runs")
    tab.until("!!document.querySelector('table.runs')")  # so that nothing more is asked
    tab.until_answered("run=first")  # the files are deleted now


def test_j_goes_through_the_tasks_and_escape_leaves_one(tab):
    tab.go("#/tasks?run=first&step=3")
    tab.until("!!document.querySelector('.tasks tbody tr:nth-child(1)[aria-current=true]')")
    tab.page.keyboard.press("j")
    tab.until("!!document.querySelector('.tasks tbody tr:nth-child(2)[aria-current=true]')")
    assert "step=" not in tab.page.url
    tab.page.keyboard.press("Escape")
    tab.until(
        "!document.querySelector('.tasks tr[aria-current=true]') && "
        "!location.hash.includes('task=')"
    )


def test_rollouts_are_filtered_walked_through_and_opened_in_another_window(tab):
    tab.go(PAGES["rollouts"][0])
    tab.until("document.querySelector('.list [aria-live]')?.innerText === '24 rollouts'")
    tab.page.get_by_role("button", name="no signal 8").click()
    tab.until("document.querySelectorAll('.rows li').length === 8")
    tab.page.keyboard.press("j")
    tab.page.keyboard.press("j")
    assert "all 2 rewards of its group are 1" in tab.text(".verdict")
    tab.page.keyboard.press("Escape")
    tab.until("!location.hash.includes('at=')")
    with tab.context.expect_page() as opened:
        tab.page.locator(".rows a").first.click(modifiers=["Control"])
    other = opened.value
    other.wait_for_selector(".verdict")
    assert "why=no_signal" in other.url and "at=41" in other.url
    tab.page.keyboard.press("?")
    assert "next and previous rollout" in tab.text("dialog")
    assert "1 \u2013 6\nRuns, Curves, Rollouts, Tasks, Timeline, Health\n" in tab.text("dialog")
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("5")
    assert "trainer" in tab.text(".lanes")


def test_hostile_text_is_shown_as_it_is(tab):
    for group in (12, 22, 32, 42):
        for rollout in (0, 1):
            tab.go(f"#/rollouts?run=first&at={group}/{rollout}")
            tab.page.wait_for_selector(".message.tool")
            for fold in tab.page.locator(".thinking summary").all():
                fold.click()
    shown = tab.page.locator(".talk").inner_text()
    for text in HOSTILE[:3]:
        assert shown.count(text) >= 4, text
    for text in ("\\x1b[2J", "\\u202egnp.exe", "<b>tool</b>", "<i>odd</i>"):
        assert text in shown
    assert not tab.count("main :is(img, iframe, script, a[href^=javascript])")
    tab.go("#/rollouts?run=first&at=12/0")
    tab.page.get_by_role("button", name="194,").click()  # the rest of a huge line
    assert tab.page.evaluate(FITS)
    tab.go("#/rollouts?run=first&at=10/0&tab=tokens")
    tab.until("document.querySelector('.tokens')?.innerText === '2+<script>four</span>'")
    tab.page.locator(".tokens .t").nth(4).hover()
    assert "clipped" in tab.text(".reader")
    tab.go("#/curves?run=first&q=img")
    assert "<img src=x onerror=window.hacked=1>" in tab.text(".chart .title")
    tab.go("#/health?run=first&process=trainer")
    assert "<script>window.hacked = 1</script>" in tab.text(".log pre span")


def test_a_table_shows_the_machines_of_a_cluster(tab, place):
    make_cluster_run(place / "third")
    try:
        tab.go("#/health?run=third")
        assert tab.text("table.machines td")
        rows = [text.split() for text in tab.page.locator("table.machines tr").all_inner_texts()]
        assert rows[1][:3] == ["0", "lost", "trains"] and {"<b>host0", "10"} < {*rows[1]}
        assert rows[3] == ["2", "not", "there", "serves"]
        tab.page.locator("table.machines a", has_text="trainer-node0").click()
        assert tab.text(".log pre span").strip() == "of trainer-node0-1"
        assert tab.page.evaluate(FITS)
    finally:
        shutil.rmtree(place / "third")
        tab.go("#/runs")


def test_tables_show_mismatch_by_place(tab, place):
    third = made.make_run(place / "third")
    made.write_noisy(third, 7, [[(100, 300), (300, 600)]] * 4, lambda *_: 0.1)
    try:
        tab.go("#/health?run=third")
        assert tab.text(".mismatch td")
        rows = [text.split() for text in tab.page.locator(".mismatch tr").all_inner_texts()]
        assert rows[1][0] == "0-127" and rows[1][-2:] == ["112", "4"]
        assert rows[-1][0] == "2" and rows[-1][-2:] == ["2,400", "4"]
        assert tab.page.evaluate(FITS)
    finally:
        shutil.rmtree(place / "third")
        tab.go("#/runs")


def test_how_a_run_died_is_said_once_with_code_as_code(tab):
    tab.go("#/health?run=first&process=trainer")
    assert "ValueError" in tab.text(".verdict") and "`" not in tab.page.inner_text("main")
    assert tab.page.inner_text("main").count("the run ended") == 1
    assert "--resume" in tab.text(".verdict code")
    assert tab.page.locator(".verdict .evidence a").inner_text() == "logs/trainer-1.log"
    assert not tab.page.locator(".lines li", has_text="ValueError").count(), "the log is below"
    tab.until(
        "document.querySelector('.log pre').textContent.startsWith('<script>window.hacked = "
        "1</script>\\nValueError')"
    )


def test_the_row_of_a_link_is_in_sight_and_else_the_first_is_open(tab, place):
    deep = made.make_run(place / "deep")
    made.write_step(
        deep, 1, [made.group(i, [0.0, 1.0], task=i, stop="max_turns_reached") for i in range(60)]
    )
    made.write_samples(deep, 1, [made.sample(0, 0, tokens=200)])
    try:
        tab.go("#/rollouts?run=deep&at=40/1")
        tab.until(
            "document.querySelector('.rows "
            "a[aria-current=true]')?.getBoundingClientRect().top < innerHeight"
        )
        assert "offset=50" in tab.page.url and "group 40 #1" in tab.text(
            ".rows a[aria-current=true]"
        )
        assert "max" not in tab.text("header.rollout")
        tab.go("#/rollouts?run=first")
        tab.go("#/rollouts?run=deep&at=0/0&tab=tokens")
        tab.until(
            "document.querySelectorAll('.tokens .chunk').length === 4 && "
            "document.querySelectorAll('.tokens .t').length > 190"
        )
        ends = (
            "[...document.querySelectorAll('.tokens .chunk')].map((one) => getComputedStyle(one, "
            "'::after').content)"
        )
        assert tab.page.evaluate(ends) == ['"\u21aa"'] * 3 + ["none"]
        tab.go("#/rollouts?run=first&kind=eval")
        tab.until(
            "!!document.querySelector('.rows li:first-child a[aria-current=true]') && "
            "location.hash.includes('at=')"
        )
        tab.page.get_by_role("button", name="training").click()
        tab.until("location.hash.includes('at=4') && !document.querySelector('.fault')")
        tab.go("#/tasks?run=first&env=sums&task=7&step=99")
        assert "nothing shows what it changed" in tab.text(".detail .note")
        assert not tab.page.locator(".side").count()
        assert "2 + 2" in tab.text(".tasks .snippet")
    finally:
        leave(tab)
        shutil.rmtree(place / "deep")


def test_dots_stay_at_their_version_and_are_chosen_by_keys(tab, place):
    many = [
        made.group(100 + version, [*([1.0] * 16), 0.0], task=9, version=version)
        for version in (4, 5, 8)
    ]
    for step, group in enumerate(many, start=5):
        made.write_step(RunDir(place / "first", place / "first/weights"), step, [group])
    for width in (390, 1280):
        tab.page.set_viewport_size({"width": width, "height": 800})
        tab.go("#/runs")
        tab.go("#/tasks?run=first&env=sums&task=9")
        tab.page.wait_for_selector(".side")
        circles = "[...document.querySelectorAll('.dots circle.one')]"
        dots = tab.page.evaluate(
            f"{circles}.map((one) => [one.querySelector('title').textContent, "
            "+one.getAttribute('cx')])"
        )
        right = tab.page.evaluate("document.querySelector('.dots').viewBox.baseVal.width")
        x = {
            version: [at for title, at in dots if title.startswith(f"version {version},")]
            for version in (4, 5, 8)
        }
        assert {len(places) for places in x.values()} == {17}
        assert min(x[4]) > 40 and max(x[8]) < right - 10
        assert max(x[4]) + 9 < min(x[5]) and max(x[5]) + 9 < min(x[8])
    assert tab.count(".dots [tabindex='0']") == 1
    tab.page.locator(".dots [tabindex='0']").focus()
    tab.page.keyboard.press("End")
    tab.page.keyboard.press("ArrowLeft")
    tab.page.keyboard.press("Enter")
    tab.until("location.hash.includes('b=108%2F15')")
    tab.page.keyboard.press("Home")
    tab.page.keyboard.press("Shift+Enter")
    tab.until("location.hash.includes('a=104%2F0')")
    assert (
        tab.page.evaluate("document.activeElement.ariaLabel")
        == "version 4, rollout 0: reward 1.000, the earlier one"
    )
    leave(tab)
    for step in (5, 6, 7):
        (place / f"first/rollouts/{step:06d}.jsonl").unlink()


def test_the_clock_of_the_timeline_stands_over_its_lines(tab):
    """Each label is centred on its line, at any width: the grid has its own idea of what `left:
    0` is."""
    for width in (390, 1280):
        tab.page.set_viewport_size({"width": width, "height": 800})
        tab.go(PAGES["timeline"][0])
        tab.page.wait_for_selector(".lanes rect")
        middle = "(one) => one.getBoundingClientRect().x + one.getBoundingClientRect().width / 2"
        middles = f"(selector) => [...document.querySelectorAll(selector)].map({middle})"
        labels, lines = (
            tab.page.evaluate(middles, selector) for selector in (".clock span", ".lanes line.grid")
        )
        assert labels and labels == pytest.approx(lines, abs=1.5)


def test_an_address_of_no_page_is_said_to_be_none_and_the_next_one_is_shown(tab):
    tab.go("#/curves?run=nothere")
    assert tab.text(".fault") == "nothere: no such run here; it may have been deleted."
    tab.go("#/nopage?run=first")
    assert "There is no page “nopage”" in tab.text(".fault")
    tab.go("#/health?run=first")
    tab.page.wait_for_selector(".log pre")
    assert tab.count(".fault") == 0


def test_a_number_of_an_address_that_is_none_is_said_to_be_none(tab):
    for where, said in (
        ("#/tasks?run=first&env=sums&task=7&step=abc", ["step = abc: give a number"]),
        ("#/timeline?run=first&at=abc", ["at = abc: give a number"]),
        ("#/rollouts?run=first&offset=abc", ["Expected int, got str - at $.offset"]),
        (
            "#/curves?run=first&from=x&to=3&smooth=7",
            ["from = x: give a number", "smooth = 7: give a number from 0 to 0.99"],
        ),
    ):
        tab.go(where)
        tab.until(
            "JSON.stringify([...document.querySelectorAll('.fault')].map(one => "
            f"one.innerText)) === JSON.stringify({said})"
        )
    assert tab.count(".then") == 0
    assert tab.page.get_by_role("button", name="Whole run").count() == 0
    assert "smoothed" not in tab.text("main")
    leave(tab)
    # which is its answer
    tab.faults[:] = [fault for fault in tab.faults if "400 (Bad Request)" not in fault]


def test_the_mean_beside_a_group_is_of_the_agent_that_is_shown(browser, tmp_path):
    """Regression: it was over all agents, whose rewards credit does not compare."""
    files = made.make_run(tmp_path / "x")
    files.status_dir.mkdir()
    rollouts = [
        made.rollout(reward, episode=i // 2, agent=("solver", "rival")[i % 2])
        for i, reward in enumerate((0.0, 6.0, 1.0, 8.0))
    ]
    some = credit_group(
        Group(group_id=10, env="sums", task=0, rollouts=rollouts), made.RULES["sums"]
    )
    made.write_step(files, 1, [some])
    with serving(tmp_path) as links:
        tab = Tab(browser, links)
        for at, mean in (("10/0", "solver 0.500"), ("10/1", "rival 7.000")):
            tab.go(f"#/rollouts?run=x&at={at}")
            assert tab.text("nav.group span") == f"group 10, mean of {mean}"
        tab.close()


def test_an_exported_list_has_the_rows_of_the_servers_in_their_order(tab, tmp_path):
    """By every sort, in both directions, page by page: equal ones and those without a value
    included. Filtered ones, too."""
    files = made.make_run(tmp_path / "x")
    files.status_dir.mkdir()
    for step in range(1, 4):
        metrics = {"num_turns": 5.0, "tokens": 2.0}
        odd = [
            made.rollout(0.0, step, episode=0, metrics=metrics, retries=step),
            made.rollout(0.0, turns=[], episode=1, error="boom", cause="environment"),
            made.rollout(1.0, step, episode=2),
        ]
        groups = [
            made.group(10 * step + i, [0.0, 0.5, 1.0 - i], task=(step * i) % 3, version=step - 1)
            for i in range(3)
        ]
        odd_group = Group(group_id=10 * step + 5, env="sums", task=step + 3, rollouts=odd)
        made.write_step(files, step, [*groups, credit_group(odd_group, made.RULES["sums"])])
    for version in (0, 2, 1, 3):
        made.write_eval_of(files, version, [0.0, 1.0, 0.5 * (version % 2)])
    library = Library([files.root])
    content = msgspec.json.decode(msgspec.json.encode(recorded("x", library.run("x"), 20 << 20)[0]))
    handlers, routes = Handlers(library), {route.name: route for route in ROUTES}

    def of_server(name, values):
        pairs = [(key, str(value).lower()) for key, value in values.items()]
        answer = msgspec.to_builtins(routes[name].ask(handlers, QueryParams(pairs)))
        return {key: answer[key] for key in ("total", "rows", "sorts", "facets") if key in answer}

    def of_file(name, values):
        return tab.page.evaluate(
            "([all, name, values]) => import('./page/recorded.js')"
            ".then((m) => m.recordedAnswer(all, name, values)).catch(String)",
            [content, name, values],
        )

    sorts = of_server("rollouts", {"run": "x"})["sorts"]
    assert {"retries", "metrics/num_turns", "tokens", "exact"} < {*sorts}
    page, both = {"run": "x", "offset": 0, "limit": 50}, ("train", "eval")
    questions = [
        (name, page | {"kind": kind, "sort": sort, "descending": descending, "limit": 14})
        for name, known in (("rollouts", sorts), ("tasks", SORTS))
        for sort, descending, kind in product(("", *known), (True, False), both)
    ]
    filters = [{"highest": 0.5}, {"lowest": -1.5}, {"lowest": 0.2, "highest": 0.9}]
    filters += [{"why": "error"}, {"outcome": "failed"}, {"offset": 7}]
    questions += [("rollouts", page | {"kind": kind} | each) for kind in both for each in filters]
    for name, values in questions:
        expected = of_server(name, values)
        assert {key: of_file(name, values)[key] for key in expected} == expected, (name, values)
    for name in ("rollouts", "tasks"):
        wrong = page | {"kind": "train", "sort": "bogus"}
        with pytest.raises(RunError) as error:
            of_server(name, wrong)
        assert of_file(name, wrong) == f"Error: {error.value}"


def test_an_exported_page_needs_neither_server_nor_network(browser, place, tmp_path):
    file = tmp_path / "first.html"
    assert view([str(place / "first"), "--export", str(file)], Children()) == 0
    context, faults = browser.new_context(offline=True), list[str]()
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: said.type in ("error", "warning") and faults.append(said.text))
    page.on(
        "request",
        lambda request: (
            not request.url.startswith(("file:", "data:")) and faults.append(request.url)
        ),
    )
    page.goto(file.as_uri())
    page.wait_for_selector(".runs tbody tr")
    for where, what in (
        ("#/curves?run=first&axis=tokens", ".chart canvas"),
        ("#/rollouts?run=first&q=the+answer+is+3&at=30/1", ".message.assistant"),
        ("#/rollouts?run=first&at=40/0&tab=tokens", ".tokens .t"),
        ("#/rollouts?run=first&at=42/1", ".message.tool"),
        ("#/tasks?run=first&env=sums&task=1", ".side ins"),
        ("#/timeline?run=first", ".lanes rect"),
        ("#/health?run=first", ".log pre"),
    ):
        page.goto(f"{file.as_uri()}{where}")
        page.wait_for_selector(what)
    page.goto(f"{file.as_uri()}#/timeline?run=first")
    page.get_by_role("button", name="Zoom in").click()
    page.wait_for_selector(".lanes rect")
    shares = page.locator(".card", has_text="Where the time went").inner_text()
    assert "forward backward" in shares and "-" not in shares
    page.goto(f"{file.as_uri()}#/rollouts?run=first&q=the+answer+is+3")
    page.wait_for_selector(".rows li:nth-child(2):last-child")
    assert not faults and page.evaluate("window.hacked") is None
    context.close()
