"""Fixtures of the unit tests."""

import logging
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from aztask import App
from aztask.operate.cli import main
from aztask.worker.stopsignals import DRAIN, NOW


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self):
        """The one line that a failed command says."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("aztask: error: "), self.err
        assert lines[0].isprintable()
        return lines[0].removeprefix("aztask: error: ")


class Cli:
    """Runs commands in this process, in a folder and an environment of the test's own.

    The folder's queue file is shared with the apps that `app` opens.
    """

    def __init__(self, folder, capsys, monkeypatch):
        self.folder: Path = folder
        self.address = f"local://{folder}/.aztask/queues.db"
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self._apps = []

    def make_file(self):
        """Create the queue file, empty: commands that only read do not."""
        path = Path(self.address.removeprefix("local://"))
        path.parent.mkdir(exist_ok=True)
        path.touch(mode=0o600)

    def __call__(self, *arguments, **environment):
        for name, value in environment.items():
            self._monkeypatch.setenv(name, value)
        self._capsys.readouterr()
        before = {number: signal.getsignal(number) for number in (*DRAIN, *NOW)}
        root = logging.getLogger()
        level, handlers = root.level, root.handlers[:]
        try:
            code = main.run([str(argument) for argument in arguments])
        finally:  # a worker that has ended ignores them for good, and writes to what is closed
            for number, handler in before.items():
                signal.signal(number, handler)
            root.setLevel(level)
            root.handlers[:] = handlers
        out, err = self._capsys.readouterr()
        return Ended(code, out, err)

    def app(self, **options):
        app = App("shop", **{"broker": self.address, "results": self.address, **options})
        self._apps.append(app)
        return app

    def module(self, name, text):
        """An importable module, loaded anew even if another test had one of that name."""
        sys.modules.pop(name, None)
        (self.folder / f"{name}.py").write_text(text)
        return name

    def close(self):
        for app in self._apps:
            app.close()


@pytest.fixture
def cli(tmp_path, capsys, monkeypatch):
    """``cli("send", "shop.add")``: run a command; see `Cli`."""
    for name in ("APP", "BROKER", "RESULTS", "EVENTS", "DEBUG"):
        monkeypatch.delenv(f"AZTASK_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    made = Cli(tmp_path, capsys, monkeypatch)
    yield made
    made.close()
