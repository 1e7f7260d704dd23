"""The retry policy: what happens to a message whose run failed. Values in, a settlement out.

The policy decides whether and when a task runs again. *How* its message waits until then is decided
by the retry strategy (`RETRY_STRATEGIES`), which the worker carries out; here a `Resubmit` stands
for all strategies.

Rules
1. A decision is repeatable: the jitter is a hash of the message's key, so the same failure of the
   same message always gives the same delay.
2. Everything is bounded: failures by ``max_retries``, snoozes by ``max_snoozes``, delays by
   ``max_delay``. Past a bound the message is dead-lettered with a reason and a description.
3. A failure that is not an exception of the task itself (its process died, its time limit passed,
   SystemExit) is always retried, up to ``max_retries``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Literal, Never, TypeAlias, get_args

from aztask.errors import (
    CodecError,
    ConfigurationError,
    Reject,
    Retry,
    Snooze,
    StepError,
    TaskControl,
    TimeLimitExceeded,
    did_you_mean,
)
from aztask.message.message import COUNTER_LIMIT, TaskMessage
from aztask.settlement import REASON_LIMIT, DeadLetter, Resubmit, Settlement
from aztask.support.checks import shown
from aztask.support.display import leaves, one_line, safe_str
from aztask.support.durations import LONGEST_SECONDS, to_seconds

RETRIES_EXHAUSTED = "retries-exhausted"
SNOOZES_EXHAUSTED = "snoozes-exhausted"
NOT_RETRYABLE = "not-retryable"
INVALID_DELAY = "invalid-delay"
EXPIRED = "expired"
UNDECODABLE = "undecodable"

RetryStrategy: TypeAlias = Literal["resubmit", "abandon", "lease-timeout", "hold", "defer"]
RETRY_STRATEGIES: tuple[RetryStrategy, ...] = get_args(RetryStrategy)
"""How a message waits for its retry; see docs/discussions/strategies/."""


@dataclass(frozen=True, slots=True, init=False)
class RetryPolicy:
    """When a failed run is retried.

    ::

        RetryPolicy(max_retries=5, delay=2.0, backoff=2.0, max_delay=600, retry_on=(OSError,))

    waits at most 2, 4, 8, 16 and 32 seconds before the five retries, for OSErrors only.

    * `max_retries`: runs after the first one, 3 by default.
    * `delay`: seconds (or a ``timedelta``) before the first retry, 1 by default.
    * `backoff`: the factor by which each further delay grows, at least 1; 2 by default.
    * `max_delay`: the longest delay, in seconds or as a ``timedelta``; 600 by default.
    * `jitter`: True (default) takes between half and all of each delay, so that many failures at
      once are not retried at once.
    * `retry_on`, `give_up_on`: exception classes to retry ((Exception,) by default), and
      not to retry (none by default); `give_up_on` wins.
    * `max_snoozes`: how often a task may raise `Snooze`, 100 by default.

    An exception group, such as that of a ``TaskGroup``, is judged by the errors in it: one that is
    not to be retried dead-letters the message, and one that is a `Reject`, `Retry` or `Snooze`
    decides, in this order; a `Snooze` beside other errors counts as a failure.

    Raises ConfigurationError if a value is not allowed.
    """

    max_retries: int
    delay: float
    backoff: float
    max_delay: float
    jitter: bool
    retry_on: tuple[type[BaseException], ...]
    give_up_on: tuple[type[BaseException], ...]
    max_snoozes: int

    def __init__(
        self,
        max_retries: int = 3,
        delay: float | timedelta = 1.0,
        backoff: float = 2.0,
        max_delay: float | timedelta = 600.0,
        jitter: bool = True,
        retry_on: type[BaseException] | Sequence[type[BaseException]] = (Exception,),
        give_up_on: type[BaseException] | Sequence[type[BaseException]] = (),
        max_snoozes: int = 100,
        **unexpected: Never,
    ) -> None:
        for name in unexpected:
            options = self.__slots__
            raise ConfigurationError(
                f"RetryPolicy has no option {name!r}.{did_you_mean(name, options)} "
                f"It has: {', '.join(options)}."
            )
        if not isinstance(jitter, bool):
            raise ConfigurationError(f"jitter must be True or False, not {jitter!r}")
        # The fields hold what the parameters mean: seconds and tuples, whatever was given.
        values: dict[str, object] = {
            "max_retries": _count(max_retries, "max_retries"),
            "delay": to_seconds(delay, "delay"),
            "backoff": _factor(backoff),
            "max_delay": to_seconds(max_delay, "max_delay"),
            "jitter": jitter,
            "retry_on": _classes(retry_on, "retry_on"),
            "give_up_on": _classes(give_up_on, "give_up_on"),
            "max_snoozes": _count(max_snoozes, "max_snoozes"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def decide(
        self, error: BaseException, message: TaskMessage, now: float | None = None
    ) -> Settlement:
        """The settlement of a run that ended with `error`.

        * `now`: UTC epoch seconds. If given, a delay past the message's expiry dead-letters at
          once.
        """
        description = describe(type(error).__name__, safe_str(error, REASON_LIMIT))
        control = self._control(error)
        if isinstance(control, Reject):
            return DeadLetter(
                safe_str(control.reason, REASON_LIMIT) or "rejected",
                safe_str(control.description, REASON_LIMIT),
            )
        if isinstance(control, Snooze):
            return self._snooze(control, message, now)
        if isinstance(control, Retry):
            return self._retry(message, description, now, control.delay)
        if self._is_final(error):
            return DeadLetter(NOT_RETRYABLE, description)
        return self._retry(message, description, now)

    def decide_named(
        self, error_type: str, error: str, message: TaskMessage, now: float | None = None
    ) -> Settlement:
        """The settlement of a failure known only by name, such as the death of a child process.

        It is always retried, see rule 3.
        """
        return self._retry(message, describe(error_type, error), now)

    def delay_of(self, message: TaskMessage) -> float:
        """Seconds to wait before the next run of `message`, from the number of its failures."""
        try:
            delay = min(self.max_delay, self.delay * self.backoff**message.resubmit_count)
        except OverflowError:
            delay = self.max_delay if self.delay else 0.0
        return delay * (0.5 + 0.5 * _fraction(message)) if self.jitter else delay

    def _control(self, error: BaseException) -> BaseException:
        """What decides: the error itself, or the `TaskControl` in an exception group that does."""
        if not isinstance(error, BaseExceptionGroup):
            return error
        inner = leaves(error)
        controls = [each for each in inner if isinstance(each, TaskControl)]
        rejects = [each for each in controls if isinstance(each, Reject)]
        retries = [each for each in controls if isinstance(each, Retry)]
        alone = len(controls) == len(inner)
        usable = rejects or ([] if self._is_final(error) else retries or (controls * alone))
        return usable[0] if usable else error

    def _is_final(self, error: BaseException) -> bool:
        never = (*self.give_up_on, CodecError, StepError)
        if isinstance(error, never):
            # Bytes that cannot be read or written today cannot be tomorrow, nor can such steps.
            return True
        if isinstance(error, BaseExceptionGroup):
            inner = [each for each in leaves(error) if not isinstance(each, TaskControl)]
            given_up = any(
                isinstance(each, (*self.give_up_on, CodecError, StepError)) for each in inner
            )
            unlisted = not isinstance(error, self.retry_on) and any(map(self._is_final, inner))
            return given_up or unlisted
        if isinstance(error, TimeLimitExceeded) or not isinstance(error, Exception):
            return False
        return not isinstance(error, self.retry_on)

    def _retry(
        self,
        message: TaskMessage,
        description: str,
        now: float | None,
        asked: object = None,
    ) -> Settlement:
        if message.resubmit_count >= self.max_retries:
            runs = message.resubmit_count + 1
            return DeadLetter(
                RETRIES_EXHAUSTED, f"{description} (failed {runs} of {self.max_retries + 1} runs)"
            )
        if asked is None:
            return _resubmit(message, self.delay_of(message), now, counted=True)
        return _resubmit_asked(message, asked, now, counted=True)

    def _snooze(self, error: Snooze, message: TaskMessage, now: float | None) -> Settlement:
        if message.snooze_count >= self.max_snoozes:
            return DeadLetter(
                SNOOZES_EXHAUSTED, f"the task asked to run again {message.snooze_count + 1} times"
            )
        return _resubmit_asked(message, error.delay, now, counted=False)


def check_policy(value: object, what: str = "retry") -> RetryPolicy:
    """Return `value` if it is a `RetryPolicy`. Raises ConfigurationError, which says what to write.

    * `what`: names the setting, for the error.
    """
    if isinstance(value, RetryPolicy):
        return value
    retries = 3
    if not value:  # None, False or 0: no retries
        retries = 0
    elif isinstance(value, int) and not isinstance(value, bool) and value <= COUNTER_LIMIT:
        retries = max(value, 0)
    raise ConfigurationError(
        f"{what} takes a RetryPolicy, not {shown(value)}; write "
        f"retry=RetryPolicy(max_retries={retries})"
    )


def check_strategy(value: object, what: str = "retry_strategy") -> RetryStrategy:
    """Return `value` if it names a retry strategy. Raises ConfigurationError."""
    if value not in RETRY_STRATEGIES:
        raise ConfigurationError(
            f"{what} takes {', '.join(map(repr, RETRY_STRATEGIES))}, not "
            f"{safe_str(value, 60)!r}.{did_you_mean(safe_str(value, 60), RETRY_STRATEGIES)}"
        )
    return value


def describe(error_type: str, error: str) -> str:
    """``Type: text`` on one line, as dead letters and events show a failure."""
    return one_line(f"{error_type}: {error}" if error else error_type, 1000)


def _resubmit_asked(
    message: TaskMessage, asked: object, now: float | None, *, counted: bool
) -> Settlement:
    """A resubmit with the delay that the task requested; an impossible delay dead-letters."""
    try:
        delay = to_seconds(asked, "delay")
    except ConfigurationError as error:
        return DeadLetter(INVALID_DELAY, f"the task asked for a delay that cannot be: {error}")
    return _resubmit(message, delay, now, counted=counted, asked=True)


def _resubmit(
    message: TaskMessage,
    delay: float,
    now: float | None,
    *,
    counted: bool,
    asked: bool = False,
) -> Settlement:
    if now is not None and message.expires is not None and now + delay > message.expires:
        return DeadLetter(EXPIRED, f"it would run again in {delay:g} s, after it has expired")
    return Resubmit(delay=delay, counted=counted, asked=asked)


def _fraction(message: TaskMessage) -> float:
    """A number in [0, 1) that depends only on the message's key."""
    key = f"{message.id}:{message.generation}:{message.hop}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(key, digest_size=6).digest(), "big") / 2**48


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= COUNTER_LIMIT:
        raise ConfigurationError(f"{name} must be an integer of at least 0, not {value!r}")
    return value


def _factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"backoff must be a number of at least 1, not {value!r}")
    if not math.isfinite(value) or not 1 <= value <= LONGEST_SECONDS:
        raise ConfigurationError(f"backoff must be a number of at least 1, not {value!r}")
    return float(value)


def _classes(value: object, name: str) -> tuple[type[BaseException], ...]:
    given = value if isinstance(value, list | tuple) else (value,)
    for kind in given:
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise ConfigurationError(f"{name} must hold exception classes, not {kind!r}")
    return tuple(given)
