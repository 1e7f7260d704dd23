"""Changes documents of workflows by compare-and-set, many at once, until each has succeeded.

The last version that this process wrote or read is remembered if the store is remote: usually a
change costs one request. A stale version only costs another try.

While other processes change the same rows, most of those tries would fail. Then bits are appended
to their row instead: one request that no other writer can make fail, and one that reads the row as
it is after that. So a bit costs two requests, however many writers there are, and of two writers
the later one finds the bits of both. Changes that cannot be appended keep the pace that
`aztask.workflows.documents` finds, and read before they write.

Crash window: if the process dies between the two requests, the bit is set, and the redelivery of
its message reads the row. If there is no redelivery, housekeeping does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final, Protocol

from aztask.errors import BrokerUnavailable
from aztask.stores.records.workflows import ROOT, Addition, Document, DocumentChange, WorkflowStore
from aztask.support import chance
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.workflows.rows import JoinRow

# -- How long the writers of contended rows wait, so that few of their writes fail.
#
# Rules
# 1. A writer that met another one doubles its pace, up to `LONGEST`; one that did not lowers it.
#    With these factors about one write in five fails, however many writers there are.
# 2. Nothing waits while no writer meets another one. The pace halves every `HALF_LIFE` seconds.
# 3. While a worker waits, more of its tasks end: their bits go into the same write.

FIRST: Final = 0.02
LONGEST: Final = 0.5
RISE: Final = 2.0
FALL: Final = 0.85
SLIGHT: Final = 0.01
"""Seconds below which a pace counts as none."""
HALF_LIFE: Final = 2.0


class Pace:
    """The pace of one process. Times are seconds. Any thread may call."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._monotonic = clock.monotonic
        self._pace = 0.0
        self._at = self._monotonic()
        self._lock = Lock()

    @property
    def contended(self) -> bool:
        """True if writers met lately: remembered versions of rows are probably old."""
        return self._now() > SLIGHT

    def wait(self) -> float:
        """How long to wait before a write: at random, twice the pace at most."""
        pace = self._now()
        return chance.uniform(0.0, 2 * pace) if pace > SLIGHT else 0.0

    def met(self) -> None:
        """A write failed, because another writer had changed the row before it."""
        with self._lock:
            self._set(min(LONGEST, max(FIRST, self._decayed() * RISE)))

    def meeting(self) -> None:
        """Other writers still change the rows; that costs no write, so the pace stays."""
        with self._lock:
            self._set(max(FIRST, self._decayed()))

    def passed(self) -> None:
        """A write succeeded at its first try."""
        with self._lock:
            self._set(self._decayed() * FALL)

    def _now(self) -> float:
        with self._lock:
            return self._decayed()

    def _set(self, pace: float) -> None:
        self._pace, self._at = pace, self._monotonic()

    def _decayed(self) -> float:
        passed = max(0.0, self._monotonic() - self._at)
        return float(self._pace * 0.5 ** (passed / HALF_LIFE))


TRIES: Final = 40
FIRST_PAUSE: Final = 0.004
LONGEST_PAUSE: Final = 0.25
REMEMBERED: Final = 500
REMEMBERED_BYTES: Final = 64 * 1024
COALESCE: Final = 0.03
"""Seconds for which a process waits at most before it appends: more of its members end."""

FOLD: Final = 48
FOLD_SHARE: Final = 0.25
"""With so many pieces, one in four writers that see them writes them into the document."""


@dataclass(frozen=True, slots=True)
class Appended:
    """What an edit says of the document after it was appended.

    * `alone`: no other process has changed the document since this one saw it.
    * `done`: nothing is left to write.
    * `row`: packs into the document with all pieces written into it; None if that must wait.
    """

    alone: bool
    done: bool
    row: JoinRow | None = None


class Edit(Protocol):
    """A change of one document, decided anew from each version of it that is read."""

    @property
    def place(self) -> tuple[str, str]:
        """The workflow, and the name of the document."""
        ...

    @property
    def patient(self) -> bool:
        """True if it may wait while other processes change the document."""
        ...

    def apply(self, data: bytes | None) -> bytes | None:
        """The new data of the document; None to leave it as it is. `data`: None if it is missing.

        Raises Damaged.
        """
        ...

    @property
    def exists(self) -> bool:
        """True if the document was made with the workflow."""
        ...

    def pieces(self) -> Mapping[str, bytes]:
        """Pieces that make the same change if they are appended, at the first call; or nothing."""
        ...

    def appended(self, data: bytes) -> Appended:
        """Note the document after its pieces were appended. Raises Damaged."""
        ...

    def first(self) -> Sequence[DocumentChange]:
        """New documents to write before this one, which the new data refers to."""
        ...

    def orphaned(self) -> None:
        """Note that the document is missing, and so is the workflow: nothing is written."""
        ...


