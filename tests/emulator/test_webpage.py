"""``@azure/service-bus`` in a page of this machine, in a real Chromium, over its own WebSockets."""

from __future__ import annotations

import functools
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import launched
from programs import need_node

from aztask.testing import emulator

FOLDER = Path(__file__).parent / "webpage"
BUNDLE = (
    *("node_modules/.bin/esbuild", "page.js", "--bundle", "--platform=browser"),
    *("--inject:./shims.js", "--define:global=globalThis"),
    *("--alias:os=os-browserify", "--alias:path=path-browserify"),
)
"""How an application bundles the SDK. It names modules of Node that a browser does not have."""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line in the log for each."""

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the page and its bundle; the packages of package.json are of this run alone."""
    need_node()
    work, site = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("site")
    for name in ("package.json", "package-lock.json", "page.js", "shims.js"):
        shutil.copy(FOLDER / name, work)
    install = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    for command in (install, [*BUNDLE, f"--outfile={site / 'bundle.js'}"]):
        done = subprocess.run(
            command, cwd=work, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{command[:2]}: {done.stderr[-1000:]}"
    (site / "index.html").write_text('<!doctype html><script src="bundle.js"></script>')
    return site


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port; gives the address of its page."""
    handler = functools.partial(Quiet, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/index.html"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_page_sends_and_receives(site):
    """The SDK encrypts WebSockets in every mode, so the browser must trust the certificate."""
    with (
        emulator(queues=["q"], tls=True) as bus,
        served(site) as address,
        launched() as running,
        running.new_context(ignore_https_errors=True) as visit,
    ):
        page = visit.new_page()
        page.goto(address)
        connection = f"{bus.connection_string};UseDevelopmentEmulator=true"
        assert page.evaluate("text => run(text)", connection) == [200_000, "page", 0]
        assert bus._emulator.broker.engine.stats("q").active == 0
