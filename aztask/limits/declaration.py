"""Limits that hold for all workers together, as `App.limit` declares them.

Rules
1. A limit is a value; `aztask.limits` has the part that counts, in the result store.
2. A limit with a key is one limit for each key. The key is made of the task's arguments.
3. A limit with a cost counts a start as many times as the cost says, for example once for each
   token. The cost is made of the task's arguments by name.
4. Operators change the numbers of a limit while workers run, until they reset it. What a limit does
   not declare, a rate or a concurrency, it does not get.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Final

from aztask.errors import ConfigurationError, CostTooLarge
from aztask.message.encryption import PLAIN_DIGESTS, KeyDigests
from aztask.support.checks import shown

MOST: Final = 1_000_000
MOST_COST: Final = 1_000_000_000
"""What a rate may count at most in its time, without and with a cost."""

LONGEST_PERIOD: Final = 7 * 86400.0
KEY_LIMIT: Final = 1024

_RATE: Final = re.compile(r"(\d+)/(\d*)(s|m|h|d)", re.ASCII)
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `count` starts in each `period` seconds; `burst` of them may come at once.

    With a cost, it counts what the starts cost.
    """

    count: int
    period: float
    burst: int = 1

    def __str__(self) -> str:
        return f"{self.count}/{self.period:g}s, burst {self.burst}"


@dataclass(frozen=True, slots=True)
class Limit:
    """A declared limit: of a rate, or of how many run at the same time, or of both.

    With a key and without both it limits nothing: it names tenants, which can be paused.

    `key`: makes the key of the task's arguments; None: one limit for all. `cost`: says how much of
    the rate a start uses; None: each start is one. `digests`: hide the keys, with encryption.
    `changed_at`: since when it has an operator's numbers, or its own again, by the store's clock.
    `largest`: what a call may cost, whatever burst an operator gave it; None: the burst.
    """

    name: str
    rate: Rate | None
    concurrency: int | None = None
    key: Callable[..., object] | None = None
    cost: Callable[..., object] | None = None
    digests: KeyDigests = PLAIN_DIGESTS
    changed_at: float | None = None
    largest: int | None = None

    def cost_of(self, named: Mapping[str, Any]) -> int:
        """What a call costs, rounded up: 1 without `cost`, and 0 if the rate does not apply to it.

        * `named`: the arguments of the call, by the names of the task's parameters.

        Raises what the function raises, ConfigurationError for a value that is no cost, and
        CostTooLarge for one that the rate never has at once.
        """
        if self.cost is None or self.rate is None:
            return 1
        value = self.cost(**named)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < math.inf
        ):
            raise ConfigurationError(
                f"limit {self.name!r}: a cost is a number from 0, not {shown(value)}"
            )
        cost, most = math.ceil(value), max(self.rate.burst, self.largest or 0)
        if cost > most:
            raise CostTooLarge(
                f"limit {self.name!r}: the call costs {cost:,}, but at most {most:,} "
                "may come at once; split the call, or give the limit a larger burst="
            )
        return cost

    def key_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The key of a call, "" without `key`; None if the limit does not apply to the call.

        It is as `KeyDigests.hidden` makes it.

        Raises what the function raises, and ConfigurationError for a value that is no key.
        """
        if self.key is None:
            return ""
        value = self.key(*args, **kwargs)
        if value is None:
            return None
        text = str(value)
        if not text or len(text) > KEY_LIMIT:
            raise ConfigurationError(
                f"limit {self.name!r}: a key has 1 to {KEY_LIMIT} characters, not {len(text)}"
            )
        return self.digests.hidden(text)

    def entry(self, key: str) -> str:
        """The name of its rate's entry in the result store; names and keys may be any text."""
        return f"limit-rate-{self._digest(key)}"

    def permits_entry(self, key: str) -> str:
        """The name of the entry of its permits."""
        return f"limit-held-{self._digest(key)}"

    def _digest(self, key: str) -> str:
        named = f"{len(self.name)}:{self.name}{key}".encode("utf-8", "surrogatepass")
        return sha256(named).hexdigest()[:40]


@dataclass(frozen=True, slots=True)
class LimitChange:
    """Numbers that an operator gave a limit; None for those that it declares. All None: a reset.

    * `app`: that declares it; "" for one without a name. `limit`: its name.
    * `period`: seconds in which the rate's `count` starts happen.
    * `at`: since when, UTC epoch seconds by the store's clock. `by`: the user and machine.
    """

    app: str
    limit: str
    count: int | None
    period: float | None
    burst: int | None
    concurrency: int | None
    at: float
    by: str = ""

    def __str__(self) -> str:
        return f"limit {self.limit}"

    @property
    def numbers(self) -> str:
        """What it changes, for people; empty for a reset."""
        rate = None if self.count is None else f"{self.count}/{self.period:g}s"
        named = {"rate": rate, "burst": self.burst, "concurrency": self.concurrency}
        return ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)

    def applied(self, declared: Limit) -> Limit:
        """The limit with these numbers.

        A call that the declaration accepts stays accepted: senders know nothing of the change.
        """
        rate, held, largest = declared.rate, declared.concurrency, None
        if rate is not None:
            largest, count = rate.burst, self.count or rate.count
            # With a cost, a burst that is not declared is the count, also of a changed rate.
            follows = declared.cost is not None and rate.burst == rate.count
            burst = self.burst or (count if follows else rate.burst)
            rate = Rate(count, self.period or rate.period, burst)
        if held is not None:
            held = self.concurrency or held
        return replace(declared, rate=rate, concurrency=held, changed_at=self.at, largest=largest)

    def packed(self) -> list[Any]:
        """The values that `read_change` takes."""
        numbers = [self.count, self.period, self.burst, self.concurrency]
        return [self.app, self.limit, *numbers, self.at, self.by]


