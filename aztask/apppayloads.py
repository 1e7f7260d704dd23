"""The payloads of an app: values that are stored once for many tasks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, Final

from aztask.config import Settings
from aztask.connections import Connections
from aztask.errors import ConfigurationError
from aztask.message.codec import Codec
from aztask.message.payload import StoredValue
from aztask.payloads.opening import payloads_for
from aztask.payloads.payloads import Payloads
from aztask.payloads.store import Kind
from aztask.sending.appcodec import codec_of
from aztask.support.durations import to_seconds

HOUR: Final = 3600.0
WEEK: Final = 7 * 86400.0
LONGEST: Final = 3650 * 86400.0


class AppPayloads(ABC):
    """The part of `aztask.app.App` that stores large values."""

    name: str
    settings: Settings
    codec: Codec
    payloads: Payloads | None
    _connections: Connections

    @abstractmethod
    def queue_settings(self, name: str) -> Settings:
        """The settings of a queue, see `aztask.appqueues.AppQueues`."""

    def _new_payloads(self, *, testing: bool) -> Payloads | None:
        """testing: use the folder beside the queues, whatever the settings name."""
        return payloads_for(self.settings, self._connections.broker_target, testing=testing)

    def _new_codec(self, payloads: Payloads | None) -> Codec:
        return codec_of(
            self.settings,
            lambda queue: self.queue_settings(queue).signature_max_age_seconds,
            payloads.load if payloads is not None else None,
        )

    def put(self, value: Any, *, keep: float | timedelta = WEEK) -> StoredValue:
        """Store `value` once, to pass it to many tasks.

        ::

            model = app.put(weights)
            score.map([(model, row) for row in rows])

        Each task gets the value itself, if you pass what this returns as an argument, or directly
        in a list that is an argument. Each run fetches it. Until its lifetime ends, any number of
        tasks may use it; a task that runs later becomes a dead letter with the reason
        ``payload-missing``.

        * `value`: anything that may be an argument.
        * `keep`: its lifetime, in seconds or as a ``timedelta``; 7 days by default, and rounded up
          to the next hour. ``aztask doctor --collect`` removes it after that.

        Raises ConfigurationError if the app stores no payloads, EncodeError, ContentRefused (more
        than 1 GiB) and BrokerUnavailable.
        """
        if self.payloads is None:
            raise ConfigurationError(
                f"the app {self.name!r} has no store for values; give the App "
                'payloads="blob://ACCOUNT/CONTAINER", or a directory'
            )
        seconds = to_seconds(keep, "keep")
        if not 0 < seconds <= LONGEST:
            raise ConfigurationError(f"keep takes seconds above 0, at most ten years, not {keep!r}")
        data = self.codec.encode_value(value, large=True)
        return self.payloads.keep(Kind.VALUE, data, time.time() + seconds + HOUR)
