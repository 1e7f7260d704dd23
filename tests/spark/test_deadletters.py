"""Dead letters as DataFrames, on the local broker, on Service Bus and on a Storage queue."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace

import pytest
from letters import TASK, bury, errors

from aztask import App, CapabilityError, ConfigurationError, QueueNotFound
from aztask.message.envelope import Envelope
from aztask.operate.cli import main
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.queues.base import MessageState
from aztask.settlement import DeadLetter
from aztask.spark import Target
from aztask.spark.deadletters import (
    dead_letters,
    groups,
    last_position,
    replay,
    sample,
    selections,
    size,
)
from aztask.spark.session import translated_errors
from aztask.stores.records.deadindex import IndexedDeadLetter, index_for

MODULE = """
import os
from aztask import App, RetryPolicy
app = App("post", retry=RetryPolicy(max_retries=0))

@app.task
def deliver(name):
    if name.startswith("bad"):
        raise ValueError(f"no address for {name!r}")
    fd = os.open("ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{name}\\n".encode())
    os.close(fd)
"""


REPLAY = """
import sys
from aztask import App
from aztask.operate.deadletters.view import Selection
from aztask.operate.deadletters.letters import Positions
from aztask.spark.deadletters import replay

selected = Selection(positions=Positions(map(int, sys.argv[1:])))
replay(App("post"), {"default": selected}, rate=10)
"""


@pytest.fixture(scope="module")
def dead_shop(tmp_path_factory):
    """601 dead letters in "default", one in "slow" that nobody can decode."""
    folder = tmp_path_factory.mktemp("shop")
    address = f"local://{folder}/q.db"
    app = App("shop", broker=address, results=address)
    bury(app, "default", list(errors(600)))
    app.broker.send("slow", [Envelope(b"\xff", {"x": 1}, message_id="odd")])
    receiver = app.broker.receiver("slow", lease=30.0)
    receiver.settle([(each, DeadLetter("undecodable", "")) for each in receiver.receive(1, 1.0)])
    yield app, Target(broker=address)
    app.close()


def test_every_dead_letter_is_a_row(spark, dead_shop):
    _, target = dead_shop
    rows = dead_letters(spark, target).collect()
    assert len(rows) == len({row.position for row in rows}) == 602
    (row,) = [row for row in rows if row.id == "t3"]
    assert (row.queue, row.task, row.reason, row.args) == (
        "default",
        TASK,
        "retries-exhausted",
        "('n3',)",
    )
    assert (row.description, row.signature) == ("KeyError: 'user-3'", "KeyError: <text>")
    assert (row.resubmit_count, row.generation, row.delivery_count) == (0, 0, 1)
    (odd,) = [row for row in rows if row.queue == "slow"]
    assert (odd.id, odd.task, odd.signature[:20]) == ("odd", None, odd.problem[:20])
    assert "no task header" in odd.problem


def test_arguments_that_are_stored_apart_are_not_fetched(spark, tmp_path):
    address = f"local://{tmp_path}/q.db"
    app = App("shop", broker=address, results=address, payload_threshold=1000)
    bury(app, "default", [("large", "x" * 5000, "rejected", "no")])
    (row,) = dead_letters(spark, Target(broker=address)).collect()
    assert (row.id, row.task, row.reason, row.args) == ("large", TASK, "rejected", None)
    assert (row.body_bytes, row.problem) == (0, "")
    assert len(list(app.payloads.store.list())) == 1
    app.close()


KEYED = """
from aztask import App
app = App(
    "post", broker={address!r}, results={address!r}, encryption_keys=["k" * 40], encrypt=True,
    signing_keys=["s" * 40], id_key="i" * 40,
)
"""


def test_encrypted_arguments_are_read_with_the_key_alone(spark, tmp_path, monkeypatch):
    address = f"local://{tmp_path}/q.db"
    (tmp_path / "keyed_post.py").write_text(KEYED.format(address=address))
    spark.sparkContext.addPyFile(str(tmp_path / "keyed_post.py"))
    monkeypatch.syspath_prepend(tmp_path)
    keyed = importlib.import_module("keyed_post").app
    letters = [(f"t{number}", "4111-1111", "rejected", "no") for number in range(3)]
    bury(keyed, "default", letters)
    readable = dead_letters(spark, Target(app="keyed_post:app")).collect()
    assert {(row.args, row.problem) for row in readable} == {("('4111-1111',)", "")}
    frame = dead_letters(spark, Target(broker=address))
    rows = frame.collect()
    assert {(row.task, row.reason, row.args) for row in rows} == {(TASK, "rejected", None)}
    for row in rows:
        assert "4111" not in repr(row)
        assert row.problem.startswith("the arguments: it is encrypted with the key ")
        assert "\n" not in row.problem
    (group,) = groups(frame).collect()
    assert (group.task, group.reason, group["count"]) == (TASK, "rejected", 3)
    assert replay(keyed, selections(frame))["default"].done == 3
    keyed.close()


def test_a_read_takes_nothing_and_repeats(spark, dead_shop):
    app, target = dead_shop
    letters = dead_letters(spark, target, ["default"], slices=3)
    assert letters.rdd.getNumPartitions() == 3
    first = sorted(row.position for row in letters.collect())
    assert sorted(row.position for row in letters.collect()) == first
    assert all(each.delivery_count == 1 for each in DeadLetters(app, "default").list())


def test_groups(spark, dead_shop):
    app, target = dead_shop
    rows = groups(dead_letters(spark, target, ["default"])).collect()
    core = {(g.task, g.reason, g.signature, g.count) for g in DeadLetters(app, "default").groups()}
    assert {(r.task, r.reason, r.signature, r["count"]) for r in rows} == core
    assert [(row.reason, row.signature, row["count"]) for row in rows] == [
        ("retries-exhausted", "ConnectionError: no answer from <address> after <n> s", 400),
        ("retries-exhausted", "KeyError: <text>", 200),
        ("rejected", "nobody is there", 1),
    ]
    assert [row.example for row in rows] == ["t1", "t0", "lonely"]
    assert rows[0].first_at <= rows[0].last_at


def test_a_sample_of_every_group(spark, dead_shop):
    _, target = dead_shop
    letters = dead_letters(spark, target, ["default"])
    drawn = [row.id for row in sample(letters, 2).collect()]
    assert len(drawn) == 5
    assert "lonely" in drawn
    assert sorted(row.id for row in sample(letters, 2).collect()) == sorted(drawn)


def test_the_last_position_is_found_across_wide_gaps(dead_shop):
    app, _ = dead_shop

    class Sparse:
        def __init__(self, positions):
            self.positions = positions
            self.looks = 0

        def list(self, limit, after):
            self.looks += 1
            return [Found(each) for each in self.positions if each > after][:limit]

    class Found:
        def __init__(self, position):
            self.position = position

    wide = [1, 2, 5, 2**48 + 1, 2**48 + 7, 2**60 + 3]
    for end in range(1, len(wide) + 1):
        letters = Sparse(wide[:end])
        assert last_position(letters, 1) == wide[end - 1]
        assert letters.looks < 130
    real = DeadLetters(app, "default")
    assert last_position(real, real.list(limit=1)[0].position) == max(
        each.position for each in real.list(limit=1000)
    )


def test_a_selection_is_replayed_from_a_snapshot(spark, tmp_path):
    address = f"local://{tmp_path}/q.db"
    app = App("shop", broker=address, results=address)
    bury(app, "default", list(errors(60)))
    path = str(tmp_path / "snapshot")
    dead_letters(spark, Target(broker=address)).write.parquet(path)
    chosen = spark.read.parquet(path).where("signature = 'KeyError: <text>' and id != 't0'")
    selected = selections(chosen)
    assert {queue: size(found) for queue, found in selected.items()} == {"default": 19}
    reports = replay(app, selected)
    assert (reports["default"].done, reports["default"].lost) == (19, 0)
    assert len(DeadLetters(app, "default").list(limit=100)) == 42
    again = replay(app, selected)  # the snapshot is old now: nothing is replayed twice
    assert (again["default"].done, again["default"].lost) == (0, 19)
    assert app.broker.stats("default").active == 19
    app.close()


def test_a_snapshot_whose_letters_are_removed_replayed_and_added_to_meanwhile(spark, tmp_path):
    """Between the plan and a read, and between a selection and its replay: what is left is read and
    replayed, the rest is told as lost, and a letter that came later is never taken for another.
    """
    app = App("shop", broker=f"local://{tmp_path}/q.db")
    bury(app, "default", list(errors(20)))
    letters, target = DeadLetters(app, "default"), Target(broker=f"local://{tmp_path}/q.db")
    frame = dead_letters(spark, target, ["default"], slices=3)
    before = {row["id"]: row["position"] for row in frame.collect()}
    assert letters.purge(Selection(frozenset({"t0", "t1"}))).done == 2
    bury(app, "default", [("later", "x", "rejected", "")])
    assert {row["id"] for row in frame.collect()} == before.keys() - {"t0", "t1"}
    selected = selections(frame)
    assert letters.replay(Selection(frozenset({"t2", "t3"}))).done == 2
    assert letters.purge(Selection(frozenset({"lonely"}))).done == 1
    report = replay(app, selected)["default"]
    assert (report.done, report.lost) == (16, 3)
    assert [each.id for each in letters.list()] == ["later"]
    assert letters.purge(Selection(everything=True)).done == 1
    assert frame.collect() == []
    assert replay(app, selected)["default"].done == 0
    app.close()


def test_the_drivers_own_app_stays_open(spark, shop):
    """Where the slices are found, the program may be using the app itself."""
    shop.app.broker.declare("default")
    broker = shop.app.broker
    dead_letters(spark, Target(app="spark_shop:app"), ["default"])
    assert shop.app.broker is broker


def test_no_dead_letters_are_no_rows(spark, tmp_path):
    app = App("shop", broker=f"local://{tmp_path}/q.db")
    app.broker.declare("default")
    letters = dead_letters(spark, Target(broker=f"local://{tmp_path}/q.db"))
    assert letters.count() == 0
    assert groups(letters).collect() == []
    assert selections(letters) == {}
    app.close()


class TestRefusals:
    def test_a_missing_queue(self, spark, dead_shop):
        with (
            pytest.raises(QueueNotFound, match="queue 'nosuch' does not exist"),
            translated_errors(),
        ):
            dead_letters(spark, dead_shop[1], ["nosuch"]).count()

    def test_a_wrong_column(self, spark, dead_shop):
        with (
            pytest.raises(ConfigurationError, match="Spark refuses the query"),
            translated_errors(),
        ):
            dead_letters(spark, dead_shop[1]).where("nosuch = 1")

    @pytest.mark.parametrize("slices", [0, 1001, "x"])
    def test_impossible_slices(self, spark, dead_shop, slices):
        with (
            pytest.raises(ConfigurationError, match="slices takes a whole number"),
            translated_errors(),
        ):
            dead_letters(spark, dead_shop[1], slices=slices).count()

    def test_a_variable_that_is_not_set(self, spark):
        with (
            pytest.raises(ConfigurationError, match="AZTASK_NOSUCH is not set"),
            translated_errors(),
        ):
            dead_letters(spark, Target(broker_env="AZTASK_NOSUCH")).count()

    @pytest.mark.parametrize(
        "address",
        [
            "Endpoint=sb://x.example.net/;SharedAccessKeyName=k;SharedAccessKey=c2VjcmV0LWtleQ==",
            "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=c2VjcmV0LWtleQ==",
        ],
    )
    def test_an_address_with_a_secret(self, address):
        with pytest.raises(ConfigurationError, match="option broker holds a secret") as raised:
            Target(broker=address)
        assert "c2VjcmV0" not in str(raised.value)

    def test_an_app_and_a_broker(self):
        with pytest.raises(ConfigurationError, match="exclude each other"):
            Target(app="shop:app", broker="local:///x.db")


def test_a_storage_queue_that_hides_some_needs_the_index(spark, azurite, tmp_path):
    results = f"local://{tmp_path}/r.db"
    forgetful = App("shop", broker=azurite.connection_string, lease=30.0)
    for queue, count in (("few", 5), ("many", 40)):
        forgetful.broker.declare(queue)
        buried = bury(forgetful, queue, list(errors(count - 1)))
    forgetful.close()
    app = App("shop", broker=azurite.connection_string, results=results)
    plain = Target(broker_env="SPARK_SHOP_AZURITE")
    assert dead_letters(spark, plain, ["few"]).count() == 5
    with pytest.raises(CapabilityError, match="has about 40 dead letters"), translated_errors():
        dead_letters(spark, plain, ["many"]).count()
    index_for(app.broker, app.results).note(  # as workers do
        [
            IndexedDeadLetter("many", each.envelope, why.reason, why.description, 1.0, 1)
            for each, why in buried
        ]
    )
    letters = dead_letters(spark, replace(plain, results=results), ["many"])
    assert letters.count() == 40
    selected = selections(letters.where("signature = 'KeyError: <text>'"))
    assert size(selected["many"]) == 13
    assert replay(app, selected)["many"].done == 13
    assert app.broker.stats("many").dead == 27
    app.close()


def test_copies_on_a_storage_queue_are_one_row_and_hide_nothing(spark, azurite, tmp_path):
    """A worker that was killed between storing a dead letter and deleting its original left two."""
    broker = azurite.connection_string
    with closing(App("copied", broker=broker)) as app:
        app.broker.declare("copied")
        ((delivery, why),) = bury(app, "copied", [("a", "x", "rejected", "why")])
        app.broker.send("copied", [delivery.envelope])
        receiver = app.broker.receiver("copied", lease=30.0)
        (again,) = receiver.receive(1, 10.0)
        receiver.settle([(again, why)])
        receiver.close()
        assert app.broker.stats("copied").dead == 2
        frame = dead_letters(spark, Target(broker_env="SPARK_SHOP_AZURITE"), ["copied"])
        assert [row["id"] for row in frame.collect()] == ["a"]
        selected = selections(frame)
        report = replay(app, selected)["copied"]
        assert (size(selected["copied"]), report.done, report.lost) == (1, 1, 0)
        assert app.broker.stats("copied").dead == 0


def run(capsys, *arguments):
    """One command in this process; what it printed."""
    capsys.readouterr()
    code = main.run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_killed_in_the_middle_of_a_replay(spark, tmp_path, monkeypatch, capsys):
    """Between send and completion, where broker and results are two files."""
    names = [f"n{number}" for number in range(45)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AZTASK_BROKER", f"local://{tmp_path}/q.db")
    monkeypatch.setenv("AZTASK_RESULTS", f"local://{tmp_path}/r.db")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "post.py").write_text(MODULE)
    app = App("post")
    texts = ("retries-exhausted", "ValueError: no address for 'x'")
    bury(app, "default", [(name, name, *texts) for name in names])
    bury(app, "default", [("bad", "bad", "rejected", "no")])
    signature = "ValueError: no address for <text>"
    wish = ["spark", "dlq", "replay", "--signature", signature]
    assert "would replay 45 dead letters (45 of default)" in run(capsys, *wish, "--dry-run")
    assert app.broker.stats("default").dead == 46

    letters = dead_letters(spark, Target.of_environment())
    selected = selections(letters.where(letters["signature"] == signature))
    killed = subprocess.run(
        [sys.executable, "-c", REPLAY, *map(str, selected["default"].positions)],
        env={**os.environ, "AZTASK_FAILPOINT": "replayed:KILL:20"},
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert app.broker.stats("default").active == 20  # sent; the second ten are dead letters still
    assert app.broker.stats("default").dead == 36

    while app.broker.peek("default", dead_letter=True)[0].state is MessageState.LEASED:
        time.sleep(0.1)  # the leases of the dead one end
    assert "replayed 35 dead letters" in run(capsys, *wish, "--yes")
    assert app.broker.stats("default").dead == 1
    worker = [sys.executable, "-m", "aztask", "-A", "post:app", "worker", "--burst", "-c", "2"]
    subprocess.run(worker, check=True, timeout=60, capture_output=True)
    assert sorted((tmp_path / "ledger").read_text().split()) == sorted(names)  # each once
    left = run(capsys, "spark", "dlq", "list", "--json").splitlines()
    assert [json.loads(line)["id"] for line in left] == ["bad"]
    app.close()


def test_the_commands(spark, dead_shop, tmp_path, monkeypatch, capsys):
    _, target = dead_shop
    monkeypatch.setenv("AZTASK_BROKER", target.broker)
    rows = [
        json.loads(line) for line in run(capsys, "spark", "dlq", "groups", "--json").splitlines()
    ]
    assert [row["count"] for row in rows] == [400, 200, 1, 1]
    table = run(capsys, "spark", "dlq", "groups", "-Q", "default", "--where", "reason = 'rejected'")
    assert table.splitlines()[1].split()[:4] == ["1", "default", "post.deliver", "rejected"]
    snapshot = tmp_path / "snapshot"
    run(capsys, "spark", "dlq", "list", "--sample", 1, "--to", snapshot)
    drawn = run(capsys, "spark", "dlq", "list", "--snapshot", snapshot, "-Q", "default", "--json")
    assert len(drawn.splitlines()) == 3
    groups_table = run(capsys, "spark", "dlq", "groups")
    assert "FIRST SENT" in groups_table
    sampled = run(capsys, "spark", "dlq", "list", "--sample", 1, "-Q", "default")
    assert sampled.splitlines()[0].endswith("SIGNATURE")
    assert "KeyError: <text>" in sampled
    table = run(capsys, "spark", "dlq", "list", "--limit", 5).splitlines()
    assert len(table) == 6
    assert table[0].split()[:2] == ["ID", "QUEUE"]
    assert main.run(["spark", "dlq", "replay", "--yes"]) == 2
    assert "select with --where, --signature or --all" in capsys.readouterr().err
    assert main.run(["spark", "dlq", "list", "--where", "nosuch = 1"]) == 4
    assert "Spark refuses the query" in capsys.readouterr().err
