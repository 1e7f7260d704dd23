"""Which requests a change of documents costs, and what is remembered between two of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from still import Still

from aztask.queues.engine import Database
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.workflows import ROOT, DocumentChange
from aztask.support.chance import SystemChance, replaced
from aztask.support.clock import Clock
from aztask.workflows.documents import Appended, Documents, Pace


class Edit:
    """Adds a letter to a document; a piece is that letter, too."""

    def __init__(
        self,
        name: str = "row",
        *,
        patient: bool = False,
        exists: bool = False,
        piece: bool = False,
        alone: bool = True,
        done: bool = True,
        fold: bool = False,
        first: tuple[DocumentChange, ...] = (),
        letter: bytes = b"x",
        workflow: str = "w",
    ) -> None:
        self.place = (workflow, name)
        self.patient, self.exists = patient, exists
        self._pieces = {"p": letter} if piece else {}
        row = SimpleNamespace(pack=lambda: b"folded")
        self._answer = Appended(alone, done, row if fold else None)
        self._first, self._letter = first, letter
        self.seen: list[bytes | None] = []
        self.orphan = False

    def apply(self, data: bytes | None) -> bytes | None:
        self.seen.append(data)
        return (data or b"") + self._letter if self._letter else None

    def pieces(self) -> dict[str, bytes]:
        found, self._pieces = self._pieces, {}
        return found

    def appended(self, data: bytes) -> Appended:
        self.seen.append(data)
        return self._answer

    def first(self) -> tuple[DocumentChange, ...]:
        found, self._first = self._first, ()
        return found

    def orphaned(self) -> None:
        self.orphan = True


class Counting:
    """The workflows of a store, and what was asked of them.

    `pieces`: how many a document has after an append; in a file they are in its data.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.pieces = 0
        self.asked: list[tuple[str, ...]] = []

    def read(self, names: Any) -> Any:
        self.asked.append(("read", *(name for _, name in names)))
        return self._inner.read(names)

    def write(self, changes: Any) -> Any:
        self.asked.append(("write", *(each.name for each in changes)))
        return self._inner.write(changes)

    def append(self, additions: Any) -> Any:
        self.asked.append(("append", *(each.name for each in additions)))
        found = self._inner.append(additions)
        return [each and replace(each, pieces=self.pieces) for each in found]

    def take(self) -> list[tuple[str, ...]]:
        found, self.asked = self.asked, []
        return found


class Last(SystemChance):
    """Chance that gives the last number of each range, and a given share."""

    def __init__(self, share: float = 0.0) -> None:
        self._share = share

    def uniform(self, first: float, last: float) -> float:
        return last

    def random(self) -> float:
        return self._share


class Site:
    def __init__(self, *, remote: bool = True) -> None:
        self.database = Database(":memory:")
        self.results = LocalResults(self.database).workflows
        self.results.write([DocumentChange("w", ROOT, b"root")])
        self.store = Counting(self.results)
        self.slept: list[float] = []
        self.time = Still()
        self.pace = Pace(self.time)
        self.documents = self.process(remote=remote)

    def process(self, *, remote: bool = True) -> Documents:
        clock = Clock(monotonic=self.time.monotonic, sleep=self.slept.append)
        return Documents(self.store, remote=remote, clock=clock, pace=self.pace)  # type: ignore[arg-type]

    def data(self, name: str = "row") -> bytes | None:
        (found,) = self.results.read([("w", name)])
        return None if found is None else found.data

    def put(self, name: str, data: bytes) -> None:
        """Another process writes a document."""
        (known,) = self.results.read([("w", name)])
        tag = None if known is None else known.tag
        assert self.results.write([DocumentChange("w", name, data, tag)]) != [None]


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    with closing(made.database), replaced(Last()):
        yield made


# -- reading and remembering -----------------------------------------------------------------------


def test_a_document_is_read_once_and_then_known(site: Site) -> None:
    site.documents.change([Edit()])
    assert site.store.take() == [("read", "row"), ("read", ROOT), ("write", "row")]
    site.documents.change([Edit()])
    assert site.store.take() == [("write", "row")]
    assert site.data() == b"xx"


def test_a_version_that_another_process_replaced_costs_another_try(site: Site) -> None:
    site.documents.change([Edit()])
    site.put("row", b"theirs")
    site.store.take()
    site.documents.change([Edit()])
    assert site.store.take() == [("write", "row"), ("read", "row"), ("write", "row")]
    assert site.data() == b"theirsx"
    assert site.slept == [0.004]


