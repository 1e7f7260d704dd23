"""Changes documents of workflows by compare-and-set, many at once, until each has succeeded.

The last version that this process wrote or read is remembered if the store is remote: usually a
change costs one request. A stale version only costs another try. While other processes change the
same rows, this one keeps the pace that `aztask.workflows.pace` finds, and reads before it writes.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, Protocol

from aztask.errors import BrokerUnavailable
from aztask.results.workflows import ROOT, Change, Document, WorkflowStore
from aztask.workflows.pace import Pace

TRIES: Final = 40
FIRST_PAUSE: Final = 0.004
LONGEST_PAUSE: Final = 0.25
REMEMBERED: Final = 500
REMEMBERED_BYTES: Final = 64 * 1024


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

    def first(self) -> Sequence[Change]:
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
        sleep: Callable[[float], None] = time.sleep,
        pace: Pace | None = None,
    ) -> None:
        self.store = store
        self._remembers = remote
        self._sleep = sleep
        self._pace = pace or Pace()
        self._known: OrderedDict[tuple[str, str], Document] = OrderedDict()
        self._lock = Lock()

    def change(self, edits: Sequence[Edit]) -> None:
        """Make all changes. Raises BrokerUnavailable if other writers come first at every try."""
        todo, pause = list(edits), FIRST_PAUSE
        patient = self._remembers and all(edit.patient for edit in todo)
        if patient and self._pace.contended:
            self._forget(todo)
            self._sleep(self._pace.wait())
        for number in range(TRIES):
            todo = self._try(todo)
            if patient and todo:
                self._pace.met()
            elif patient and not number:
                self._pace.passed()
            if not todo:
                return
            if self._remembers:
                wait = random.uniform(0.0, pause)  # noqa: S311  # only spreads the writers
                self._sleep(max(wait, self._pace.wait()) if patient else wait)
                pause = min(2 * pause, LONGEST_PAUSE)
        workflow, name = todo[0].place
        raise BrokerUnavailable(
            f"other workers keep changing {name} of workflow {workflow}; it is tried again"
        )

    def _try(self, edits: Sequence[Edit]) -> list[Edit]:
        """Change what can be changed now; returns the edits that are to be tried again.

        An edit that would change nothing of a remembered version is tried on the current one.
        """
        left: list[Edit] = []
        changes: list[tuple[Edit, Change]] = []
        before: list[Change] = []
        for edit, document, remembered in self._current(edits):
            data = edit.apply(None if document is None else document.data)
            if data is not None:
                tag = None if document is None else document.tag
                changes.append((edit, Change(*edit.place, data, tag)))
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
