"""The ends of a run that is not over: it goes on later, and neither failed nor succeeded.

They are no `Exception`, so that ``except Exception`` in a task does not catch them. A task that
catches them all the same, and returns, fails (`StepError`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from aztask.settlement import DeadLetter, Decision, Resubmit
from aztask.steps.waits import Wait

STEP_ORDER: Final = "step-order"
UNREACHABLE_SECONDS: Final = 5.0
ORDER_STEPS: Final = 10
LONGEST_ORDER_PAUSE: Final = 30.0


class Suspension(BaseException):
    """The run ends here and goes on later.

    * `kind`: for records, as an error's type. `delay`: seconds until it goes on, if it is to go on.
    """

    kind = "Suspended"
    delay = 0.0

    def settlement(self, grace: float) -> Decision:
        """What becomes of the message. grace: ``unknown_task_grace``, in seconds."""
        raise NotImplementedError


class StepDelayed(Suspension):
    """A step failed, and its own retry policy runs it again later."""

    kind = "StepRetry"

    def __init__(self, step: str, due: float, now: float, why: str = "") -> None:
        """due: when, UTC epoch seconds; now: the time on the same clock. why: the error."""
        self.due = due
        self.delay = max(0.0, due - now)
        reason = f": {why}" if why else ""
        super().__init__(f"step {step} is retried in {self.delay:.3g} s{reason}")

    def settlement(self, grace: float) -> Decision:
        """The queue holds the message until then; no retry of the task is used."""
        return Resubmit(delay=self.delay, counted=False, asked=True)


class Parked(Suspension):
    """The task waits, without a slot: its next hop goes on (`TaskMessage.parked`)."""

    kind = "Parked"

    def __init__(
        self, what: str, due: float, now: float, waits: tuple[Wait, ...] = (), since: float = 0.0
    ) -> None:
        """
        * `what`: it waits for.
        * `due`: until when, `since`: since when, UTC epoch seconds; `now`: on the same clock.
        * `waits`: all that may wake it.
        """
        self.due = due
        self.what, self.waits, self.since = what, waits, since
        self.delay = max(0.0, due - now)
        until = datetime.fromtimestamp(due, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        super().__init__(f"{what}, until {until}")

    def settlement(self, grace: float) -> Decision:
        """The worker makes it from the delay: `aztask.worker.pipeline.decisions`."""
        return Resubmit(delay=self.delay, counted=False, asked=True)


def combined(found: Iterable[Suspension]) -> Suspension:
    """How a run goes on of which several branches have ended in these.

    Branches that wait, or retry a step, go on together when the first of them does: the others
    find that their time has not come, and end again. If one of them waits, the run is parked.
    """
    several = list(found)
    timed = [each for each in several if isinstance(each, StepDelayed | Parked)]
    if len(timed) < len(several):
        return next(each for each in several if each not in timed)
    first = min(timed, key=lambda each: each.delay)
    parked = next((each for each in timed if isinstance(each, Parked)), None)
    if parked is None or len(timed) == 1:
        return first
    waits = tuple(wait for each in timed if isinstance(each, Parked) for wait in each.waits)
    since = min(each.since for each in timed if isinstance(each, Parked))
    text = str(first)
    if isinstance(first, Parked):
        others = dict.fromkeys(str(wait) for wait in waits if wait not in first.waits)
        text = first.what + "".join(f", and {other}" for other in others if other != "a time")
    return Parked(text, first.due, first.due - first.delay, waits, since)


class Renewal(Suspension):
    """The task continues with other arguments: its next hop begins a new history."""

    kind = "Renewal"

    def __init__(self) -> None:
        super().__init__("it continues with other arguments")

    def settlement(self, grace: float) -> Decision:
        """The worker makes it: `aztask.worker.pipeline.decisions`."""
        return Resubmit(counted=False, asked=True)


class StepsUnavailable(Suspension):
    """The result store cannot be reached, so the run does not know its steps or record one."""

    kind = "BrokerUnavailable"

    def settlement(self, grace: float) -> Decision:
        """The message comes again after five seconds; no retry of the task is used."""
        return Resubmit(delay=UNREACHABLE_SECONDS, counted=False, asked=True)


class OrderChanged(Suspension):
    """The code asks for its steps in another order than they were recorded.

    Most often a deploy is under way, and another worker still has the former code.
    """

    kind = STEP_ORDER

    def __init__(self, wanted: str, recorded: str, waited: float) -> None:
        """waited: for how many seconds runs have met this."""
        self._waited = waited
        self._names = f"the code runs step {wanted} where step {recorded} was recorded"
        super().__init__(self._names)

    def settlement(self, grace: float) -> Decision:
        """A worker with the former code may take it; after the grace it is dead-lettered."""
        if self._waited >= grace:
            return DeadLetter(
                STEP_ORDER,
                f"{self._names}; deploy the former order, or use context.patched, then replay it",
            )
        pause = min(LONGEST_ORDER_PAUSE, grace / ORDER_STEPS)
        return Resubmit(delay=pause, counted=False, asked=True)


@dataclass(frozen=True, slots=True)
class BranchEnd:
    """How a branch ended: with a value, or with an error that `gather` raises later."""

    value: Any
    error: BaseException | None = None

    @classmethod
    def of(cls, result: Callable[[], Any]) -> BranchEnd:
        """The end that this call reports."""
        try:
            return cls(result())
        except BaseException as error:  # noqa: BLE001  # raised once all have ended
            return cls(None, error)


def values_of(ends: Sequence[BranchEnd]) -> list[Any]:
    """The values; raises what ends the run, if anything does, else the first error."""
    errors = [each.error for each in ends if each.error is not None]
    suspended = [error for error in errors if isinstance(error, Suspension)]
    for error in sorted(errors, key=lambda each: isinstance(each, Exception)):
        raise combined(suspended) if isinstance(error, Suspension) else error
    return [each.value for each in ends]
