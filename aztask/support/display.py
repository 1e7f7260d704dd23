"""Values and errors as one short, printable line, whatever they contain."""

from __future__ import annotations

import reprlib
import traceback

LINE_LIMIT = 256
PART_LIMIT = 4_000
_SMALL_BYTES = 1024


def short_repr(value: object, size: int = _SMALL_BYTES + 1) -> str:
    """A short repr for people, at most 256 characters; never raises and never takes long.

    * `size`: bytes of the encoded value, if known: a small value is shown in full, quickly.
    """
    try:
        text = repr(value) if size <= _SMALL_BYTES else _ABBREVIATED.repr(value)
    except Exception as error:  # noqa: BLE001 - it is the user's __repr__, which may do anything
        text = f"<{type(value).__name__}: its repr raised {type(error).__name__}>"
    return one_line(text)


def safe_str(value: object, limit: int = LINE_LIMIT) -> str:
    """The text of `value`, mostly an error, on one line; never raises.

    The text of an exception group, such as that of a ``TaskGroup``, ends with its inner errors.
    """
    try:
        text = str(value)
        if isinstance(value, BaseExceptionGroup):
            shown = leaves(value)[:SHOWN_LEAVES]
            inner = [f"{type(each).__name__}: {safe_str(each, limit)}" for each in shown]
            text = f"{text}: {'; '.join(inner)}"
    except BaseException as error:  # noqa: BLE001 - a user's __str__, which may even call sys.exit
        text = f"<{type(value).__name__}: its text raised {type(error).__name__}>"
    return one_line(text, limit)


SHOWN_LEAVES = 20


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in an exception group, from however deep; of another error, it alone."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in leaves(each)]


def traceback_of(error: BaseException, part: int = PART_LIMIT) -> str:
    """The traceback of `error` and its causes, without a line break at its end; never raises.

    Each frame, and the text of each exception, is cut to `part` characters: a traceback with an
    exception's text of 50 MB would be as long in every log.
    """
    lines = []
    try:
        for line in traceback.TracebackException.from_exception(error).format():
            lines.append(line if len(line) <= part else f"{line[: part - 4]}...\n")
    except BaseException as broken:  # noqa: BLE001 - a user's __repr__, which may do anything
        name = type(error).__name__
        lines.append(f"{name}: its traceback cannot be shown: {type(broken).__name__}\n")
    return "".join(lines).removesuffix("\n")


def one_line(text: str, limit: int = LINE_LIMIT) -> str:
    """`text` without line breaks and control characters, cut to `limit` characters."""
    if len(text) > limit:
        text = text[: limit - 3] + "..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def visible(text: str) -> str:
    """`text` with control characters, ANSI codes and lone surrogates as escapes."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )


def storable(text: str, limit: int | None = None) -> str:
    """`text` cut to `limit` characters, in a form that every store, codec and service can write.

    Lone surrogates (from undecodable file names, for example) have no UTF-8 form, and some stores
    refuse NUL: both become escapes such as ``\\udc80`` and ``\\x00``.
    """
    text = text[:limit]
    if text.isascii():
        return text.replace("\0", "\\x00")
    text = text.replace("\0", "\\x00")
    return text.encode("utf-8", "backslashreplace").decode()[:limit]


def _abbreviated() -> reprlib.Repr:
    shortener = reprlib.Repr()
    shortener.maxlevel = 3
    shortener.maxstring = shortener.maxother = shortener.maxlong = 60
    return shortener


_ABBREVIATED = _abbreviated()


def byte_text(count: int) -> str:
    """A number of bytes for a reader: ``1,234 bytes``, ``56.7 MiB``, ``1.2 GiB``."""
    if count < 1 << 20:
        return f"{count:,} bytes"
    unit, name = (1 << 30, "GiB") if count >= 1 << 30 else (1 << 20, "MiB")
    return f"{count / unit:,.1f} {name}"


def plural(count: int, noun: str) -> str:
    """A number and its noun: ``1 message``, ``2 messages``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
