"""What people may see: values and errors as one short, printable line, without secrets."""

from __future__ import annotations

import hmac
import logging
import re
import reprlib
import traceback
import unicodedata
from collections.abc import Iterable
from typing import Final, NoReturn, Self
from urllib.parse import quote, quote_plus

# -- masking ---------------------------------------------------------------------------------
#
# Keep secrets out of reprs, logs and errors, and control characters out of terminals.
#
# Rules
# 1. A secret is wrapped in `Secret` where it enters the process. Only `Secret.reveal` returns it in
#    the clear, so a search for that word finds every place that uses it.
# 2. `mask` works on any text: it knows the patterns of keys and signatures, and it replaces every
#    wrapped secret wherever it occurs, and the secret arguments of the tasks that run (`hide`).
# 3. Text from outside is shown through `printable`: one line, no character that moves a cursor.


MASK = "****"

_SHORTEST_KNOWN = 8
"""Wrapped secrets shorter than this many characters are not masked in other text: a secret "test"
would mask half of a log."""

_known: dict[str, None] = {}
"""The forms in which wrapped secrets may occur. A process has a handful, kept as long as it lives.
A dict serves as an ordered set because its single operations are atomic among threads."""

_passing: dict[object, tuple[str, ...]] = {}
"""The texts in secret arguments of runs here, by what each run is called; also atomic."""


class Secret:
    """A text that is shown as ``****`` and cannot be pickled or serialised by accident.

    ::

        key = Secret(os.environ["KEY"])
        print(key)                       # ****
        sign(key.reveal())
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) >= _SHORTEST_KNOWN:
            shown = text.encode("utf-8", "backslashreplace").decode()
            _known.update(dict.fromkeys((text, quote(shown, safe=""), quote_plus(shown))))

    def reveal(self) -> str:
        """The secret in the clear, for the call that needs it."""
        return self._text

    def __repr__(self) -> str:
        return f"Secret({MASK})"

    def __str__(self) -> str:
        return MASK

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(_bytes(self._text), _bytes(other._text))

    def __hash__(self) -> int:
        return hash(self._text)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a secret is not pickled: let the other process read it from its environment or a file"
        )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


_EQUALS = r"[\"']?\s*(?:=|:|%3[dD])\s*[\"']?"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        # SharedAccessKey=..., AccountKey=..., in a connection string, JSON or a repr.
        (
            rf"((?:SharedAccessKey|AccountKey|account_key|signing_keys?|password){_EQUALS})"
            r"[^\s;,&\"'*][^\s;,&\"']*",
            rf"\1{MASK}",
        ),
        # SharedAccessSignature=sv=...&sig=...: all of it.
        (rf"(SharedAccessSignature{_EQUALS})[^\s;\"'*][^\s;\"']*", rf"\1{MASK}"),
        # ...?sv=...&sig=... in a URL or a SAS token, also when the URL is quoted in another.
        (r"((?:^|[?&;\s\"'(]|%3f|%26)(?:sig|signature)(?:=|%3d))[^&\s\"';,)]+", rf"\1{MASK}"),
        # scheme://user:password@host
        (r"(://)[^/\s@\"']+@", rf"\1{MASK}@"),
        # Authorization headers.
        (r"\b(Bearer|SharedKey|SharedKeyLite)(\s+)[A-Za-z0-9._~+/:=-]{8,}", rf"\1\2{MASK}"),
    )
)


_MAY_MATCH: Final = re.compile(r"[=:%]|bearer|sharedkey", re.IGNORECASE)
"""Found in whatever one of the patterns finds: most texts have none of it, and need one search."""


def mask(text: str) -> str:
    """`text` with every key, signature and password in it replaced by ``****``.

    Masking a masked text changes nothing.
    """
    for secret in list(_known):
        if secret in text:
            text = text.replace(secret, MASK)
    if _passing:  # the longest first: a shorter one may be a part of it
        found = [each for texts in list(_passing.values()) for each in texts if each in text]
        for secret in sorted(found, key=len, reverse=True):
            text = text.replace(secret, MASK)
    if not _MAY_MATCH.search(text):
        return text
    for pattern, replacement in _PATTERNS:
        if pattern.search(text):  # `sub` prepares its replacement even where nothing matches
            text = pattern.sub(replacement, text)
    return text


def hide(run: object, texts: Iterable[str]) -> None:
    """Let `mask` replace these texts, too, until `unhide`. run: what names them, such as an id."""
    found = tuple(each for each in dict.fromkeys(texts) if each not in MASK)
    if found:
        _passing[run] = found


def unhide(run: object) -> None:
    """Forget the texts of a run."""
    _passing.pop(run, None)


def printable(text: str, limit: int = 200) -> str:
    """`text` quoted, on one line of at most about `limit` characters, without invisible characters.

    Control characters, line breaks, ANSI codes, direction marks and lone surrogates are shown as
    escapes; a longer text ends with an ellipsis. Secrets are masked.
    """
    masked = mask(text)  # before the cut, which could leave half a key that no pattern knows
    shown = "".join(
        character if _visible(character) else character.encode("unicode_escape").decode("ascii")
        for character in masked[:limit].replace("\\", "\\\\")
    )
    return f"'{shown}'" if len(masked) <= limit else f"'{shown}...'"


def _visible(character: str) -> bool:
    """True for letters, marks, numbers, punctuation, symbols and the plain space."""
    return character == " " or unicodedata.category(character)[0] in "LMNPS"


class SecretFilter(logging.Filter):
    """A logging filter that masks secrets in messages, arguments and tracebacks.

    ::

        for handler in logging.getLogger().handlers:
            handler.addFilter(SecretFilter())

    Add it to each *handler*: a filter on a logger does not see the records of its children, and
    azure-core and urllib3 log whole SAS URLs from loggers of their own.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Mask the record in place; returns True, so that no record is dropped."""
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001  # an ill-matched format string, an argument's own __str__
            # Logging catches the errors of a handler, but not those of a filter: any error here
            # would reach the code that logs.
            args = record.args if isinstance(record.args, tuple) else (record.args,)
            message = f"{safe_str(record.msg)} ({', '.join(map(short_repr, args))})"
        record.msg, record.args = mask(message), None
        if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
            record.exc_text = traceback_of(record.exc_info[1])
        if record.exc_text:
            record.exc_text = mask(record.exc_text)
        if record.stack_info:
            record.stack_info = mask(record.stack_info)
        return True


# -- display ---------------------------------------------------------------------------------


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
