"""The commands of docs/how-to/spark/run-on-a-cluster.md, with executors that lack aztask."""

import re
import subprocess
from pathlib import Path

import pytest
from azurite import running
from cluster import ON_THE_MACHINES, standalone

from aztask import App

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "spark" / "run-on-a-cluster.md"
TEXT = PAGE.read_text()
CODE = re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
CONSOLE = re.findall(r"^```console\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def commands(name):
    """The commands of the block that has this word in it."""
    (block,) = [each for each in CONSOLE if name in each]
    return [each.strip() for each in re.split(r"^\$ ", block, flags=re.MULTILINE) if each.strip()]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """(the cluster, a folder with the page's files, the broker of its queue)."""
    folder = tmp_path_factory.mktemp("cluster")
    for text, name in CODE:
        (folder / name).write_text(text)
    with running(folder / "azurite") as azurite:
        app = App("shop", broker=azurite.connection_string)
        app.broker.declare("default")
        with standalone(folder, SHOP_BROKER=azurite.connection_string) as cluster:
            yield cluster, folder, app.broker
        app.close()


def test_the_machines_have_what_the_page_says_and_no_more(site):
    _, folder, _ = site
    (install,) = commands("pip install pyarrow")
    assert install.split()[2:] == list(ON_THE_MACHINES)
    python = str(folder / "bare" / "bin" / "python3")
    for name in (*ON_THE_MACHINES, "aztask", "kombu", "msgpack", "azure.core", "pyspark"):
        ended = subprocess.run([python, "-c", f"import {name}"], cwd="/", stderr=-3, check=False)
        assert (ended.returncode == 0) == (name in ON_THE_MACHINES), name


def test_a_packed_job_runs_on_executors_that_lack_aztask(site):
    cluster, folder, broker = site
    pack, submit = commands("spark-submit")
    packed = cluster.run(pack, folder)
    assert packed.returncode == 0, packed.stderr
    assert "install on the machines of the cluster: cryptography" in packed.stdout
    before = broker.stats("default").total
    job = cluster.run(submit, folder)
    assert job.returncode == 0, job.stdout + job.stderr[-3000:]
    assert "100 tasks sent" in job.stdout
    assert broker.stats("default").total - before == 100
    assert cluster.executors() == 2
