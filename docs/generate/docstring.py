"""Turns a docstring into Markdown, and finds in it what it says about each parameter."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import NamedTuple

_BLOCK = re.compile(r"(?m)^(?P<lead>.*?)::\n\n(?P<code>(?:[ ]{4}.*\n?|\n)+)")
_RAISES = re.compile(r"(?<=[.)])\s+(?=Raises [A-Z])")


class Parsed(NamedTuple):
    """A docstring in parts, each of them Markdown.

    lead: what it says first. parameters: name to description. tail: what follows them.
    """

    lead: str
    parameters: dict[str, str]
    tail: str


def parse(text: str | None, names: Iterable[str] = ()) -> Parsed:
    """Split a docstring at ``name: description``, for the names given.

    Descriptions may follow each other in a paragraph or stand in lines or items of their own.
    Several names may share one: ``retry_on, give_up_on: exception classes``.
    """
    text = inspect.cleandoc(text or "")
    found = list(_pattern(names).finditer(text)) if names else []
    if not found:
        return Parsed(markdown(text), {}, "")
    described: dict[str, str] = {}
    tail = ""
    ends = [match.start("names") for match in found[1:]] + [len(text)]
    for match, end in zip(found, ends, strict=True):
        part = text[match.end() : end]
        if end == len(text):
            part, tail = _without_tail(part)
        part = re.sub(r"\s+[*-]?\s*$", "", part)
        line = markdown(" ".join(part.split())).rstrip(";,")
        for name in re.findall(r"\w+", match["names"]):
            if name != "and":
                described[name] = line if line.endswith((".", ":", ")")) else line + "."
    lead = re.sub(r"[*-]\s*$", "", text[: found[0].start("names")]).strip()
    return Parsed(markdown(lead), described, markdown(tail))


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    known = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    name = rf"`{{0,2}}(?:{known})`{{0,2}}"
    before = r"(?:\A|(?<=[.;:)])\s+|\n)(?:[ ]*[*-][ ]+)?"
    return re.compile(rf"{before}(?P<names>{name}(?:(?:,| and)\s+{name})*):(?!:)\s+")


def _without_tail(part: str) -> tuple[str, str]:
    """The last description, without the paragraphs and the errors that follow it."""
    first, _, rest = part.partition("\n\n")
    pieces = _RAISES.split(first, maxsplit=1)
    return pieces[0], "\n\n".join([*pieces[1:], *([rest] if rest.strip() else [])])


def markdown(text: str) -> str:
    """The Markdown of a cleaned docstring: literals, and blocks of code as blocks."""
    text = _BLOCK.sub(_fenced, text + "\n")
    return re.sub(r"(?<!`)``([^`]+)``(?!`)", r"`\1`", text).strip()


def _fenced(match: re.Match[str]) -> str:
    code = inspect.cleandoc("\n" + match["code"])
    lead = f"{match['lead']}:\n\n" if match["lead"].strip() else ""
    return f"{lead}```text\n{code}\n```\n\n"


def one_paragraph(text: str) -> str:
    """The same in one paragraph, for an item of a list."""
    return " ".join(text.split())
