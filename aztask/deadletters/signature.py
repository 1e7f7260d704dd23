"""Error signatures: the text of an error without the parts that differ from case to case.

``ConnectionError: no answer from 10.0.3.7:5432 after 31 s`` and the same error of another host have
the signature ``ConnectionError: no answer from <address> after <n> s``. So a million dead letters
become a few groups, and you select a group by a text that you can read.

Rules
1. Equal texts have equal signatures in every process and version of Python: nothing is hashed,
   learned or dependent on a locale.
2. A signature contains no digit (except in the name of the error's type), no quoted text, no path,
   id, address or time: a word in angle brackets replaces them.
3. Work is bounded: only the first `READ_LIMIT` characters are read.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

__all__ = ["error_signature"]

READ_LIMIT: Final = 1024
"""Characters of a text that are read: as many as services keep of a dead letter's description."""
SIGNATURE_LIMIT: Final = 160
"""Characters of the longest signature."""

_HEX: Final = "[0-9A-Fa-f]"
_OPENED: Final = r"(?<![\w'\"`])"
"""A quote does not begin in the middle of a word: there it is an apostrophe."""

_STEPS: Final = tuple(
    (re.compile(pattern), word)
    for pattern, word in (
        # Our own note of the number of runs, which is not part of the error.
        (r" \(failed \d+ of \d+ runs\)", ""),
        # Quoted texts, with escapes in them. The end of the last one may have been cut off.
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
        # Paths: absolute ones, those of Windows, and relative ones that can be nothing else.
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
    """The signature of an error's text, at most `SIGNATURE_LIMIT` characters; "" for an empty text.

    * `text`: ``Type: message``, as in an event or a dead letter's description. The name of the type
      stays as it is.
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
