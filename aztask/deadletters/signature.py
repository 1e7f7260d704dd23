"""What many errors have in common: the text of one, without what differs from case to case.

``ConnectionError: no answer from 10.0.3.7:5432 after 31 s`` and the same of another host have the
signature ``ConnectionError: no answer from <address> after <n> s``, so that a million dead letters
become a few groups, and a group is selected by a text that a person can read.

Rules
1. Equal texts have equal signatures in every process and version of Python: nothing is hashed,
   learned or dependent on a locale.
2. A signature holds no digit (but for the name of the error's type), no quoted text, no path, id,
   address or time: those are replaced by a word in angle brackets.
3. Work is bounded: no more than the first `READ_LIMIT` characters are looked at.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

__all__ = ["error_signature"]

READ_LIMIT: Final = 1024
"""Characters of a text that count: as many as services keep of a dead letter's description."""
SIGNATURE_LIMIT: Final = 160
"""Characters of a signature."""

_HEX: Final = "[0-9A-Fa-f]"
_OPENED: Final = r"(?<![\w'\"`])"
"""Not in the middle of a word: an apostrophe opens nothing."""

_STEPS: Final = tuple(
    (re.compile(pattern), word)
    for pattern, word in (
        # Our own note of how often a task was tried, which says nothing of the error.
        (r" \(failed \d+ of \d+ runs\)", ""),
        # Quoted texts, with escapes in them. The last one may have lost its end to a limit.
        (rf"{_OPENED}b?(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`)(?!\w)", "<text>"),
        (rf"{_OPENED}b?['\"](?=[^\s'\"])[^'\"]*$", "<text>"),
        (r"\b[a-zA-Z][a-zA-Z0-9+.-]{1,20}://[^\s<>\"']+", "<url>"),
        (r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+", "<email>"),
        (rf"\b{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}\b", "<uuid>"),
        (
            r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?)?"
            r"(?:Z\b|[+-]\d\d:?\d\d\b)?",
            "<time>",
        ),
        (r"\b\d{1,2}:\d\d:\d\d(?:[.,]\d+)?\b", "<time>"),
        (r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b", "<address>"),
        (rf"\[?(?<![\w:])(?:{_HEX}{{0,4}}:){{2,7}}{_HEX}{{0,4}}(?![\w:])\]?(?::\d+)?", "<address>"),
        (rf"\b0[xX]{_HEX}+\b", "<hex>"),
        # Paths: absolute ones, those of Windows, and relative ones that look like nothing else.
        (r"(?<![\w<>/])(?:~|\.{1,2})?/[\w.@%+~-][^\s:;,'\"<>()\[\]{}]*", "<path>"),
        (r"\b[A-Za-z]:\\[^\s;,'\"<>()]*", "<path>"),
        (r"(?<![\w/<])[\w.-]+(?:/[\w.-]+)+\.\w{1,8}\b", "<path>"),
        (r"(?<![\w/<])[\w.-]+(?:/[\w.-]+){2,}", "<path>"),
        (rf"\b(?=[A-Fa-f]*\d)(?=\d*[A-Fa-f]){_HEX}{{8,}}\b", "<hex>"),
        (r"\b(?=[A-Za-z_-]{0,60}\d)[A-Za-z0-9_-]{20,}={0,2}", "<id>"),
        (r"(?<![\w.])[-+]?(?=\d)|(?<=\d)[eE][-+]?(?=\d)", ""),
        (r"\d+(?:[.,_]\d+)*", "<n>"),
        (r"<n>(?:%?[,;:]? ?<n>){2,}", "<n> …"),
        (r"\s+", " "),
    )
)
_TYPE: Final = re.compile(r"[A-Za-z_][\w.]{0,100}(?=: |$)")


@lru_cache(maxsize=4096)
def error_signature(text: str) -> str:
    """The signature of one error's text, at most `SIGNATURE_LIMIT` characters; "" of an empty one.

    text: as an event's or a dead letter's description has it, ``Type: message``. The name of the
    type is kept as it is.
    """
    text = " ".join(text[:READ_LIMIT].split())
    kind = _TYPE.match(text)
    head = kind.group() if kind else ""
    rest = text[len(head) :]
    for pattern, word in _STEPS:
        rest = pattern.sub(word, rest)
    signature = (head + rest).strip()
    if len(signature) > SIGNATURE_LIMIT:
        signature = signature[: SIGNATURE_LIMIT - 1].rstrip() + "…"
    return signature