def test_an_edit_that_changes_nothing_of_a_known_version_looks_at_the_current_one(
    site: Site,
) -> None:
    site.documents.change([Edit()])
    site.put("row", b"theirs")
    site.store.take()
    nothing = Edit(letter=b"")
    site.documents.change([nothing])
    assert nothing.seen == [b"x", b"theirs"]
    assert site.store.take() == [("read", "row")]
    assert site.data() == b"theirs"


def test_in_a_local_store_the_current_version_is_always_read() -> None:
    site = Site(remote=False)
    with closing(site.database):
        for _ in range(2):
            site.documents.change([Edit(patient=True, piece=True, exists=True)])
            site.store.take()
        nothing = Edit(letter=b"")
        site.documents.change([nothing])
        assert site.store.take() == [("read", "row")]
        assert nothing.seen == [b"xx"]


def test_several_documents_are_read_and_written_together(site: Site) -> None:
    site.documents.change([Edit("a"), Edit("b")])
    assert site.store.take() == [("read", "a", "b"), ("read", ROOT), ("write", "a", "b")]
    site.put("b", b"theirs")
    site.documents.change([Edit("a"), Edit("b"), Edit("c")])
    assert site.store.take() == [
        ("read", "c"), ("read", ROOT), ("write", "a", "b", "c"), ("read", "b"), ("write", "b"),
    ]  # fmt: skip
    assert [site.data(name) for name in "abc"] == [b"xx", b"theirsx", b"x"]


def test_what_a_document_refers_to_is_written_before_it(site: Site) -> None:
    firsts = [Edit(name, first=(DocumentChange("w", f"values-{name}", b"v"),)) for name in "ab"]
    site.documents.change(firsts)
    assert site.store.take()[2:] == [("write", "values-a", "values-b"), ("write", "a", "b")]


def test_of_a_workflow_that_was_deleted_nothing_is_written(site: Site) -> None:
    site.results.write([DocumentChange("v", ROOT, b"root")])
    gone = [Edit(workflow="gone"), Edit("other", workflow="gone")]
    there, new = Edit(workflow="v"), Edit()
    site.documents.change([*gone, there, new])
    assert [each.orphan for each in (*gone, there, new)] == [True, True, False, False]
    assert gone[0].seen == []
    assert site.results.read([("gone", "row"), ("v", "row"), ("w", "row")])[0] is None
    assert site.store.take()[1] == ("read", ROOT, ROOT, ROOT)


def test_large_documents_are_not_remembered(site: Site) -> None:
    for letter in (b"x" * 65_536, b"y", b"z"):
        site.documents.change([Edit(letter=letter)])
    asked = [each for each in site.store.take() if each == ("read", "row")]
    assert len(asked) == 2, "65537 bytes are too many, and are read again"


def test_the_last_500_documents_are_remembered(site: Site) -> None:
    names = [f"row-{number}" for number in range(501)]
    site.documents.change([Edit(name) for name in names[:500]])
    site.documents.change([Edit(names[0])])
    site.documents.change([Edit(names[500])])
    site.store.take()
    site.documents.change([Edit(name) for name in (*names[2:5], names[0], names[500])])
    assert [each[0] for each in site.store.take()] == ["write"]
    site.documents.change([Edit(names[1])])
    assert site.store.take()[0] == ("read", names[1])


def test_data_is_read_as_it_is_now(site: Site) -> None:
    site.documents.change([Edit()])
    site.put("row", b"theirs")
    assert site.documents.read([("w", "row"), ("w", "missing")]) == [b"theirs", None]


# -- appending -------------------------------------------------------------------------------------


def made(site: Site, *names: str) -> None:
    for name in names:
        site.put(name, b"d")


def test_a_document_that_exists_and_is_not_known_is_appended_to(site: Site) -> None:
    made(site, "row", "other")
    site.documents.change([Edit("other")])
    site.store.take()
    site.documents.change([Edit(exists=True, piece=True), Edit("other", exists=True, piece=True)])
    assert site.store.take() == [("append", "row"), ("write", "other")]
    assert site.data("row") == b"dx"
    site.documents.change([Edit(exists=True, piece=True)])
    assert site.store.take() == [("write", "row")], "now it is known"


def test_one_that_may_not_exist_is_read_first(site: Site) -> None:
    site.documents.change([Edit(piece=True)])
    assert site.store.take() == [("read", "row"), ("read", ROOT), ("write", "row")]


def test_what_cannot_be_appended_is_written(site: Site) -> None:
    edits = [Edit("missing", exists=True, piece=True), Edit("row", exists=True, piece=True)]
    made(site, "row")
    site.documents.change(edits)
    assert site.store.take() == [
        ("append", "missing", "row"), ("read", "missing"), ("read", ROOT), ("write", "missing"),
    ]  # fmt: skip
    assert (site.data("missing"), site.data("row")) == (b"x", b"dx")


