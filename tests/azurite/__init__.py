"""Azurite's services, each a child process, for the tests and for developers.

It is installed with npm into this folder when it is missing (`package.json` pins the version), and
each service is put into one file (`launch.js` says why). It runs on a free port of 127.0.0.1 with
its data in a folder of the caller's. A test may move its clock. A developer starts it with
``python -m tests.azurite``.
"""

from __future__ import annotations

import fcntl
import http.client
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

try:
    from programs import need_node
except ModuleNotFoundError:  # ``python -m tests.azurite`` starts one folder above
    from tests.programs import need_node

HERE = Path(__file__).parent
SOURCES = HERE / "node_modules" / "azurite" / "dist" / "src"
BUNDLED = HERE / "node_modules" / ".bundled"
SERVICES = ("queue", "table", "blob")
ACCOUNT = "devstoreaccount1"
# the published key of the development account
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
START_SECONDS = 120.0  # Node.js alone needs more than 30 s on a machine with 20 times its load
QUIET_SECONDS = 60.0


def install() -> None:
    """Install Azurite once; other processes wait. Node.js too, where the system lacks it."""
    need_node()
    with (HERE / ".install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if BUNDLED.exists():
            return
        subprocess.run(
            ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"],
            cwd=HERE,
            check=True,
        )
        made = HERE / "node_modules" / ".bundling"
        entries = [f"{service}={SOURCES / service / 'main.js'}" for service in SERVICES]
        esbuild = HERE / "node_modules" / ".bin" / "esbuild"
        options = ["--bundle", "--platform=node", "--log-level=error", f"--outdir={made}"]
        # of a database that Azurite could use, and that is not installed
        options.append("--external:pg-hstore")
        subprocess.run([esbuild, *options, *entries], check=True)
        for service in SERVICES:
            command = ["node", HERE / "launch.js", "--compile", made / f"{service}.js"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        made.rename(BUNDLED)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now.

    Not one that the system picks: it gives such a port to the next client as well, so that it may
    be taken when a service that is started later comes to it.
    """
    while True:
        port = random.randint(10_240, 32_767)  # Linux picks from 32,768 on
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Azurite:
    """One running service: "queue", "blob" or "table".

    certificate: (its file, its key's file) for https.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        certificate: tuple[Path, Path] | None = None,
        oauth: bool = False,
        clock_offset: float = 0.0,
        service: str = "queue",
        movable: bool = True,
        in_memory: bool = False,
        fillable: bool = False,
    ) -> None:
        """movable: whether its clock can be moved; a benchmark wants Azurite as it comes.

        fillable: whether `fill` can be called, of the service "table".

        in_memory: keeps no data in files, and so is faster, but for its first `QUIET_SECONDS` only:
        it tidies up then, and answers nobody for 3 s after 2,000 messages, 12 s after 4,000.
        """
        install()
        self._movable = movable
        self._fillable = fillable and service == "table"
        self._in_memory = in_memory
        self.service = service
        self.port = port or free_port()
        self.scheme = "https" if certificate else "http"
        self.folder = folder
        self._offset = clock_offset
        self._extra: list[str] = []
        if certificate:
            self._extra += ["--cert", str(certificate[0]), "--key", str(certificate[1])]
        if oauth:
            self._extra += ["--oauth", "basic"]
        self._process: subprocess.Popen[bytes] | None = None
        self._clock_port = self._fill_port = 0
        self.start()

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/{ACCOUNT}"

    @property
    def connection_string(self) -> str:
        return self.connection_string_at(self.port)

    def connection_string_at(self, port: int) -> str:
        """The same account as seen through a proxy on another port."""
        return (
            f"DefaultEndpointsProtocol={self.scheme};AccountName={ACCOUNT};AccountKey={KEY};"
            f"{self.service.capitalize()}Endpoint={self.scheme}://127.0.0.1:{port}/{ACCOUNT};"
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, on the same port and data as before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "azurite.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command(),
                env={**os.environ, "AZTASK_CLOCK_OFFSET": str(self._offset)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        give_up_at = time.monotonic() + START_SECONDS
        while " successfully " not in (text := log.read_text(errors="replace")):
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                self.stop()
                raise RuntimeError(f"Azurite did not start: {text}")
            time.sleep(0.02)
        if self._movable:
            self._clock_port = _port_after("clock on ", text)
        if self._fillable:
            self._fill_port = _port_after("fill on ", text)

    def _command(self) -> Sequence[str]:
        return [
            "node",
            *(("--require", str(HERE / "clock.js")) if self._movable else ()),
            # `fill.js` uses Azurite's own modules, which are not to be had in one file.
            *(
                ("--require", str(HERE / "fill.js"), str(SOURCES / "table" / "main.js"))
                if self._fillable
                else (str(HERE / "launch.js"), str(BUNDLED / f"{self.service}.js"))
            ),
            *(f"--{self.service}Host", "127.0.0.1", f"--{self.service}Port", str(self.port)),
            *(
                ("--inMemoryPersistence",)
                if self._in_memory
                else ("--location", str(self.folder / "data"))
            ),
            "--skipApiVersionCheck",
            "--disableTelemetry",
            "--silent",
            *self._extra,
        ]

    def advance(self, seconds: float) -> None:
        """Move its clock forward; it has moved on return."""
        connection = http.client.HTTPConnection("127.0.0.1", self._clock_port, timeout=5)
        connection.request("POST", f"/{seconds}")
        connection.getresponse().read()
        connection.close()
        self._offset += seconds

    def fill(self, table: str, file: Path) -> int:
        """Put the rows of a file into a table, a line of JSON each; returns how many."""
        connection = http.client.HTTPConnection("127.0.0.1", self._fill_port, timeout=600)
        connection.request("POST", f"/{ACCOUNT}/{table}?file={quote(str(file))}")
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"the table {table} was not filled: {text}")
        return int(text)

    def stop(self) -> None:
        """SIGTERM, so that it writes its data; SIGKILL if it does not end."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port_after(mark: str, text: str) -> int:
    return int(text[text.index(mark) + len(mark) :].split(maxsplit=1)[0])


@contextmanager
def running(folder: Path, **options: object) -> Iterator[Azurite]:
    """An Azurite that is stopped at the end."""
    azurite = Azurite(folder, **options)  # type: ignore[arg-type]
    try:
        yield azurite
    finally:
        azurite.stop()


@contextmanager
def storing(folder: Path, **options: object) -> Iterator[tuple[Azurite, Azurite]]:
    """Where results are kept: a table service and a blob service of one account."""
    with (
        running(folder / "table", service="table", **options) as table,
        running(folder / "blob", service="blob", **options) as blob,
    ):
        yield table, blob


def account_of(*services: Azurite, **ports: int) -> str:
    """The connection string of an account with these services; ports: those of proxies before
    them, by the service's name.
    """
    endpoints = "".join(
        f"{each.service.capitalize()}Endpoint={each.scheme}://127.0.0.1:"
        f"{ports.get(each.service, each.port)}/{ACCOUNT};"
        for each in services
    )
    scheme = services[0].scheme
    return f"DefaultEndpointsProtocol={scheme};AccountName={ACCOUNT};AccountKey={KEY};{endpoints}"


_kept: dict[str, Azurite] = {}


def kept(service: str) -> Azurite:
    """A service that stays until `stop_kept`: for tests that name what is theirs, and leave its
    clock alone. Every start costs half a second of processor time, and much longer waits.
    """
    if service not in _kept:
        folder = Path(tempfile.mkdtemp(prefix="aztask-azurite-"))
        _kept[service] = Azurite(folder, service=service)
    return _kept[service]


def stop_kept() -> None:
    """Stop those that stayed, and remove their data."""
    while _kept:
        _, azurite = _kept.popitem()
        azurite.stop()
        shutil.rmtree(azurite.folder, ignore_errors=True)
