"""``aztask doctor`` on the local broker: its lines, its JSON, its exit codes."""

import json
import zipfile

import pytest

SHOP = """
from aztask import App
app = App("shop", results={results!r})

@app.task(queue="orders")
def ship(order: int) -> int:
    return order
"""


@pytest.fixture
def shop(cli, monkeypatch):
    monkeypatch.setenv("AZTASK_BROKER", cli.address)
    cli.make_file()
    cli.module("doctor_shop", SHOP.format(results=cli.address))
    return cli


def findings(ended):
    return {
        (each["subject"], each["check"]): each for each in map(json.loads, ended.out.splitlines())
    }


def test_one_line_for_each_finding(shop):
    ended = shop("doctor", "-A", "doctor_shop")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert all(line.startswith("ok       ") for line in lines)
    assert "ok       app: shop: 1 task; queues orders" in lines
    assert "ok       queue orders: it is created when it is first used" in lines
    assert ended.err == "0 problems, 0 warnings\n"


def test_nothing_is_said_twice(shop):
    lines = shop("doctor", "-A", "doctor_shop", "-Q", "orders").out.splitlines()
    texts = [line.partition(": ")[2] for line in lines]
    assert len(set(texts)) == len(texts)


def test_json_is_one_object_for_each_finding(shop, cli):
    found = findings(shop("doctor", "-A", "doctor_shop", "-Q", "orders", "--json"))
    assert found["broker", "durability"]["level"] == "ok"
    assert found["queue orders", "exists"]["advice"] is None
    assert ("queue default", "exists") not in found
    assert (
        "file system" in found["broker", "file"]["text"]
        or "file is" in found["broker", "file"]["text"]
    )


def test_a_bundle_has_the_findings_and_is_not_written_over(shop):
    path = shop.folder / "shop.zip"
    ended = shop("doctor", "-A", "doctor_shop", "--json", "--bundle", str(path))
    assert ended.code == 0
    assert ended.err.startswith(f"wrote {path}: 6 files; read them before you send it\n")
    with zipfile.ZipFile(path) as archive:
        packed = json.loads(archive.read("aztask-bundle/findings.json"))
    printed = findings(ended)
    assert {(each["subject"], each["check"]) for each in packed} == printed.keys()
    again = shop("doctor", "-A", "doctor_shop", "--bundle", str(path))
    assert (again.code, f"{path} exists already" in again.error) == (1, True)


def test_without_results_a_promise_is_void(cli, monkeypatch):
    cli.make_file()
    monkeypatch.setenv("AZTASK_BROKER", cli.address)
    ended = cli("doctor", "--json")
    assert ended.code == 0
    assert findings(ended)["results", "results"]["level"] == "warning"
    assert "0 problems, 1 warning" in ended.err


def test_a_queue_that_wants_sessions(shop):
    shop("queues", "create", "orders", "--sessions")
    ended = shop("doctor", "-A", "doctor_shop", "--json")
    assert ended.code == 4
    assert findings(ended)["queue orders", "sessions"]["level"] == "problem"
    assert shop("doctor", "-Q", "orders").code == 0, "nobody said that an app has other wishes"


def test_a_name_that_is_not_allowed_and_other_queues_are_looked_at(shop):
    ended = shop("doctor", "-A", "doctor_shop", "-Q", "../x,orders", "--json")
    assert ended.code == 4
    found = findings(ended)
    assert found["queue ../x", "name"]["level"] == "problem"
    assert found["queue orders", "exists"]["level"] == "ok"


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\nb", "x" * 64])
def test_names_that_are_no_names(shop, name):
    ended = shop("doctor", "-Q", name)
    assert ended.code == 4
    assert ended.out.replace("\n", "").isprintable()


def test_events_that_cannot_be_written(shop, monkeypatch):
    monkeypatch.setenv("AZTASK_EVENTS", "/proc/none/events")
    ended = shop("doctor", "-A", "doctor_shop", "--json")
    assert ended.code == 4
    assert "/proc/none/events cannot be written" in findings(ended)["events", "events"]["text"]


def test_events_that_can_be_written_are_not_made(shop, monkeypatch, tmp_path):
    monkeypatch.setenv("AZTASK_EVENTS", str(tmp_path / "deep" / "events"))
    assert findings(shop("doctor", "--json"))["events", "events"]["level"] == "ok"
    assert not (tmp_path / "deep").exists()


def test_a_power_cut_is_covered_or_not(shop, monkeypatch):
    assert "loss of power may" in findings(shop("doctor", "--json"))["broker", "durability"]["text"]
    monkeypatch.setenv("AZTASK_BROKER", f"{shop.address}?durable=full")
    text = findings(shop("doctor", "--json"))["broker", "durability"]["text"]
    assert text == "accepted messages survive a loss of power"


def test_memory_is_no_place_for_a_worker(shop, monkeypatch):
    monkeypatch.setenv("AZTASK_BROKER", "local://:memory:")
    assert (
        "no worker can reach them" in findings(shop("doctor", "--json"))["broker", "file"]["text"]
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("-A", "nosuch"), 2),
        (("-A", "nosuch:app"), 2),
        (("--lease", "0"), 2),
        (("--lease", "nan"), 2),
        (("-Q", ""), 2),
        (("-Q", "a,,b"), 2),
        (("extra",), 2),
    ],
)
def test_wrong_uses(shop, arguments, code):
    ended = shop("doctor", *arguments)
    assert ended.code == code
    assert ended.error


def test_without_any_queue_file_it_says_so(cli):
    ended = cli("doctor")
    assert ended.code == 4
    assert "there is no queue file" in ended.error
