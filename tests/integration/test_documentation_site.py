"""The documentation as its readers see it: in Chromium, from other projects, and as Markdown."""

from __future__ import annotations

import fcntl
import functools
import os
import posixpath
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import opened
from playwright.sync_api import Page, ViewportSize
from sphinx.util.inventory import InventoryFile

DOCS = Path(__file__).parents[2] / "docs"
NARROW: ViewportSize = {"width": 360, "height": 740}
# What readers type, and a page that must be among the first five that they get.
TERMS = {
    "retry": "how-to/basics/retry",
    "dead letter": "how-to/basics/dead-letters",
    "schedule": "how-to/basics/schedules",
    "cron": "how-to/basics/schedules",
    "priority": "how-to/advanced/priorities",
    "rate limit": "how-to/advanced/rate-limits",
    "workflow": "how-to/advanced/workflows",
    "chord": "reference/workflows",
    "unique": "how-to/advanced/unique-tasks",
    "session": "how-to/advanced/sessions",
    "lease": "how-to/advanced/set-leases",
    "emulator": "emulator",
    "celery": "coming-from-celery",
    "django": "how-to/frameworks/django",
    "fastapi": "how-to/frameworks/fastapi",
    "payload": "how-to/advanced/large-payloads",
    "prometheus": "how-to/production/metrics",
    "RetryPolicy": "reference/retry",
    "deploy": "how-to/production/deploy",
    "testing": "how-to/basics/testing",
    "circuit breaker": "how-to/advanced/circuit-breakers",
    "glossary": "glossary",
}

# Furo scrolls its content, not the window, where something is too wide.
WIDE = """() => Math.max(...["html", ".page", ".main", ".content"].flatMap(
    name => [...document.querySelectorAll(name)].map(
        each => each.scrollWidth - Math.min(each.clientWidth, innerWidth))))"""
