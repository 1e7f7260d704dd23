"""Atom feeds and entries around the service's descriptions (RFC 4287, and the service's schema)."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from aztask.errors import ConfigurationError

ATOM = "http://www.w3.org/2005/Atom"
CONNECT = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
COUNTS = "http://schemas.microsoft.com/netservices/2011/06/servicebus"
INSTANCE = "http://www.w3.org/2001/XMLSchema-instance"
SCHEMA = "http://www.w3.org/2001/XMLSchema"


def tag(name: str, text: str) -> str:
    """An element with text."""
    return f"<{name}>{escape(text)}</{name}>"


def instant(seconds: float) -> str:
    """An xsd:dateTime in UTC."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def entry(url: str, title: str, times: tuple[float, float], content: str) -> str:
    """An entry; times are those of publication and update, content is a description."""
    return (
        f'<entry xmlns="{ATOM}"><id>{escape(url)}</id>'
        f'<title type="text">{escape(title)}</title>'
        f"<published>{instant(times[0])}</published><updated>{instant(times[1])}</updated>"
        f'<author><name>aztask</name></author><link rel="self" href={quoteattr(url)}/>'
        f'<content type="application/xml">{content}</content></entry>'
    )


def feed(url: str, title: str, now: float, entries: Iterable[str], following: str | None) -> str:
    """A feed; `following` is the URL of the next page."""
    further = f'<link rel="next" href={quoteattr(following)}/>' if following else ""
    return (
        f'<feed xmlns="{ATOM}"><title type="text">{escape(title)}</title><id>{escape(url)}</id>'
        f'<updated>{instant(now)}</updated><link rel="self" href={quoteattr(url)}/>{further}'
        f"{''.join(entries)}</feed>"
    )


def error(status: int, detail: str) -> str:
    """The document that goes with a status of 400 or above."""
    return f"<Error>{tag('Code', str(status))}{tag('Detail', detail)}</Error>"


def description(body: bytes, name: str) -> ElementTree.Element:
    """The element `name` inside a request's entry. Raises ConfigurationError."""
    if b"<!DOCTYPE" in body or b"<!ENTITY" in body:
        raise ConfigurationError("the request's XML must not declare anything")
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as failure:
        raise ConfigurationError(f"the request is not XML: {failure}") from None
    found = (
        root if local(root) == name else next((e for e in root.iter() if local(e) == name), None)
    )
    if found is None:
        raise ConfigurationError(f"the request has no {name}")
    return found


def local(element: ElementTree.Element) -> str:
    """An element's name without its namespace: clients differ in prefixes."""
    return element.tag.rsplit("}", 1)[-1]


def children(element: ElementTree.Element) -> dict[str, ElementTree.Element]:
    """The element's children by local name."""
    return {local(child): child for child in element}
