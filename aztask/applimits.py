"""The limits of an app, which hold for all workers together."""

from __future__ import annotations

from collections.abc import Callable

from aztask.canvas.limits import Limit, limit_of
from aztask.errors import ConfigurationError
from aztask.taskoptions import name_text


class AppLimits:
    """The part of `aztask.app.App` that declares limits."""

    limits: dict[str, Limit]

    def limit(
        self,
        name: str,
        *,
        rate: str | None = None,
        burst: int = 1,
        concurrency: int | None = None,
        key: Callable[..., object] | None = None,
    ) -> None:
        """Declare a limit that holds for all workers together, for ``@app.task(limits=[name])``.

        ::

            app.limit("api", rate="10/s", burst=20)
            app.limit("tenant", concurrency=5, key=lambda tenant, *_: tenant)

        * `rate`: how many starts in which time: "10/s", "600/m", "5/10s", "1000/h".
        * `burst`: how many may start at once after a quiet time.
        * `concurrency`: how many may run at the same time.
        * `key`: a function of the task's arguments that returns a text or a number; each one has
          the limit for itself, and None means that the limit does not apply. Workers call it
          outside of the pool, so it must be quick. A limit that has only a key limits nothing, but
          its keys can be paused: ``aztask control pause --tenant NAME=KEY``.

        Needs a result store. Raises ConfigurationError.
        """
        if name_text(name, "limit: the name") in self.limits:
            raise ConfigurationError(f"there is a limit {name!r} already")
        self.limits[name] = limit_of(name, rate=rate, burst=burst, concurrency=concurrency, key=key)
