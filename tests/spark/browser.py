"""A headless Chromium, with a new profile for each page."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def chromium(page: Path, *arguments: str) -> str:
    """Load a page, and return what Chromium prints."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.fail("Chromium is not installed: apt-get install chromium", pytrace=False)
    with tempfile.TemporaryDirectory(prefix="aztask-chromium-") as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", *arguments, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def dom_of(page: Path) -> str:
    """The page as the browser understood it."""
    return chromium(page, "--virtual-time-budget=2000", "--dump-dom")


def screenshot(page: Path, image: Path, *, height: int = 3000) -> bytes:
    """The page as the browser draws it, as PNG."""
    chromium(page, f"--screenshot={image}", f"--window-size=1200,{height}")
    return image.read_bytes()
