"""``aztask spark submit`` and ``stream`` in this process, on the session that already runs."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

from aztask.operate.cli import main
from aztask.spark import task_id

ABOUT = ("-A", "spark_shop", "--task", "shop.resize", "--key", "path")
INPUTS = ("files.csv", "table", "in", "a.json", "twice.json", "broken.json", "nosuch.json")
SCHEMA = "path STRING, width INT"


@pytest.fixture
def run(spark, shop, capsys, tmp_path, monkeypatch):
    """Run a command in a folder of the test's own: exit code, stdout, the last line of stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AZTASK_APP", raising=False)
    monkeypatch.delenv("AZTASK_BROKER", raising=False)

    def made(*arguments):
        capsys.readouterr()
        given = [str(tmp_path / each) if each in INPUTS else each for each in arguments]
        code = main.run(["spark", *given])
        out, err = capsys.readouterr()
        return code, out, (err.splitlines() or [""])[-1]

    return made


def ids(shop, queue):
    return {each.envelope.correlation_id for each in shop.app.broker.peek(queue, limit=1000)}


def test_csv_by_its_header(run, shop, tmp_path):
    (tmp_path / "files.csv").write_text("path,width\n" + "".join(f"c{n},{n}\n" for n in range(20)))
    about = (*ABOUT, "--submission-id", "one", "--input", "files.csv", "-q", "csv")
    code, out, _ = run("submit", *about, "--schema", SCHEMA, "--json")
    assert code == 0
    told = json.loads(out)
    assert (told["rows"], told["sent"], told["failed"], told["queue"]) == (20, 20, 0, "csv")
    assert ids(shop, "csv") == {task_id("one", f"c{n}") for n in range(20)}
    code, out, _ = run("submit", *about, "--schema", SCHEMA, "--dry-run")
    assert code == 0
    assert "would be sent: 20" in " ".join(out.split())
    assert shop.app.broker.stats("csv").active == 20
    code, _, error = run("submit", *about, "--schema", "width INT, path STRING")
    assert (code, len(ids(shop, "csv"))) == (1, 20)
    assert "header" in error
    code, _, error = run("submit", *about)
    assert (code, len(ids(shop, "csv"))) == (4, 20)
    assert "column 'width' is of type string" in error
    assert "takes width: int; cast it to bigint, or read the files with a schema" in error


def test_parquet_and_a_rate(run, spark, shop, tmp_path):
    rows = spark.createDataFrame([(f"p{n}", n, None) for n in range(50)], SCHEMA + ", x INT")
    rows.write.parquet(str(tmp_path / "table"))
    about = (*ABOUT, "--submission-id", "two", "--input", "table", "-q", "parquet")
    code, _, error = run("submit", *about)
    assert code == 4
    assert "takes no argument 'x'" in error
    code, out, _ = run(
        "submit",
        *about,
        "--columns",
        "path,quality=width,width",
        "--rate",
        "1000",
        "--writers",
        "1",
    )
    assert code == 0, out
    assert len(ids(shop, "parquet")) == 50
    more = ("--columns", "path,width", "--manifest", str(tmp_path / "manifest"))
    code, out, _ = run("submit", *about, *more)
    assert code == 0, out
    assert spark.read.parquet(str(tmp_path / "manifest" / "two")).count() == 50


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--input", "nosuch.json"), 4, "nosuch.json cannot be read as json"),
        (("--input", "a.json", "--key", "pth"), 4, "Did you mean 'path'"),
        (("--input", "a.json", "--task", "shop.resise"), 5, "Did you mean 'shop.resize'"),
        (("--input", "a.json", "--columns", "path="), 2, "is not like path,width=column"),
        (("--input", "a.json", "--writers", "2"), 2, "--writers needs --rate"),
        (("--input", "a.json", "--format", "xml"), 2, "xml"),
        (("--input", "a.json", "-A", "nosuch"), 2, "there is no module 'nosuch'"),
        (("--input", "a.json", "--conf", "x=1"), 2, "is not like spark.key=value"),
        (("--input", "a.json", "-q", "NO QUEUE"), 4, "cannot name a queue"),
        (("--input", "broken.json"), 1, "submission id"),
        (("--input", "twice.json"), 4, "equal keys are one task"),
    ],
)
def test_what_goes_wrong_is_one_line_and_an_exit_code(run, tmp_path, arguments, code, words):
    row = '{"path": "a", "width": 1}\n'
    (tmp_path / "a.json").write_text(row)
    (tmp_path / "twice.json").write_text(2 * row)
    (tmp_path / "broken.json").write_text('{"path": "a", "width": "\n')
    found, out, error = run(
        "submit", *ABOUT, "--submission-id", "x", "-q", "wrong", "--schema", SCHEMA, *arguments
    )
    assert (found, out) == (code, ""), error
    assert error.startswith("aztask: error: ")
    assert words in error


