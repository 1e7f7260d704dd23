"""Pages in a headless Chromium, driven by Playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright
from programs import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Chromium's own sandbox needs a user other than root; GPU and crash reports a desktop.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-crash-reporter")
WIDTH = 1200


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser that runs until the end of the block."""
    found = chromium()
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=found.program,
            args=list(FLAGS),
            env={**os.environ, **found.environment},
        )
        try:
            yield running
        finally:
            running.close()


@contextmanager
def opened(address: str, *, height: int = 3000, dark: bool = False) -> Iterator[Page]:
    """A page, as a visitor with an empty profile sees it. address: a URL."""
    with launched() as running:
        page = running.new_page(
            viewport={"width": WIDTH, "height": height},
            color_scheme="dark" if dark else "light",
        )
        page.goto(address)
        yield page


def dom_of(path: Path) -> str:
    """A file as the browser understood it."""
    with opened(path.as_uri()) as page:
        return page.content()


def screenshot(path: Path, image: Path) -> bytes:
    """A file as the browser draws it, as PNG; `image` is where it is written."""
    with opened(path.as_uri()) as page:
        return page.screenshot(path=image)