class Documents:
    """The documents of all workflows in one store. Any thread may call."""

    def __init__(
        self,
        store: WorkflowStore,
        *,
        remote: bool,
        clock: Clock = SYSTEM_CLOCK,
        pace: Pace | None = None,
    ) -> None:
        self.store = store
        self._remembers = remote
        self._sleep = clock.sleep
        self._pace = pace or Pace(clock)
        self._known: OrderedDict[tuple[str, str], Document] = OrderedDict()
        self._lock = Lock()

    def change(self, edits: Sequence[Edit]) -> None:
        """Make all changes. Raises BrokerUnavailable if other writers come first at every try."""
        todo, pause = list(edits), FIRST_PAUSE
        patient = self._remembers and all(edit.patient for edit in todo)
        if self._remembers:
            todo = self._begin(todo, patient=patient)
        for number in range(TRIES):
            if not todo:
                return
            todo = self._try(todo)
            if patient and todo:
                self._pace.met()
            elif patient and not number:
                self._pace.passed()
            if todo and self._remembers:
                todo = self._append(todo)
                wait = chance.uniform(0.0, pause)
                if todo:
                    self._sleep(max(wait, self._pace.wait()) if patient else wait)
                pause = min(2 * pause, LONGEST_PAUSE)
        workflow, name = todo[0].place
        raise BrokerUnavailable(
            f"other workers keep changing {name} of workflow {workflow}; it is tried again"
        )

    def _begin(self, edits: Sequence[Edit], *, patient: bool) -> list[Edit]:
        """Append what costs no more than to write it; returns the edits that are to be written.

        That is everything while other writers are about, and otherwise what would have to be read.
        """
        contended = self._pace.contended
        if contended and patient:
            self._forget(edits)
        with self._lock:
            unknown = [edit for edit in edits if edit.exists and edit.place not in self._known]
        if not contended and not unknown:
            return list(edits)
        longest = COALESCE if contended and patient else 0.0
        todo = self._append(edits, longest) if contended else self._append(unknown)
        if not contended:
            todo += [edit for edit in edits if all(edit is not each for each in unknown)]
        elif todo and patient:
            self._sleep(self._pace.wait())
        return todo

    def _append(self, edits: Sequence[Edit], longest: float = 0.0) -> list[Edit]:
        """Append what can be appended; returns the edits that are still to be made.

        * `longest`: seconds to wait at most, at random, before that.
        """
        pieces = [(edit, found) for edit in edits if (found := edit.pieces())]
        if not pieces:
            return list(edits)
        if longest:
            self._sleep(chance.uniform(0.0, longest))
        left = [edit for edit in edits if all(edit is not each for each, _ in pieces)]
        answers = self.store.append([Addition(*edit.place, found) for edit, found in pieces])
        folds: list[DocumentChange] = []
        for (edit, _), document in zip(pieces, answers, strict=True):
            self._note(edit.place, document)
            if document is None:
                left.append(edit)
                continue
            now = edit.appended(document.data)
            if now.alone:
                self._pace.passed()
            else:
                self._pace.meeting()
            if not now.done:
                left.append(edit)
            elif now.row and document.pieces >= FOLD and chance.share() < FOLD_SHARE:
                folds.append(DocumentChange(*edit.place, now.row.pack(), document.tag))
        self._fold(folds)
        return left

    def _fold(self, changes: Sequence[DocumentChange]) -> None:
        """Write pieces into their documents, once: it harms nothing if another writer is first."""
        tags = self.store.write(changes) if changes else []
        for change, tag in zip(changes, tags, strict=True):
            place = (change.workflow, change.name)
            self._note(place, None if tag is None else Document(change.data, tag))

    def _try(self, edits: Sequence[Edit]) -> list[Edit]:
        """Change what can be changed now; returns the edits that are to be tried again.

        An edit that would change nothing of a remembered version is tried on the current one.
        """
        left: list[Edit] = []
        changes: list[tuple[Edit, DocumentChange]] = []
        before: list[DocumentChange] = []
        for edit, document, remembered in self._current(edits):
            data = edit.apply(None if document is None else document.data)
            if data is not None:
                tag = None if document is None else document.tag
                changes.append((edit, DocumentChange(*edit.place, data, tag)))
                before += edit.first()
            elif remembered:
                self._note(edit.place, None)
                left.append(edit)
        if before:
            self.store.write(before)
        tags = self.store.write([change for _, change in changes]) if changes else []
        for (edit, change), tag in zip(changes, tags, strict=True):
            self._note(edit.place, None if tag is None else Document(change.data, tag))
            if tag is None:
                left.append(edit)
        return left

    def read(self, places: Sequence[tuple[str, str]]) -> list[bytes | None]:
        """The current data of these documents; None for missing ones."""
        return [None if each is None else each.data for each in self.store.read(places)]

    def _current(self, edits: Sequence[Edit]) -> list[tuple[Edit, Document | None, bool]]:
        """Each edit, its document, and True if that is a remembered version.

        Edits whose document is missing, together with the workflow, are not in the list.
        """
        places = [edit.place for edit in edits]
        with self._lock:
            known = {place: self._known[place] for place in places if place in self._known}
        missing = [place for place in places if place not in known]
        read = dict(zip(missing, self.store.read(missing), strict=True)) if missing else {}
        unborn = sorted({place[0] for place, document in read.items() if document is None})
        roots = self.store.read([(workflow, ROOT) for workflow in unborn]) if unborn else []
        gone = {workflow for workflow, root in zip(unborn, roots, strict=True) if root is None}
        found: list[tuple[Edit, Document | None, bool]] = []
        for edit in edits:
            place = edit.place
            document = known.get(place) or read.get(place)
            if document is None and place[0] in gone:
                edit.orphaned()
            else:
                found.append((edit, document, place in known))
        return found

    def _forget(self, edits: Sequence[Edit]) -> None:
        with self._lock:
            for edit in edits:
                self._known.pop(edit.place, None)

    def _note(self, place: tuple[str, str], document: Document | None) -> None:
        """Remember a version that we wrote; forget one that another writer replaced."""
        if not self._remembers:
            return
        with self._lock:
            self._known.pop(place, None)
            if document is not None and len(document.data) <= REMEMBERED_BYTES:
                self._known[place] = document
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
