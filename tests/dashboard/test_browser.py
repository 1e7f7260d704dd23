"""The dashboard in Chromium: axe's rules, the keyboard, a phone, and without JavaScript.

Run by ``tox -e dashboard``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import launched
from dashboardshop import PAYLOAD, fill, morning
from waiting import wait_until

from aztask import App
from aztask.dashboard.pages import PAGES
from aztask.operate.jobrunner import FROM_COUNT
from aztask.settlement import DeadLetter

PICTURES = Path(__file__).parents[2] / "docs" / "pictures" / "dashboard"
ADDRESSES = {
    "/queue": "/queue?name=default",
    "/task": f"/task?id={quote('run-1 ' + PAYLOAD)}",
    "/workflow": "/workflow?id=w",
    "/schedule": "/schedule?name=nightly",
    "/letters": "/letters?queue=default",
    "/search": f"/search?q={quote('run')}",
}
EDITED = "dead-1"
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}
SIZES = {"light": (1080, 760), "dark": (1080, 760), "phone": (390, 844)}
DRAWN = [
    ("overview", "/", "light"),
    ("task-dark", "/task?id=order-4711", "dark"),
    ("workflow", "/workflow?id=close-may", "light"),
    ("dead-letters-phone", "/dead", "phone"),
]
"""The pictures of the documentation; AZTASK_PICTURES=1 takes them anew."""

APP = """
from aztask import App
app = App("shop", broker={place!r}, results={place!r}, events={events!r})

@app.task
def add(left, right):
    '''Add two numbers.'''
    return left + right

@app.task(name="shop.charge")
def charge(order):
    pass

@app.task(name="shop.send_invoice")
def send_invoice(order):
    pass

@app.task(name="shop.close_month")
def close_month(amounts):
    pass

app.limit("api", rate="10/s", concurrency=3)
app.schedule("nightly", add.s(1, 2), every=3600)
app.queue("orders")
"""


@contextmanager
def serving(folder, filled):
    """The address of the login with the key, as the command prints it.

    filled: fills the app of a folder before the dashboard starts.
    """
    place = f"local://{folder}/queues.db"
    (folder / "shopapp.py").write_text(APP.format(place=place, events=str(folder / "events")))
    names: dict[str, object] = {}
    exec((folder / "shopapp.py").read_text(), names)  # noqa: S102  # the text above
    app = names["app"]
    assert isinstance(app, App)
    app.broker.declare("default")
    filled(app)
    app.close()
    command = [sys.executable, "-m", "aztask", "dashboard", "-A", "shopapp:app", "--role", "act"]
    process = subprocess.Popen(
        [*command, "--http", "127.0.0.1:0", "--interval", "1s"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://\S+/login\?key=\S+", line)
        assert found, line + process.stderr.read()
        health = f"{found[0].partition('/login')[0]}/healthz"
        wait_until(lambda: answers(health), 20, "the server answers")
        # Workers on the same machine come first.
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, os.nice(0) + 10)
        yield found[0]
    finally:
        process.terminate()
        assert process.wait(20) in (0, -15, 143)
        process.stderr.close()


def answers(address):
    try:
        urllib.request.urlopen(address, timeout=2).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A dashboard whose every value is an attack."""
    with serving(tmp_path_factory.mktemp("dashboard"), fill) as address:
        yield address


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory):
    """A dashboard of a shop on a bad morning."""
    with serving(tmp_path_factory.mktemp("shop"), morning) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with launched() as running:
        yield running


@pytest.fixture
def opened(served, browser):
    """Opens a page as a person who is logged in; errors of its console end the test."""
    contexts, problems = [], []

    def open_page(path, *, look="light", scripts=True, at=served):
        width, height = SIZES[look]
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if look == "dark" else "light",
            java_script_enabled=scripts,
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda each: problems.append(each.text) if each.type == "error" else 0)
        page.on("pageerror", lambda each: problems.append(str(each)))
        page.on("requestfailed", lambda each: problems.append(f"failed: {each.url}"))
        page.goto(at)
        page.goto(at.partition("/login")[0] + ADDRESSES.get(path, path))
        return page

    yield open_page
    # A stream, an icon or a reading for the charts that ends with its page is no failure of it.
    found = [
        each
        for each in problems
        if not re.search(r"/live|icon\.svg|failed: .*/history\.json", each)
    ]
    for context in contexts:
        context.close()
    assert found == []


