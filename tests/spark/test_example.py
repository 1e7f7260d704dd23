"""The examples on Spark: the commands of their READMEs do what the text says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_readme(name, tmp_path):
    """Run the commands of an example's README in a copy of it; what they print."""
    folder = tmp_path / name
    shutil.copytree(
        EXAMPLES / name, folder, ignore=shutil.ignore_patterns("__pycache__", ".aztask")
    )
    blocks = re.findall(r"```console\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    commands = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    script = [
        f'aztask() {{ {sys.executable} -m aztask "$@"; }}',
        f'python() {{ {sys.executable} "$@"; }}',
        "set -e",
        *commands,
    ]
    ended = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout, folder


@pytest.mark.usefixtures("shop_folder")
def test_submit(tmp_path):
    shown, _ = run_readme("spark", tmp_path)
    assert "4 rows, 4 sent, 0 failed" in shown
    assert shown.split()[-5:] == ["a.png", "b.png", "c.png", "d.png", "e.png"]


@pytest.mark.usefixtures("shop_folder")
def test_statistics(tmp_path):
    shown, folder = run_readme("spark-stats", tmp_path)
    for task in ("shop.resize", "shop.fetch", "shop.report"):
        assert task in shown
    assert "<svg" in (folder / "report.html").read_text()


@pytest.mark.usefixtures("shop_folder")
def test_tables(tmp_path):
    shown, _ = run_readme("spark-tables", tmp_path)
    for event, count in {"enqueued": 100, "succeeded": 80, "dead_lettered": 20}.items():
        assert re.findall(rf" {event} +(\d+)", shown) == [str(count), str(2 * count)]
    assert shown.count("file added to the tables") + shown.count("files added to the tables") == 2


@pytest.mark.usefixtures("shop_folder")
def test_recommend(tmp_path):
    shown, folder = run_readme("recommend", tmp_path)
    assert "replayed 4 dead letters" in shown
    lost = re.search(r"lease: raised: (\d+) leases were lost", shown)
    assert int(lost[1]) >= 12  # three runs of four films; a lease may also lapse before its run
    assert '"lease_seconds": 30.0' in (folder / "leases.json").read_text()
    assert shown.rpartition("replayed")[2].count("succeeded") == 4
