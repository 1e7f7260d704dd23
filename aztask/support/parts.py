"""Parts: the threads, lanes and helpers of a process, and whether each of them works.

A *part* is a job that goes on in the background: one thread, or several that do the same. Each part
has a name and says how long one of its steps may take.

Rules
1. No thread of a part ends in silence. Whatever it raises is logged once with its traceback, then
   it is tried again, after pauses that grow up to `LONGEST_PAUSE`.
2. A step that takes longer than `longest` counts as failing: the part stands still.
3. A part may put single items aside, such as one bad schedule, and go on with the others.
4. A part is failing from its first failed step until a step of it succeeds.
5. `failures` lists what fails in this process. The heartbeat, the probes and the metrics show it.

The list of parts is one for the process, because its threads are. A part is in it as long as its
owner keeps it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from types import FrameType
from typing import Any, Final
from weakref import WeakValueDictionary

from aztask.support.display import mask, safe_str

logger = logging.getLogger("aztask.parts")

FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
CALM_SECONDS: Final = 60.0
"""After so many seconds without an error, the pauses start from `FIRST_PAUSE` again."""

LONGEST_STEP: Final = 120.0
"""Seconds that a step may take, where a part does not say otherwise."""

REASON_CHARACTERS: Final = 300
MOST_ASIDE: Final = 100
"""Items that one part lists as put aside; the others are only logged."""


@dataclass(frozen=True, slots=True)
class PartFailure:
    """A part, or one item that it has put aside, that does not work.

    * `part`: the part's name; for an item the item's, such as ``schedule nightly``.
    * `since`: UTC epoch seconds.
    * `reason`: on one line, secrets masked.
    """

    part: str
    since: float
    reason: str


class Part:
    """One job in the background. Any thread may call.

    * `name`: for logs and health; parts with the same name are shown as one.
    * `longest`: seconds that one step may take.
    * `essential`: what this part does, such as ``receive``, if the process is not ready while all
      parts with the same word fail; else "".
    """

    def __init__(
        self, name: str, *, longest: float = LONGEST_STEP, essential: str = "", listed: bool = True
    ) -> None:
        """listed: False for a part that `failures` does not know, for tests."""
        self.name = name
        self.longest = longest
        self.essential = essential
        self._busy: dict[int, float] = {}
        self._troubled: set[int] = set()  # threads whose step has reported a failure
        self._aside: dict[str, PartFailure] = {}
        self._failure: PartFailure | None = None
        self._logged: tuple[type[BaseException], str] | None = None
        self._still_logged = False
        self._stopping = threading.Event()
        self._number = next(_numbers)
        if listed:
            _parts[self._number] = self

    def __repr__(self) -> str:
        return f"Part({self.name!r})"

    # -- threads -----------------------------------------------------------------------------

    def thread(self, target: Callable[..., object], name: str, *arguments: Any) -> threading.Thread:
        """A daemon thread, not started, that calls `target` again whenever it raises (rule 1).

        It ends when `target` returns, or raises after `stop`. `target` must be able to go on from
        wherever it was interrupted.
        """
        return PartThread(self, name, lambda: self.run(lambda: target(*arguments)))

    def once(self, target: Callable[..., object], name: str, *arguments: Any) -> threading.Thread:
        """A daemon thread, not started, that calls `target` once; its error is logged."""
        return PartThread(self, name, lambda: self.step(lambda: target(*arguments)))

    def alarm(self, seconds: float, target: Callable[..., object], *arguments: Any) -> Alarm:
        """A started timer that calls `target` after `seconds`, unless it is cancelled."""
        alarm = Alarm(self, seconds, lambda: self.step(lambda: target(*arguments)))
        alarm.start()
        return alarm

    def adopt(self) -> None:
        """Count the calling thread, which something else has started, as one of this part."""
        setattr(threading.current_thread(), "part", self)  # noqa: B010  # a thread of any class

    def run(self, target: Callable[[], object]) -> None:
        """Call `target` until it returns, see `thread`."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                target()
                self.rest()
                return
            except BaseException as error:  # noqa: BLE001  # no error at all may end it in silence
                failures = 0 if time.monotonic() - began > CALM_SECONDS else failures
                pause = pause_after(failures)
                self.failed(error, f"it is tried again in {pause:g} s")
            finally:
                self.idle()
            failures += 1
            if self._stopping.wait(pause):
                return

    def step(self, target: Callable[[], object]) -> None:
        """Call `target` once, as one step; an error is logged and not raised."""
        self.begin()
        try:
            target()
        except Exception as error:  # noqa: BLE001  # it is logged, and health shows it
            self.failed(error, "it is tried again when it is needed")
        else:
            self.rest()
        finally:
            self.idle()

    def stop(self) -> None:
        """End the pauses: threads that fail from now on end. The part is listed no longer."""
        self._stopping.set()
        _parts.pop(self._number, None)

    # -- steps -------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step of the calling thread begins: it must end within `longest`."""
        ident = threading.get_ident()
        if self._troubled:
            self._troubled.discard(ident)
        self._busy[ident] = time.monotonic()

    def rest(self) -> None:
        """The calling thread's step has ended; the thread may wait for as long as it likes.

        A part that was failing works again, unless this very step has reported a failure.
        """
        ident = threading.get_ident()
        self._busy.pop(ident, None)
        if ident in self._troubled:
            self._troubled.discard(ident)
        elif self._failure is not None:
            if self._logged is not None:
                logger.info("part %s works again", self.name)
            self._failure = self._logged = None

    def idle(self) -> None:
        """The step of the calling thread has ended, well or not."""
        ident = threading.get_ident()
        self._busy.pop(ident, None)
        self._troubled.discard(ident)

    def failed(self, error: BaseException, then: str = "it is tried again") -> None:
        """A step has failed unexpectedly: log it with its traceback, the same error only once."""
        text = reason_of(error)
        self._fail(text)
        if self._logged != (type(error), text):
            self._logged = (type(error), text)
            logger.error(
                "part %s failed unexpectedly, %s: %s", self.name, then, text, exc_info=error
            )

    def trouble(self, error: object) -> None:
        """A step has failed for a known reason, which the caller has logged, and is tried again."""
        self._fail(error if isinstance(error, str) else reason_of(error))

    def put_aside(self, item: str, error: object) -> None:
        """Go on without this item, which fails (rule 3). The caller logs it. item: such as
        ``schedule nightly``."""
        known = self._aside.get(item)
        since = known.since if known is not None else time.time()
        if known is not None or len(self._aside) < MOST_ASIDE:
            self._aside[item] = PartFailure(item, since, reason_of(error))

    def take_back(self, item: str) -> None:
        """The item works again, or is gone."""
        if self._aside:
            self._aside.pop(item, None)

    def aside(self) -> list[str]:
        """The items that are put aside now."""
        return list(self._aside)

    # -- health ------------------------------------------------------------------------------

    @property
    def failure(self) -> PartFailure | None:
        """Why this part fails, or stands still; None if it works."""
        if self._failure is not None:
            return self._failure
        seconds = self._still_for()
        if seconds <= self.longest:
            self._still_logged = False
            return None
        text = f"it stands still: a step has not ended for more than {self.longest:g} s"
        return PartFailure(self.name, time.time() - seconds, text)

    @property
    def failures(self) -> list[PartFailure]:
        """Why this part fails, and the items that it has put aside."""
        failure = self.failure
        return [*([] if failure is None else [failure]), *list(self._aside.values())]

    def watch(self) -> None:
        """Log, once, that the part stands still, and where. Call it about every second."""
        seconds = self._still_for()
        if seconds > self.longest and not self._still_logged:
            self._still_logged = True
            ident = min(self._busy, key=lambda each: self._busy.get(each, 0.0), default=0)
            place = _line_of(sys._current_frames().get(ident))
            logger.error("part %s has stood still for %.0f s, at %s", self.name, seconds, place)
        elif seconds <= self.longest and self._still_logged:
            self._still_logged = False
            logger.info("part %s goes on", self.name)

    def _still_for(self) -> float:
        busy = list(self._busy.values())
        return time.monotonic() - min(busy) if busy else 0.0

    def _fail(self, reason: str) -> None:
        since = self._failure.since if self._failure is not None else time.time()
        self._troubled.add(threading.get_ident())
        self._failure = PartFailure(self.name, since, reason)


