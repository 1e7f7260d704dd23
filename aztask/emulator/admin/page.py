"""The emulator's own page, for people who debug with it: entities, messages, locks, connections.

It is read only and needs no script. ``/`` shows everything, ``/$entity/NAME`` one entity with its
messages.

Rules
1. Without a key only this machine is served, by name and by origin, as for the administration. With
   a key the browser asks for it (Basic authentication; any user name).
2. Every value that a client chose is escaped where it is written. The headers allow no script, no
   foreign style and no frame.
3. Bodies are cut at `MAX_TEXT` characters, and a page has `MAX_MESSAGES` messages of each kind.
"""

from __future__ import annotations

import base64
import binascii
import codecs
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final
from urllib.parse import quote, unquote

from aztask.emulator.amqp import sections
from aztask.emulator.broker import stored
from aztask.emulator.broker.broker import Service
from aztask.emulator.broker.entities import Entity, SubscriptionRule
from aztask.emulator.broker.filters import CorrelationFilter, SqlFilter
from aztask.emulator.server import Endpoint
from aztask.emulator.view import shown, view_of
from aztask.queues.engine import PeekedMessage, number_of

MAX_TEXT: Final = 2000
MAX_MESSAGES: Final = 50
STYLE_PATH: Final = "/$style.css"
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
# The colours are the dashboard's.
STYLE: Final = """
:root { color-scheme: light dark; --ground: #ffffff; --raised: #f4f6f8; --text: #1b2430;
  --soft: #4d5a69; --line: #d3dae1; --link: #0b58a5; --bad: #a81c1c; }
@media (prefers-color-scheme: dark) { :root { --ground: #12171d; --raised: #1b222a;
  --text: #e4e9ee; --soft: #a9b5c1; --line: #36414c; --link: #86bdf5; --bad: #ff9d9d; } }
html { font: 15px/1.45 system-ui, sans-serif; }
body { margin: 0; background: var(--ground); color: var(--text); }
a { color: var(--link); }
header { background: var(--raised); border-bottom: 1px solid var(--line); padding: .6em 1.2em; }
main { padding: .4em 1.2em 3em; max-width: 96rem; margin: 0 auto; }
h1, h2, td, th { overflow-wrap: anywhere; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .38em .7em;
  border-bottom: 1px solid var(--line); }
thead th { background: var(--raised); font-size: .87rem; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-width: 50rem; }
.soft { color: var(--soft); }
"""


def allowed(broker: Service, headers: Mapping[str, str]) -> bool:
    """Return whether a browser showed the key (rule 1); without a key there is nothing to show."""
    if not broker.access.required:
        return True
    kind, _, encoded = headers.get("authorization", "").partition(" ")
    try:
        user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        return False
    return kind.lower() == "basic" and broker.access.password(user, password)


def render(broker: Service, endpoints: Iterable[Endpoint], path: str) -> str | None:
    """Return the document at a path, which is still quoted; None if there is none."""
    if path == "/":
        return _document("Entities", _overview(broker, endpoints))
    name = unquote(path.removeprefix("/$entity/"))
    entity = broker.namespace.find(name) if path.startswith("/$entity/") else None
    return None if entity is None else _document(entity.path, _entity(broker, entity))


def _document(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)} · aztask emulator</title><link rel="stylesheet"'
        f' href="{STYLE_PATH}"></head><body><header><a href="/">aztask emulator</a></header>'
        f"<main><h1>{escape(title)}</h1>{body}</main></body></html>"
    )


class _Link:
    """A cell that leads to an entity."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __str__(self) -> str:
        return f'<a href="/$entity/{quote(self.path, safe="")}">{escape(self.path)}</a>'


class _Block:
    """A cell of text that keeps its lines."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