def test_what_is_left_to_write_after_an_append_is_written(site: Site) -> None:
    made(site, "row")
    site.documents.change([Edit(exists=True, piece=True, done=False, letter=b"y")])
    assert site.store.take() == [("append", "row"), ("write", "row")]
    assert site.data() == b"dyy"


def test_while_others_write_a_patient_edit_waits_a_moment_and_appends(site: Site) -> None:
    made(site, "row")
    site.documents.change([Edit(exists=True, piece=True)])
    site.store.take()
    site.pace.met()
    site.documents.change([Edit(patient=True, piece=True, alone=False)])
    assert site.store.take() == [("append", "row")]
    assert site.slept == [0.03], "more of its members may end"
    site.slept.clear()
    site.documents.change([Edit(patient=False, piece=True, alone=False)])
    assert site.slept == [], "one that others wait for goes at once"


def test_while_others_write_a_patient_edit_without_pieces_waits_for_its_pace_and_reads(
    site: Site,
) -> None:
    site.documents.change([Edit(patient=True)])
    site.store.take()
    site.pace.met()
    site.documents.change([Edit(patient=True)])
    assert site.slept == [0.04]
    assert site.store.take() == [("read", "row"), ("write", "row")]
    site.slept.clear()
    site.documents.change([Edit(patient=False)])
    assert site.store.take() == [("write", "row")], "what it knows is tried"
    assert site.slept == []


def test_edits_are_patient_together_or_not_at_all(site: Site) -> None:
    site.pace.met()
    site.documents.change([Edit("a", patient=True), Edit("b", patient=False)])
    assert site.slept == []


def test_a_pace_falls_if_nobody_was_met_and_stays_if_others_write(site: Site) -> None:
    made(site, "row")
    for alone, expected in ((False, 0.02), (True, 0.017)):
        site.pace = Pace(site.time)
        site.documents = site.process()
        site.pace.met()
        site.documents.change([Edit(exists=True, piece=True, alone=alone)])
        assert site.pace.wait() / 2 == pytest.approx(expected)
    site.pace = Pace(site.time)
    site.documents = site.process()
    site.documents.change([Edit(exists=True, piece=True, alone=False)])
    assert site.pace.contended, "others are about"


def test_a_patient_write_lowers_the_pace_if_its_first_try_succeeds(site: Site) -> None:
    site.documents.change([Edit(patient=True)])
    site.pace.met()
    site.documents.change([Edit(patient=True)])
    assert site.pace.wait() / 2 == pytest.approx(0.017)
    site.documents.change([Edit(patient=False)])
    assert site.pace.wait() / 2 == pytest.approx(0.017)


def test_a_write_that_meets_another_one_appends_its_pieces(site: Site) -> None:
    site.documents.change([Edit()])
    site.put("row", b"theirs")
    site.store.take()
    site.documents.change([Edit(piece=True)])
    assert site.store.take() == [("write", "row"), ("append", "row")]
    assert site.slept == []
    assert site.data() == b"theirsx"


# -- folding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "share", "options", "folded"),
    [
        (48, 0.24, {"fold": True}, True),
        (47, 0.24, {"fold": True}, False),
        (48, 0.25, {"fold": True}, False),
        (48, 0.24, {"fold": False}, False),
        (60, 0.0, {"fold": True}, True),
    ],
)
def test_one_in_four_writers_that_see_48_pieces_writes_them_into_the_document(
    pieces: int, share: float, options: dict[str, bool], folded: bool
) -> None:
    site = Site()
    with closing(site.database), replaced(Last(share)):
        made(site, "row")
        site.store.pieces = pieces
        site.documents.change([Edit(exists=True, piece=True, **options)])
        asked = site.store.take()
        assert asked == [("append", "row"), *([("write", "row")] if folded else [])]
        assert (site.data() == b"folded") == folded
        site.documents.change([Edit()])
        assert site.store.take() == [("write", "row")], "the version is known either way"


def test_a_fold_that_another_writer_was_faster_than_is_no_harm(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(site, "row")
    site.store.pieces = 48
    write = site.store.write
    monkeypatch.setattr(site.store, "write", lambda changes: [None for _ in changes])
    site.documents.change([Edit(exists=True, piece=True, fold=True)])
    monkeypatch.setattr(site.store, "write", write)
    assert site.data() == b"dx"
    site.store.take()
    site.documents.change([Edit()])
    assert site.store.take() == [("read", "row"), ("write", "row")], "its version is not known"