class PartThread(threading.Thread):
    """A daemon thread of a part."""

    def __init__(self, part: Part, name: str, target: Callable[[], object]) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.part = part


class Alarm(threading.Timer):
    """A timer of a part."""

    def __init__(self, part: Part, seconds: float, target: Callable[[], object]) -> None:
        super().__init__(seconds, target)
        self.part = part
        self.daemon = True
        self.name = "aztask-alarm"


_parts: WeakValueDictionary[int, Part] = WeakValueDictionary()
_numbers = count(1)


def all_parts() -> list[Part]:
    """The parts of this process, in the order in which they were made."""
    found = [reference() for reference in _parts.valuerefs()]
    return sorted((each for each in found if each is not None), key=attrgetter("_number"))


def part_of(thread: threading.Thread) -> Part | None:
    """The part to which a thread belongs; None for a thread of a library."""
    part = getattr(thread, "part", None)
    return part if isinstance(part, Part) else None


def failures() -> list[PartFailure]:
    """What fails in this process now, the oldest first; one entry for each name."""
    found: dict[str, PartFailure] = {}
    for part in all_parts():
        for failure in part.failures:
            known = found.get(failure.part)
            if known is None or failure.since < known.since:
                found[failure.part] = failure
    return sorted(found.values(), key=lambda each: (each.since, each.part))


def watch_parts() -> None:
    """Log which parts of this process stand still. Call it about every second."""
    for part in all_parts():
        part.watch()


def lacking(parts: Iterable[Part], seconds: float) -> list[PartFailure]:
    """The failures because of which something essential is not done, for `seconds` at least.

    One part of several that do the same is enough.
    """
    found: dict[str, list[PartFailure | None]] = {}
    for part in parts:
        if part.essential:
            found.setdefault(part.essential, []).append(part.failure)
    before = time.time() - seconds
    return [
        failure
        for same in found.values()
        if all(each is not None and each.since <= before for each in same)
        for failure in same[:1]
        if failure is not None
    ]


def pause_after(failures: int) -> float:
    """Seconds to wait after so many failures in a row, before this one."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 10))


def reason_of(error: object) -> str:
    """An error in one line: its type, unless it is our own, and its text."""
    text = " ".join(mask(safe_str(error, 4 * REASON_CHARACTERS)).split())
    kind = type(error)
    if isinstance(error, BaseException) and not kind.__module__.startswith("aztask"):
        text = f"{kind.__name__}: {text}" if text else kind.__name__
    return text[:REASON_CHARACTERS] or kind.__name__


def _line_of(frame: FrameType | None) -> str:
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