FOUND = "document.querySelector('#search-results h2 ~ p')?.innerText.match(/found/)"
# The contrast of each text with what is behind it, as WCAG 2 computes it; hidden text is skipped.
CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const known = new Map();
    const rgba = text => {
        if (!known.has(text)) {
            canvas.clearRect(0, 0, 1, 1);
            canvas.fillStyle = text;
            canvas.fillRect(0, 0, 1, 1);
            const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
            known.set(text, [r, g, b, a / 255]);
        }
        return known.get(text);
    };
    const over = (top, under) =>
        top.slice(0, 3).map((v, i) => v * top[3] + under[i] * (1 - top[3]));
    const light = color => {
        const part = color.map(
            v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
    };
    const behind = element => {
        if (!element) return [255, 255, 255, 1];
        const color = rgba(getComputedStyle(element).backgroundColor);
        return color[3] === 1 ? color : [...over(color, behind(element.parentElement)), 1];
    };
    const low = new Map();
    let seen = 0;
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const element = node.parentElement, style = getComputedStyle(element);
        const shown = element.checkVisibility({checkOpacity: true, checkVisibilityCSS: true});
        if (!node.data.trim() || !shown) continue;
        if (element.closest("svg, script, style, .headerlink")) continue;
        seen += 1;
        const back = behind(element), ink = over(rgba(style.color), back);
        const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5)
            low.set(`${element.tagName}.${element.className} ${style.color}`,
                    `${ratio.toFixed(2)}: ${node.data.trim().slice(0, 40)}`);
    }
    return {seen, low: Object.fromEntries(low)};
}"""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once for all test processes."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "documentation"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "llms.txt").exists():
            doctrees = folder.with_suffix(".doctrees")
            command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
            done = subprocess.run(
                [*command, "-d", doctrees, DOCS, folder],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def address(built: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(built)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@functools.cache
def names() -> tuple[str, ...]:
    """All pages, as Sphinx calls them."""
    found = (path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md"))
    return tuple(sorted(path.as_posix() for path in found if "_build" not in path.parts))


def readable(page: Page, address: str) -> dict[str, object]:
    """What is wrong on each page, as wide as a telephone."""
    page.set_viewport_size(NARROW)
    wrong: dict[str, object] = {}
    for name in (*names(), "search", "genindex"):
        page.goto(f"{address}/{name}.html", wait_until="domcontentloaded")
        wide = page.evaluate(WIDE)
        if wide > 0:
            wrong[f"{name} scrolls sideways"] = wide
        found = page.evaluate(CONTRAST)
        assert found["seen"] > 10 or name in ("search", "genindex"), name
        if found["low"]:
            wrong[f"{name} is hard to read"] = found["low"]
    return wrong


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_is_readable_on_a_telephone(address: str, dark: bool) -> None:
    with opened(f"{address}/index.html", dark=dark) as page:
        colors = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (colors == "rgb(255, 255, 255)") is not dark, "light and dark are two themes"
        assert readable(page, address) == {}


def test_what_is_hard_to_read_is_noticed(address: str) -> None:
    with opened(f"{address}/index.html") as page:
        page.evaluate("document.querySelector('article p').style.color = '#aaa'")
        assert page.evaluate(CONTRAST)["low"]
        page.set_viewport_size(NARROW)
        page.evaluate("document.querySelector('article p').style.width = '900px'")
        assert page.evaluate(WIDE) > 0


def test_search_finds_what_readers_type(address: str) -> None:
    assert len(TERMS) >= 20
    missing = {}
    with opened(address) as page:
        for term, wanted in TERMS.items():
            page.goto(f"{address}/search.html?q={term.replace(' ', '+')}")
            page.wait_for_function(FOUND)
            links = page.locator("#search-results li a")
            first = [links.nth(n).get_attribute("href") or "" for n in range(min(5, links.count()))]
            if not any(link.startswith(f"{wanted}.html") for link in first):
                missing[term] = first
    assert missing == {}


def test_the_way_around(address: str) -> None:
    with opened(f"{address}/how-to/basics/retry.html") as page:
        assert (
            page.inner_text(".sidebar-tree .current-page > a") == "Retry, reject, run again later"
        )
        beside = page.locator(".sidebar-tree li.current > ul > li.current > ul > li > a")
        assert beside.count() >= 9, "the pages of the same group"
        assert beside.first.is_visible()
        assert page.locator(".toc-tree a").count() >= 3, "the sections of this page"
        assert "Set the options" in page.inner_text(".related-pages .prev-page")
        assert "dead letters" in page.inner_text(".related-pages .next-page")
        page.click("text=This page as Markdown")
        assert page.url.endswith("/how-to/basics/retry.md")


def test_a_copy_button_leaves_the_prompt_and_the_output_out(address: str) -> None:
    with opened(f"{address}/how-to/basics/logging.html") as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        block = page.locator("div.highlight-console").first
        assert block.inner_text().startswith("$ export")
        block.hover()
        block.locator("button.copybtn").click()
        copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.splitlines() == [
        "export AZTASK_APP=orders:app",
        "aztask send orders.ship --args '[7]' --task-id order-7",
        "aztask worker --burst",
    ]


def test_other_projects_can_link_to_the_reference(built: Path) -> None:
    with (built / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "https://example.org", posixpath.join)
    wanted = {
        "py:class": ("aztask.App", "aztask.RetryPolicy", "aztask.Context", "aztask.AsyncResult"),
        "py:method": ("aztask.App.send", "aztask.Task.delay", "aztask.AsyncResult.get"),
        "py:function": ("aztask.chain", "aztask.current_context", "aztask.testing.emulator"),
        "py:exception": ("aztask.Retry", "aztask.errors.BrokerUnavailable", "aztask.LeaseLost"),
    }
    assert not any("aztask.emulator" in each for each in inventory.values()), "a package"
    for kind, objects in wanted.items():
        for name in objects:
            place, _, anchor = inventory[kind][name].uri.partition("#")
            text = (built / posixpath.relpath(place, "https://example.org")).read_text("utf-8")
            assert anchor and f'id="{anchor}"' in text, name


def test_every_page_is_there_as_plain_markdown(built: Path) -> None:
    wrong = []
    for name in names():
        text = (built / f"{name}.md").read_text(encoding="utf-8")
        prose = re.sub(r"(?ms)^```.*?^```|`[^`\n]+`", "", text)
        wrong += [f"{name}: {each}" for each in re.findall(r"\{\w+\}`?|<!--.*?-->|^:::.*", prose)]
        assert "```{" not in text
        for link in re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", prose):
            if not (built / posixpath.join(posixpath.dirname(name), link)).exists():
                wrong.append(f"{name}: {link}")
    assert wrong == []


def test_the_cookbook_has_a_block_in_each_of_its_recipes() -> None:
    """`tests/docs` runs the blocks."""
    text = (DOCS / "how-to" / "cookbook.md").read_text(encoding="utf-8")
    recipes = re.split(r"(?m)^### (?=\d)", text)[1:]
    assert [int(recipe.partition(".")[0]) for recipe in recipes] == [*range(1, 26)]
    for recipe in recipes:
        assert recipe.count("```") >= 2 and "More: {doc}`" in recipe, recipe.splitlines()[0]
        assert "not run" not in recipe


def test_llms_txt_lists_every_page_once(built: Path) -> None:
    text = (built / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# aztask\n\n> aztask runs Python functions")
    links = re.findall(r"(?m)^- \[[^]]+\]\(([^)]+)\.md\): \S", text)
    groups = {name for name in names() if name.endswith("index")}
    assert sorted(links) == sorted(set(names()) - groups)
