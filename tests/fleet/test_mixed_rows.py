"""This revision beside the first whose rows have owners, on one store, and a rollback.

Each reads, changes and deletes what the other one wrote, and neither takes a row that the other one
has replaced in the meantime for the one that it read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import azurite
import pytest
from previous import ROOT, WITH_OWNERS, MissingRelease, previous_release

from aztask.address.addresses import LocalAddress
from aztask.address.owner import Owner
from aztask.address.urls import parse_results
from aztask.queues.engine import Database
from aztask.stores.records.controls import EntryChange
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.tables.store import TablesResults

HERE = Path(__file__).parent
BROKER = "servicebus://shop.servicebus.windows.net"
KEYS = ["shop.pay:a", "a/b?c#d\\e", "\xe4" * 300]
FAR = 2e9


class Site:
    """One result store, and processes of both revisions."""

    def __init__(self, results: str, former: Path) -> None:
        self.results = results
        self.packages = {"former": former, "this": ROOT}

    def run(self, revision: str, *steps: list[Any]) -> list[Any]:
        package = self.packages[revision]
        environment = {
            **os.environ,
            "PYTHONPATH": str(package),
            "FLEET_PACKAGE": str(package / "aztask"),
        }
        done = subprocess.run(
            [sys.executable, str(HERE / "rows_app.py"), self.results, BROKER],
            input=json.dumps(steps), env=environment, timeout=120, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        answers: list[Any] = json.loads(done.stdout)
        return answers

    def open(self) -> LocalResults | TablesResults:
        address, owner = parse_results(self.results), Owner(BROKER, "shop")
        if isinstance(address, LocalAddress):
            return LocalResults(Database(address.path), owner=owner)
        return TablesResults(address, owner=owner)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return previous_release(tmp_path_factory.mktemp("former"), WITH_OWNERS)
    except MissingRelease as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(params=["local", "tables"])
def site(request: pytest.FixtureRequest, tmp_path: Path, former: Path) -> Iterator[Site]:
    if request.param == "local":
        yield Site(f"local://{tmp_path}/results.db", former)
        return
    with azurite.storing(tmp_path / "azurite") as services:
        account = azurite.account_of(*services)
        store = TablesResults(parse_results(account))  # type: ignore[arg-type]
        store.create()
        store.close()
        yield Site(account, former)


@pytest.mark.parametrize(("first", "second"), [("former", "this"), ("this", "former")])
def test_each_revision_goes_on_with_the_rows_of_the_other_one(
    site: Site, first: str, second: str
) -> None:
    names = ["control", "limit-a/b", "breakers"]
    made = [["hold", key, "one", FAR + n] for n, key in enumerate(KEYS)]
    assert all(site.run(first, *made, *(["enter", name, "one"] for name in names)))
    seen = site.run(
        second,
        *(["hold", key, "two", FAR] for key in KEYS),
        *(["enter", name, "two"] for name in names),
        *(["holder", key] for key in KEYS),
        *(["entry", name] for name in names),
        ["due", FAR + 9],
        ["owners"],
    )
    assert seen[:6] == [False] * 6, "they are there"
    assert seen[6:9] == [["one", FAR + n, BROKER] for n in range(3)]
    assert seen[9:] == ["one", "one", "one", KEYS, sorted([BROKER, f"shop on {BROKER}"])]
    assert all(
        site.run(
            second,
            ["replace", KEYS[0], "two", FAR + 5],
            ["release", KEYS[1]],
            ["change", "control", "two"],
            ["drop", "breakers"],
        )
    )
    assert site.run(
        first,
        ["holder", KEYS[0]], ["holder", KEYS[1]], ["due", FAR + 9],
        ["entry", "control"], ["entry", "breakers"],
        ["hold", KEYS[1], "three", FAR], ["replace", KEYS[2], "three", FAR], ["release", KEYS[0]],
        ["change", "limit-a/b", "three"], ["enter", "breakers", "three"],
        ["due", FAR + 9],
    ) == [
        ["two", FAR + 5, BROKER], None, [KEYS[2], KEYS[0]], "two", None,
        True, True, True, True, True, [KEYS[1], KEYS[2]],
    ]  # fmt: skip
    assert site.run(second, ["purge", "limit-", FAR], ["entry", "limit-a/b"]) == [1, None]


def test_a_row_that_the_former_revision_made_anew_is_not_the_one_that_was_read(site: Site) -> None:
    """In a file, that revision gives a new holder the version that the one before it had."""
    assert site.run("former", ["hold", "k", "one", FAR], ["enter", "control", "one"])
    store = site.open()
    read = store.uniques.read("k")
    assert read is not None
    (entry,) = store.controls.read(["control"])
    assert entry is not None
    site.run("former", ["release", "k"], ["hold", "k", "two", FAR], ["drop", "control"],
             ["enter", "control", "two"])  # fmt: skip
    assert store.uniques.write("k", b"late", FAR, read) is None
    assert not store.uniques.release(read)
    assert store.controls.write([EntryChange("control", b"late", entry.tag)]) == [None]
    assert not store.controls.remove("control", entry.tag)
    assert site.run("former", ["holder", "k"], ["entry", "control"]) == [
        ["two", FAR, BROKER],
        "two",
    ]
    store.close()


@pytest.mark.parametrize(("first", "second"), [("former", "this"), ("this", "former")])
def test_each_revision_goes_on_with_the_notes_of_the_other_one(
    site: Site, first: str, second: str
) -> None:
    def noted(*keys: str) -> list[list[Any]]:
        return [[key, f"why {key}", "what", 5.0, 70_000, ""] for key in keys]

    assert site.run(first, ["note", "c", "a", *KEYS], ["notes"])[1] == noted("c", "a", *KEYS)
    assert site.run(
        second,
        ["notes"], ["note", "a", "b"], ["notes"], ["unnote", "c", KEYS[1]], ["notes"],
    )[::2] == [
        noted("c", "a", *KEYS), noted("c", "a", *KEYS, "b"), noted("a", KEYS[0], KEYS[2], "b"),
    ]  # fmt: skip
    assert site.run(
        first,
        ["note", "a", "d"], ["notes"], ["unnote", "b"], ["keep", ["a", "d"], 4.0],
        ["keep", ["a", "d"], 6.0], ["notes"],
    )[1:] == [
        noted("a", KEYS[0], KEYS[2], "b", "d"), None, 0, 2, noted("a", "d"),
    ]  # fmt: skip
    assert site.run(second, ["keep", [], 6.0], ["note", "e"], ["notes"])[::2] == [2, noted("e")]
    assert site.run(first, ["notes"]) == [noted("e")]