def _cell(value: object) -> str:
    if isinstance(value, (_Link, _Block)):
        return str(value)
    return escape("" if value is None else str(value))


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table, or a line that says that there is nothing. Every cell is escaped."""
    head = f"<h2>{escape(title)}</h2>"
    if not rows:
        return f'{head}<p class="soft">None.</p>'
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in headings)
    lines = "".join(f"<tr>{''.join(f'<td>{_cell(c)}</td>' for c in row)}</tr>" for row in rows)
    return (
        f'{head}<div class="wide"><table><thead><tr>{names}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _overview(broker: Service, endpoints: Iterable[Endpoint]) -> str:
    connected = sorted(endpoints, key=lambda each: each.since)
    view = view_of(broker, connected)
    counts = ("active", "locked", "scheduled", "deferred", "dead", "transfer_dead", "receivers")
    rows = [
        (_Link(each.name), each.kind, *(getattr(each, name) for name in counts))
        for each in view.entities
    ]
    now = broker.clock.monotonic()
    links = [
        (each.remote, each.client.container, f"{now - each.since:.0f} s", "\n".join(addresses))
        for each in connected
        for addresses in [each.client.addresses()]
    ]
    headings = ("Entity", "Kind", *(name.replace("_", " ").capitalize() for name in counts))
    settings = [
        ("Tier", broker.namespace.tier.value if broker.namespace.tier else "none"),
        ("Key", "required" if broker.access.required else "none: this machine only"),
        ("Faults", broker.faults),
        ("Locks", len(broker.locks)),
    ]
    return (
        _table("Entities", headings, rows)
        + _table("Connections", ("Address", "Container", "For", "Links"), links)
        + _table("Emulator", ("Setting", "Value"), settings)
    )


def _entity(broker: Service, entity: Entity) -> str:
    engine, parts = broker.engine, []
    settings = [(name, getattr(entity, name)) for name in _SETTINGS]
    parts.append(_table("Settings", ("Setting", "Value"), settings))
    if entity.rules:
        rows = [_rule(rule) for rule in entity.rules]
        parts.append(_table("Rules", ("Rule", "Filter", "Action"), rows))
    below = broker.namespace.subscriptions(entity)
    if below:
        parts.append(_table("Subscriptions", ("Name",), [(_Link(each.path),) for each in below]))
    now = broker.clock.monotonic()
    waiting = engine.peek(entity.path, limit=MAX_MESSAGES)
    dead = engine.peek(entity.path, limit=MAX_MESSAGES, dead_letter=True)
    parts.append(_table("Messages", _COLUMNS, [_message(each, now) for each in waiting]))
    letters = [(*_message(each, now), each.reason, each.description) for each in dead]
    columns = (*_COLUMNS, "Reason", "Description")
    parts.append(_table("Dead letters", columns, letters))
    if broker.namespace.transfer_dead(entity):
        place = broker.namespace.transfer(entity).path
        lost = engine.peek(place, limit=MAX_MESSAGES, dead_letter=True)
        rows = [(*_message(each, now), each.reason, each.description) for each in lost]
        parts.append(_table("Transfer dead letters", columns, rows))
    return "".join(parts)


_SETTINGS: Final = (
    *("kind", "status", "lock_seconds", "max_deliveries", "time_to_live", "dead_letter_expired"),
    *("duplicate_window", "sessions", "forward_to", "forward_dead_letters_to"),
    *("max_message_bytes", "auto_delete"),
)
_COLUMNS: Final = (
    *("Number", "State", "Locked for", "Message id", "Session", "Deliveries", "Properties"),
    "Body",
)


def _rule(rule: SubscriptionRule) -> tuple[object, ...]:
    match rule.filter:
        case SqlFilter(text, parameters):
            said = f"{text} {parameters or ''}"
        case CorrelationFilter(system, properties):
            said = shown({**system, **properties})
        case other:
            said = type(other).__name__
    return rule.name, _Block(said), _Block(rule.action.text if rule.action else "")


def _message(message: PeekedMessage, now: float) -> tuple[object, ...]:
    cut = sections.cut(stored.unpack(message.payload).bare)
    lock = message.lease_until
    return (
        number_of(message.seq),
        message.state,
        None if lock is None else f"{lock - now:.0f} s",
        message.message_id,
        message.session,
        message.delivery_count,
        _Block("\n".join(f"{k}: {_text(v)}" for k, v in cut.application_properties.items())),
        _Block(_body(cut)),
    )


def _body(cut: sections.Sections) -> str:
    if not cut.data_items:
        return _text(cut.value)
    data = b"".join(cut.raw[start:end] for start, end in cut.data_items[:100])
    try:
        # the cut may be inside a character: its first bytes wait in the decoder
        text = codecs.getincrementaldecoder("utf-8")().decode(
            data[: 4 * MAX_TEXT], final=len(data) <= 4 * MAX_TEXT
        )
    except UnicodeDecodeError:
        text = data[: MAX_TEXT // 2].hex(" ")
    more = f" ... {len(data)} bytes" if len(text) > MAX_TEXT or len(data) > 4 * MAX_TEXT else ""
    return text[:MAX_TEXT] + more


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else shown(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."
