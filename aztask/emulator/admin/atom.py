"""Atom feeds and entries with the service's descriptions (RFC 4287 and the service's schema)."""

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
    """Return an XML element without attributes, its text escaped."""
    return f"<{name}>{escape(text)}</{name}>"


def instant(seconds: float) -> str:
    """Return UTC epoch seconds as an xsd:dateTime."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def entry(url: str, title: str, times: tuple[float, float], content: str) -> str:
    """Return an entry.

    times: of publication and of update, UTC epoch seconds. content: a description in XML.
    """
    return (
        f'<entry xmlns="{ATOM}"><id>{escape(url)}</id>'
        f'<title type="text">{escape(title)}</title>'
        f"<published>{instant(times[0])}</published><updated>{instant(times[1])}</updated>"
        f'<author><name>aztask</name></author><link rel="self" href={quoteattr(url)}/>'
        f'<content type="application/xml">{content}</content></entry>'
    )


def feed(url: str, title: str, now: float, entries: Iterable[str], following: str | None) -> str:
    """Return a feed. following: the URL of the next page, None on the last one."""
    further = f'<link rel="next" href={quoteattr(following)}/>' if following else ""
    return (
        f'<feed xmlns="{ATOM}"><title type="text">{escape(title)}</title><id>{escape(url)}</id>'
        f'<updated>{instant(now)}</updated><link rel="self" href={quoteattr(url)}/>{further}'
        f"{''.join(entries)}</feed>"
    )


def error(status: int, detail: str) -> str:
    """Return the document of a response with a status of 400 or above."""
    return f"<Error>{tag('Code', str(status))}{tag('Detail', detail)}</Error>"


def description(body: bytes, name: str) -> ElementTree.Element:
    """Return the element `name` of a request's entry. Raises ConfigurationError.

    Document type and entity declarations are refused, because they can blow up a parser.
    """
    if b"<!DOCTYPE" in body or b"<!ENTITY" in body:
        raise ConfigurationError("the request's XML must not declare anything")
    try:
        root = ElementTree.fromstring(body)  # noqa: S314  # declarations are refused above
    except ElementTree.ParseError as failure:
        raise ConfigurationError(f"the request is not XML: {failure}") from None
    found = (
        root if local(root) == name else next((e for e in root.iter() if local(e) == name), None)
    )
    if found is None:
        raise ConfigurationError(f"the request has no {name}")
    return found


def local(element: ElementTree.Element) -> str:
    """Return an element's name without its namespace, which differs between clients."""
    return element.tag.rsplit("}", 1)[-1]


def children(element: ElementTree.Element) -> dict[str, ElementTree.Element]:
    """Return the element's children by local name."""
    return {local(child): child for child in element}
