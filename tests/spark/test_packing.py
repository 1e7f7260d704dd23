"""``aztask spark pack``: a Python without aztask can import everything from the zip."""

import configparser
import importlib.util
import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from cluster import SPARK, bare_python

from aztask.errors import ConfigurationError
from aztask.operate.cli import main
from aztask.spark import packing
from aztask.spark.packing import pack, wheel_files

IMPORTS = (
    *(
        "aztask.spark.submission.send",
        "aztask.spark.submission.datasource",
        "aztask.spark.events.source",
    ),
    *("aztask.queues.storagequeue.broker", "aztask.queues.servicebus.broker", "azure.identity"),
    *("azure.storage.blob", "azure.data.tables", "msgpack", "certifi", "mine", "parts.deep"),
)
FROM_THE_ZIP = ("aztask", "kombu", "mine", "azure.core", "msgpack", "jinja2", "markupsafe")
# The templates of the report are read from the zip too.
RENDER = """
from aztask.spark.report.page import render
from aztask.spark.report.summary import Summary
counts = {"events": 0, "files": 0, "compacted_files": 0, "duplicates": 0, "odd": {}, "skipped": {}}
page = render(Summary("<b>", counts, None, [], [], [], [], [], 1))
assert "Tasks: &lt;b&gt;</title>" in page, page
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, with a module and a package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AZTASK_APP", raising=False)
    (tmp_path / "mine.py").write_text("app = 1\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").touch()
    (tmp_path / "parts" / "deep.py").touch()
    return tmp_path


def wheel(path, names, **more):
    """A wheel with these files, each with its own name in it."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, f"name = {name!r}\n")
        for name, text in more.items():
            archive.writestr(name, text)
    return str(path)


def test_a_python_without_aztask_imports_it_from_the_zip(here, capsys):
    assert main.run(["spark", "pack", "-A", "mine:app", "-o", "all.zip", "parts", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes"] == (here / "all.zip").stat().st_size < 10_000_000
    assert told["parts"][:2] == ["mine", "parts"]
    compiled = [each for each in ("cryptography", "deltalake") if importlib.util.find_spec(each)]
    assert [each.partition(" ")[0] for each in told["to_install"]] == compiled
    lib = SPARK / "python" / "lib"
    path = [str(here / "all.zip"), str(lib / "pyspark.zip"), *map(str, lib.glob("py4j-*.zip"))]
    script = f"import sys; sys.path[:0] = {path!r}\n" + "".join(f"import {n}\n" for n in IMPORTS)
    script += "import os; assert os.path.isfile(certifi.where())\n"
    script += RENDER
    script += f"print(*[sys.modules[name].__file__ for name in {FROM_THE_ZIP!r}], sep='\\n')\n"
    python = bare_python(here / "bare") / "python3"
    ended = subprocess.run(
        [python, "-c", script], cwd="/", capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("all.zip") == len(FROM_THE_ZIP)


def test_the_same_input_makes_the_same_zip(here):
    pack("one.zip", ["mine.py"])
    pack("two.zip", ["mine"])
    assert (here / "one.zip").read_bytes() == (here / "two.zip").read_bytes()
    assert sorted(path.name for path in here.iterdir()) == sorted(
        ["mine.py", "one.zip", "parts", "two.zip"]
    )


def test_a_wheel_is_packed_as_it_would_be_installed(here):
    names = ["shop/__init__.py", "shop/data.txt", "shop-1.data/purelib/more.py"]
    names += ["shop-1.data/scripts/run", "shop-1.dist-info/METADATA"]
    pack("all.zip", [wheel(here / "shop-1-py3-none-any.whl", names)])
    with zipfile.ZipFile("all.zip") as archive:
        assert archive.read("shop/data.txt") == b"name = 'shop/data.txt'\n"
        assert archive.read("more.py") == b"name = 'shop-1.data/purelib/more.py'\n"
        assert "aztask/spark/submission/send.py" in archive.namelist()
        assert not [name for name in archive.namelist() if "scripts" in name]


@pytest.mark.parametrize(
    ("target", "source", "words"),
    [
        ("all.whl", "mine", r"all\.whl' does not end with \.zip"),
        ("all.zip", "nosuch", "no file and no module 'nosuch'"),
        ("all.zip", "a b", "no file and no module 'a b'"),
        ("all.zip", "sys", "module 'sys' has no files here"),
        ("all.zip", "text.txt", "cannot be packed"),
        ("all.zip", "text.whl", "is not a wheel"),
        ("all.zip", "nosuch.whl", "is not a wheel"),
        ("all.zip", "fast.whl", "compiled, .* install it on the machines"),
        ("no/all.zip", "mine", "cannot be written: No such file"),
    ],
)
def test_what_cannot_be_packed_is_said(here, target, source, words):
    (here / "text.txt").write_text("x")
    (here / "text.whl").write_text("x")
    wheel(here / "fast.whl", ["fast/__init__.py", "fast/core.so"])
    before = sorted(here.iterdir())
    with pytest.raises(ConfigurationError, match=words) as caught:
        pack(target, [source])
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(here.iterdir()) == before


def test_the_files_of_a_wheel(here):
    assert list(wheel_files(here / wheel(here / "a.whl", ["a.py"]))) == ["a.py"]


def test_each_extra_is_for_the_cluster_or_stays_here():
    """A new one has to be sorted: what is forgotten is not packed."""
    settings = configparser.ConfigParser()
    settings.read(Path(__file__).parents[2] / "setup.cfg")
    extras = set(settings["options.extras_require"])
    here = {"dashboard", "django", "mcp", "migrate", "prometheus", "reload", "test", "top"}
    here.add("spark-connect")
    there = {name for name in extras if name in packing._CLUSTER.split("|")}
    assert (there | here, there & here) == (extras, set())