def read_change(record: Any) -> LimitChange:
    """The change in a document. Raises TypeError and ValueError if it is damaged."""
    app, name, count, period, burst, concurrency, at, by = record
    if not all(isinstance(text, str) for text in (app, name, by)) or isinstance(at, bool):
        raise TypeError
    for number in (count, burst, concurrency):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise TypeError
        if number is not None and not 1 <= number <= MOST_COST:
            raise ValueError
    if (count is None) != (period is None) or not math.isfinite(at):
        raise ValueError
    if period is not None and not 0 < period <= LONGEST_PERIOD:
        raise ValueError
    return LimitChange(app, name, count, period, burst, concurrency, float(at), by)


def change_of(
    app: str,
    declared: Limit,
    at: float,
    *,
    rate: object = None,
    burst: object = None,
    concurrency: object = None,
    by: str = "",
) -> LimitChange:
    """These numbers for the limit of the app, without any a reset. Raises ConfigurationError.

    at: now, by the store's clock.
    """
    what = f"limit {declared.name!r}"
    if declared.rate is None and (rate is not None or burst is not None):
        raise ConfigurationError(f"{what} declares no rate, so none can be changed")
    if declared.concurrency is None and concurrency is not None:
        raise ConfigurationError(f"{what} declares no concurrency, so none can be changed")
    most = MOST if declared.cost is None else MOST_COST
    count, period = (None, None) if rate is None else _rate_of(rate, what, most)
    at_once = None if burst is None else _count(burst, f"{what}: burst", most)
    if at_once is not None and declared.rate is not None:
        counted = count or declared.rate.count
        if at_once > max(counted, declared.rate.burst):
            raise ConfigurationError(
                f"{what}: burst {at_once:,} is more than its rate counts, {counted:,}, and than "
                f"the declared burst, {declared.rate.burst:,}; give it a smaller burst"
            )
    held = None if concurrency is None else _count(concurrency, f"{what}: concurrency")
    return LimitChange(app, declared.name, count, period, at_once, held, at, by)


def limit_of(
    name: str,
    *,
    rate: object = None,
    burst: object = None,
    concurrency: object = None,
    key: Callable[..., object] | None = None,
    cost: Callable[..., object] | None = None,
    digests: KeyDigests = PLAIN_DIGESTS,
) -> Limit:
    """The limit with these options. Raises ConfigurationError."""
    what = f"limit {name!r}"
    if not name.isprintable() or len(name) > KEY_LIMIT:
        raise ConfigurationError("a limit's name has at most 1,024 printable characters")
    if key is not None and not callable(key):
        raise ConfigurationError(
            f"{what}: key takes a function of the task's arguments, not {shown(key)}"
        )
    if cost is not None and not callable(cost):
        raise ConfigurationError(
            f"{what}: cost takes a function of the task's arguments, not {shown(cost)}"
        )
    if rate is None and concurrency is None and key is None:
        raise ConfigurationError(
            f"{what}: give it a rate, a concurrency, or both; or a key alone, to pause tenants"
        )
    held = None if concurrency is None else _count(concurrency, f"{what}: concurrency")
    if rate is None:
        if burst is not None or cost is not None:
            given = "cost" if burst is None else "burst"
            raise ConfigurationError(f"{what}: {given} belongs to a rate; give it one")
        return Limit(name, None, held, key, digests=digests)
    most = MOST if cost is None else MOST_COST
    count, period = _rate_of(rate, what, most)
    if burst is None:
        at_once = 1 if cost is None else count
    else:
        at_once = _count(burst, f"{what}: burst", most)
    return Limit(name, Rate(count, period, at_once), held, key, cost, digests)


def _count(value: object, what: str, most: int = MOST) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigurationError(f"{what} takes a whole number above 0, not {shown(value)}")
    return value


def _rate_of(rate: object, what: str, most: int) -> tuple[int, float]:
    found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if found is not None:
        count, period = int(found[1]), float(found[2] or 1) * _UNITS[found[3]]
        if 1 <= count <= most and 0 < period <= LONGEST_PERIOD and math.isfinite(period):
            return count, period
    raise ConfigurationError(
        f'{what}: rate takes a text such as "10/s", "600/m" or "5/10s", with the '
        f"units {', '.join(_UNITS)}: starts per time, at most "
        f"{most:,} in 7 days, not {shown(rate)}"
    )