def test_a_wheel_is_repacked_for_the_executors(run, shop_folder, shop, tmp_path, monkeypatch):
    """Its module is not on the executors' path, for here they run in another directory."""
    source = "import os\nfrom aztask import App\napp = App('w', broker=os.environ['W_BROKER'])\n"
    source = source.replace("os.environ['W_BROKER']", repr(os.environ["SPARK_SHOP_BROKER"]))
    source += "@app.task(name='w.t', queue='wheel')\ndef t(path: str, width: int): ...\n"
    with zipfile.ZipFile(tmp_path / "wheel_shop-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("wheel_shop/__init__.py", source)
    with zipfile.ZipFile(tmp_path / "wheel_shop-1-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path)  # the driver has it installed
    (tmp_path / "a.json").write_text('{"path": "a", "width": 1}\n')
    about = ("-A", "wheel_shop", "--task", "w.t", "--key", "path", "--submission-id", "w")
    given = ("--input", "a.json", "--schema", SCHEMA)
    code, _, error = run("submit", *about, *given)
    assert code == 1
    assert "executors cannot import 'wheel_shop': put it into a zip with aztask spark pack" in error
    code, _, error = run("submit", *about, *given, "--py-files", "wheel_shop-1-py3-none-any.whl")
    assert code == 0, error
    assert ids(shop, "wheel") == {task_id("w", "a")}
    for name, words in (("nosuch.zip", "is not a file"), ("a.json", "neither a .py file")):
        code, _, error = run("submit", *about, *given, "--py-files", name)
        assert (code, words in error) == (4, True), error


def test_without_an_app_it_says_what_to_do(run, tmp_path):
    about = ("--task", "t", "--key", "path", "--submission-id", "x", "--input", "a.json")
    code, _, error = run("submit", *about)
    assert code == 2
    assert "AZTASK_BROKER" in error


def test_a_stream_of_files(run, shop, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text('{"path": "f1", "width": 1}\n')
    about = (*ABOUT, "--input", "in", "--format", "json", "--schema", SCHEMA, "-q", "files")
    more = ("--checkpoint", str(tmp_path / "checkpoint"), "--available-now", "--json")
    code, out, error = run("stream", *about, *more, "--submission-id", "live")
    assert code == 0, error
    (batch,) = [json.loads(line) for line in out.splitlines()]
    assert (batch["batch"], batch["rows"]) == (0, 1)
    assert ids(shop, "files") == {task_id("live", "f1")}
    (tmp_path / "in" / "b.json").write_text('{"path": null, "width": 1}\n')
    code, out, error = run("stream", *about, *more, "--submission-id", "live")
    assert code == 1
    assert "the key column 'path' is null" in error


@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize("command", ["submit", "stream"])
def test_a_line_that_does_not_fit_is_named(run, tmp_path, kind, command):
    """Otherwise a query ends at it again and again, and does not say where."""
    folder = tmp_path / "in"
    folder.mkdir()
    lines = {
        "csv": "path,width\na,1\nb,wide\nc,3\n",
        "json": '{"path": "a", "width": 1}\n{"path": "b", "width": wide}\n',
    }
    (folder / f"bad.{kind}").write_text(lines[kind])
    about = (*ABOUT, "--input", "in", "--format", kind, "--schema", SCHEMA, "-q", f"bad-{command}")
    more = ("--checkpoint", str(tmp_path / "checkpoint"), "--available-now")
    given = more if command == "stream" else ("--no-check-keys",)
    code, _, error = run(command, *about, *given, "--submission-id", "bad")
    assert code == 1
    assert f"/in/bad.{kind} does not fit the schema" in error
    assert ("b,wide" if kind == "csv" else '"width": wide') in error
    assert ("start the query again" if command == "stream" else "submit again") in error


def test_without_java_the_command_is_one_line(tmp_path, shop_folder):
    (tmp_path / "a.json").write_text('{"path": "a", "width": 1}\n')
    told = {**os.environ, "PATH": str(tmp_path)}
    told.pop("JAVA_HOME", None)
    command = ("spark", "submit", *ABOUT, "--submission-id", "x", "--input", "a.json")
    ended = subprocess.run(
        [sys.executable, "-m", "aztask", *command],
        env=told,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 4
    assert ended.stderr.startswith("aztask: error: Spark needs Java 17 or newer")
    assert len(ended.stderr.splitlines()) == 1