@pytest.mark.parametrize("look", sorted(SIZES))
@pytest.mark.parametrize("path", sorted(PAGES))
def test_a_page_keeps_axes_rules_and_fits(opened, path, look):
    page = opened(path, look=look)
    found = Axe().run(page, options=RULES)
    assert found.violations_count == 0, found.generate_report()
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0
    assert page.locator("h1").count() == 1
    assert page.locator("img").count() == 0


@pytest.mark.parametrize(("name", "path", "look"), DRAWN)
def test_a_page_of_an_ordinary_shop_fits(opened, ordinary, tmp_path, name, path, look):
    page = opened(path, look=look, at=ordinary)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    # In a picture, a folder of this test would distract.
    page.evaluate("document.querySelector('.where').textContent = 'local:///var/lib/shop.db'")
    folder = PICTURES if os.environ.get("AZTASK_PICTURES") else tmp_path
    folder.mkdir(exist_ok=True)
    page.screenshot(path=folder / f"{name}.png")
    assert (folder / f"{name}.png").stat().st_size < 150_000


def test_every_page_reads_without_javascript(opened):
    for path in sorted(PAGES):
        page = opened(path, scripts=False)
        assert page.locator("nav a").count() > 5
        assert page.locator("#live-button").is_hidden()
    page = opened("/runs", scripts=False)
    page.select_option("select[name=state]", "failed")
    page.click("form.filter button")
    page.wait_for_url("**/runs?*state=failed*")
    assert page.locator("tbody tr").count() == 1


def test_the_keyboard_alone_reaches_everything(opened):
    page = opened("/queues")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.textContent.trim()"))
        if seen[-1] == "default":
            break
    assert {"Pause", "Log out", "Dead letters", "default"} <= set(seen)
    page.keyboard.press("Enter")
    page.wait_for_url("**/queue?name=default")


@pytest.mark.parametrize("look", sorted(SIZES))
@pytest.mark.parametrize(
    "path",
    [
        "/act?action=purge&queue=default&all=yes",
        "/act?action=cancel",
        f"/edit?queue=default&id={EDITED}",
    ],
)
def test_the_pages_of_an_action_keep_axes_rules_and_fit(opened, path, look):
    page = opened(path, look=look)
    found = Axe().run(page, options=RULES)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.locator("main form").count() == 1, page.content()


@pytest.mark.parametrize("scripts", [True, False])
def test_an_action_is_counted_confirmed_and_in_the_audit(opened, scripts):
    page = opened("/queues", scripts=scripts)
    if page.locator("a.act", has_text="Resume").count():
        page.locator("a.act", has_text="Resume").first.click()
        page.locator("main form button").click()
        page.wait_for_url("**/audit?id=*")  # leaving it earlier would cut it off
        page.goto(page.url.partition("/audit")[0] + "/queues")
    page.locator("a.act", has_text="Pause").first.click()
    asked = page.locator(".ask").inner_text()
    assert asked.startswith("This would pause queue ")
    page.locator("main form button").press("Enter")
    page.wait_for_url("**/audit?id=*")
    assert "1 of 1 done" in page.locator(".outcome").inner_text()
    assert "local" in page.locator("tr.chosen").inner_text()


def many(app):
    """So many dead letters that their replay is a job."""
    ids = [f"m{number}" for number in range(FROM_COUNT + 100)]
    for task_id in ids:
        app.send("shop.add", [1, 2], task_id=task_id)
    receiver = app.broker.receiver("default", lease=30.0)
    left = len(ids)
    while left:
        some = receiver.receive(200, 1.0)
        receiver.settle([(each, DeadLetter("rejected", "no stock")) for each in some])
        left -= len(some)
    receiver.close()


