"""A standalone Spark cluster, or a Spark Connect server: real processes on 127.0.0.1.

Their executors run a Python that has only what docs/how-to/spark/run-on-a-cluster.md asks for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pyspark

SPARK = Path(pyspark.__file__).parent
ON_THE_MACHINES = ("pyarrow", "numpy", "cryptography")
"""The libraries that the page asks to install, besides their dependencies (`bare_python`)."""
WITH_THEM = ("cffi", "pycparser")
START_SECONDS = 120.0
# As in tox.ini for short sessions: halves the CPU time of a start.
QUICK = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions "
    "-XX:-BytecodeVerificationRemote -XX:MetaspaceSize=256m "
    "-XX:+UnlockExperimentalVMOptions -XX:SymbolTableSize=1048576"
)
ADDRESS = ("--host", "127.0.0.1", "--webui-port", "0")
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": QUICK,
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


@dataclass(frozen=True)
class Cluster:
    """host: ``127.0.0.1:PORT`` of the master. environment: for drivers. folder: of the logs."""

    host: str
    environment: dict[str, str]
    folder: Path

    def run(self, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a page's command; HOST:7077 in it is replaced by this cluster's master."""
        return subprocess.run(
            ["bash", "-c", command.replace("HOST:7077", self.host)],
            cwd=folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def executors(self) -> int:
        """The number of workers on which an executor has run."""
        return len({path.parents[2] for path in self.folder.glob("worker-*/app-*/*/stderr")})


def bare_python(folder: Path) -> Path:
    """Make a Python with only the libraries of `ON_THE_MACHINES`; returns its ``bin`` folder."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    for name in (*ON_THE_MACHINES, *WITH_THEM):
        found = distribution(name)
        for top in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(found.locate_file(top)))
    return folder / "bin"


def thin_client(folder: Path) -> Path:
    """Make a Python with aztask[spark-connect,delta]; returns its ``bin`` folder."""
    root = Path(__file__).parents[2]
    source = folder / "source"
    for name in ("aztask", "release"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in root.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    venv.create(folder / "thin", with_pip=True, symlinks=True)
    programs = folder / "thin" / "bin"
    pip = (str(programs / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check")
    subprocess.run([*pip, f"{source}[spark-connect,delta]"], check=True)
    return programs


@contextmanager
def standalone(folder: Path, *, workers: int = 2, **environment: str) -> Iterator[Cluster]:
    """Run a master and workers of one core each. environment: further variables for all."""
    common = _environment(folder, environment)
    path = os.environ["PATH"]
    machines = {**common, "PATH": f"{bare_python(folder / 'bare')}:{path}"}
    own = Path(sys.executable).parent
    driver = {**common, "PATH": f"{SPARK / 'bin'}:{own}:{path}"}
    with ExitStack() as stack:
        told = folder / "master.log"
        master = ("deploy.master.Master", "--port", "0", *ADDRESS)
        stack.enter_context(_daemon(told, machines, *master))
        host = _waited(told, r"Starting Spark master at spark://(127\.0\.0\.1:\d+)", 1)[0]
        for number in range(workers):
            worker = ("deploy.worker.Worker", f"spark://{host}", "-c", "1", "-m", "512m", *ADDRESS)
            place = ("-d", str(folder / f"worker-{number}"))
            log = folder / f"worker-{number}.log"
            stack.enter_context(_daemon(log, machines, *worker, *place))
        _waited(told, r"Registering worker (127\.0\.0\.1:\d+)", workers)
        yield Cluster(host, driver, folder)


@contextmanager
def connect_server(
    folder: Path, *, client: Path, options: tuple[str, ...] = (), **environment: str
) -> Iterator[Cluster]:
    """Run a Spark Connect server with two cores; commands have the programs of `client` alone.

    client: a virtual environment's ``bin``. options: of spark-submit, for the server. environment:
    further variables for server and client.
    """
    common = _environment(folder, environment)
    path = os.environ["PATH"]
    python = bare_python(folder / "bare") / "python3"
    machine = {**common, "PATH": path, "PYSPARK_PYTHON": str(python), "SPARK_DAEMON_MEMORY": "1g"}
    name = "sql.connect.service.SparkConnectServer"
    settings = {"binding.address": "127.0.0.1", "binding.port": "0"}
    submit = ("deploy.SparkSubmit", "--master", "local[2]", "--class", f"org.apache.spark.{name}")
    told = [f"--conf=spark.connect.grpc.{key}={value}" for key, value in settings.items()]
    log = folder / "server.log"
    with _daemon(log, machine, *submit, *told, *options, "spark-internal"):
        host = _waited(log, r"Spark Connect server started at: \S*?(127\.0\.0\.1:\d+)", 1)[0]
        without = {key: value for key, value in common.items() if key != "JAVA_HOME"}
        yield Cluster(host, {**without, "PATH": f"{client}:/usr/bin:/bin"}, folder)


def _environment(folder: Path, further: dict[str, str]) -> dict[str, str]:
    """The variables of all processes; the settings of Spark are in a file of the folder."""
    conf = folder / "conf"
    conf.mkdir(parents=True)
    lines = [f"{name} {value}\n" for name, value in SETTINGS.items()]
    (conf / "spark-defaults.conf").write_text("".join(lines))
    return {
        **{name: os.environ[name] for name in ("HOME", "LANG", "JAVA_HOME") if name in os.environ},
        "SPARK_CONF_DIR": str(conf),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "128m",
        "SPARK_DAEMON_JAVA_OPTS": QUICK,
        "SPARK_SUBMIT_OPTS": QUICK,
        "SPARK_LAUNCHER_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        **further,
    }


@contextmanager
def _daemon(log: Path, environment: dict[str, str], name: str, *arguments: str) -> Iterator[None]:
    """Run a class of Spark's until the end of the block; a worker ends its executors."""
    command = [str(SPARK / "bin" / "spark-class"), f"org.apache.spark.{name}", *arguments]
    with log.open("wb") as stream:  # Python finds what is in its working directory
        process = subprocess.Popen(
            command, env=environment, cwd=log.parent, stdout=stream, stderr=stream
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _waited(log: Path, pattern: str, count: int) -> list[str]:
    """Wait until a log has this many matches of the pattern, and return them."""
    give_up_at = time.monotonic() + START_SECONDS
    while len(found := re.findall(pattern, log.read_text(errors="replace"))) < count:
        assert time.monotonic() < give_up_at, log.read_text(errors="replace")[-3000:]
        time.sleep(0.05)
    return found
