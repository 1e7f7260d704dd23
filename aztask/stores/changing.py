"""The one loop of compare-and-set: read, decide, write, and again if another writer was faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from aztask.errors import BrokerUnavailable
from aztask.support import chance, clock

TRIES: Final = 20
_FIRST_PAUSE: Final = 0.002
_DOUBLED: Final = 5

Read = TypeVar("Read")
Data = TypeVar("Data")
Result = TypeVar("Result")
Data_co = TypeVar("Data_co", covariant=True)
Result_co = TypeVar("Result_co", covariant=True)
Data_contra = TypeVar("Data_contra", contravariant=True)


class Cell(Protocol[Read, Data_contra]):
    """One value with versions, such as a row or a document."""

    def read(self) -> Read:
        """The version that is current now; `write` compares it."""
        ...

    def write(self, data: Data_contra, before: Read) -> bool:
        """Replace the version that was read; False if that is not the current one."""
        ...


@dataclass(frozen=True, slots=True)
class New(Generic[Data_co, Result_co]):
    """A decision: write this data. `result`: what `change` returns then."""

    data: Data_co
    result: Result_co


@dataclass(frozen=True, slots=True)
class Kept(Generic[Result_co]):
    """A decision: write nothing. `result`: what `change` returns."""

    result: Result_co


def change(
    cell: Cell[Read, Data],
    decide: Callable[[Read], New[Data, Result] | Kept[Result]],
    what: str,
    *,
    tries: int = TRIES,
) -> Result:
    """Change a cell until no other write comes between; returns the result of the last decision.

    * `decide`: gives the decision for the version that was read. It may be called several times, so
      it does nothing else that lasts.
    * `what`: names the cell in the error.

    Writers that meet twice pause for some milliseconds, so that one of them goes first. (The first
    write may have been made without a look, as for a new row.) Raises BrokerUnavailable if others
    come first at every try, and what the cell raises.
    """
    for attempt in range(tries):
        before = cell.read()
        decided = decide(before)
        if isinstance(decided, Kept) or cell.write(decided.data, before):
            return decided.result
        if attempt:
            longest = _FIRST_PAUSE * 2 ** min(attempt - 1, _DOUBLED)
            clock.current().sleep(chance.uniform(0.0, longest))  # spreads the writers
    raise BrokerUnavailable(f"other processes keep changing {what}; try again")