def test_many_dead_letters_are_replayed_as_a_job_whose_page_follows_it(opened, tmp_path):
    with serving(tmp_path, many) as address:
        page = opened("/letters?queue=default", at=address)
        page.locator("a.act", has_text="Replay these").first.click()
        assert page.locator(".ask").inner_text().startswith("This would replay 600 dead letters")
        page.locator("main form button").press("Enter")
        page.wait_for_url("**/jobs?id=*")
        # The open page follows the job by itself.
        done = page.locator(".outcome", has_text="600 of 600 done")
        done.wait_for(timeout=60_000)
        assert done.inner_text().startswith("done:")
        found = Axe().run(page, options=RULES)
        assert found.violations_count == 0, found.generate_report()


def test_charts_draw_what_workers_did_and_stay_while_the_page_is_read_again(opened, ordinary):
    page = opened("/", at=ordinary)
    charts = page.locator("#charts canvas")
    charts.nth(4).wait_for(timeout=10_000)
    assert charts.count() == 5
    # None is wider than its frame: those that are made first see a grid with fewer columns.
    cut = "each => each.querySelector('.uplot').offsetWidth > each.clientWidth"
    assert not any(each.evaluate(cut) for each in page.locator("#charts figure").all())
    blue = """() => {
        const canvas = document.querySelector("#charts canvas"), context = canvas.getContext("2d");
        const all = context.getImageData(0, 0, canvas.width, canvas.height).data;
        let found = 0;
        for (let at = 0; at < all.length; at += 4)
            found += all[at + 3] > 200 && all[at] < 60 && all[at + 2] > 120;
        return found;
    }"""
    assert page.evaluate(blue) > 100  # the line of all runs
    mark = "document.getElementById('live').dataset.seen"
    page.evaluate(f"{mark} = 'before'")
    page.evaluate("document.getElementById('charts').dataset.same = 'yes'")
    wait_until(lambda: page.evaluate(f"{mark} === undefined"), 10, "the page is read again")
    assert page.evaluate("document.getElementById('charts').dataset.same") == "yes"
    assert charts.count() == 5


@pytest.mark.parametrize("scripts", [True, False])
def test_the_history_is_narrowed_by_the_address(opened, ordinary, scripts):
    page = opened("/", at=ordinary, scripts=scripts)
    page.select_option("select[name=window]", "day")
    page.select_option("select[name=by]", "queue")
    page.locator("form.filter button").press("Enter")
    page.wait_for_url("**/?window=day&by=queue*")
    table = page.get_by_role("region", name="What workers did")
    assert table.locator("tbody th").all_inner_texts() == ["All", "mail", "payments"]
    table.locator("a", has_text="payments").click()
    page.wait_for_url("**queue=payments*")
    assert table.locator("tbody th").all_inner_texts() == ["All", "payments"]
    assert page.input_value("input[name=queue]") == "payments"
    page.goto(page.url.replace("by=queue", "by=worker"))
    assert "are kept for an hour" in page.locator("p.warn").inner_text()


def test_an_open_page_reads_itself_again_and_can_be_paused(opened):
    page = opened("/workers")
    state = page.locator("#live-state")
    # Not `wait_for_function`: it compiles a text in the page, which the page's policy forbids.
    wait_until(lambda: state.inner_text() == "Live", 10, "the stream is open")
    mark = "document.getElementById('live').dataset.seen"
    page.evaluate(f"{mark} = 'before'")
    wait_until(lambda: page.evaluate(f"{mark} === undefined"), 10, "the page is read again")
    assert page.locator("#live #live").count() == 0
    page.click("#live-button")
    page.evaluate(f"{mark} = 'before'")
    page.wait_for_timeout(2500)
    assert page.evaluate(mark) == "before"
    assert state.inner_text() == "Paused"
