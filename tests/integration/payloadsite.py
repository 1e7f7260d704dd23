"""Sites whose large arguments are stored apart, for the tests of payloads."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import Site, site_in

from aztask import App
from aztask.operate import orphans
from aztask.stores.payloads.store import ListedPayload

LARGE = bytes(range(256)) * 20_000  # 5.12 MB


@contextmanager
def payload_site(
    folder: Path,
    *,
    joint: bool = False,
    broker: str = "",
    direct: dict[str, Any] | None = None,
    **given: Any,
) -> Iterator[Site]:
    """given: options of the workers' app; direct: those of the test's app, if they differ."""
    extra = {"LEDGER_OPTIONS": json.dumps(given)}
    with site_in(folder, joint=joint, extra=extra, broker=broker) as site:
        site._app = app_of(site, **(direct or given))
        yield site


def app_of(site: Site, **given: Any) -> App:
    """An app of this process on the site's broker and results."""
    given.setdefault("owner", site.extra.get("AZTASK_OWNER"))
    return App("ledger", broker=site.broker, results=site.results, **given)


def stored(site: Site, kind: str = "args") -> list[ListedPayload]:
    """The payloads of one kind that are stored now."""
    payloads = site.app().payloads
    assert payloads is not None
    return [each for each in payloads.store.list() if each.kind == kind]


def collect(site: Site, *, after: float = 3 * 3600.0) -> str:
    """What ``aztask doctor --collect`` does, `after` seconds from now."""
    app = site.app()
    assert app.payloads is not None
    (finding,) = orphans._collected(app, app.payloads, time.time() + after)
    return str(finding)
