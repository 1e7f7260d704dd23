"""Templates: every value is masked, made visible and escaped on its way into a page.

Rules
1. `Environment.finalize` sees every value that a template writes, so no template can forget it:
   secrets become ``****``, control characters escapes, and autoescaping does the rest.
2. Addresses are made by `url` alone, which quotes each part.
3. A missing name is an error, not an empty text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from aztask.dashboard.access import Visitor
from aztask.operate.requests import KINDS, Role
from aztask.support.display import mask, one_line, plural, short_repr, visible
from aztask.version import shown_release

LONGEST_VALUE: Final = 2_000
LONGEST_BLOCK: Final = 20_000

_SPANS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"))


def shown(value: Any) -> Any:
    """A value as text for a page, before it is escaped; markup of our own stays as it is."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return visible(mask(str(value)))


def block(text: str) -> Markup:
    """A text of several lines, such as a traceback, for ``<pre>``."""
    masked = mask(text)
    cut = masked if len(masked) <= LONGEST_BLOCK else f"{masked[:LONGEST_BLOCK]}\n..."
    return escape("\n".join(visible(line) for line in cut.splitlines()))


def value_text(value: Any) -> str:
    """Any Python value on one line: JSON if it has that form."""
    try:
        text = json.dumps(value, default=short_repr, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = short_repr(value)
    return one_line(text, LONGEST_VALUE)


def url(path: str, **query: Any) -> Markup:
    """An address on this server; empty conditions are omitted."""
    given = {name: value for name, value in query.items() if value not in ("", None)}
    pairs = urlencode(given, errors="replace")
    return escape(f"{path}?{pairs}" if pairs else path)


def span(seconds: float | None) -> str:
    """A duration in one unit: ``340 ms``, ``12.5 s``, ``5 m``."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    for size, unit in _SPANS:
        if seconds >= 2 * size:
            return f"{int(seconds / size)} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def moment(at: float | None) -> Markup:
    """A time as ``<time>``: in UTC for the eye and for programs."""
    if at is None:
        return Markup("–")
    try:
        found = datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError):
        return escape(f"{at:g}")
    text = f"{found:%Y-%m-%d %H:%M:%S}"
    return Markup('<time datetime="{}">{}</time>').format(found.isoformat(), text)


def ago(at: float | None, now: float | None = None) -> str:
    """How long ago: ``5 m ago``."""
    if at is None:
        return "–"
    return f"{span(max(0.0, (time.time() if now is None else now) - at))} ago"


def may(visitor: Visitor, action: str) -> bool:
    """Whether the visitor's role may do this."""
    return visitor.role >= KINDS[action].role


class Live:
    """The part of one answer that open pages ask for again and again, as text.

    Visitors of one role see the same, so it is written once for all of them: with many viewers,
    that was half of what they cost. Not for several threads.
    """

    def __init__(self) -> None:
        self._texts: dict[Role | None, Markup] = {}

    def text(self, visitor: Visitor | None, caller: Callable[[], Markup]) -> Markup:
        """What visitors of this role see. `caller`: writes it; templates call this with a block."""
        role = None if visitor is None else visitor.role
        found = self._texts.get(role)
        if found is None:
            found = self._texts[role] = caller()
        return found


class Pages:
    """The templates, ready to be filled."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=PackageLoader("aztask.dashboard"),
            autoescape=True,
            finalize=shown,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.globals.update(url=url, may=may)
        self._environment.filters.update(
            plain=str,
            block=block,
            value=value_text,
            span=span,
            moment=moment,
            ago=ago,
            plural=plural,
            release=shown_release,
        )

    def fill(self, name: str, context: Mapping[str, Any]) -> str:
        """The template with this name, filled with these values."""
        # A lone surrogate never gets so far: `visible` writes it as an escape.
        return self._environment.get_template(f"{name}.html").render(context)
